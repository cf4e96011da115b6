"""What the context of a stage's forward is told: torch's own class since 2.15, and before that one like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import pipelining

__all__ = ["PipelineStageInfo"]

if TYPE_CHECKING or not hasattr(pipelining, "PipelineStageInfo"):

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PipelineStageInfo:
        """One forward of a stage, as `PipelineStage.register_forward_context` tells of it.

        Args:
            stage_index: of the stage.
            microbatch_index: of the microbatch in its step.
            is_metadata_inference: whether torch runs it to learn shapes; bpipe never does.

        Example:
            >>> PipelineStageInfo(stage_index=1, microbatch_index=3).microbatch_index
            3
        """

        stage_index: int
        microbatch_index: int
        is_metadata_inference: bool = False

else:
    PipelineStageInfo = pipelining.PipelineStageInfo
