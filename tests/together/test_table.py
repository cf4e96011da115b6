"""Every pair of shapes does in training what the documentation says, with the gradients and losses of one process."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.parallel.replicas import gradient_bytes
from bpipe.schedules import Plan
from tests.together.table import PAIRS, in_loopback, outcome, plan_of, written

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_documentation_names_every_pair() -> None:
    assert list(written()) == PAIRS


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_a_pair_does_what_is_written(names: tuple[str, ...]) -> None:
    assert outcome(names) == written()[names]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_a_plan_has_what_it_is_named_after(names: tuple[str, ...]) -> None:
    if names == ("directions", "paths"):
        return
    plan = plan_of(names)
    assert bool(plan.overlapped) >= ("pairs" in names)
    assert any(map(plan.recomputed, range(plan.num_ranks))) == ("recomputation" in names)


TRAINED = [names for names, what in written().items() if what.startswith("trained")]


@pytest.mark.parametrize("by", ["evict", "recompute"])
@pytest.mark.parametrize("names", TRAINED, ids="-".join)
def test_a_balanced_pair_takes_what_was_predicted(names: tuple[str, ...], by: Any) -> None:
    """To the byte, after every action; with directions within the gradients of earlier steps, which are static bytes.

    Twins set these aside until they sum, and how many wait at which action is not counted here.
    """
    schedules, counts = in_loopback(plan_of(names), budget="lowest", by=by)
    for schedule in schedules:
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
        assert Plan.from_text(schedule.plan.to_text()) == schedule.plan
    plan, ranks = schedules[0].plan, range(len(schedules))
    assert any(plan.evicted(rank) or plan.recomputed(rank) for rank in ranks) or "directions" in names
    for schedule, count in zip(schedules, counts):
        parameters = (one for stage in schedule.session.context.stages.values() for one in stage.submod.parameters())
        aside = gradient_bytes(parameters) if "directions" in names else 0
        *moments, last = count.moments()
        assert all(0 <= moment.counted_after - moment.planned_after <= aside for moment in moments)
        assert last.counted_after == last.planned_after
