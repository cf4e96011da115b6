"""Huang et al.'s estimate (arXiv 2401.02088): E1 to E4."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.estimate import huang
from bpipe.schedules import Costs, build, simulate


@pytest.mark.parametrize(("x", "y", "factor"), [(1, 2, 0.9507), (2, 4, 0.9103), (1, 4, 0.8654)])
def test_bubble_factors(x: int, y: int, factor: float) -> None:
    """FACTS.md, p = 8, B = 128. Tolerance: the four digits given."""
    assert huang.bubble_factor(128, 8, x, y) == pytest.approx(factor, abs=5e-5)


def test_a_stage_ratio_of_142_is_a_speed_up_of_135() -> None:
    """FACTS.md: Huang et al.'s 1.35x on GPT-3 96B, p = 8, B = 128, 1 -> 2. Tolerance: the two digits given."""
    assert huang.speed_up(128, 8, 1, 2, 1.42) == pytest.approx(1.35, abs=5e-3)


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.floats(0.1, 2))
@settings(max_examples=40)
def test_the_four_agree_with_each_other_and_with_a_simulation(p: int, quarter: int, x: int, y: int, t: float) -> None:
    batch, flops, peak = 4 * quarter, 5.0, 100.0
    seconds = {b: t * (b + 0.5) for b in (x, y)}
    steps = {b: huang.step_s(batch, b, p, seconds[b]) for b in (x, y)}
    shares = {b: huang.stage_mfu(b, flops, seconds[b], peak) for b in (x, y)}
    for b in (x, y):
        assert huang.mfu(batch, b, p, shares[b]) == pytest.approx(batch * flops / (peak * steps[b]))
        simulated = simulate(build("1f1b", p, batch // b), Costs(forward_s=seconds[b] / 3))
        assert simulated.makespan_s == pytest.approx(steps[b])
    assert huang.speed_up(batch, p, x, y, shares[y] / shares[x]) == pytest.approx(steps[x] / steps[y])
    both = huang.estimate(batch, p, (x, y), stage_s=(seconds[x], seconds[y]), stage_mfu=(shares[x], shares[y]))
    assert both.step_s == (steps[x], steps[y]) and both.mfu is not None
    assert both.speed_up == pytest.approx(steps[x] / steps[y]) == pytest.approx(both.mfu[1] / both.mfu[0])


@pytest.mark.parametrize("arguments", [(0, 8, 1, 2), (128, 0, 1, 2), (128, 8, 3, 4), (128, 8, 1, 2.0), ("128", 8, 1, 2)])
def test_impossible_sizes(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError):
        huang.bubble_factor(*arguments)


def test_impossible_ratio() -> None:
    with pytest.raises(ConfigurationError, match="stage_ratio"):
        huang.speed_up(128, 8, 1, 2, 0)
