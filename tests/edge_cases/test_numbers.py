"""Plain numbers among the inputs: they count as long as they may decide what is saved, and no longer."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.memory.saved.stash import Stash
from bpipe.model.microbatch import Description
from bpipe.model.plain_numbers import CountedNumbers
from tests.edge_cases.case import NUM_STAGES, Batch, Case, M, pipeline
from tests.found import finds_sizes
from tests.models import WIDTH, batch_of
from tests.over import Over
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LOWEST = Over(bpipe.OneFOneB, {"budget": "lowest"})


class Mode(enum.IntEnum):
    THIN = 1
    THICK = 2


class Stage(nn.Module):
    """Takes any keyword arguments; some say how much it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, thick: int = 1, after: int = 10**9, it: Any = 0, **_: Any) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x)) * (1 + 0.01 * int(it))
        for _ in range(int(thick) + 2 * (int(it) >= after) - 1):
            y = y.sin()
        return y


def run(
    steps: Sequence[dict[str, Any]], schedule: Any = LOWEST, inputs: Callable[[int], tuple[Any, ...]] | None = None
) -> tuple[list[bool], list[Any]]:
    """Steps with keyword arguments: whether each of them measured, and the schedules."""
    torch.manual_seed(0)
    loopback, schedules = pipeline(schedule, [Stage() for _ in range(NUM_STAGES)], F.mse_loss)
    measured = []
    for kwargs in steps:
        x, y = batch_of("quiet", M)
        loopback.step(schedules, x, target=y, return_outputs=False, **kwargs)
        measured.append(finds_sizes(schedules[0]))
    return measured, schedules


def counts(measured: list[bool]) -> str:
    return "".join("m" if one else "." for one in measured)


NUMBERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "int": lambda step: {"it": step},
    "numpy": lambda step: {"it": np.int32(step)},
    "nested": lambda step: {"state": {"it": [step, "text"], "epoch": 0}},
    "two": lambda step: {"it": step, "tokens": 10**12 + 512 * step},
    "negative": lambda step: {"left": -step},
    "float and tensor": lambda step: {"lr": 0.1**step, "it": step, "scale": torch.full((M,), float(step))},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_each_step_is_soon_balanced(caplog, name):
    measured, schedules = run([NUMBERS[name](step) for step in range(7)])
    assert counts(measured) == "mmmm..."
    assert sum(schedule.stats["evicted_bytes"] for schedule in schedules) > 0
    assert not caplog.records
    assert all(schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"] for schedule in schedules)


def test_numbers_that_change_seldom():
    steps = [{"it": step, "epoch": step // 6, "size": 4} for step in range(16)]
    assert counts(run(steps)[0]) == "mmmm..m.....mm.."  # three epochs are measured, and once without a number


def test_gradients_are_a_single_processes():
    def batch(step: int) -> Batch:
        x, y = batch_of("quiet", M, step)
        cut = [((xi,), {"it": step}, yi) for xi, yi in zip(x.chunk(M), y.chunk(M))]
        return Batch((x,), y, {"it": step}, cut)

    case = Case(lambda: [Stage() for _ in range(NUM_STAGES)], batch, F.mse_loss, steps=5)
    case.check(["1f1b", "bytes", "parts", "recompute", "zbv"])


@pytest.mark.parametrize("thick", [lambda step: 1 + step % 3, lambda step: Mode(1 + step % 2), lambda step: np.int64(1 + step % 2)])
def test_a_number_that_decides_what_is_saved_counts(thick):
    measured, schedules = run([{"thick": thick(step)} for step in range(9)])
    num = len({int(thick(step)) for step in range(9)})
    assert counts(measured) == "m" * num + "." * (9 - num)
    assert all(schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"] for schedule in schedules)


def test_beside_one_that_decides_another_does_not():
    measured, schedules = run([{"thick": 1 + step % 2, "it": step} for step in range(12)])
    assert counts(measured)[-4:] == "...."
    assert all(schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"] for schedule in schedules)


def test_bools_and_texts_select():
    for values in ([True, False], ["a", "b"], [None, 1]):
        measured, _ = run([{"which": values[step % 2]} for step in range(5)])
        assert counts(measured) == "mm..."


def test_one_that_decides_later_is_noticed_and_counts_again(caplog):
    caplog.set_level(logging.INFO, "bpipe")
    steps = [{"it": step, "after": 6} for step in range(16)]
    measured, schedules = run(steps)
    assert counts(measured) == "mmmm...mmmmmm..."  # five times with its number, then once without it
    assert "saves more than planned" in caplog.text
    assert all(schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"] for schedule in schedules)


class Shorter(Stage):
    """Returns less from a step on."""

    def forward(self, x: torch.Tensor, after: int = 10**9, it: Any = 0, **_: Any) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        return y[:, :8] if it >= after else y


def test_one_that_decides_messages_later_is_noticed():
    """Messages are agreed for each number, so that they change without an error."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target[:, : output.shape[1]])

    results = []
    for schedule in (LOWEST, bpipe.OneFOneB):
        torch.manual_seed(0)
        modules = [Shorter() for _ in range(NUM_STAGES)]
        loopback, schedules = pipeline(schedule, modules, loss_fn)
        for step in range(12):
            x, y = batch_of("quiet", M, step)
            loopback.step(schedules, x, target=y, return_outputs=False, it=step, after=5)
        results.append([parameter.grad for module in modules for parameter in module.parameters()])
        assert all(one.stats["device_peak_bytes"] == one.stats["predicted_device_peak_bytes"] for one in schedules)
    assert all(torch.equal(one, other) for one, other in zip(*results) if one is not None and other is not None)


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.ZBV, bpipe.BalancedOneFOneB], ids=lambda one: one.rule)
def test_what_a_schedule_that_does_not_measure_pays(monkeypatch, schedule):
    """Nothing is followed from the third step on, but what is evicted, and nothing is remembered for each number."""
    followed: list[None] = []
    make = Stash.__init__
    monkeypatch.setattr(Stash, "__init__", lambda *args, **options: followed.append(None) or make(*args, **options))
    run([{"it": 0}] * 2, schedule)
    evicted = len(followed) - NUM_STAGES
    followed.clear()
    _, schedules = run([{"it": step} for step in range(30)], schedule)
    assert len(followed) <= 4 * NUM_STAGES + 30 * evicted // 2
    assert all(len(one.session.context.memory.kinds) <= 4 * NUM_STAGES for one in schedules)


def test_each_microbatch_has_numbers_of_its_own():
    torch.manual_seed(0)
    loopback, schedules = pipeline(LOWEST, [Stage() for _ in range(NUM_STAGES)], F.mse_loss)
    for step in range(5):
        x, y = batch_of("quiet", M)
        microbatches = [{"it": step * M + i} for i in range(M)]
        loopback.step(schedules, x, kwarg_mbs=microbatches, target=y, return_outputs=False)
    assert schedules[0].plan.sizes is not None


def test_ranks_agree_although_each_has_its_own_numbers():
    (measured, gradients), (others, _) = run_ranks(as_rank, 2)
    assert measured == others
    assert counts(measured)[-3:] == "..."
    assert gradients


def as_rank(rank: int) -> tuple[list[bool], list[torch.Tensor]]:
    """Balanced and plain: the gradients are the same, and the first rank's numbers change twice as often as the other's."""
    found, measured = [], []
    for make in (LOWEST, bpipe.OneFOneB):
        torch.manual_seed(rank)
        module = Stage()
        schedule = make(bpipe.PipelineStage(module, rank, 2, "cpu"), M, loss_fn=F.mse_loss)
        for step in range(10):
            x, y = batch_of("quiet", M, step)
            schedule.step(x, target=y, return_outputs=False, **({"it": step} if rank == 0 else {"it": step // 2, "epoch": 1}))
            measured.append(finds_sizes(schedule))
        found.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
        schedule.close()
    assert all(map(torch.equal, *found))
    return measured[:10], found[0]


def test_little_is_remembered():
    known = CountedNumbers()
    for form in range(100):
        for number in range(40):
            known.learn(str(form), (number, -number), number % 5)
    assert len(known._forms) == 64
    assert all(len(form._seen) <= 16 for form in known._forms.values())


def test_a_number_counts_again_when_something_else_is_taken_and_longer_each_time():
    known, history = CountedNumbers(), ""
    for step in range(60):
        forms = known.forms("train", [Description("form", (step,))])
        history += "." if "None" in forms.counted[0] else "#"
        is_noticed = known.learn("train form", (step,), step // 20)
        assert is_noticed is (step in (20, 40))
    assert history == "###" + "." * 18 + "####" + "." * 16 + "########" + "." * 11
