"""The step in which `Balanced` measures is plain's to the bit, or it is refused: what its order decides about is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import StageError
from bpipe.schedules import Destinations
from tests.edge_cases.case import NUM_STAGES, Batch, Case, M, pipeline
from tests.models import WIDTH, Block, Result, as_rank, assert_same, batch_of, joined, mse
from tests.over import Over
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LOWEST = {"budget": "lowest"}
WAYS: dict[str, dict[str, Any]] = {
    "whole": LOWEST,
    "inside": {**LOWEST, "parts": 4, "inside": True},
    "host": {**LOWEST, "to": Destinations(host="only")},
    "recompute": {**LOWEST, "by": "recompute"},
}
IN_ORDER = {**LOWEST, "measure": "in_order"}


def batch(step: int) -> Batch:
    x, y = batch_of("quiet", M, step)
    return Batch((x,), y)


def seeded(make: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    """Modules, made when Python's and NumPy's random numbers begin anew."""
    random.seed(0)
    np.random.seed(0)
    return make()


def case_of(make: Callable[[], list[nn.Module]], **options: Any) -> Case:
    return Case(partial(seeded, make), options.pop("batch", batch), options.pop("loss_fn", F.mse_loss), **options)


def assert_equal(one: Result, other: Result) -> None:
    one.outputs = other.outputs = [torch.zeros(1)]
    assert_same(one, other)


def assert_plains(case: Case, schedule: type[bpipe.Schedule], **options: Any) -> Result:
    """Compare the schedule balanced with the schedule as it is."""
    result = case.piped(Over(schedule, {**LOWEST, **options}))
    assert_equal(result, case.piped(schedule))
    return result


def first_step_fails(case: Case, schedule: type[bpipe.Schedule], match: str) -> None:
    modules = case.make()
    loopback, schedules = pipeline(Over(schedule, LOWEST), modules, case.loss_fn)
    first = case.batch(0)
    with pytest.raises(StageError, match=match) as caught:
        loopback.step(schedules, *first.args, target=first.target, **first.kwargs)
    assert "measure='in_order'" in str(caught.value)


# Stages, one on a rank, whose backward draws or writes.


class Inner(nn.Module):
    """A block whose backward does something with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * self.scale() + self.noise(x)
        if y.requires_grad:
            y.register_hook(self.seen)
        return y

    def scale(self) -> float | torch.Tensor:
        return 1.0

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Torchs(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) * 0.1

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient) * 1e-3


class Pythons(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(random.random())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * random.uniform(0.9, 1.1)


class NumPys(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(np.random.rand(), dtype=x.dtype)

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float(np.random.uniform(0.9, 1.1))


class Own(Inner):
    """Draws from a generator of its own, one of torch's, Python's or NumPy's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.made = {
            "torch": torch.Generator().manual_seed(3),
            "python": random.Random(3),
            "numpy": np.random.default_rng(3),
        }[kind]

    def drawn(self) -> float:
        return float(torch.rand((), generator=self.made) if isinstance(self.made, torch.Generator) else self.made.random())

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.drawn())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.drawn()


class Recomputed(Inner):
    """Draws other random numbers when its region is recomputed, as preserve_rng_state=False lets it."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = checkpoint(lambda x: F.dropout(self.linear(x), 0.2), x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(y, torch.Tensor)
        return y


class RecomputedNorm(Inner):
    """Its statistics are those of each forward, and of each recomputation in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = checkpoint(lambda x: self.norm(self.linear(x).flatten(0, 1)).view_as(x), x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        return y


class Amax(Inner):
    """Scales as delayed scaling does: by a buffer that backwards write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(4))

    def scale(self) -> torch.Tensor:
        return self.amax.max()  # type: ignore[no-any-return, operator]

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.amax = self.amax.roll(1)  # type: ignore[assignment, operator]
        self.amax[0] = 1 + gradient.abs().max()  # type: ignore[index]
        return gradient


class Attribute(Inner):
    """The same in a plain attribute: a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = 1.0

    def scale(self) -> float:
        return self.norm

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.norm = 0.9 * self.norm + 0.1 * (1 + float(gradient.norm()))
        return gradient


class Meter:
    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {"seen": [1.0]}


class Inside(Attribute):
    """The same deep in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def scale(self) -> float:
        return self.meter.norms["seen"][-1]

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.meter.norms["seen"].append(1 + float(gradient.norm()))
        return gradient


class OptimizerInBackward(Inner):
    """Its weights are updated as soon as a microbatch's gradient is there."""

    def __init__(self, *, uses_data: bool) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_update, uses_data=uses_data))


@torch.no_grad()
def _update(parameter: torch.Tensor, *, uses_data: bool) -> None:
    assert parameter.grad is not None
    (parameter.data if uses_data else parameter).add_(parameter.grad, alpha=-0.1)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "torch": Torchs,
    "Python": Pythons,
    "NumPy": NumPys,
    "its own, torch": partial(Own, "torch"),
    "its own, Python": partial(Own, "python"),
    "its own, NumPy": partial(Own, "numpy"),
    "recomputed": Recomputed,
}
WRITING: dict[str, Callable[[], nn.Module]] = {
    "statistics, recomputed": RecomputedNorm,
    "buffer": Amax,
    "attribute": Attribute,
    "object": Inside,
    "optimizer": partial(OptimizerInBackward, uses_data=False),
    "optimizer, data": partial(OptimizerInBackward, uses_data=True),
}


def at(index: int, make: Callable[[], nn.Module]) -> Case:
    """A stage of a kind among quiet ones."""
    return case_of(lambda: [make() if i == index else Block(dropout=0.0) for i in range(NUM_STAGES)])


@pytest.mark.parametrize("name", [*DRAWING, *WRITING])
def test_a_backward_that_draws_or_writes_is_refused_or_measured_in_order(name):
    make = {**DRAWING, **WRITING}[name]
    match = r"^stage 1, microbatch 0: the backward" + (" draws random numbers" if name in DRAWING else " changes the")
    first_step_fails(at(1, make), bpipe.OneFOneB, match)
    case = at(1, make)
    for schedule in (bpipe.OneFOneB, bpipe.GPipe):
        plain, balanced = case.piped(schedule), case.piped(Over(schedule, IN_ORDER))
        assert_equal(plain, balanced)
    assert sum(stats["evicted_bytes"] for stats in case.piped(Over(bpipe.OneFOneB, IN_ORDER)).stats) > 0
