"""Verdicts: what is said in each case, that it is what the ranking says, and that links are compared fairly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.api.options import Options
from bpipe.estimate import words
from bpipe.estimate.advisor import advise
from bpipe.estimate.decision import SMALLEST_GAIN
from bpipe.estimate.devices import GIB
from tests.estimate.samples import DEVICE, MODEL, ONE, SETUP, STAGE, between, first_line, stage
from tests.tiers import examples

APART, TOGETHER = [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]


def test_balancing_that_gains() -> None:
    advice = advise(MODEL, efficiency={1: 0.3, 2: 0.45}, recomputations=["none"], memory_bytes=between(1), **SETUP)
    assert first_line(advice).startswith("Balance: ") and "microbatch 2 instead of 1" in first_line(advice)
    assert advice.best is advice.best_balanced


def test_a_gain_counts_from_1_percent() -> None:
    setup: dict[str, Any] = SETUP | {"recomputations": ["none"], "memory_bytes": between(1)}
    found = [advise(MODEL, efficiency={1: 0.3, 2: 0.3 * ratio / 100}, **setup) for ratio in range(109, 114)]
    gains = [advice.gain for advice in found if advice.gain is not None]
    assert min(gains) == 0 and any(0 < gain < 0.01 for gain in gains) and any(0.01 < gain < 0.02 for gain in gains)
    assert [advice.decision for advice in found] == ["balance" if gain > 0.01 else "don't" for gain in gains]
    assert [first_line(advice).startswith("Balance: ") for advice in found] == [gain > 0.01 for gain in gains]


def test_balancing_that_is_not_needed() -> None:
    advice = advise(MODEL, memory_bytes=1000 * GIB, **SETUP)
    assert first_line(advice).startswith(
        "Don't balance, there is no need: microbatch 16 fits plain with recomputation none, and every candidate that fits balanced "
        "also fits plain."
    )
    assert advice.decision == "no need" and advice.best is advice.best_plain


def test_only_balanced_fits() -> None:
    advice = advise(MODEL, recomputations=["none"], microbatch_sizes=[2], memory_bytes=between(1), **SETUP)
    assert first_line(advice).startswith("Balance: nothing fits without it. The best is 1f1b balanced, 5 slots")
    assert advice.best_plain is None and advice.estimate is None


@pytest.mark.parametrize(("share", "gains"), [(0.25, False), (0.5, True)])
def test_more_recomputation_is_judged_by_its_speed(share: float, gains: bool) -> None:
    """Balancing makes microbatches of 32 fit with full recomputation: a reason only where a stage runs them fast enough."""
    setup: dict[str, Any] = {"num_stages": 8, "tensor_parallel": 4, "device": "a100-80gb"}
    setup |= {"recomputations": ["none", "full"], "microbatch_sizes": [1, 32], "memory_bytes": 72 * GIB}
    setup["options"] = Options(bytes_per_parameter=16)
    advice = advise("gpt3-96b", batch=512, efficiency={1: 0.25, 32: share}, **setup)
    fits = {(one.microbatch_size, one.is_balanced) for one in advice.candidates if one.fits and one.schedule == "1f1b"}
    assert fits == {(1, False), (1, True), (32, True)}
    trade = "it allows microbatch 32 instead of 1 and recomputation full instead of none; that "
    assert first_line(advice).startswith("Balance: 7" if gains else f"Don't balance: {trade}loses 24") and trade in advice.verdict
    assert (advice.best is advice.best_balanced) is gains and (advice.decision == "balance") is gains


@given(
    st.sampled_from([4, 6, 8]),
    st.sampled_from([8, 16, 24]),
    st.integers(250, 4000),
    st.tuples(*[st.floats(0.3, 0.5) | st.floats(0.1, 1)] * 3),
    st.sampled_from([1e8, 1e9, 4e9, 25e9, float("inf")]),
    st.sampled_from([["none"], ["none", "full"], ["selective", "full"]]),
)
@settings(max_examples=examples(30), deadline=None)
def test_the_verdict_is_the_rankings(
    p: int, batch: int, mib: int, shares: tuple[float, ...], link: float, recomputations: list[str]
) -> None:
    """Balance is what the ranking says, to 1%; every other sentence says the opposite."""
    setup: dict[str, Any] = {"batch": batch, "num_stages": p, "device": DEVICE, "memory_bytes": mib * 2**20, "link": link}
    setup |= {"efficiency": dict(zip((1, 2, 4), shares)), "recomputations": recomputations, "attention": "materialised"}
    advice = advise(MODEL, **setup)
    gain, best = advice.gain, advice.best
    assert first_line(advice).startswith("Balance") is (advice.decision == "balance")
    wins = best is not None and best.is_balanced and (gain is None or gain > SMALLEST_GAIN)
    assert (advice.decision == "balance") is wins
    assert (advice.decision == "nothing fits") is (best is None)
    plain = {(one.microbatch_size, one.recomputation) for one in advice.candidates if one.fits and not one.is_balanced}
    balanced = {(one.microbatch_size, one.recomputation) for one in advice.candidates if one.fits and one.is_balanced}
    if advice.decision == "no need":
        assert balanced <= plain


def test_a_slow_link_does_not_hide_what_a_fast_one_would_make_best() -> None:
    """Over 10 bytes a second microbatch 4 moves fast enough, but gains nothing; 2 needs 125, and runs a sequence a fifth faster."""
    alone = replace(ONE, shared_bytes=0, output_bytes=0, input_gradient_bytes=0)
    one, two, four = (replace(alone, microbatch_size=b) for b in (1, 2, 4))
    two = replace(two, own_bytes=200, movable_bytes=200, forward_s=1.6, backward_s=3.2)
    four = replace(four, own_bytes=200, movable_bytes=100, forward_s=4.2, backward_s=8.4)
    profile = replace(STAGE, measurements=(one, two, four))
    setup: dict[str, Any] = {"batch": 64, "num_stages": 8, "memory_bytes": STAGE.static_bytes() + 1320}
    setup["options"] = Options(reserve_bytes=0)
    slow, ideal = advise(profile, link=10.0, **setup), advise(profile, **setup)
    assert slow.best_balanced is not None and slow.best_balanced.microbatch_size == 4
    assert ideal.best_balanced is not None and ideal.best_balanced.microbatch_size == 2 and ideal.gain is not None
    assert f"turn a gain of {100 * ideal.gain:.1f}%, that of an unlimited link, into a loss of" in first_line(slow)
    assert slow.decision == "don't" and slow.breaks_even_bytes_per_s is not None and slow.best is slow.best_plain
    for factor, gains in ((1.01, True), (0.95, False)):
        found = advise(profile, link=slow.breaks_even_bytes_per_s * factor, **setup)
        assert (found.best is found.best_balanced) is gains


def test_nothing_fits() -> None:
    advice = advise(MODEL, memory_bytes=GIB // 2, **SETUP)
    assert first_line(advice).startswith("Nothing fits: ") and "too much" in first_line(advice)
    assert "fused attention" in advice.verdict and advice.best is None


def test_three_stages_have_nothing_to_balance() -> None:
    advice = advise(MODEL, **(SETUP | {"num_stages": 3, "memory_bytes": 100 * GIB}))
    assert first_line(advice).startswith("Nothing to balance: 3 stages or fewer") and advice.decision == "nothing to balance"


def test_equally_fast_1f1b_is_named_before_gpipe_and_one_stage_is_one() -> None:
    few = advise(stage({1: 1.0}), batch=4, num_stages=4, memory_bytes=GIB)
    assert [one.schedule for one in few.candidates[:2]] == ["1f1b", "gpipe"]
    assert few.candidates[0].step_s == few.candidates[1].step_s
    assert max(few.candidates[0].device_peak_bytes) == max(few.candidates[1].device_peak_bytes)
    alone = advise(MODEL, **(SETUP | {"num_stages": 1, "memory_bytes": 100 * GIB}))
    assert "The best is 1f1b, 1 stage, microbatch" in first_line(alone)


def test_stages_without_a_forward_to_hide_behind() -> None:
    advice = advise(MODEL, **(SETUP | {"num_stages": 4, "layers": [0, 4, 6, 6], "microbatch_sizes": [1]}))
    one = next(one for one in advice.candidates if one.is_balanced)  # only rank 0 evicts, and it has an embedding alone
    assert one.hides_at_bytes_per_s is None
    assert words.link(one, 1e9).startswith("Over the link's 1 GB/s ")
    assert ". Balancing breaks even at 2 GB/s." in words.slow_link(one, one, 1e9, 0.1, 2e9)


def test_estimates_are_those_of_huang() -> None:
    """E1 to E4 between the two candidates that the verdict compares, shown with what they take for granted."""
    advice = advise(MODEL, efficiency={1: 0.3, 2: 0.45}, recomputations=["none"], memory_bytes=between(1), **SETUP)
    found, plain, balanced = advice.estimate, advice.best_plain, advice.best_balanced
    assert found is not None and plain is not None and balanced is not None
    assert found.stage_mfu == (pytest.approx(0.3), pytest.approx(0.45)) and found.mfu is not None
    assert found.mfu[1] == found.stage_mfu[1] * 32 / (32 + 2 * 7)
    assert found.step_s[0] == pytest.approx((32 + 7) * plain.sequence_s)
    assert found.speed_up == pytest.approx(found.step_s[0] / found.step_s[1])
    said = "Huang et al.'s estimate, for equal stages: ", "a stage alone reaches 45.0% of the peak, after 30.0%"
    assert all(text in advice.verdict for text in said) and "E1" not in advice.verdict


@pytest.mark.parametrize(
    ("nodes", "cross_link"),
    [(None, None), (APART, "link"), (TOGETHER, 25e9), (TOGETHER, None), (APART, None)],
)
def test_the_ideal_gain_is_the_same_whatever_the_given_link(nodes: list[int] | None, cross_link: Any) -> None:
    """Plain and balanced are compared over the same link, whichever joins the ranks of a pair."""
    setup: dict[str, Any] = SETUP | {"recomputations": ["none"], "memory_bytes": between(1), "efficiency": {1: 0.3, 2: 0.45}}
    texts = set()
    for given_link in (0.1e9, 1e9):
        links = (
            {"link": 300e9, "cross_link": given_link} if cross_link == "link" else {"link": given_link, "cross_link": cross_link}
        )
        first = first_line(advise(MODEL, nodes=nodes, **links, **setup))
        texts.add((first.split("turn a ")[1].split(" into ")[0], first.split("They hide ")[1]))
    assert len(texts) == 1


def test_the_first_line_stands_alone_and_the_table_is_there() -> None:
    advice = advise(MODEL, **SETUP)
    text = str(advice)
    assert first_line(advice).endswith(".") and "small on toy: 8 stages, 32 sequences per step" in text
    assert "1f1b balanced, 5 slots" in text and "Assumed:" in text and "45%" in text
    assert "measure it with bpipe.profile" in advice.verdict.replace("\n", " ")
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 120


def test_assumed_efficiency_is_told_and_a_measured_one_is_not() -> None:
    assert "assumed, not measured" in advise(MODEL, memory_bytes=between(1), **SETUP).verdict
    assert "taken for every size" in advise(MODEL, memory_bytes=between(1), efficiency=0.4, **SETUP).verdict
    assert "efficiency" not in advise(MODEL, memory_bytes=between(1), efficiency={1: 0.4, 2: 0.4}, **SETUP).verdict


def test_the_break_even_of_a_larger_microbatch_is_said_and_true() -> None:
    setup: dict[str, Any] = {"batch": 128, "num_stages": 8, "tensor_parallel": 4, "device": "a100-80gb", "recomputations": ["none"]}
    advice = advise("gpt3-96b", microbatch_sizes=[1, 2], **setup)
    assert "\nIt pays if microbatch 2 reaches at least 47% of the peak, where microbatch 1 reaches 45%.\n" in advice.verdict
    for share, pays in ((0.468, False), (0.478, True)):
        found = advise("gpt3-96b", efficiency={1: 0.45, 2: share}, **setup)
        plain, balanced = (
            next(one for one in found.candidates if one.fits and (one.is_balanced, one.microbatch_size) == kind)
            for kind in ((False, 1), (True, 2))
        )
        assert (balanced.step_s < plain.step_s) is pays


def test_the_break_even_of_measured_stages_is_in_seconds() -> None:
    advice = advise(MODEL, efficiency={1: 0.3, 2: 0.45}, recomputations=["none"], memory_bytes=between(1), **SETUP)
    plain, balanced = advice.best_plain, advice.best_balanced
    assert plain is not None and balanced is not None
    said = words.pays_from(plain, balanced, lambda _: None)
    assert said.startswith("It pays if the slowest stage takes at most ") and "for a microbatch of 2; it takes " in said
    assert words.pays_from(plain, plain, None) == ""
    assert words.pays_from(plain, balanced, lambda size: 3.0).startswith("It pays for no efficiency: microbatch 2 would have to ")
