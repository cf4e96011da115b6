"""What cuts a model, and what says how batches are cut: these are torch's own; schedules take the stages that they make."""

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
