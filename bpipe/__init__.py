"""Pipeline parallelism with balanced activation memory: early stages offload saved activations to late ones (BPipe, ICML 2023).

The public names, and rooms such as `bpipe.errors`, are loaded on first use, so that `import bpipe` and `import bpipe.schedules`
need no torch.
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
        BitPipe,
        BitPipeReordered,
        BitPipeZB,
        BreadthFirst,
        Chimera,
        DualPipeV,
        FromPlan,
        GPipe,
        Interleaved1F1B,
        InterleavedZeroBubble,
        OneFOneB,
        Seq1F1B,
        TeraPipe,
        VHalf,
        VMin,
    )
    from bpipe.api.loopback import Loopback
    from bpipe.api.options import Options
    from bpipe.api.schedule import Schedule
    from bpipe.as_torch.bases import PipelineScheduleMulti, PipelineScheduleSingle, _PipelineSchedule, get_schedule_class
    from bpipe.as_torch.csv_runtime import FromCSV, _PipelineScheduleRuntime
    from bpipe.as_torch.frontends import (
        Pipe,
        SplitPoint,
        TensorChunkSpec,
        build_stage,
        merge_chunks,
        pipe_split,
        pipeline,
        split_args_kwargs_into_chunks,
    )
    from bpipe.as_torch.one_stage import Schedule1F1B, ScheduleGPipe
    from bpipe.as_torch.several_stages import (
        ScheduleDualPipeV,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )
    from bpipe.backward.loss_scale import loss_scale
    from bpipe.estimate.advisor import advise
    from bpipe.estimate.profile import profile
    from bpipe.estimate.profile_slices import profile_slices
    from bpipe.model.stage import PipelineStage
    from bpipe.model.stage_info import PipelineStageInfo
    from bpipe.overlap.points import yield_here
    from bpipe.parallel.placement import pair_adjacent, place
    from bpipe.partition.choose import choose_stages
    from bpipe.partition.measure import measure_layers
    from bpipe.partition.model_split import split_model
    from bpipe.partition.split_check import check_split
    from bpipe.partition.traced import split_traced
    from bpipe.partition.transformers import split_transformer, transformer_layers
    from bpipe.relaxed.auxiliary_heads import local_heads
    from bpipe.relaxed.local_block import LocalBlock
    from bpipe.relaxed.local_learning import LocalLearning
    from bpipe.relaxed.routed_training import Routes
    from bpipe.relaxed.stream import Stream
    from bpipe.tools.chrome import save_trace
    from bpipe.tools.draw import draw
    from bpipe.tools.trace_record import load_trace
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
    "BitPipe",
    "BitPipeReordered",
    "BitPipeZB",
    "BreadthFirst",
    "Chimera",
    "DualPipeV",
    "FromPlan",
    "GPipe",
    "GradScaler",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LocalBlock",
    "LocalLearning",
    "Loopback",
    "OneFOneB",
    "Options",
    "PipelineStage",
    "Routes",
    "Schedule",
    "Seq1F1B",
    "Stream",
    "TeraPipe",
    "TiedWeights",
    "VHalf",
    "VMin",
    "__version__",
    "advise",
    "auto",
    "check_split",
    "choose_plan",
    "choose_stages",
    "clip_grad_norm_",
    "draw",
    "load_trace",
    "local_heads",
    "loss_scale",
    "measure_layers",
    "pair_adjacent",
    "place",
    "profile",
    "profile_slices",
    "save_trace",
    "share_loss",
    "split_model",
    "split_traced",
    "split_transformer",
    "trace",
    "training_state",
    "transformer_layers",
    "yield_here",
]

# The names of torch.distributed.pipelining: docs/torch-pipelining.md. Those that only its newest version has are left out, so that
# `from bpipe import *` works with an older one.
__all__ += [
    "FromCSV",
    "Pipe",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "build_stage",
    "get_schedule_class",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "split_args_kwargs_into_chunks",
]

OLDEST_TORCH = (2, 11)

_NAMES = {  # of each module of bpipe
    "api.balanced": "Balanced",
    "api.catalogue": "BalancedOneFOneB BitPipe BitPipeReordered BitPipeZB BreadthFirst Chimera DualPipeV FromPlan GPipe "
    "Interleaved1F1B InterleavedZeroBubble OneFOneB Seq1F1B TeraPipe VHalf VMin ZBH1 ZBH2 ZBV",
    "api.loopback": "Loopback",
    "api.options": "Options",
    "api.schedule": "Schedule",
    "backward.loss_scale": "loss_scale",
    "chooser.automatic": "auto",
    "chooser.choose_plan": "choose_plan",
    "estimate.advisor": "advise",
    "estimate.profile": "profile",
    "estimate.profile_slices": "profile_slices",
    "model.stage": "PipelineStage",
    "overlap.points": "yield_here",
    "parallel.placement": "pair_adjacent place",
    "partition.choose": "choose_stages",
    "partition.measure": "measure_layers",
    "partition.model_split": "split_model",
    "partition.split_check": "check_split",
    "partition.traced": "split_traced",
    "partition.transformers": "split_transformer transformer_layers",
    "relaxed.auxiliary_heads": "local_heads",
    "relaxed.local_block": "LocalBlock",
    "relaxed.local_learning": "LocalLearning",
    "relaxed.routed_training": "Routes",
    "relaxed.stream": "Stream",
    "tools.chrome": "save_trace",
    "tools.trace_record": "load_trace",
    "tools.draw": "draw",
    "tools.tracing": "trace",
    "training.checkpoint": "training_state",
    "training.clip": "clip_grad_norm_",
    "training.loss": "share_loss",
    "training.scaler": "GradScaler",
    "training.tied": "TiedWeights",
    "as_torch.bases": "PipelineScheduleMulti PipelineScheduleSingle _PipelineSchedule get_schedule_class",
    "as_torch.csv_runtime": "FromCSV _PipelineScheduleRuntime",
    "as_torch.frontends": "Pipe SplitPoint TensorChunkSpec build_stage merge_chunks pipe_split pipeline "
    "split_args_kwargs_into_chunks PipelineActivationLiveness analyze_pipeline_activation_liveness",
    "as_torch.one_stage": "Schedule1F1B ScheduleGPipe",
    "as_torch.several_stages": "ScheduleDualPipeV ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS "
    "ScheduleZBVZeroBubble",
    "model.stage_info": "PipelineStageInfo",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_ROOMS = frozenset(
    (
        "bpipe.errors",
        "bpipe.estimate",
        "bpipe.fill",
        "bpipe.overlap",
        "bpipe.partition",
        "bpipe.passes",
        "bpipe.schedules",
        "bpipe.search",
        "bpipe.slices",
        "bpipe.torchtitan",
    )
)
_NEED_NO_TORCH = frozenset({"advise", "choose_plan", "choose_stages", "draw", "load_trace", "pair_adjacent", "place", "save_trace"})


def __getattr__(name: str) -> Any:
    if (room := f"bpipe.{name}") in _ROOMS:
        return import_module(room)
    if name not in _HOMES:
        raise AttributeError(f"module 'bpipe' has no attribute {name!r}")
    if name not in _NEED_NO_TORCH:
        _check_torch()
    return getattr(import_module(f"bpipe.{_HOMES[name]}"), name)


def _check_torch() -> None:
    """Raise an ImportError if torch is too old, instead of failing somewhere deep inside."""
    import torch

    from bpipe.torch_private.release import release

    if release() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"bpipe needs torch {oldest} or newer, and this is torch {torch.__version__}: pip install 'torch>={oldest}'"
        )


def __dir__() -> list[str]:
    return sorted(__all__)
