"""Huang et al.'s estimate (arXiv 2401.02088): E1 to E4."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.estimate import huang
from bpipe.schedules import Costs, build, simulate
from tests.tiers import examples


@pytest.mark.parametrize(("x", "y", "factor"), [(1, 2, 0.9507), (2, 4, 0.9103), (1, 4, 0.8654)])
def test_bubble_factors(x: int, y: int, factor: float) -> None:
    """FACTS.md, p = 8, B = 128. Tolerance: the four digits given."""
    assert huang.estimate(128, 8, (x, y), stage_s=(1.0, 1.0)).bubble_factor == pytest.approx(factor, abs=5e-5)


def test_a_stage_ratio_of_142_is_a_speed_up_of_135() -> None:
    """FACTS.md: Huang et al.'s 1.35x on GPT-3 96B, p = 8, B = 128, 1 -> 2. Tolerance: the two digits given."""
    assert huang.estimate(128, 8, (1, 2), stage_s=(1.42, 2.0)).speed_up == pytest.approx(1.35, abs=5e-3)


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.floats(0.1, 2))
@settings(max_examples=examples(40))
def test_the_four_agree_with_each_other_and_with_a_simulation(p: int, quarter: int, x: int, y: int, t: float) -> None:
    batch, flops, peak = 4 * quarter, 5.0, 100.0
    seconds = t * (x + 0.5), t * (y + 0.5)
    shares = x * flops / (peak * seconds[0]), y * flops / (peak * seconds[1])
    both = huang.estimate(batch, p, (x, y), stage_s=seconds, stage_mfu=shares)
    assert both.mfu is not None
    for b, stage_s, step_s, mfu in zip((x, y), seconds, both.step_s, both.mfu):
        simulated = simulate(build("1f1b", p, batch // b), Costs(forward_s=stage_s / 3))
        assert simulated.makespan_s == pytest.approx(step_s)
        assert mfu == pytest.approx(batch * flops / (peak * step_s))
    assert both.stage_ratio == pytest.approx(shares[1] / shares[0])
    assert both.speed_up == pytest.approx(both.step_s[0] / both.step_s[1]) == pytest.approx(both.mfu[1] / both.mfu[0])
