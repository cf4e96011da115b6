"""Plans of slices: their figures, their order as a rule of the verifier, their texts, and their costs."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bpipe
from bpipe.errors import ConfigurationError, PlanError
from bpipe.flow.shaping import shaped
from bpipe.flow.units import Units
from bpipe.passes.balance.balance import balance, by_count, default_slots
from bpipe.passes.communicate import computations_only
from bpipe.passes.profiling_order import profiling_order
from bpipe.passes.recompute import recompute
from bpipe.plan.grid import rows
from bpipe.plan.order import clock
from bpipe.schedules import (
    Action,
    Costs,
    Link,
    Op,
    Plan,
    Sizes,
    StageSizes,
    build,
    finish,
    from_csv,
    simulate,
    verify,
)
from bpipe.schedules.by_name import forward_plan
from tests.amounts import amounts, changed
from tests.schedules.mutations import exchanged
from tests.schedules.replay import occupied, occupied_bytes, replay
from tests.tiers import examples

SLICED = ("seq_1f1b", "tera_pipe", "interleaved_1f1b")


def of_a_microbatch(slices: int) -> Costs:
    """F = 1 and B = 2 for a microbatch, in slices of equal cost."""
    return Costs(forward_s=1 / slices)


def sliced(name: str, p: int, m: int, k: int, **more: object) -> Plan:
    v = 2 if name == "interleaved_1f1b" else 1
    return build(name, v * p, m, num_ranks=p, slices=k, **more)  # type: ignore[arg-type]


# Figures, in microbatches.


def check_figures(p: int, m: int, k: int) -> None:
    plain = build("seq_1f1b", p, m, slices=k)
    step = 3 * m + 3 * (p - 1) / k
    assert simulate(plain, of_a_microbatch(k)).makespan_s == pytest.approx(step)
    assert [Fraction(peak, k) for peak in plain.peak_slots] == [Fraction(min(k + p - 1 - x, m * k), k) for x in range(p)]
    slots = k + -(-p // 2)
    even = build("seq_1f1b", p, m, slices=k, slots=slots)
    assert max(even.peak_slots) == (slots if plain.peak_slots[0] >= slots else plain.peak_slots[0]) <= slots
    assert simulate(even, of_a_microbatch(k)).makespan_s == pytest.approx(step)


@pytest.mark.parametrize(("p", "m", "k"), [(2, 4, 1), (2, 4, 16), (3, 6, 2), (4, 8, 3), (5, 5, 7), (7, 14, 4), (16, 16, 2)])
def test_step_and_peaks_are_the_formulas(p: int, m: int, k: int) -> None:
    check_figures(p, m, k)


@pytest.mark.parametrize("p", range(2, 17))
def test_step_and_peaks_are_the_formulas_everywhere(p: int) -> None:
    for k in (1, 2, 3, 4, 6, 8, 13, 16):
        for m in {p, 2 * p}:
            check_figures(p, m, k)


@pytest.mark.parametrize(
    ("p", "m", "k", "step", "peak", "lowest"),
    [(4, 8, 4, 26.25, 1.75, 1.5), (8, 16, 8, 50.625, 1.875, 1.5), (8, 16, 4, 53.25, 2.75, 2.0)],
)
def test_the_figures_of_the_issue(p: int, m: int, k: int, step: float, peak: float, lowest: float) -> None:
    plain = build("seq_1f1b", p, m, slices=k)
    even = finish(by_count(computations_only(plain)))
    assert max(plain.peak_slots) / k == peak and max(even.peak_slots) / k == lowest
    assert simulate(plain, of_a_microbatch(k)).makespan_s == simulate(even, of_a_microbatch(k)).makespan_s == step


def test_a_link_that_carries_a_slice_within_its_forward_hides_all_evictions() -> None:
    plan = build("seq_1f1b", 8, 16, slices=4, slots=8)
    moved = sum(len(plan.evicted(rank)) for rank in range(8))
    assert moved / (8 * plan.num_units) == pytest.approx(0.076, abs=5e-4)
    costs = replace(of_a_microbatch(4), saved_bytes=1000, link=Link(bytes_per_s=1000 / (0.95 / 4)))
    assert simulate(plan, costs).makespan_s == 53.25


def test_slots_are_as_many_microbatches_as_without_slices() -> None:
    assert [default_slots(p) for p in range(2, 9)] == [-(-(p + 2) // 2) for p in range(2, 9)]


@pytest.mark.parametrize(("share", "most"), [(0.03, 2.02), (0.12, 2.06)])
def test_keys_and_values_that_stay_cost_little(share: float, most: float) -> None:
    """They stay on the rank of their stage: they are the fixed bytes of a slice, those that cannot move."""
    slice_bytes = 10_000
    fixed = round(slice_bytes * share)
    sizes = Sizes(stages=(StageSizes(parts=(slice_bytes - fixed,), fixed=fixed),) * 8, static=(0,) * 8)
    plan = finish(balance(computations_only(build("seq_1f1b", 8, 16, slices=4)), sizes=sizes))
    assert max(plan.device_peak_bytes) / (4 * slice_bytes) <= most


def test_slices_of_equal_length_are_slower_than_none_where_attention_takes_half() -> None:
    """Of a forward, half goes to attention, whose part of slice s grows as 2s+1: p = 8, m = 16, k = 4."""
    equal = [(0.5 + 0.5 * (2 * s + 1) / 4) / 4 for s in range(4)]
    plan = build("seq_1f1b", 8, 16, slices=4)
    whole = Costs(forward_s=1.0)
    assert simulate(plan, whole.of_slices(plan, seconds=equal)).makespan_s == pytest.approx(72.1, abs=0.1)
    assert simulate(plan, whole.of_slices(plan)).makespan_s == 53.25
    lengths = (0.366, 0.252, 0.205, 0.177)
    costs = replace(whole, saved_bytes=10**6).of_slices(plan, lengths=lengths)
    assert simulate(plan, costs).peak_bytes(0) / 1e6 == pytest.approx(2.98, abs=0.01)


# The order.


@pytest.mark.parametrize(("name", "twin"), [("seq_1f1b", "1f1b"), ("tera_pipe", "gpipe")])
def test_one_slice_is_the_whole_microbatch(name: str, twin: str) -> None:
    for p, m in ((1, 1), (2, 5), (4, 8), (5, 3)):
        assert replace(build(name, p, m), name=twin) == build(twin, p, m)


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize(("p", "m", "k"), [(1, 2, 3), (2, 4, 2), (3, 3, 4), (4, 8, 3), (4, 4, 8)])
def test_slices_ascend_forward_and_descend_backward(name: str, p: int, m: int, k: int) -> None:
    plan = sliced(name, p, m, k)
    for stage in range(plan.num_stages):
        lane = [a for a in plan.compute(plan.stage_ranks[stage]) if a.stage == stage]
        assert [plan.slice_of(a.microbatch) for a in lane if a.op is Op.F] == [(i, s) for i in range(m) for s in range(k)]
        assert [plan.slice_of(a.microbatch) for a in lane if a.op is Op.B] == [(i, s) for i in range(m) for s in reversed(range(k))]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Finished plans of slices, balanced or not."""
    name, p, k = draw(st.sampled_from(SLICED)), draw(st.integers(1, 4)), draw(st.integers(2, 4))
    m = p * draw(st.integers(1, 2)) if name == "interleaved_1f1b" else draw(st.integers(1, 5))
    plan = sliced(name, p, m, k)
    how = draw(st.sampled_from(["plain", "balanced", "parts"]))
    if how == "plain":
        return plan
    if how == "balanced":
        return finish(by_count(computations_only(plan)))
    sizes = Sizes.of([6] * plan.num_stages, num_ranks=p, num_parts=3)
    return finish(balance(plan, sizes=sizes))


