"""Install the simulated device, as CUDA or as a make that torch does not know.

To be imported before torch, which looks for CUDA when it is imported. `SIMULATED_MAKE` says which of the two, "cuda" or "accel";
`SIMULATED_DEVICES` how many there are, two without it. `KIND` is the device's type, and `MODULE` what torch has for it. `simulator`
is the C++ part: reports, delays, capacity, statistics.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from tests.accelerator.build import LIBRARY, MAKE, built, make, torch_folder

KIND = make()


def _load() -> Any:
    assert "torch" not in sys.modules, "import tests.accelerator.device before torch: torch looks for CUDA once"
    path = os.environ.setdefault(LIBRARY, str(built(KIND)))
    os.environ.setdefault(MAKE, KIND)
    os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "0"  # there are no pools of memory, from which torch would take symmetric memory
    for name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
        library = torch_folder() / "lib" / f"lib{name}.so"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(path)  # registers the device
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location("simulator", Path(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulator = _load()

from tests.accelerator import host_threads, torch_module  # noqa: E402

torch_module.install(simulator, KIND)
host_threads.install(simulator)

import torch  # noqa: E402

MODULE: Any = torch.get_device_module(KIND)


def reports() -> list[str]:
    """What the checker found, each with the Python stack behind it; all devices are waited for first."""
    simulator.synchronize_device(-1)
    return [f"{kind}: {text}\n{stack}" for kind, text, stack in simulator.reports()]


def unordered() -> list[str]:
    """Likewise, but for kernels that failed, as those of NCCL do when another rank aborts it."""
    return [report for report in reports() if not report.startswith("kernel:")]
