"""Planning takes little time: 16 ranks, 128 microbatches, four families, a tight budget."""

from __future__ import annotations

import pytest

from benchmarks.planning_time import CHOICE_S, LINKS, SEARCH_S, families, seconds_of
from bpipe.search.fastest import searched
from bpipe.search.named import named
from tests.tries import holds_in_one_try


@pytest.mark.alone
@pytest.mark.parametrize(
    "plan, most_s",
    [pytest.param(named, CHOICE_S, id="choice"), pytest.param(searched, SEARCH_S, id="search", marks=pytest.mark.exhaustive)],
)
def test_planning_takes_seconds(plan: object, most_s: float) -> None:
    given = families(LINKS["fast links"])
    assert callable(plan)
    holds_in_one_try(lambda: seconds_of(lambda: plan(given)), lambda seconds: seconds <= most_s)
