"""The checks by name; each process runs one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from bpipe.tools.gpu import checkout, equality, memory, nccl, versions
from bpipe.tools.gpu.model import Size, make_deterministic
from bpipe.tools.gpu.verdict import Verdict

__all__: list[str] = []

WIDER = 2  # over NCCL: the wider a block, the longer its forward beside the transfer of what it saves


def verdicts_of(name: str, size: Size) -> Iterable[Verdict]:
    """Run a check; some of its verdicts may come before others."""
    make_deterministic()
    device = torch.device("cuda", 0)
    match name:
        case "environment":
            return versions.check()
        case "equality":
            return equality.check(size, device)
        case "memory":
            return memory.check(size, device)
        case "nccl":
            wide = replace(size, width=WIDER * size.width, heads=WIDER * size.heads, sequences=max(1, size.sequences // WIDER))
            return nccl.check(wide, torch.cuda.device_count())
        case "study":
            return checkout.study(checkout.root())
        case "suite":
            return [checkout.suite(checkout.root())]
    raise ValueError(f"no check {name!r}")
