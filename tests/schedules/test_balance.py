"""The balance pass: the bound, how few microbatches move, and budgets that are too small."""

from __future__ import annotations

import ast
import re
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.balance.balance import balance
from bpipe.plan.action import HOST
from bpipe.plan.destinations import Destinations
from bpipe.schedules import Op, Plan, build, one_f_one_b, verify
from tests.schedules.replay import occupied, replay
from tests.schedules.strategies import computations
from tests.tiers import examples

# Slots a stage at m = 4p, copies in flight counted at both ends (FACTS.md).
PEAKS = {
    2: [2, 1],
    3: [3, 2, 1],
    4: [3, 3, 2, 3],
    5: [4, 4, 3, 2, 3],
    6: [4, 4, 4, 3, 4, 4],
    7: [5, 5, 5, 4, 3, 4, 4],
    8: [5, 5, 5, 5, 4, 5, 5, 5],
    12: [7] * 6 + [6] + [7] * 5,
    16: [9] * 8 + [8] + [9] * 7,
}


def bound(p: int) -> int:
    return ceil((p + 2) / 2)


def plain(p: int, m: int) -> Plan:
    return computations(one_f_one_b.order(p, m), range(p), name="1f1b")


def balanced(p: int, m: int, rule: str) -> Plan:
    """Before sends and receives, which change no slot: quick enough to try every size."""
    return balance(plain(p, m), slots=bound(p), rule=rule)


def moved(plan: Plan) -> list[int]:
    return [len(plan.evicted(rank)) for rank in range(plan.num_ranks)]


