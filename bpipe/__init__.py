"""Pipeline parallelism with balanced activation memory: early stages offload saved activations to late ones (BPipe, ICML 2023).

The public names are loaded on first use, so that `import bpipe` and `import bpipe.schedules` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bpipe._version import __version__

if TYPE_CHECKING:
    from bpipe.api.balanced import Balanced
    from bpipe.api.catalogue import (
        ZBH1,
        ZBH2,
        ZBV,
        BalancedOneFOneB,
        BreadthFirst,
        DualPipeV,
        FromPlan,
        GPipe,
        Interleaved1F1B,
        OneFOneB,
        VHalf,
        VMin,
    )
    from bpipe.api.loopback import Loopback
    from bpipe.api.schedule import Schedule
    from bpipe.estimate.advisor import advise
    from bpipe.estimate.profile import profile
    from bpipe.model.stage import PipelineStage
    from bpipe.parallel.placement import pair_adjacent, place
    from bpipe.partition.choose import choose_stages
    from bpipe.partition.measure import measure_layers
    from bpipe.partition.model_split import split_model
    from bpipe.partition.split_check import check_split
    from bpipe.partition.transformers import split_transformer, transformer_layers
    from bpipe.tools.chrome import save_trace
    from bpipe.tools.chrome_read import load_trace
    from bpipe.tools.draw import draw
    from bpipe.tools.tracing import trace
    from bpipe.training.checkpoint import training_state
    from bpipe.training.clip import clip_grad_norm_
    from bpipe.training.loss import share_loss
    from bpipe.training.scaler import GradScaler
    from bpipe.training.tied import TiedWeights

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "Balanced",
    "BalancedOneFOneB",
    "BreadthFirst",
    "DualPipeV",
    "FromPlan",
    "GPipe",
    "GradScaler",
    "Interleaved1F1B",
    "Loopback",
    "OneFOneB",
    "PipelineStage",
    "Schedule",
    "TiedWeights",
    "VHalf",
    "VMin",
    "__version__",
    "advise",
    "check_split",
    "choose_stages",
    "clip_grad_norm_",
    "draw",
    "load_trace",
    "measure_layers",
    "pair_adjacent",
    "place",
    "profile",
    "save_trace",
    "share_loss",
    "split_model",
    "split_transformer",
    "trace",
    "training_state",
    "transformer_layers",
]

OLDEST_TORCH = (2, 11)

_HOMES = {
    "Balanced": "bpipe.api.balanced",
    "BalancedOneFOneB": "bpipe.api.catalogue",
    "BreadthFirst": "bpipe.api.catalogue",
    "DualPipeV": "bpipe.api.catalogue",
    "FromPlan": "bpipe.api.catalogue",
    "GPipe": "bpipe.api.catalogue",
    "GradScaler": "bpipe.training.scaler",
    "Interleaved1F1B": "bpipe.api.catalogue",
    "Loopback": "bpipe.api.loopback",
    "OneFOneB": "bpipe.api.catalogue",
    "PipelineStage": "bpipe.model.stage",
    "Schedule": "bpipe.api.schedule",
    "TiedWeights": "bpipe.training.tied",
    "VHalf": "bpipe.api.catalogue",
    "VMin": "bpipe.api.catalogue",
    "ZBH1": "bpipe.api.catalogue",
    "ZBH2": "bpipe.api.catalogue",
    "ZBV": "bpipe.api.catalogue",
    "advise": "bpipe.estimate.advisor",
    "check_split": "bpipe.partition.split_check",
    "choose_stages": "bpipe.partition.choose",
    "clip_grad_norm_": "bpipe.training.clip",
    "draw": "bpipe.tools.draw",
    "load_trace": "bpipe.tools.chrome_read",
    "measure_layers": "bpipe.partition.measure",
    "pair_adjacent": "bpipe.parallel.placement",
    "place": "bpipe.parallel.placement",
    "profile": "bpipe.estimate.profile",
    "save_trace": "bpipe.tools.chrome",
    "share_loss": "bpipe.training.loss",
    "split_model": "bpipe.partition.model_split",
    "split_transformer": "bpipe.partition.transformers",
    "trace": "bpipe.tools.tracing",
    "training_state": "bpipe.training.checkpoint",
    "transformer_layers": "bpipe.partition.transformers",
}

_NEED_NO_TORCH = frozenset({"advise", "choose_stages", "draw", "load_trace", "pair_adjacent", "place", "save_trace"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bpipe' has no attribute {name!r}")
    if name not in _NEED_NO_TORCH:
        _check_torch()
    return getattr(import_module(_HOMES[name]), name)


def _check_torch() -> None:
    """Raise an ImportError if torch is too old, instead of failing somewhere deep inside."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"bpipe needs torch {oldest} or newer, and this is torch {torch.__version__}: pip install 'torch>={oldest}'"
        )


def __dir__() -> list[str]:
    return sorted(__all__)
