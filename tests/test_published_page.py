"""docs/published.md is what its functions say, and these agree with plans, with formulas, and with the published figures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.published import balance_claims, breadth_first, order_claims, other_claims
from benchmarks.published.choices import CHOICES, chosen
from benchmarks.published.page import CLAIMS, PAGE, page, section_of
from benchmarks.published.scenarios import (
    BALANCED,
    GPT3_96B,
    LONG,
    LONGER,
    LOST,
    PAID,
    PAID_NOT,
    PAID_ON_48,
    PLAIN,
    RECOMPUTING,
    SCENARIOS,
    SLOW,
    SMALL_BATCH,
    VOCABULARY,
    Scenario,
    Way,
    outcome,
)
from bpipe.estimate.advisor import advise
from bpipe.estimate.huang import estimate
from bpipe.schedules import Op, build, simulate

WITHOUT_TORCH = "import sys; import benchmarks.published.page; assert not {'torch', 'numpy'} & set(sys.modules)"


def test_the_page_is_what_the_functions_say() -> None:
    """But for the choices, which take longer."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert all(line in lines for claim in CLAIMS if claim is not CHOICES for line in section_of(claim).splitlines())


def test_all_of_the_page_is_what_the_functions_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_claim_of_the_issue_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for figure in ("1.25x to 2.17x", "1.35x", "43%", "1.05x to 1.28x", "5.0x", "63%", "11% and 17%"):
        assert figure in text
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("name", ["swarm", "slow-links"])
def test_a_command_prints_its_part_of_the_page(name: str) -> None:
    claim = next(claim for claim in CLAIMS if claim.name == name)
    done = subprocess.run([sys.executable, "-m", "benchmarks.published", claim.name], capture_output=True, text=True, check=True)
    assert done.stdout == section_of(claim) + "\n"
    assert all(line in PAGE.read_text(encoding="utf-8").splitlines() for line in done.stdout.splitlines())


def test_it_needs_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


# Balance.


@pytest.mark.parametrize("target", balance_claims.BPIPE_GAINS)
def test_the_solved_stage_ratio_makes_the_published_gain(target: float) -> None:
    """GPT-3 96B, full recomputation against none at microbatch 1; links keep their speed, so that within 1%."""
    gain = next(one for one in balance_claims.bpipe_gains() if one.before[0] == "full" and one.after[0] == "none")
    base = balance_claims.ON_48[0]
    faster = replace(base, efficiency={1: base.efficiency[1] * gain.ratio_for(target)})
    ratio = outcome(base, PLAIN, 1, "full").step_s / outcome(faster, BALANCED, 1, "none").step_s
    assert ratio == pytest.approx(target, rel=0.01)
    assert gain.gain == pytest.approx(4 / 3, rel=0.01)  # F + 2F against F + F + 2F


def test_134b_are_134b() -> None:
    assert balance_claims.ON_48[1].model.num_parameters == pytest.approx(134e9, rel=0.01)
    assert breadth_first.cluster(8, 8).model.num_parameters == pytest.approx(52e9, rel=0.01)


def test_a_larger_microbatch_breaks_even_where_huangs_estimate_says() -> None:
    """E4 takes all stages to be equal; the last one has the head besides."""
    for one in balance_claims.huang_gains():
        assert one.gain == pytest.approx(estimate(128, 8, one.sizes, stage_s=(1.0, 1.0)).bubble_factor, rel=0.005)


def test_only_gpt3_turns_into_a_multiple_of_four() -> None:
    """Megatron-LM's fused softmax: a multiple of 4 of the microbatch times the heads of a device."""
    products = [[int(part) for part in one.softmaxes.split(" -> ")] for one in balance_claims.huang_gains()]
    assert [[product % 4 == 0 for product in pair] for pair in products] == [[False, True], [False, True], [True, True]]
    assert GPT3_96B.num_heads == 104


@pytest.mark.parametrize("loss", balance_claims.LOSSES)
def test_the_solved_link_makes_the_published_loss(loss: float) -> None:
    plain_s = outcome(SLOW, PLAIN, 1).step_s
    assert balance_claims.over(balance_claims.loses_at(loss)).step_s / plain_s - 1 == pytest.approx(loss, abs=0.005)


# Breadth-first.


@pytest.mark.parametrize("m", [1, 4, 8])
def test_gathers_and_reductions_are_those_of_the_plan(m: int) -> None:
    """The breadth-first rule has them among its actions: 2v-1 gathers, v reductions."""
    p, v = 4, 4
    plan = build("breadth_first", p * v, m, num_ranks=p)
    for rank in range(p):
        ops = [action.op for action in plan.actions[rank]]
        network = breadth_first.network_of(plan, rank, [1.0] * (p * v))
        assert (network.gathers, network.reductions) == (ops.count(Op.UNSHARD), ops.count(Op.REDUCE_GRAD)) == (2 * v - 1, v)
        assert network.seconds == network.gathers + network.reductions


