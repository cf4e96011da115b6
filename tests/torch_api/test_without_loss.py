"""A schedule without a loss: torch lets `loss.backward()` train the last stage alone; here it says that a loss_fn is missing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import bpipe
from bpipe.errors import ConfigurationError
from tests.dry_run.fake_group import fake_group
from tests.torch_api.models import WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[..., Any]


class Last(nn.Module):
    """Returns what a pipeline may: tensors of all kinds and plain values, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "words": y.argmax(-1), "why": "no reason", "pair": (y.cos(), None)}


def in_a_loopback(last: nn.Module, kind: str = "step", num_ranks: int = 2, **options: Any) -> Step:
    loopback = bpipe.Loopback(num_ranks)
    modules = [*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks - 1)), last]
    stages = [bpipe.PipelineStage(module, i, num_ranks, "cpu", group=loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [bpipe.ScheduleGPipe(stage, 2, **options) for stage in stages]
    return lambda x: getattr(loopback, kind)(schedules, x)


def alone(last: nn.Module) -> Step:
    return bpipe.ScheduleGPipe(bpipe.PipelineStage(last, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0)), 2).step


@pytest.mark.parametrize("make", [in_a_loopback, alone])
def test_a_backward_of_the_output_names_what_is_missing(make: Callable[[nn.Module], Step]) -> None:
    last = Last()
    step = make(last)
    for _ in range(2):  # after it, the pipeline goes on
        output = step(torch.ones(4, WIDTH))
        for value in (output["y"], output["pair"][0]):
            with pytest.raises(ConfigurationError, match=r"the schedule has no loss_fn. Give it loss_fn=,.*the last stage alone"):
                value.pow(2).mean().backward()
    assert last.linear.weight.grad is None


def test_what_else_is_done_with_outputs() -> None:
    """In train mode: numbers, metrics, changes in place, and the output as the next batch; nothing is kept."""
    step = in_a_loopback(Last())
    output = step(torch.ones(4, WIDTH))
    y, words = output["y"], output["words"]
    assert not words.requires_grad and output["why"] == "no reason" and output["pair"][1] is None
    assert isinstance(y.sum().item(), float) and torch.equal(y.argmax(-1), words) and y.detach().numpy().shape == (4, WIDTH)
    y[0] = 0
    assert not y.mul_(2)[0].any() and not y._is_view()
    step(y)
    kept = weakref.ref(output["pair"][0])
    del output
    assert kept() is None


@pytest.mark.parametrize("kind", ["eval", "no_grad", "eval mode", "frozen"])
def test_plain_outputs_where_nobody_trains(kind: str) -> None:
    last = Last().train(kind != "eval mode").requires_grad_(kind != "frozen")
    step = in_a_loopback(last, "eval" if kind == "eval" else "step")
    with torch.no_grad() if kind == "no_grad" else nullcontext():
        output = step(torch.ones(4, WIDTH))
    assert not output["y"].requires_grad and output["y"].grad_fn is None


def test_a_dtensor() -> None:
    class Whole(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(super().forward(x), mesh)

    with fake_group(0, size=1):
        mesh = init_device_mesh("cpu", (1,))
        output = alone(Whole(WIDTH, WIDTH))(torch.ones(4, WIDTH))
        with pytest.raises(ConfigurationError, match="the schedule has no loss_fn"):
            output.to_local().sum().backward()
