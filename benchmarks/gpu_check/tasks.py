"""The checks by name; each process runs one of them."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_check import checkout, equality, memory, nccl
from benchmarks.gpu_check.model import Size, make_deterministic
from benchmarks.gpu_check.verdict import Verdict, judged
from bpipe._version import __version__
from bpipe.device import name_of

WIDER = 2  # over NCCL: the wider a block, the longer its forward beside the transfer of what it saves
MEANING = "What all else on this page ran with."


def verdicts_of(name: str, size: Size) -> Iterable[Verdict]:
    """Run a check; some of its verdicts may come before others."""
    make_deterministic()
    device = torch.device("cuda", 0)
    match name:
        case "environment":
            return _environment()
        case "equality":
            return equality.check(size, device)
        case "memory":
            return memory.check(size, device)
        case "nccl":
            wide = replace(size, width=WIDER * size.width, sequences=max(1, size.sequences // WIDER))
            return nccl.check(wide, torch.cuda.device_count())
        case "study":
            return checkout.study()
        case "suite":
            return [checkout.suite()]
    raise ValueError(f"no check {name!r}")


def _environment() -> list[Verdict]:
    """List versions and GPUs, and run one operation on each GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    wrong = [f"GPU {device.index} adds wrong" for device in devices if torch.ones(8, device=device).sum().item() != 8]
    return [judged("environment", MEANING, wrong, _found(devices))]


def _found(devices: list[torch.device]) -> dict[str, Any]:
    names = Counter(map(name_of, devices))
    return {
        "GPUs": ", ".join(f"{number} x {name}" for name, number in names.items()),
        "memory of the first, free_bytes": torch.cuda.mem_get_info(devices[0])[0],
        "memory of the first, all_bytes": torch.cuda.mem_get_info(devices[0])[1],
        "bpipe": __version__,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip or "none",
        "NCCL": _nccl(),
        "Python": platform.python_version(),
    }


def _nccl() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "none"