@given(plans())
@settings(max_examples=examples(40))
def test_plans_verify_and_run_on_the_replay(plan: Plan) -> None:
    verify(plan)
    assert replay(plan) is None and occupied(plan) == plan.peak_slots
    verify(finish(profiling_order(plan)))
    verify(forward_plan(plan))


@given(plans(), st.data())
@settings(max_examples=examples(40))
def test_two_slices_in_the_wrong_order_are_caught(plan: Plan, data: st.DataObject) -> None:
    """Forwards of a stage exchanged, or backwards, on all ranks that the messages name: nothing else is wrong with the plan."""
    op = data.draw(st.sampled_from([Op.F, Op.B]))
    microbatch = data.draw(st.integers(0, plan.num_microbatches - 1))
    first = data.draw(st.integers(0, plan.slices - 2))
    one, other = plan.units.of(microbatch)[first : first + 2]
    stages = range(plan.num_stages)
    names = {one: other, other: one}
    of_op = {Op.F: ("F", "SEND_F", "RECV_F"), Op.B: ("B", "SEND_B", "RECV_B")}[op]

    def renamed(a: Action) -> Action:
        is_concerned = a.op.value.removeprefix("WAIT_") in of_op and a.stage in stages
        return a._replace(microbatch=names.get(a.microbatch, a.microbatch)) if is_concerned else a

    wrong = replace(plan, actions=tuple(tuple(map(renamed, lane)) for lane in plan.actions))
    assert "out of order" in str(replay(wrong)) or "missing token" in str(replay(wrong))
    with pytest.raises(PlanError, match="ordered: "):
        verify(wrong)


