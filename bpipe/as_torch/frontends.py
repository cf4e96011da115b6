"""What cuts a model, and what says how batches are cut: these are torch's own; schedules take the stages that they make."""

from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import Pipe, SplitPoint, build_stage, pipe_split, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

__all__ = [
    "Pipe",
    "SplitPoint",
    "TensorChunkSpec",
    "build_stage",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "split_args_kwargs_into_chunks",
]

SINCE = {"PipelineActivationLiveness": "2.15", "analyze_pipeline_activation_liveness": "2.15"}  # which older versions lack


def __getattr__(name: str) -> Any:
    if name not in SINCE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not hasattr(pipelining, name):  # no AttributeError, whose message `from bpipe import` drops
        raise ImportError(f"{name} is torch's own, since torch {SINCE[name]}, and this is torch {torch.__version__}")
    return getattr(pipelining, name)
