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

_HOMES = {
    "BalancedOneFOneB": "bpipe.schedule",
    "GPipe": "bpipe.schedule",
    "Loopback": "bpipe.loopback",
    "OneFOneB": "bpipe.schedule",
    "PipelineStage": "bpipe.stage",
    "Schedule": "bpipe.schedule",
    "pair_adjacent": "bpipe.comm.placement",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bpipe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