def test_waiting_for_the_network_lengthens_the_work_by_just_that() -> None:
    plan = build("interleaved_1f1b", 8, 8, num_ranks=4)
    seconds = [0.25] * 8
    longer = simulate(plan, breadth_first.with_network(plan, order_claims.UNITS, seconds))
    for rank in range(4):
        work_s = simulate(plan, order_claims.UNITS).work_s(rank)
        assert longer.work_s(rank) == pytest.approx(work_s + breadth_first.network_of(plan, rank, seconds).seconds)


def test_43_percent_lie_between_two_and_four_stages_per_rank() -> None:
    (two, _), (four, _), (late, _) = (breadth_first.bubble_gains(*sizes) for sizes in ((8, 2), (8, 4), (16, 8)))
    assert two < 1.43 < four and late < 1.43
    assert breadth_first.sharded_gains(4) == pytest.approx([1, 1], rel=0.01)
    assert all(gain > 2 for gain in breadth_first.sharded_gains(8))


# Other orders, and idle time.


def test_bitpipe_by_its_formula() -> None:
    """A bubble of p-2 forwards at m = p = 8, against (p-1)(F+B) of 1F1B, half of it interleaved (docs/table-of-schedules.md)."""
    assert order_claims.bitpipe_gain("1F1B", 8) == (24 + 21) / (24 + 6)
    assert order_claims.bitpipe_gain("interleaved 1F1B, v = 2", 8) == (24 + 10.5) / (24 + 6)
    assert order_claims.bitpipe_gain("ZB-V", 8) < 1


def test_the_overhead_of_slices_makes_the_published_gain() -> None:
    p, m, k, gain = order_claims.TERAPIPE_SETTINGS[0]
    overhead = order_claims.overhead_for(gain, order_claims.sliced_gain(p, m, k), k)
    plan = build("tera_pipe", p, m, slices=k)
    sliced = simulate(plan, replace(order_claims.UNITS, forward_s=1 / k + overhead, backward_s=2 * (1 / k + overhead)))
    assert order_claims.step("gpipe", p, m) / sliced.makespan_s == pytest.approx(gain)


@pytest.mark.parametrize("share, both", [(0.0, 3), (1 / 3, 2)])
def test_dualpipe_has_the_bubble_of_its_table(share: float, both: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP = 16, B = 2 and W = 1."""
    assert order_claims.dualpipe_bubble(share) == pytest.approx((16 / 2 - 1) * (both + 2 - 3))


def test_pipefills_two_figures_fit_together() -> None:
    """63% of the work that is left beside the idle time are 2.6K of 8K GPUs; 16 stages and microbatches are idle as long."""
    idle, share = other_claims.published_idle()
    assert share * idle / (1 - idle) == pytest.approx(0.63)
    assert idle == pytest.approx(15 / 31, abs=0.001)
    assert other_claims.filled_gain(order_claims.timeline("1f1b", 16, 16), 1.0) == pytest.approx(15 / 16)


# Choices.


def fastest(scenario: Scenario) -> tuple[Way, int, str]:
    """The fastest plan that fits; of equals, the one that moves less."""
    fits = {key: one for key, one in scenario.outcomes().items() if one.fits}
    return min(fits, key=lambda key: (float(f"{fits[key].step_s:.4g}"), key[0] == BALANCED))


def test_the_fastest_that_fit_are_those_that_paid() -> None:
    chosen = [fastest(scenario) for scenario in SCENARIOS]
    assert [way for way, _, _ in chosen] == [
        *(BALANCED, BALANCED, PLAIN, PLAIN),
        *(Way("zbv", 2), Way("seq_1f1b", 1, 4)),
        Way("1f1b", layers=(5, 5, 5, 5, 4, 4, 4, 0)),
        *(PLAIN, RECOMPUTING),
        Way("interleaved_1f1b", 4),
    ]
    assert [size for _, size, _ in chosen[1:4]] == [2, 1, 2]


def test_balance_is_chosen_where_it_paid_and_not_where_it_did_not() -> None:
    assert ["offload" in chosen(one, of_all=False).name for one in (PAID_ON_48, PAID, PAID_NOT, LOST, SLOW)] == [
        *(True, True, False, False, False)
    ]
    assert [chosen(one, of_all=False).microbatch_size for one in (PAID, PAID_NOT, LOST)] == [2, 1, 2]


def test_the_choices_of_everything() -> None:
    for scenario in SCENARIOS:
        classic, best = (chosen(scenario, of_all=of_all) for of_all in (False, True))
        assert best.step_s <= classic.step_s
    for long in (LONG, LONGER):
        assert not chosen(long, of_all=True).name.startswith("v_")
    assert len(chosen(VOCABULARY, of_all=True).stages[-1]) == 1
    assert chosen(SMALL_BATCH, of_all=True).plan.num_stages > SMALL_BATCH.num_ranks


def test_advice_agrees_where_it_knows_the_plans() -> None:
    decisions = [advise(one.model, num_stages=one.num_ranks, **one.described).decision for one in (PAID, PAID_NOT, LOST, SLOW)]
    assert decisions == ["balance", "don't", "don't", "no need"]
