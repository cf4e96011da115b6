"""Build the simulated device once for each source and torch, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
COMPILER = os.environ.get("CXX", "g++")
LIBRARY = "SIMULATED_LIBRARY"  # the environment variable with the library's path, which processes that are started from here find
MAKE = "SIMULATED_MAKE"  # likewise with the make of device, which is the type that torch knows it by
MAKES = {"cuda": "CUDA", "accel": "PrivateUse1"}  # and torch's place for it
KEPT_S = 24 * 3600  # for how long an older library stays after its last use: another checkout may need it


def make() -> str:
    """The make of device that is simulated here: CUDA, if nothing else is said."""
    chosen = os.environ.get(MAKE, "cuda")
    assert chosen in MAKES, f"{MAKE}={chosen}: it is one of {', '.join(MAKES)}"
    return chosen


def why_not() -> str | None:
    """Why the simulated device cannot be built or used here, with the way out; None: it can."""
    if sys.platform != "linux":
        return "the simulated device is built on Linux only"
    if (torch_folder() / "lib/libtorch_cuda.so").exists():
        return "torch has CUDA itself here: the simulated device needs its CPU wheel"
    if shutil.which(COMPILER) is None:
        return f"no C++ compiler ({COMPILER}): install one to run bpipe on the simulated device (Debian: apt-get install g++)"
    if not (_python_include() / "Python.h").exists():
        return f"no Python.h in {_python_include()}: the simulated device needs it (Debian: apt-get install python3-dev)"
    return None


def built(make: str) -> Path:
    """The library of a make of simulated device for this Python's torch; some 30 s of one core where it is not there yet.

    torch itself is not imported: it looks for CUDA when it is, and the library has to be there before.
    """
    import fcntl  # which Windows does not have

    digest = hashlib.sha256(f"{version('torch')} {sysconfig.get_python_version()} {COMPILER} {make}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpipe-tests"
    library = cache / f"simulator-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of a test run build it once
            if not library.exists():
                made = Path(folder) / "simulator.so"
                _compile(made, MAKES[make])
                made.replace(library)
                _delete_old(cache)
    os.utime(library)  # it is in use: see _delete_old
    return library


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def _python_include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _delete_old(cache: Path) -> None:
    """Delete the libraries of other sources, but for those that were used within the last day."""
    for library in cache.glob("simulator-*.so"):
        if time.time() - library.stat().st_mtime > KEPT_S:
            library.unlink()


def _compile(made: Path, place: str) -> None:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", _python_include()]
    command = [COMPILER, "-shared", "-fPIC", "-std=c++20", "-O0", "-Wall", "-DTORCH_EXTENSION_NAME=simulator"]
    command += [f"-DSIMULATED_MAKE={place}", "-Wl,-soname,libcuda.so.1"]  # which is the driver's name: see ipc.h
    command += ["-DTORCH_API_INCLUDE_EXTENSION_H", *(f"-isystem{folder}" for folder in includes), str(SOURCES / "simulator.cpp")]
    command += [f"-L{torch / 'lib'}", *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-4000:]}")
