"""A rank that is not in the group that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import bpipe
from bpipe.errors import ConfigurationError
from tests.dry_run.fake_group import fake_group

LAYER = nn.Linear(4, 4)
mse = nn.functional.mse_loss


def stage_of(group: Any) -> bpipe.PipelineStage:
    return bpipe.PipelineStage(LAYER, 0, 1, "cpu", group=group)


USES: dict[str, Callable[[Any], object]] = {
    "a stage": stage_of,
    "a stream": lambda group: bpipe.Stream(stage_of(group), mse, torch.optim.SGD(LAYER.parameters())),
    "auto with a model": lambda group: bpipe.auto(nn.Sequential(LAYER), torch.ones(8, 4), mse, group=group),
    "replicas": lambda group: bpipe.Balanced(bpipe.OneFOneB(stage_of(bpipe.Loopback(1).rank(0)), 2, mse), replicas=group),
    "a scaler": lambda group: bpipe.GradScaler("cpu", group=group),
    "clipping": lambda group: bpipe.clip_grad_norm_(LAYER.parameters(), 1.0, group=group),
    "a checkpoint": lambda group: bpipe.training_state(LAYER, group=group),
    "a loss": lambda group: bpipe.share_loss([torch.ones(())], group=group),
    "tied weights": lambda group: bpipe.TiedWeights({"weight": LAYER.weight}, group=group),
}


@pytest.mark.parametrize("is_mesh", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_rank_outside_its_group(use: str, is_mesh: bool) -> None:
    """torch gives it an object all the same, of which nothing can be asked."""
    with fake_group(0, size=3):
        group = DeviceMesh("cpu", [1, 2]) if is_mesh else dist.new_group([1, 2])
        with pytest.raises(ConfigurationError, match="rank 0 is not in the group: give the group of this rank's own pipeline"):
            USES[use](group)
