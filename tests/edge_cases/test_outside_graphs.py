"""Inputs of an autograd graph outside the pipeline: gradients of a single process, or refused before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError
from tests.edge_cases.case import pipeline
from tests.edge_cases.test_batches import Taking

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, WIDTH = 2, 4, 4
X, Y = torch.randn(2, 2 * M, WIDTH, generator=torch.Generator().manual_seed(0))


class Outside(nn.Linear):
    """A module that is no stage, whose backward needs what its forward has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


def modules() -> tuple[Outside, list[nn.Module]]:
    torch.manual_seed(0)
    return Outside(WIDTH, WIDTH), [Taking() for _ in range(P)]


def weighted(output: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.mse_loss(output if weight is None else output * weight, target)


def step(loss_fn: Any, stages: list[nn.Module], inputs: dict[str, Any]) -> None:
    loopback, schedules = pipeline(bpipe.OneFOneB, stages, loss_fn, M)
    given = {"return_outputs": False} | inputs
    if "arg_mbs" not in given:
        loopback.step(schedules, X, **given)
    else:
        loopback.step(schedules, **given)


class Keeping(nn.Module):
    """A loss that keeps a tensor."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        return weighted(output, target, weight=kept)


def in_a_closure(kept: torch.Tensor) -> Callable[..., torch.Tensor]:
    def inner(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return weighted(output, target, weight=kept)

    return lambda output, target: inner(output, target)


def as_default(kept: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda output, target, weight=kept: weighted(output, target, weight=weight)


def twice(made: list[torch.Tensor]) -> dict[str, Any]:
    return {"arg_mbs": [(x,) for x in made], "target_mbs": [{"y": y} for y in made]}


# By name: what of the step's arguments, and how the loss function, has a tensor of the outer graph
Inputs = Callable[[Outside], dict[str, Any]]
MBS = [(x,) for x in X.chunk(M)]
SHARED: dict[str, tuple[str, Inputs, Callable[[torch.Tensor], Any]]] = {
    "arg_mbs of one tensor": (
        r"arg_mbs\[1\].* as arg_mbs\[0\] is",
        lambda outside: {"arg_mbs": [(x,) for x in outside(X).chunk(M)], "target": Y},
        lambda kept: F.mse_loss,
    ),
    "arg_mbs that share an embedding": (
        r"arg_mbs\[1\].* as arg_mbs\[0\] is",
        lambda outside: {"arg_mbs": [(x + code,) for code in [outside(X[:2])] for x in X.chunk(M)], "target": Y},
        lambda kept: F.mse_loss,
    ),
    "target_mbs of one tensor": (
        r"target_mbs\[1\].* as target_mbs\[0\] is",
        lambda outside: {"target_mbs": list(outside(Y).chunk(M))},
        lambda kept: F.mse_loss,
    ),
    "the input and the target of a microbatch": (
        r"target_mbs\[0\].* as arg_mbs\[0\] is",
        lambda outside: twice([outside(x) for x in X.chunk(M)]),
        lambda kept: lambda output, target: F.mse_loss(output, target["y"]),
    ),
    "kwarg_mbs": (
        r"kwarg_mbs\[0\]",
        lambda outside: {"arg_mbs": MBS, "kwarg_mbs": [{"mask": outside(x)} for x in X.chunk(M)], "target": Y},
        lambda kept: F.mse_loss,
    ),
    "loss_kwargs": ("loss_kwargs", lambda outside: {"target": Y, "loss_kwargs": {"weight": outside(X[:1])}}, lambda kept: weighted),
    "a closure": ("a tensor that loss_fn keeps", lambda outside: {"target": Y}, in_a_closure),
    "a default": ("a tensor that loss_fn keeps", lambda outside: {"target": Y}, as_default),
    "a partial": (
        "a tensor that loss_fn keeps",
        lambda outside: {"target": Y},
        lambda kept: functools.partial(weighted, weight=kept),
    ),
    "a loss module": ("a tensor that loss_fn keeps", lambda outside: {"target": Y}, Keeping),
    "a list of a bound method's object": (
        "a tensor that loss_fn keeps",
        lambda outside: {"target": Y},
        lambda kept: Keeping([kept]).forward,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_graph_that_several_backwards_would_run_through_is_refused(name: str) -> None:
    """Torch's loop raises in the second backward, after gradients were added; here nothing was, and the next step runs."""
    match, inputs, loss_of = SHARED[name]
    outside, stages = modules()
    loopback, schedules = pipeline(bpipe.OneFOneB, stages, loss_of(outside(X[:1])), M)
    given = inputs(outside)
    with pytest.raises(ConfigurationError, match=f"^{match}.*of an autograd graph outside|^{match}.* would free"):
        loopback.step(schedules, *(() if "arg_mbs" in given else (X,)), return_outputs=False, **given)
    assert all(parameter.grad is None for module in (outside, *stages) for parameter in module.parameters())
    assert all(one.session.guard.broken is None for one in schedules)


def alone(name: str) -> list[torch.Tensor | None]:
    outside, stages = modules()
    for i in range(M):
        RIGHT[name][1](outside, stages, i).div(M).backward()
    return gradients(outside, stages)


def gradients(outside: nn.Module, stages: list[nn.Module]) -> list[torch.Tensor | None]:
    return [parameter.grad for module in (outside, *stages) for parameter in module.parameters()]


def through(stages: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage(x)
    return x


PARTS, TARGETS = X.chunk(M), Y.chunk(M)
Single = Callable[[Outside, list[nn.Module], int], torch.Tensor]
RIGHT: dict[str, tuple[Callable[[Outside], tuple[Any, dict[str, Any]]], Single]] = {
    "a graph for each microbatch": (
        lambda outside: (F.mse_loss, {"arg_mbs": [(outside(x),) for x in PARTS], "target": Y}),
        lambda outside, stages, i: F.mse_loss(through(stages, outside(PARTS[i])), TARGETS[i]),
    ),
    "a graph for each target": (
        lambda outside: (F.mse_loss, {"target_mbs": [outside(y) for y in TARGETS]}),
        lambda outside, stages, i: F.mse_loss(through(stages, PARTS[i]), outside(TARGETS[i])),
    ),
    "views of a parameter, which save nothing": (
        lambda outside: (F.mse_loss, {"arg_mbs": [(x + row,) for x, row in zip(PARTS, outside.weight.unbind())], "target": Y}),
        lambda outside, stages, i: F.mse_loss(through(stages, PARTS[i] + outside.weight[i]), TARGETS[i]),
    ),
    "a parameter among loss_kwargs": (
        lambda outside: (weighted, {"target": Y, "loss_kwargs": {"weight": outside.weight[0]}}),
        lambda outside, stages, i: weighted(through(stages, PARTS[i]), TARGETS[i], weight=outside.weight[0]),
    ),
    "computed in the loss": (
        lambda outside: (lambda o, t: weighted(o, t, weight=outside(X[:1])), {"target": Y}),
        lambda outside, stages, i: weighted(through(stages, PARTS[i]), TARGETS[i], weight=outside(X[:1])),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_graphs_that_one_backward_runs_through_train_what_is_outside(name: str) -> None:
    """Gradients of stages and of the module outside are those of a single process."""
    outside, stages = modules()
    loss_fn, given = RIGHT[name][0](outside)
    step(loss_fn, stages, given)
    for found, expected in zip(gradients(outside, stages), alone(name), strict=True):
        assert (found is None) is (expected is None)
        assert found is None or torch.equal(found, expected)


def test_the_way_out_gives_the_gradients_of_a_single_process() -> None:
    """As the message says: a detached leaf, and the backward of the rest after the step."""
    outside, stages = modules()
    x = outside(X)
    y = x.detach().requires_grad_()
    step(F.mse_loss, stages, {"arg_mbs": [(part,) for part in y.chunk(M)], "target": Y})
    x.backward(y.grad)
    other, others = modules()
    F.mse_loss(through(others, other(X)), Y).backward()
    for found, expected in zip(gradients(outside, stages), gradients(other, others), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def keep_the_loss(kept: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept["loss"] = loss = F.mse_loss(output, target)
        return loss

    return loss_fn


def keep_a_metric(kept: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept["metric"] = (output - target).pow(2).max()
        kept["outputs"] = [*kept.get("outputs", ()), output]
        return F.mse_loss(output, target)

    return loss_fn


@pytest.mark.parametrize("num_stages", [1, P])
@pytest.mark.parametrize("loss_of", [keep_the_loss, keep_a_metric])
def test_a_loss_function_may_keep_what_it_has_made(loss_of: Callable[[dict[str, Any]], Any], num_stages: int) -> None:
    """A loss to be shown later is part of a graph that is over, which no other step runs through."""
    _, stages = modules()
    kept: dict[str, Any] = {}
    loopback, schedules = pipeline(bpipe.OneFOneB, stages[:num_stages], loss_of(kept), M)
    for _ in range(3):
        loopback.step(schedules, X, target=Y)
    assert kept


class Biased(nn.Module):
    """Adds what a keyword argument brings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(X.shape[-1], X.shape[-1])

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + bias


def test_one_stage_may_get_a_graph_for_each_microbatch_by_keyword() -> None:
    torch.manual_seed(0)
    outside, stage = nn.Linear(X.shape[-1], X.shape[-1]), Biased()

    def found() -> list[torch.Tensor]:
        gradients = [parameter.grad for module in (outside, stage) for parameter in module.parameters()]
        outside.zero_grad()
        stage.zero_grad()
        assert None not in gradients
        return gradients  # type: ignore[return-value]

    schedule = bpipe.GPipe(bpipe.PipelineStage(stage, 0, 1, "cpu", bpipe.Loopback(1).rank(0)), M, loss_fn=F.mse_loss)
    schedule.step(arg_mbs=MBS, kwarg_mbs=[{"bias": outside(x).tanh()} for x in PARTS], target_mbs=list(PARTS))
    piped = found()
    for x in PARTS:
        F.mse_loss(stage(x, outside(x).tanh()), x).div(M).backward()
    assert all(map(torch.equal, piped, found()))


def test_a_loss_may_keep_a_metric_that_it_has_made() -> None:
    """Which has a graph of its own, and no part in the loss; a graph from outside is refused in the first step."""

    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe, self.metric = nn.Linear(X.shape[-1], 1), torch.zeros(())

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.metric = self.probe(output.detach()).square().mean()
            return F.mse_loss(output, target)

    _, stages = modules()
    loopback, schedules = pipeline(bpipe.OneFOneB, stages, Metric(), M)
    for _ in range(3):
        loopback.step(schedules, X, target=Y, return_outputs=False)