@pytest.mark.parametrize(
    ("p", "m", "before", "after"),
    [(4, 8, (4, 3, 2, 1), (3, 3, 2, 3)), (8, 32, (8, 7, 6, 5, 4, 3, 2, 1), (5, 5, 5, 5, 4, 5, 5, 5))],
)
def test_peaks_plain_and_balanced(p: int, m: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert build("1f1b", p, m).peak_slots == before
    assert build("balanced_1f1b", p, m).peak_slots == after


@pytest.mark.parametrize("p", PEAKS)
def test_peaks_at_four_times_as_many_microbatches(p: int) -> None:
    assert list(build("balanced_1f1b", p, 4 * p).peak_slots) == PEAKS[p]


@pytest.mark.parametrize("p", range(1, 17))
def test_bound_and_share_of_moved_microbatches(p: int) -> None:
    k = bound(p)
    for m in range(1, 4 * p + 1):
        plan = balanced(p, m, "fewest")
        assert max(plan.peak_slots) <= k
        for x, count in enumerate(moved(plan)):
            evictor = min(p - x, m) > k
            assert count <= (ceil(m * (p - x - k) / (p - x - 2)) if evictor else 0)
            assert count >= evictor


@pytest.mark.parametrize("p", range(1, 17))
def test_eager_rule_moves_each_microbatch_but_the_first_and_last_few(p: int) -> None:
    k = bound(p)
    for m in range(1, 4 * p + 1):
        plan = balanced(p, m, "eager")
        assert max(plan.peak_slots) <= k
        assert moved(plan) == [m - k + 1 if min(p - x, m) > k else 0 for x in range(p)]


@pytest.mark.parametrize("rule", ["fewest", "eager"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (5, 20), (6, 7), (7, 9), (8, 32), (9, 9), (11, 13)])
def test_finished_plans_keep_the_bound_and_run(p: int, m: int, rule: str) -> None:
    plan = build("balanced_1f1b", p, m, rule=rule)
    assert max(plan.peak_slots) <= bound(p)
    assert occupied(plan) == plan.peak_slots


def test_fewest_evictions_of_eight_stages() -> None:
    """15, 12 and 7 are the least possible (FACTS.md: a linear program)."""
    assert moved(build("balanced_1f1b", 8, 32)) == [15, 12, 7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("p", "shares"), [(4, [0.5]), (8, [0.5, 0.4, 0.25]), (16, [0.5, 0.462, 0.417, 0.364, 0.3, 0.222, 0.125])])
def test_share_of_long_steps(p: int, shares: list[float]) -> None:
    """Both ends of a step need a few moves less."""
    counts = moved(balanced(p, 1000, "fewest"))
    assert not any(counts[len(shares) :])
    for share, count in zip(shares, counts):
        assert 1000 * share - p / 4 <= count <= 1000 * share


@pytest.mark.parametrize("p", range(1, 9))
def test_nothing_moves_where_all_fits(p: int) -> None:
    assert not any(moved(build("balanced_1f1b", p, bound(p))))
    assert p > 3 or not any(moved(build("balanced_1f1b", p, 4 * p)))


def test_computations_keep_their_order() -> None:
    for p, m in ((4, 8), (8, 20)):
        before, after = build("1f1b", p, m), build("balanced_1f1b", p, m)
        assert [before.compute(rank) for rank in range(p)] == [after.compute(rank) for rank in range(p)]


# Budgets and pairs of one's own.


@pytest.mark.parametrize("m", range(5, 13))
def test_budget_for_each_rank(m: int) -> None:
    plan = build("gpipe", 2, m, slots=(m - 2, m + 3))
    assert plan.peak_slots[0] == m - 2
    assert plan.peak_slots[1] <= m + 3
    assert plan.evicted(0)
    assert replay(plan) is None


def test_a_rank_without_a_budget_takes_all_evictions() -> None:
    plan = build("1f1b", 4, 12, slots=(3, None, None, None), pairs=(2, 0, 0, 0))
    assert plan.peak_slots == (3, 3, 4, 1)
    assert plan.slots == (3, None, None, None)
    assert {action.op for action in plan.served[2]} == {Op.ACCEPT, Op.WAIT_ACCEPT, Op.RETURN, Op.WAIT_RETURN}


@given(st.integers(3, 7), st.integers(4, 12), st.data())
@settings(max_examples=examples(60))
def test_any_pairs(p: int, m: int, data: st.DataObject) -> None:
    pairs = [data.draw(st.sampled_from([r for r in range(p // 2, p) if r != rank])) for rank in range(p)]
    peaks = build("1f1b", p, m).peak_slots
    plan = build("1f1b", p, m, slots=[max(peak - 2, 3) if x < p // 2 else None for x, peak in enumerate(peaks)], pairs=pairs)
    assert replay(plan) is None
    for rank in range(p):
        assert {action.peer for action in plan.actions[rank] if action.op is Op.EVICT} <= {pairs[rank]}
        assert set(plan.remote_buffers(rank)) == {r for r in range(p) if plan.evicted(r) and pairs[r] == rank}


def smallest(error: BudgetError) -> list[int | None]:
    found = re.search(r"[Tt]he smallest budget that works here is slots=(.+)\.", str(error))
    assert found is not None
    budget = ast.literal_eval(found[1])
    return budget if isinstance(budget, int) else list(budget)


def lowered(budget):
    return budget - 1 if isinstance(budget, int) else [None if k is None else k - 1 for k in budget]


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 7),
    st.integers(1, 9),
    st.sampled_from(["fewest", "eager"]),
    st.integers(1, 4) | st.lists(st.none() | st.integers(1, 5), min_size=7, max_size=7),
)
def test_too_small_a_budget_names_the_smallest_that_works(name: str, p: int, m: int, rule: str, slots) -> None:
    slots = slots if isinstance(slots, int) else slots[:p]
    enough = slots
    try:
        build(name, p, m, slots=slots, rule=rule)
    except BudgetError as error:
        enough = smallest(error)
        with pytest.raises(BudgetError):
            build(name, p, m, slots=lowered(enough), rule=rule)
    plan = build(name, p, m, slots=enough, rule=rule)
    verify(plan)
    assert all(k is None or peak <= k for k, peak in zip(plan.slots, plan.peak_slots))


def test_message_of_too_small_a_budget() -> None:
    with pytest.raises(BudgetError, match=r"^2 slots are too few for balanced_1f1b with 4 stages and 8 microbatches: .*slots=3\.$"):
        build("balanced_1f1b", 4, 8, slots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": (3, 3)}, r"slots=\(3, 3\): .* each of 4 ranks"),
        ({"slots": (3, 3, 3, 0)}, "slots=(3, 3, 3, 0)"),
        ({"slots": 2.5}, "slots=2.5: give a whole number of at least 1"),
        ({"slots": True}, "slots=True: give a whole number"),
        ({"slots": 3, "pairs": (3, 2, 1)}, "pairs=(3, 2, 1)"),
        ({"slots": 3, "pairs": (4, 2, 1, 0)}, "a rank from 0 to 3"),
        ({"slots": 3, "rule": "lazy"}, "rule='lazy': choose one of 'fewest', 'eager'"),
    ],
)
def test_options_that_make_no_sense(options, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        build("balanced_1f1b", 4, 8, **options)
    assert message in str(raised.value) or re.search(message, str(raised.value))


def test_the_pair_is_asked_first_then_ones_own_node_then_the_roomiest() -> None:
    room = [0, 2, 5, None, 1, 3]
    assert Destinations().of(0, room) == [5, 3, 2, 1, 4]
    assert Destinations(nodes=(0, 0, 1, 1, 0, 1)).of(0, room) == [5, 1, 4, 3, 2]
    assert Destinations(others=False, host="last").of(0, room) == [5, HOST]
    assert Destinations(host="only").of(0, room) == [HOST]
