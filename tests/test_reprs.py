"""What people print says what it is: short, with units, without an address, and whatever state the object is in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.estimate import Measurement, Profile, SliceMeasurement, SliceProfile
from bpipe.fill import Pieces
from bpipe.memory.ledger import Ledger
from bpipe.overlap import TwoThreads
from bpipe.plan import grid
from bpipe.schedules import Costs, Link, Plan, Sizes, Timeline, build, simulate
from tests.test_messages import Breaks, pipeline, stages

ROOMS = ("bpipe", "bpipe.schedules", "bpipe.estimate", "bpipe.fill", "bpipe.overlap", "bpipe.slices", "bpipe.partition")
X = torch.ones(8, 8)
LONGEST = 300  # characters of a repr


def public_classes() -> Iterator[type]:
    for room in map(import_module, ROOMS):
        yield from (one for name in room.__all__ if isinstance(one := getattr(room, name), type))


def test_every_public_class_has_a_repr_of_its_own() -> None:
    only_bases = {bpipe.PipelineScheduleSingle, bpipe.PipelineScheduleMulti}  # nothing is an instance of them alone
    assert [one.__name__ for one in {*public_classes()} - only_bases if one.__repr__ is object.__repr__] == []


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.GELU(), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))


def run(steps: int = 2, **given: Any) -> tuple[bpipe.Loopback, list[Any]]:
    loopback, schedules = pipeline(4, Wide)
    schedules = [bpipe.Balanced(one, **given) for one in schedules] if given else schedules  # type: ignore[misc]
    for _ in range(steps):
        loopback.step(schedules, X, target=X)
    return loopback, schedules


def profile() -> Profile:
    sizes = {"own_bytes": 2**21, "movable_bytes": 2**20, "shared_bytes": 0, "output_bytes": 2**10, "input_gradient_bytes": 2**10}
    one = Measurement(microbatch_size=1, forward_s=1e-3, backward_s=2e-3, **sizes)
    counts = dict.fromkeys(("trainable_bytes", "gradient_bytes", "parameter_bytes"), 4000) | {"buffer_bytes": 0}
    return Profile(name="Block", device="cpu", num_parameters=1000, num_trainable=1000, measurements=(one,), **counts)


def slice_profile() -> SliceProfile:
    measured = [SliceMeasurement(length=n, context=x, forward_s=n + x, backward_s=2.0 * n) for n in (1, 2, 4) for x in (0, 4)]
    return SliceProfile(name="Block", device="cpu", measurements=tuple(measured))


def stream() -> bpipe.Stream:
    stage = bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
    return bpipe.Stream(stage, nn.functional.mse_loss, torch.optim.SGD(stage.submod.parameters(), lr=0.1))


def balanced_timeline() -> Timeline:
    return simulate(build("balanced_1f1b", 4, 8), Costs(forward_s=0.01, saved_bytes=2**20))


SAID = {
    "a stage": (lambda: stages(1, bpipe.Loopback(4), 4)[0], ["PipelineStage(Sequential, stage 0 of 4 on cpu"]),
    "plain, before": (lambda: run(0)[1][1], ["OneFOneB(1f1b: 4 stages, 4 microbatches", "stage 1 on cpu, not run yet"]),
    "plain, after": (lambda: run()[1][1], ["2 steps"]),
    "balanced": (lambda: run(budget="lowest")[1][0], ["Balanced(1f1b, balanced in bytes: 4 stages", "budget='lowest'", "2 steps"]),
    "balanced in bytes": (lambda: run(0, budget=2**20)[1][0], ["budget 1.00 MiB", "not run yet"]),
    "slots": (lambda: bpipe.BalancedOneFOneB(stages(4, bpipe.Loopback(4))[0], 8), ["balanced_1f1b: 4 stages", "budget 3 slots"]),
    "several stages": (
        lambda: bpipe.Interleaved1F1B(
            [bpipe.PipelineStage(nn.Linear(8, 8), x, 8, "cpu", LOOPBACK.rank(0)) for x in (0, 4)], 8
        ),
        ["Interleaved1F1B(interleaved_1f1b: 4 ranks with 2 stages each, 8 microbatches", "stages 0, 4 on cpu"],
    ),
    "auto": (lambda: bpipe.auto(stages(1, bpipe.Loopback(1))[0], 4, nn.functional.mse_loss), ["AutoSchedule(", "chosen after the"]),
    "a loopback": (lambda: bpipe.Loopback(4), ["Loopback(4 ranks"]),
    "a ledger before": (Ledger, ["no step has run"]),
    "a ledger": (lambda: run()[1][0].ledger, ["Ledger(at most ", "B of activations, 4 microbatches"]),
    "a ledger of evictions": (lambda: run(budget="lowest")[1][0].ledger, ["evicted "]),
    "a plan": (lambda: build("1f1b", 4, 8), ["Plan(1f1b: 4 stages, 8 microbatches, peak slots 4 3 2 1)"]),
    "a timeline": (balanced_timeline, ["Timeline(balanced_1f1b: 4 stages, 8 microbatches, simulated, 330 ms)"]),
    "some of a timeline": (lambda: part_of(balanced_timeline()), ["with the times of ranks [1] only"]),
    "a lane": (lambda: balanced_timeline().actions[0], ["Lane(", "actions, 0 B that stay"]),
    "a profile": (profile, ["Profile(Block on cpu: 1,000 parameters, microbatches of 1)"]),
    "a profile of slices": (slice_profile, ["SliceProfile(Block on cpu: 6 slices measured"]),
    "costs": (Costs, ["Costs(forward_s=1.0"]),
    "a link": (Link, ["Link("]),
    "a stream": (stream, ["Stream(stage 0 of 1 on cpu, not run yet)"]),
    "a fill job": (lambda: Pieces(lambda: iter([]), num_bytes=2**20), ["Pieces(<lambda>, on an error: fail)"]),
    "two threads": (TwoThreads, ["TwoThreads(grace_s="]),
    "a trace": (lambda: bpipe.trace(run(0)[1]), ["Trace(of 4 schedules, not entered)"]),
    "advice": (
        lambda: bpipe.advise("gpt3-13b", batch=16, num_stages=4, device="a100-80gb", microbatch_sizes=[4]),
        ["Advice(gpt3-13b on a100-80gb: 4 stages", "candidates)"],
    ),
}  # fmt: skip
LOOPBACK = bpipe.Loopback(4)


def part_of(whole: Timeline) -> Timeline:
    empty = replace(whole.actions[0], begin_s=whole.actions[0].begin_s[:0], end_s=whole.actions[0].end_s[:0])
    return replace(whole, actions=tuple(lane if rank == 1 else empty for rank, lane in enumerate(whole.actions)))


@pytest.mark.parametrize("name", SAID)
def test_a_repr_says_what_it_is(name: str) -> None:
    make, says = SAID[name]
    made = make()  # type: ignore[operator]
    said = repr(made)
    assert [part for part in says if part not in said] == [], said
    assert not re.search(r" at 0x", f"{said} {made!s}") and "\n" not in said and len(said) < LONGEST


def test_a_schedule_says_how_it_ended() -> None:
    loopback, schedules = pipeline(2, Breaks)
    with pytest.raises(ArithmeticError):
        loopback.step(schedules, X, target=X)
    assert repr(schedules[0]).endswith("broken: ArithmeticError)")
    schedules[0].close()
    assert repr(schedules[0]).endswith("broken: ArithmeticError)")
    _, others = pipeline(2)
    others[0].close()
    assert repr(others[0]).endswith("stage 0 on cpu, closed)")
    wrapped = bpipe.Balanced(others[1])
    assert repr(others[1]).endswith("given to another schedule)") and "not run yet" in repr(wrapped)


@pytest.mark.parametrize("kind", [bpipe.OneFOneB, bpipe.Balanced, bpipe.PipelineStage, bpipe.Stream, bpipe.Routes])
def test_what_was_not_constructed_prints_too(kind: type) -> None:
    """A debugger shows `self` where a constructor has failed."""
    assert repr(kind.__new__(kind)) == f"{kind.__name__}(not constructed)"


def test_a_plan_that_breaks_rules_prints_too() -> None:
    plan = build("1f1b", 2, 2)
    lost = replace(plan, flow=replace(plan.flow, stage_ranks=()))
    for wrong in (lost, replace(plan, actions=plan.actions[:1]), replace(plan, slots=())):
        assert repr(wrong).startswith("Plan(")
    assert isinstance(plan, Plan)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        self.kept.append(y)  # which has another owner from now on
        return torch.exp(y)


def test_a_printed_ledger_lists_what_cannot_move_the_largest_first() -> None:
    loopback, schedules = pipeline(4, Keeps)
    loopback.step(schedules, X, target=X)
    ledger = schedules[0].ledger
    assert ledger.held
    ledger.held = [one._replace(num_bytes=2**20 * factor) for factor in range(1, 20) for one in ledger.held[:1]]
    first, head, *rows = str(ledger).splitlines()
    assert first == repr(ledger) and head.startswith("Cannot move, of the microbatch that was followed last")
    assert [" ".join(row.split()[:2]) for row in rows[:2]] == ["19.0 MiB", "18.0 MiB"]
    assert ledger.held[0].reason in rows[0] and rows[-1] == "  and 7 more in .held"


def test_a_printed_profile_is_a_table_with_units() -> None:
    assert str(profile()).splitlines() == [
        "Block on cpu: 1,000 parameters, 3.91 KiB; with Adam 15.6 KiB stay",
        "microbatch  forward  backward     saves     moves     sends",
        "         1  1.00 ms   2.00 ms  2.00 MiB  1.00 MiB  1.00 KiB",
    ]


def test_stats_stay_a_dict_of_numbers() -> None:
    """Loggers take it as it is."""
    stats = run()[1][0].stats
    assert type(stats) is dict and all(isinstance(value, int | float) for value in stats.values())


def test_sizes_of_a_plan_are_not_shortened() -> None:
    """Ranks compare these texts, because plans follow from them."""
    for one, other in ((Sizes.of([1, 2]), Sizes.of([1, 3])), (Costs(saved_bytes=[1, 2]), Costs(saved_bytes=[1, 3]))):
        assert repr(one) != repr(other)


def test_a_large_plan_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build("balanced_1f1b", 4, 8)
    assert "peak slots" in repr(plan)
    monkeypatch.setattr(grid, "MOST_SCANNED", 100)
    assert repr(plan) == "Plan(balanced_1f1b: 4 stages, 8 microbatches)"


def test_a_trace_counts_its_steps() -> None:
    loopback, schedules = run(0)
    with bpipe.trace(schedules) as traced:
        loopback.step(schedules, X, target=X)
    assert repr(traced) == "Trace(of 4 schedules, 1 steps)"
    assert re.fullmatch(r"Timeline\(1f1b: 4 stages, 4 microbatches, measured in step 0, [\d.]+ m?s\)", repr(traced.timelines[-1]))