def test_the_error_names_the_slices() -> None:
    plan = build("seq_1f1b", 2, 2, slices=3)
    lane = plan.actions[1]
    first, second = (lane.index(next(a for a in lane if a[:3] == (Op.B, 1, unit))) for unit in (2, 1))
    with pytest.raises(PlanError, match=r"(?s)rank 1, action \d+: 1B0/1 stands before 1B0/2.*1B0/1.*<-- ERROR HERE"):
        verify(exchanged(plan, 1, first, second))


def test_the_clock_waits_for_the_state_of_a_stage() -> None:
    lane = [Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.B, 0, 0), Action(Op.B, 0, 1)]
    chain = shaped(None, "chain", (0,), 2)
    assert clock([lane], chain)[0][0].tolist() == [0, 1, 2, 4]
    cut = shaped(shaped(None, "chain", (0,), 1), "slices", 2)
    with pytest.raises(PlanError, match="rank 0 before 0B0/0"):
        clock([lane], cut)
    with pytest.raises(PlanError, match="rank 0 before 0F0/1"):
        clock([[lane[1], lane[0]]], cut)


# Texts.


@given(plans())
@settings(max_examples=examples(20))
def test_texts_are_read_back(plan: Plan) -> None:
    assert Plan.from_text(plan.to_text()) == plan
    if not any(plan.served) and plan.sizes is None:
        assert replace(from_csv(plan.to_csv(), plan.name), slots=plan.slots) == plan


def test_torch_refuses_a_csv_of_slices(tmp_path: Path) -> None:
    """It would take them for microbatches, and each several times."""
    from torch.distributed.pipelining.schedules import _Action

    text = build("seq_1f1b", 2, 2, slices=2).to_csv()
    assert text.startswith("slices=2,0F0/0,0SEND_F0/0,")
    with pytest.raises(RuntimeError, match="slices=2"):
        _Action.from_str(text.split(",")[0])
    with pytest.raises(PlanError, match="'0F0/0' is not an action of a plan with slices=1"):
        from_csv(text.removeprefix("slices=2,"))


@pytest.mark.parametrize(
    ("text", "slices", "unit"), [("2F3", 1, 3), ("2F3/1", 4, 13), ("0EVICT3/1.2@5", 4, 13), ("1WAIT_LOAD0/3@host", 4, 3)]
)
def test_an_action_names_its_slice(text: str, slices: int, unit: int) -> None:
    action = Action.parse(text, Units(slices))
    assert action.microbatch == unit and f"{action.text(Units(slices))}{action.at_peer}" == text


@pytest.mark.parametrize(
    ("text", "slices", "expected"),
    [("2F3/1", 1, "whole microbatch, such as 2F0"), ("2F3", 4, "such as 2F0/3"), ("2F3/4", 4, "one of its 4 slices")],
)
def test_an_action_without_its_slice_is_refused(text: str, slices: int, expected: str) -> None:
    with pytest.raises(PlanError, match=f"'{text}' is not an action of a plan with slices={slices}.*{expected}"):
        Action.parse(text, Units(slices))


def test_a_grid_shows_microbatches_and_slices() -> None:
    plan = build("seq_1f1b", 2, 2, slices=2)
    assert str(plan).startswith("seq_1f1b: 2 stages, 2 microbatches of 2 slices, peak slices 3 2\n")
    assert rows(plan)[1].startswith("rank 1 | ..   F0/0 F0/1 B0/1 b0/1 F1/0 B0/0")


