"""The plan with the shortest predicted step is the fastest one measured: real models, over gloo, on devices that sleep."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.real_choices import MOST_WRONG, Work, measure, wrong
from benchmarks.real_models import MODELS
from tests.tries import holds_in_one_try

pytestmark = [pytest.mark.alone, pytest.mark.slow]

MOST_OVER_BEST = 1.03


@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_plan_is_the_fastest_and_takes_what_was_predicted(model: str) -> None:
    """A few candidates and steps; the study `real_choices` has all of them."""
    work = Work(model, m=4, speed=2.0, seconds=0.0, fewest_rounds=3, is_short=True, effort=200_000)

    def is_right(rows: Any) -> bool:
        chosen = [row for row in rows if row["is_chosen"]]
        assert len(rows) >= 6 and len(chosen) == 2
        is_best = all(row["time"] <= MOST_OVER_BEST for row in chosen)
        return is_best and all(wrong(row)["value"] <= MOST_WRONG for row in rows)

    holds_in_one_try(lambda: measure(work), is_right)
