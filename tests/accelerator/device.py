"""Install the simulated device as CUDA. To be imported before torch, which looks for CUDA when it is imported.

`SIMULATED_DEVICES` says how many there are. `simulator` is the C++ part: reports, delays, capacity, statistics.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from tests.accelerator.build import LIBRARY, built, torch_folder


def _load() -> Any:
    assert "torch" not in sys.modules, "import tests.accelerator.device before torch: torch looks for CUDA once"
    path = os.environ.setdefault(LIBRARY, str(built()))
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

from tests.accelerator import as_torch_cuda  # noqa: E402

as_torch_cuda.install(simulator)


def reports() -> list[str]:
    """What the checker found, each with the Python stack behind it; all devices are waited for first."""
    simulator.synchronize_device(-1)
    return [f"{kind}: {text}\n{stack}" for kind, text, stack in simulator.reports()]