@pytest.mark.parametrize("arguments", ["[0]", "[]", "[-1]", "[3]", "[2.0]", "[true]", "[2,2]", "[[2]]", '["2"]', "[2", "[NaN]"])
def test_a_text_with_other_slices_is_refused(arguments: str) -> None:
    text = build("seq_1f1b", 2, 2, slices=2).to_text().replace("flow slices [2]", f"flow slices {arguments}")
    with pytest.raises(PlanError):
        verify(Plan.from_text(text))


# Sizes and costs of each slice.


def uneven(p: int, k: int, parts: int = 1, *, grows: bool = False) -> Sizes:
    """Sizes in which each slice is smaller than the one before, or larger; the last one gives gradients to all other states."""
    lengths = sorted(range(1, k + 1), reverse=not grows)
    of = [amounts(received=1 + n, sent=1 + n, state=n, collected=5 * n) for n in lengths]
    each = [StageSizes(parts=(10 * n,) * parts, fixed=n, amounts=of_slice) for n, of_slice in zip(lengths, of)]
    each[-1] = changed(each[-1], state=0, given=5 * sum(lengths[:-1]), collected=0)
    by_slice = [(one,) * p for one in each]
    return Sizes(stages=by_slice[0], static=(7,) * p, later_slices=tuple(by_slice[1:]))


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(("p", "m", "k", "parts"), [(4, 3, 2, 1), (4, 4, 3, 1), (4, 4, 3, 2), (6, 8, 4, 1)])
def test_slices_of_different_sizes_are_metered_and_balanced(p: int, m: int, k: int, parts: int, grows: bool) -> None:
    sizes = uneven(p, k, parts, grows=grows)
    plain = finish(replace(computations_only(build("seq_1f1b", p, m, slices=k)), sizes=sizes))
    even = finish(balance(computations_only(plain), sizes=sizes))
    for plan in (plain, even):
        assert Plan.from_text(plan.to_text()) == plan
        assert occupied_bytes(plan) == plan.device_peak_bytes
    assert max(even.device_peak_bytes) < max(plain.device_peak_bytes)
    assert even.budgets is not None and max(even.device_peak_bytes) == even.budgets[0]  # as the pass has counted
    for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B):
        assert [sizes.carried(Action(op, 1, unit), plan.flow) for unit in range(k)] == [
            one["out"].num_bytes for one, *_ in sizes.by_unit
        ]
    assert simulate(even, of_a_microbatch(k)).device_peak_bytes(0) == even.device_peak_bytes[0]


@pytest.mark.parametrize("state", [0, 3, 10])
def test_a_recomputed_slice_keeps_its_state(state: int) -> None:
    stage = StageSizes(parts=(20,), fixed=10, amounts=amounts(state=state, received=2, sent=2))
    sizes = Sizes(stages=(stage,) * 4, static=(0,) * 4)
    plan = finish(recompute(computations_only(build("seq_1f1b", 4, 6, slices=3)), sizes=sizes))
    assert plan.recomputed(0) and occupied_bytes(plan) == plan.device_peak_bytes
    assert Plan.from_text(plan.to_text()) == plan
    without = replace(plan, sizes=Sizes(stages=(changed(sizes.stages[0], state=0),) * 4, static=(0,) * 4), budgets=None)
    assert (plan.device_peak_bytes[0] > without.device_peak_bytes[0]) is (state > 0)


@pytest.mark.parametrize("change", [{"given": 1}, {"collected": 4}, {"collected": 6}, {"given": 5, "collected": 10}])
def test_gradients_of_states_are_collected_after_they_are_given(change: dict[str, int]) -> None:
    plan, sizes = build("seq_1f1b", 2, 2, slices=2), uneven(2, 2, grows=True)
    finish(replace(computations_only(plan), sizes=sizes))
    wrong = replace(sizes, stages=(sizes.stages[0], changed(sizes.stages[1], **change)))
    with pytest.raises(PlanError, match="sizes of stage 1: each byte that a slice has given"):
        finish(replace(computations_only(plan), sizes=wrong))
    with pytest.raises(ConfigurationError, match="sizes of stage 1: each byte that a slice has given"):
        balance(plan, sizes=wrong)


