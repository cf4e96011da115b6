"""bpipe: activation memory of a pipeline as something to schedule across its ranks.

The public names are loaded on first use, so that `import bpipe` and `import bpipe.schedules` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bpipe._version import __version__

if TYPE_CHECKING:
    from bpipe.comm.placement import pair_adjacent
    from bpipe.loopback import Loopback
    from bpipe.schedule import BalancedOneFOneB, GPipe, OneFOneB, Schedule
    from bpipe.stage import PipelineStage

__all__ = [
    "BalancedOneFOneB",
    "GPipe",
    "Loopback",
    "OneFOneB",
    "PipelineStage",
    "Schedule",
    "__version__",
    "pair_adjacent",
]

OLDEST_TORCH = (2, 11)

_HOMES = {
    "BalancedOneFOneB": "bpipe.schedule",
    "GPipe": "bpipe.schedule",
    "Loopback": "bpipe.loopback",
    "OneFOneB": "bpipe.schedule",
    "PipelineStage": "bpipe.stage",
    "Schedule": "bpipe.schedule",
    "pair_adjacent": "bpipe.comm.placement",
}

_NEED_NO_TORCH = frozenset({"pair_adjacent"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bpipe' has no attribute {name!r}")
    if name not in _NEED_NO_TORCH:
        _check_torch()
    return getattr(import_module(_HOMES[name]), name)


def _check_torch() -> None:
    """Say clearly when torch is too old, instead of failing somewhere inside."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"bpipe needs torch {oldest} or newer, and this is torch {torch.__version__}: pip install 'torch>={oldest}'"
        )


def __dir__() -> list[str]:
    return sorted(__all__)
