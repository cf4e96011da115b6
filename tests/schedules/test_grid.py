"""The grid over time: where what moves is marked, and what the head says of memory."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.flow.shaping import shaped
from bpipe.passes.recompute import recompute
from bpipe.plan.grid import excerpt, head, num_fitting, rows
from bpipe.schedules import Action, Plan, Sizes, build

LANE = (
    "0F0 0EVICT0.1@host 0EVICT0.2@host 0F1 0WAIT_EVICT0.1@host 0WAIT_EVICT0.2@host "
    "0LOAD0.2@host 0LOAD0.1@host 0B1 0WAIT_LOAD0.2@host 0WAIT_LOAD0.1@host 0B0"
)


def plan(**memory: object) -> Plan:
    actions = (tuple(map(Action.parse, LANE.split())),)
    sizes = Sizes.of([2**30], num_parts=2)
    known = {"name": "by_hand", "flow": shaped(None, "chain", (0,), 2), "served": ((),), "slots": (None,)}
    return Plan(actions=actions, **known, **{"sizes": sizes, **memory})  # type: ignore[arg-type]


def test_what_moves_is_marked_under_the_computation_behind_it_and_once_for_all_parts() -> None:
    assert rows(plan()) == ["rank 0 | F0 F1 B1 b1 B0 b0", "       |    ^0 v0"]


def test_the_head_counts_bytes_where_the_plan_does() -> None:
    assert head(plan()) == "by_hand, balanced in bytes: 1 stage, 2 microbatches, planned: device 2.00 GiB; activations 2.00 GiB"
    assert head(plan(budgets=(2**31,))).endswith(", planned: device 2.00 GiB; activations 2.00 GiB; budget 2.00 GiB")
    assert head(plan(sizes=None, budgets=None)).endswith(", peak slots 2")


def test_an_excerpt_names_the_host() -> None:
    assert excerpt(plan(), 0, False, 1).splitlines()[2] == "      1 0EVICT0.1       host   <-- ERROR HERE"


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("width", [1, 15, 16, 40, 81, 1000])
@pytest.mark.parametrize("shown", [plan(), build("balanced_1f1b", 4, 12), build("zbv", 8, 11)], ids=lambda plan: plan.name)
def test_the_columns_that_fit_are_as_many_as_do(shown: Plan, width: int, first: int) -> None:
    def longest(columns: int) -> int:
        return max(map(len, rows(shown, slice(first, first + columns))))

    fitting = num_fitting(shown, first, width)
    assert fitting == 1 or longest(fitting) <= width
    assert longest(fitting + 1) > width or longest(fitting + 1) == longest(1000)


@pytest.mark.parametrize(
    "name, stages, given, title, counts",
    [
        ("1f1b", 4, {}, "1f1b", "4 stages, 8 microbatches"),
        ("1f1b", 4, {"slots": 3}, "1f1b, balanced", "4 stages, 8 microbatches"),
        ("balanced_1f1b", 4, {}, "balanced_1f1b", "4 stages, 8 microbatches"),
        ("interleaved_1f1b", 8, {"num_ranks": 4}, "interleaved_1f1b", "4 ranks with 2 stages each, 8 microbatches"),
        ("gpipe", 1, {}, "gpipe", "1 stage, 8 microbatches"),
    ],
)
def test_the_head_says_what_a_plan_is(name: str, stages: int, given: dict[str, Any], title: str, counts: str) -> None:
    assert head(build(name, stages, 8, **given)).startswith(f"{title}: {counts}, peak slots ")


def test_recomputed_plans_say_so() -> None:
    plan = recompute(build("1f1b", 4, 8), sizes=Sizes.of([8] * 4), budgets=16)
    assert head(plan).startswith("1f1b, recomputed in bytes: 4 stages, 8 microbatches, planned: ")