@pytest.mark.parametrize("grows", [False, True])
def test_recomputed_slices_of_different_sizes(grows: bool) -> None:
    plan = finish(recompute(computations_only(build("seq_1f1b", 4, 6, slices=3)), sizes=uneven(4, 3, grows=grows)))
    assert plan.recomputed(0) and occupied_bytes(plan) == plan.device_peak_bytes
    assert Plan.from_text(plan.to_text()) == plan


def test_a_state_is_among_the_fixed_bytes() -> None:
    with pytest.raises(ConfigurationError, match="a slice's state is among its fixed bytes"):
        StageSizes(parts=(1,), fixed=1, amounts=amounts(state=2))


def test_sizes_of_another_number_of_slices_are_refused() -> None:
    plan = build("seq_1f1b", 2, 2, slices=2)
    with pytest.raises(ConfigurationError, match="sizes of 3 slices for a plan with slices=2"):
        balance(plan, sizes=uneven(2, 3), budgets=100)
    with pytest.raises(PlanError, match="sizes of 3 slices for a plan with slices=2"):
        verify(replace(plan, sizes=uneven(2, 3)))
    with pytest.raises(ConfigurationError, match="later_slices: give each slice 2 stages"):
        replace(uneven(2, 2), later_slices=(uneven(2, 2, 3).stages,))


def test_costs_of_slices_add_up_to_those_of_the_microbatch() -> None:
    plan = build("seq_1f1b", 3, 2, slices=3)
    costs = Costs(forward_s=[3.0, [1.0, 2.0], 5.0], saved_bytes=[100, 7, 0], output_bytes=10, static_bytes=9)
    cut = costs.of_slices(plan, lengths=[0.5, 0.3, 0.2], seconds=[0.2, 0.3, 0.5])
    cut.check(plan)
    assert [cut.seconds(Op.F, 1, unit) for unit in range(6)] == pytest.approx([0.2, 0.3, 0.5, 0.4, 0.6, 1.0])
    assert [cut.saved(0, unit) for unit in range(6)] == [50, 30, 20] * 2
    assert sum(cut.saved(1, unit) for unit in range(3)) == 7 and cut.static(0) == 9
    assert [cut.carried(Action(Op.RECV_F, 1, unit)) for unit in range(3)] == [5, 3, 2]
    assert costs.of_slices(build("1f1b", 3, 2)) == costs


@pytest.mark.parametrize(
    "given", [{"lengths": [0.5, 0.5, 0.5]}, {"lengths": [1.0]}, {"seconds": [1.5, -0.5]}, {"seconds": [0.4, 0.4]}]
)
def test_shares_that_do_not_add_up_are_refused(given: dict[str, list[float]]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(given))}=.*give 2 shares"):
        Costs().of_slices(build("seq_1f1b", 2, 2, slices=2), **given)  # type: ignore[arg-type]


def test_a_series_has_an_entry_for_each_slice() -> None:
    plan = build("seq_1f1b", 2, 3, slices=4)
    for length in (4, 12):
        Costs(forward_s=[[1.0] * length] * 2).check(plan)
    for length in (1, 3, 8):
        with pytest.raises(ConfigurationError, match="one for each of 12 slices, or of the 4 of a microbatch"):
            Costs(forward_s=[[1.0] * length] * 2).check(plan)


def test_the_page_s_examples_run() -> None:
    names: dict[str, Any] = {}
    page = (Path(bpipe.__file__).parents[1] / "docs/slices.md").read_text().partition("## Plans")[2]  # what runs is in tests/slices
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert max(names["even"].peak_slots) == 8 and names["by_cost"].saved(0, 0) > names["by_cost"].saved(0, 1)


# What cannot be.


def test_a_schedule_of_whole_microbatches_takes_no_slices() -> None:
    with pytest.raises(ConfigurationError, match=r"zbv runs whole microbatches, not slices=2 of each: .*seq_1f1b"):
        build("zbv", 4, 8, slices=2)
    with pytest.raises(ConfigurationError, match="slices=0: give a whole number"):
        build("seq_1f1b", 4, 8, slices=0)


def test_units_of_a_microbatch_follow_each_other() -> None:
    plan = build("seq_1f1b", 2, 3, slices=4)
    units = [list(plan.units.of(i)) for i in range(3)]
    assert units == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and plan.num_units == 12
    assert [plan.slice_of(unit) for unit in units[2]] == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_sizes_of_no_slices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no sizes of any slice"):
        Sizes.of_slices([], static=(0,))
