"""Modules that put their weights' gradients off by themselves: `dw_builder` of our stages, and of those that are adopted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from tests.edge_cases.case import NUM_STAGES, ONE_STAGE, SCHEDULES, M
from tests.models import held_by

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6
T = torch.Tensor


class LaterFunction(torch.autograd.Function):
    """A product whose backward leaves the weight's half in a list."""

    @staticmethod
    def forward(ctx: Any, x: T, weight: T, later: list[Any]) -> T:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.weight = later, weight  # under saved-tensor hooks torch gives another tensor back in place of a parameter
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.weight, x, gradient))
        return gradient @ weight.t(), None, None


class Later(nn.Module):
    """Two such products and an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.later: list[Any] = []
        self.num_built = 0

    def forward(self, x: T) -> T:
        return LaterFunction.apply(torch.tanh(LaterFunction.apply(self.norm(x), self.first, self.later)), self.second, self.later)

    def builder(self) -> Callable[[], None]:
        self.num_built += 1
        later, self.later[:] = list(self.later), ()

        @torch.no_grad()
        def run() -> None:
            for weight, x, gradient in later:
                product = x.t() @ gradient
                weight.grad = product if weight.grad is None else weight.grad + product

        return run


class MainGrad(Later):
    """Adds to a buffer of the module's own, and gives the parameters views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.main = torch.zeros(2, WIDTH, WIDTH)

    def builder(self) -> Callable[[], None]:
        self.num_built += 1
        later, self.later[:] = list(self.later), ()

        @torch.no_grad()
        def run() -> None:
            for weight, x, gradient in later:
                index = int(weight is self.second)
                self.main[index].addmm_(x.t(), gradient)
                weight.grad = self.main[index]

        return run


class Ordinary(nn.Module):
    """Puts nothing off; its builder has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_built = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: T) -> T:
        return torch.tanh(self.linear(x))

    def builder(self) -> Callable[[], None]:
        self.num_built += 1
        return lambda: None


class Bare(Later):
    """An ordinary weight besides, whose gradient autograd has computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: T) -> T:
        return super().forward(self.linear(x))


class Mixed(Later):
    """Evaluates inputs of its own, too, that need no gradient."""

    def forward(self, x: T) -> T:
        return super().forward(x) + LaterFunction.apply(torch.ones(len(x), WIDTH), self.first * 1, [])


def own(module: Any, index: int, group: Any) -> Any:
    return bpipe.PipelineStage(module, index, NUM_STAGES, "cpu", group, dw_builder=module.builder)


def adopted(module: Any, index: int, group: Any) -> Any:
    """As torch's stage looks from outside."""
    return SimpleNamespace(
        submod=module,
        stage_index=index,
        num_stages=NUM_STAGES,
        device=torch.device("cpu"),
        group=group,
        dw_builder=module.builder,
    )


def made(kind: type[Any]) -> list[Any]:
    torch.manual_seed(0)
    return [kind() for _ in range(NUM_STAGES)]


@pytest.mark.parametrize("stage_of", [own, adopted])
@pytest.mark.parametrize("kind", [Later, MainGrad, Ordinary, Bare, Mixed])
def test_runners_run_where_the_weight_half_is(kind: type[Any], stage_of: Callable[..., Any]) -> None:
    x, y = torch.randn(2, 2 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    alone = made(kind)
    for _ in range(2):
        for xi, yi in zip(x.chunk(M), y.chunk(M), strict=True):
            (F.mse_loss(nn.Sequential(*alone)(xi), yi) / M).backward()
            for module in alone:
                module.builder()()
    expected = [parameter.grad for module in alone for parameter in module.parameters()]
    for name in ("1f1b", "bytes", "recompute", "interleaved", "zb_h1", "dualpipe_v"):
        modules, schedule = made(kind), SCHEDULES[name]
        loopback = bpipe.Loopback(NUM_STAGES if name in ONE_STAGE else NUM_STAGES // 2)
        schedules = [
            schedule([stage_of(modules[i], i, loopback.rank(rank)) for i in held], M, loss_fn=F.mse_loss)
            for rank, held in enumerate(held_by(schedule, loopback.num_ranks, NUM_STAGES))
        ]
        for _ in range(2):
            loopback.step(schedules, x, target=y)
        found = [parameter.grad for module in modules for parameter in module.parameters()]
        assert all(map(torch.equal, found, expected)), name
        assert [module.num_built for module in modules] == [2 * M] * NUM_STAGES


class Noting(Ordinary):
    """Notes the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ""

    def builder(self) -> Callable[[], None]:
        self.order += "b"
        return self.run

    def run(self) -> None:
        self.order += "r"


@pytest.mark.parametrize("name", ["1f1b", "zb_h2"])
def test_a_runner_waits_for_the_weight_half(name: str) -> None:
    modules, loopback = made(Noting), bpipe.Loopback(NUM_STAGES)
    schedules = [SCHEDULES[name](own(module, i, loopback.rank(i)), M, loss_fn=F.mse_loss) for i, module in enumerate(modules)]
    x, y = torch.randn(2, 2 * M, WIDTH)
    loopback.step(schedules, x, target=y)
    assert all(sorted(module.order) == ["b"] * M + ["r"] * M for module in modules)
    assert any("bb" in module.order for module in modules) is (name == "zb_h2")
