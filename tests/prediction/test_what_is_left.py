"""Nothing that a forward or a loss notes in a dry run is left, wherever it notes it: gradients are plain 1F1B's to the bit."""

from __future__ import annotations

import functools
import itertools
import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bpipe
from bpipe.errors import StageError
from bpipe.prediction.fake_modules import check_gone
from tests.models import mse
from tests.over import Over, pipeline
from tests.prediction.kinds import WIDTH, Layer
from tests.prediction.test_dry_run import M, num_fakes

T = torch.Tensor
Note = Callable[[], float]


@dataclass
class Helper:
    calls: int = 0
    tables: dict[int, T] = field(default_factory=dict)

    def table(self, n: int) -> T:
        if n not in self.tables:
            self.tables[n] = torch.arange(n).float().cos()[:, None]
        return self.tables[n]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Strict(OrderedDict):
    """As a ModelOutput, which refuses to be updated."""

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise TypeError


def of_variable() -> Note:
    calls = 0

    def note() -> float:
        nonlocal calls
        calls += 1
        return float(calls)

    return note


class Noting(Layer):
    """Scales by a number that changes with each call, which is kept somewhere."""

    def __init__(self, kept: Any, note: Callable[[Any], float]) -> None:
        super().__init__()
        self.kept, self.note = kept, note

    def forward(self, x: T) -> T:
        return x + self.inner(x) * (1 + 0.1 * self.note(self.kept))


def added(container: Any, key: Any) -> float:
    container[key] += 1
    return float(container[key])


def called(value: Any) -> float:
    value.calls += 1
    return float(value.calls)


def rotated(value: deque[int]) -> float:
    value.rotate()
    return float(value[0])


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a dict in a dict": (lambda: {"a": {"n": 0}}, lambda kept: added(kept["a"], "n")),
    "a dict in a tuple": (lambda: ({"n": 0},), lambda kept: added(kept[0], "n")),
    "a list in a UserDict": (lambda: UserDict(n=[0]), lambda kept: added(kept["n"], 0)),
    "a deque": (lambda: deque([1, 2, 3]), rotated),
    "a strict dict": (lambda: Strict(n=0), lambda kept: added(kept, "n")),
    "an array": (lambda: np.zeros(2), lambda kept: added(kept, 0)),
    "an object": (Helper, called),
    "slots": (Slotted, called),
    "a table made once": (Helper, lambda kept: float(kept.table(3).shape[0]) * 0 + len(kept.tables)),
    "a generator in an object": (lambda: Helper(random.Random(3)), lambda kept: kept.calls.random()),  # type: ignore[arg-type]
    "NumPy's generator": (lambda: [np.random.default_rng(3)], lambda kept: float(kept[0].random())),
    "a counter": (itertools.count, lambda kept: float(next(kept))),
    "a variable of a function": (of_variable, lambda kept: kept()),
}


def trained(modules: list[nn.Module], schedule: Any, loss_fn: Any) -> list[T]:
    torch.manual_seed(1)
    loopback, schedules = pipeline(schedule, modules, M, loss_fn)
    for number in range(2):
        x = torch.randn(5 * M, WIDTH, generator=torch.Generator().manual_seed(number))
        loopback.step(schedules, x, target=x)
    return [p.grad for module in modules for p in module.parameters()]


def both(make: Callable[[], tuple[list[nn.Module], Any]]) -> Iterator[list[T]]:
    for schedule in (bpipe.OneFOneB, Over(bpipe.OneFOneB, {"budget": "lowest"})):
        torch.manual_seed(0)
        yield trained(*(lambda made: (made[0], schedule, made[1]))(make()))


@pytest.mark.parametrize("name", KEPT)
def test_what_modules_keep_is_as_it_was(name: str) -> None:
    make, note = KEPT[name]
    fakes = num_fakes()
    plain, balanced = both(lambda: ([Noting(make(), note) for _ in range(2)], mse))
    assert all(map(torch.equal, plain, balanced)) and num_fakes() == fakes


class Smoothed:
    """A loss that counts, keeps a mean, and a list of what it has returned."""

    def __init__(self) -> None:
        self.calls, self.mean, self.history = 0, torch.zeros(()), list[T]()

    def __call__(self, output: T, target: T) -> T:
        loss = mse(output, target) * (1 + 0.1 * self.calls)
        self.calls, self.mean = self.calls + 1, 0.9 * self.mean + 0.1 * loss.detach()
        self.history.append(loss.detach())
        return loss + self.mean


def closing() -> Any:
    history: list[T] = []

    def loss_fn(output: T, target: T) -> T:
        history.append(mse(output, target).detach())
        return mse(output, target) * len(history)

    return loss_fn


@pytest.mark.parametrize("make", [Smoothed, closing])
def test_what_losses_keep_is_as_it_was(make: Callable[[], Any]) -> None:
    fakes = num_fakes()
    plain, balanced = both(lambda: ([Layer(), Layer()], make()))
    assert all(map(torch.equal, plain, balanced)) and num_fakes() == fakes


@functools.lru_cache
def table(n: int) -> T:
    return torch.arange(n).float().cos()[:, None]


SEEN: list[T] = []


def test_caches_of_functions_are_cleared_and_globals_are_refused() -> None:
    plain, balanced = both(lambda: ([Noting(None, lambda _: float(table(5).shape[0])) for _ in range(2)], mse))
    assert all(map(torch.equal, plain, balanced)) and type(table(5)) is T

    class Hoarding(Layer):
        def forward(self, x: T) -> T:
            SEEN.append(x.detach())
            return super().forward(x)

    with pytest.raises(StageError, match=r"has kept a tensor of shape .* of the dry run") as caught:
        trained([Hoarding(), Hoarding()], Over(bpipe.OneFOneB, {"budget": "lowest"}), mse)
    assert "measure='in_order'" in str(caught.value)
    SEEN.clear()
    trained([Hoarding(), Hoarding()], Over(bpipe.OneFOneB, {"budget": "lowest", "measure": "in_order"}), mse)
    assert len(SEEN) == 4 * M
    SEEN.clear()


def test_torchs_threads_may_let_go_of_fake_tensors_a_moment_later() -> None:
    """The thread of a device's backwards does: it holds what it has run last until it is scheduled again."""
    held = [torch.ones(2)] * 9
    check_gone([lambda: held.pop() if held else None], torch.device("cuda"))
    assert not held


def test_a_mode_forgets_the_results_of_operators() -> None:
    trained([Layer(), Layer()], Over(bpipe.OneFOneB, {"budget": "lowest"}), mse)
    assert FakeTensorMode.cache_info().size == 0
