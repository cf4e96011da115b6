"""What cuts a model, and what says how batches are cut: these are torch's own; schedules take the stages that they make."""

from torch.distributed.pipelining import Pipe, SplitPoint, build_stage, pipe_split, pipeline
from torch.distributed.pipelining.microbatch import TensorChunkSpec

__all__ = ["Pipe", "SplitPoint", "TensorChunkSpec", "build_stage", "pipe_split", "pipeline"]
