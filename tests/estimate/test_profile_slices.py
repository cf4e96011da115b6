"""Measuring a stage on slices: what is timed, a formula that fits it, and lengths that are chosen by it and run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.estimate import SliceMeasurement, SliceProfile, costs_of_slices
from bpipe.partition import slice_lengths
from bpipe.schedules import Action, Op, build, simulate
from tests.clock import Clock
from tests.slices.models import KINDS, WIDTH, Stage, Whole, batch_of, stages_of
from tests.slices.test_run import by_themselves, furthest, run, taken

mse = nn.functional.mse_loss
OF_TIME = 1e-2  # seconds of a forward for itself; long beside what the bench needs
PER_POSITION, PER_PAIR = 3e-4, 1e-5
Costs = tuple[float, float, float, float]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products on busy cores: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Sleeper(torch.autograd.Function):
    """Sleeps in the forward, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleepy(nn.Module):
    """A stage whose slices take known times: for themselves, for their positions, and for the pairs that attention sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        length, context = x.shape[1], sum(past)
        self.seen.append((*past, length))
        seconds = OF_TIME + PER_POSITION * length + PER_PAIR * length * (2 * context + length)
        return Sleeper.apply(x * self.weight, seconds), length


def test_times_are_those_of_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().patch_all(monkeypatch)
    stage = Sleepy()
    profile = bpipe.profile_slices(stage, torch.randn(1, 64, 2), [8, 32, 64], repeats=3)
    assert [(one.length, one.context) for one in profile.measurements] == [
        (8, 0),
        (8, 28),
        (8, 56),
        (32, 0),
        (32, 16),
        (32, 32),
        (64, 0),
    ]
    for one in profile.measurements:
        forward_s = OF_TIME + PER_POSITION * one.length + PER_PAIR * one.length * (2 * one.context + one.length)
        assert (one.forward_s, one.backward_s) == pytest.approx((forward_s, 2 * forward_s), abs=1e-6)
    assert (4, 8, 8, 8, 8) in stage.seen and (16, 32) in stage.seen  # earlier slices have its length, the first one the rest
    assert stage.weight.grad is None


def measured(cost: Any, lengths: list[int], contexts: list[int]) -> SliceProfile:
    found = [
        SliceMeasurement(
            length=length, context=context, forward_s=cost(length, context) / 3, backward_s=cost(length, context) / 1.5
        )
        for length in lengths
        for context in contexts
    ]
    return SliceProfile(name="Stage", device="cpu", measurements=tuple(found))


@pytest.mark.parametrize("costs", [(1.0, 0.1, 0.0, 1e-4), (1.0, 0.1, 0.02, 1e-4), (0.0, 0.1, 0.0, 0.0), (0.5, 0.0, 0.0, 1e-5)])
def test_what_the_formula_can_say_it_says_exactly(costs: Costs) -> None:
    def cost(length: int, context: int) -> float:
        fixed, position, before, pair = costs
        return fixed + position * length + before * context + pair * length * (2 * context + length)

    profile = measured(cost, [64, 256, 1024], [0, 512, 3072])
    assert profile.coefficients == pytest.approx(costs, abs=1e-9) and profile.error < 1e-9
    assert profile.seconds(100, 2000) == pytest.approx(cost(100, 2000))
    chosen = slice_lengths(4096, profile.seconds, num_stages=8, num_microbatches=8, multiple_of=64)
    assert chosen == slice_lengths(4096, cost, num_stages=8, num_microbatches=8, multiple_of=64)


def test_no_coefficient_is_negative_and_the_error_is_told() -> None:
    """Otherwise the search would find slices that cost nothing."""
    profile = measured(lambda length, context: max(1.0, length / 100) + 1 / (1 + context), [10, 50, 200, 400], [0, 100])
    assert min(profile.coefficients) >= 0
    errors = [abs(profile.seconds(one.length, one.context) / one.seconds - 1) for one in profile.measurements]
    assert profile.error == max(errors) > 0.1 and f"within {100 * profile.error:.0f}%" in str(profile)


def test_costs_of_slices() -> None:
    """What each slice takes by itself on each stage: forwards and backwards by their own formulas, bytes by lengths."""
    profile = measured(lambda length, context: 3.0 + 0.3 * length + 3e-3 * length * (2 * context + length), [8, 32, 64], [0, 32])
    plan = build("seq_1f1b", 2, 3, slices=3)
    whole = bpipe.schedules.Costs(forward_s=9.0, backward_s=2.0, input_s=1.0, weight_s=0.5, saved_bytes=100, output_bytes=64)
    costs = costs_of_slices([profile, profile], [32, 16, 16], whole, plan)
    for slice_, (length, context) in enumerate([(32, 0), (16, 32), (16, 48)]):
        forward, backward = costs.seconds(Op.F, 1, 3 + slice_), costs.seconds(Op.B, 0, slice_)
        assert [forward, backward] == pytest.approx([profile.seconds(length, context) / third for third in (3, 1.5)])
        assert [costs.seconds(op, 0, slice_) for op in (Op.I, Op.W)] == pytest.approx([backward / 2, backward / 4])
    assert [costs.saved(0, slice_) for slice_ in range(3)] == [50, 25, 25] and costs.carried(Action(Op.SEND_F, 0, 0)) == 32
    assert simulate(plan, costs).makespan_s > 0
    for wrong, match in (([profile], "1 profiles for 2 stages"), ([profile] * 2, "lengths=.*give 3 shares")):
        with pytest.raises(ConfigurationError, match=match):
            costs_of_slices(wrong, [32, 32], whole, plan)


@pytest.mark.parametrize("kind", KINDS)
def test_profile_choose_and_run(kind: str) -> None:
    """From a stage to its slices: measured, cut by what was measured, and trained on as whole sequences are."""
    modules, batch = stages_of(kind, 3), batch_of(3, positions=48)
    profile = bpipe.profile_slices(modules[1], batch[0][:2], repeats=2)
    assert {one.length for one in profile.measurements} == {3, 6, 12, 24, 48}
    lengths = slice_lengths(48, profile.seconds, num_stages=3, num_microbatches=3, multiple_of=4)
    expected = by_themselves(modules, 3, batch)
    run(modules, bpipe.Seq1F1B, 3, batch, slices=len(lengths), options=bpipe.Options(slice_lengths=lengths))
    assert furthest(taken(modules), expected) < 1e-12


def test_what_is_run_is_left_as_it_was() -> None:
    (stage,) = stages_of("attention", 1)
    x, y = batch_of(1)
    before = torch.get_rng_state()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return mse(output, target, reduction="sum"), target.numel()

    bpipe.profile_slices(stage, x, [4, 12], contexts=[0, 8], loss_fn=loss_fn, target=y, is_first=True, repeats=1)
    assert all(parameter.grad is None for parameter in stage.parameters()) and torch.equal(torch.get_rng_state(), before)


def test_a_loss_of_whole_sequences_is_refused() -> None:
    x, y = batch_of(1)
    with pytest.raises(StageError, match="returned a Tensor for a slice of Stage: with loss_of_slices=True it returns two numbers"):
        bpipe.profile_slices(Stage("attention").double(), x, [4], loss_fn=mse, target=y, is_first=True, repeats=1)


def test_words_on_the_first_stage() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rest = nn.Embedding(9, WIDTH), Stage("lstm")

        def forward(self, words: torch.Tensor, past: Any = ()) -> Any:
            return self.rest(self.embed(words), past)

    profile = bpipe.profile_slices(First(), torch.arange(16).view(2, 8) % 9, [2, 4], contexts=[0, 4], repeats=1)
    assert [(one.length, one.context) for one in profile.measurements] == [(2, 0), (2, 4), (4, 0), (4, 4)]


class Dropping(nn.Module):
    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        return nn.functional.dropout(x, 0.5), None


@pytest.mark.parametrize(
    ("module", "given", "error", "message"),
    [
        (Whole(Stage("lstm")), {}, ConfigurationError, "has no argument `past`"),
        (Stage("lstm"), {"lengths": [13, 4]}, ConfigurationError, "13 positions is longer than the example's sequence of 12"),
        (Stage("lstm"), {"lengths": [12]}, ConfigurationError, "slices of one length"),
        (Stage("lstm"), {"lengths": "4"}, ConfigurationError, "lengths='4': give a whole number"),
        (Stage("lstm"), {"contexts": [12]}, ConfigurationError, "so far inside a sequence of 12"),
        (Stage("lstm"), {"example": torch.randn(4)}, ConfigurationError, "no dimension of positions"),
        (Stage("lstm"), {"repeats": 0}, ConfigurationError, "repeats=0"),
        (Dropping(), {}, StageError, "drew random numbers"),
        (nn.Linear(3, 3), {"example": "x"}, ConfigurationError, "no tensor"),
    ],
)
def test_what_cannot_be_measured_is_refused(module: nn.Module, given: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        bpipe.profile_slices(module, **{"example": torch.randn(2, 12, WIDTH), **given})
