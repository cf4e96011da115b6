"""Share the loss of a step, which only the rank of the last stage has, with all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from bpipe.checks import check_choice
from bpipe.errors import ConfigurationError
from bpipe.training.pipeline_ranks import Ranks

__all__ = ["share_loss"]

Reduction = Literal["mean", "sum"]


@torch.no_grad()
def share_loss(losses: Sequence[torch.Tensor], *, reduction: Reduction = "mean", group: Any = None) -> float:
    """Give every rank of a pipeline the loss of the step that has just run.

    Communicates one all_gather of 16 bytes per rank over the pipeline's group. Collective; blocks the host.

    Args:
        losses: the list that was given to `schedule.step(..., losses=losses)`: one loss per microbatch on the rank of the last
            stage, empty on the others.
        reduction: "mean" over the microbatches, or their "sum", for a `loss_fn` that divides by the whole step's number of
            tokens itself. Reduced where the losses are, in their dtype: the number is the same on all ranks.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

    Returns:
        The loss.

    Raises:
        ConfigurationError: no rank has losses, or several have; raised on all ranks. Another reduction, or a `Loopback`'s group.

    Example:
        >>> share_loss([torch.tensor(1.0), torch.tensor(2.0)])
        1.5
    """
    check_choice("reduction", reduction, get_args(Reduction))
    ranks = Ranks(group, f"torch.stack(losses).{reduction}() is the loss")
    mine = [1.0, float(getattr(torch.stack(list(losses)), reduction)())] if losses else [0.0, 0.0]
    gathered = torch.stack(ranks.gather(torch.tensor(mine, dtype=torch.float64))).tolist()
    found = [loss for has_losses, loss in gathered if has_losses]
    if len(found) != 1:
        having = [rank for rank, (has_losses, _) in enumerate(gathered) if has_losses]
        raise ConfigurationError(
            f"of the {ranks.size} ranks of the group {having or 'none'} have losses: pass losses=[] to step(), and here what it "
            "became, with the group of one pipeline"
        )
    return float(found[0])
