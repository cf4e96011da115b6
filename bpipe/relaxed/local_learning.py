"""Local learning: no gradients between stages (PPLL, arXiv 2411.12780). p ranks, m microbatches."""

from __future__ import annotations

from collections.abc import Mapping

from bpipe.api.schedule import Schedule
from bpipe.errors import ConfigurationError
from bpipe.model.stage import PipelineStage
from bpipe.relaxed.local_block import LocalBlock
from bpipe.schedules import Plan

__all__ = ["LocalLearning"]


class LocalLearning(Schedule):
    """Local learning: each stage has a head and a loss of its own, and no gradient leaves it (PPLL, arXiv 2411.12780).

    So each rank runs a microbatch's backward right behind its forward: every rank holds one microbatch, and waits only (p-1)F.
    The gradients of a stage are those of its block trained alone, to the bit; they are not those of `OneFOneB`. docs/relaxed.md
    says what that gives up.

    The module of each stage but the last returns `(output, prediction)`, such as a `LocalBlock` does; the loss is
    `loss_fn(prediction, target)`, and the next stage gets the output. The last stage's module returns its output, as everywhere.
    Every rank takes the target, and fills `losses` with those of its own stage; the last one returns the outputs. A `Loopback` has
    one `losses` for all ranks, and fills it with the last stage's.

    Arguments, methods and other errors are `Schedule`'s. There is one stage per rank.

    Raises:
        ConfigurationError: the last stage has a `LocalBlock`; from `step`, a rank got no target.
        StageError: from `step`, the module of a stage that is not the last one returned something else than a pair.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bpipe import Loopback
        >>> loopback = Loopback(2)
        >>> modules = [LocalBlock(nn.Linear(4, 6), head=nn.Linear(6, 3)), nn.Linear(6, 3)]
        >>> stages = [PipelineStage(module, i, 2, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
        >>> schedules = [LocalLearning(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy) for stage in stages]
        >>> loopback.step(schedules, torch.randn(8, 4), target=torch.randint(3, (8,))).shape
        torch.Size([8, 3])
    """

    rule = "local_learning"

    def _check_placement(self, plan: Plan, stages: Mapping[int, PipelineStage]) -> None:
        super()._check_placement(plan, stages)
        for stage in stages.values():
            if stage.is_last and isinstance(stage.submod, LocalBlock):
                raise ConfigurationError(
                    f"stage {stage.stage_index} is the last one and has a LocalBlock, but its own output is the prediction: give "
                    "it the module without a head, or with its head behind it, as in nn.Sequential(block, head)"
                )
