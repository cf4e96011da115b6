"""Plans with skips: what a small one is, that any is sound for a machine of its own, and that no damage to one goes unnoticed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, PlanError
from bpipe.flow.units import Units
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import without_transfers
from bpipe.passes.recompute import recompute
from bpipe.plan.grid import rows
from bpipe.plan.issue_order import issue_orders
from bpipe.plan.order import linearise
from bpipe.schedules import Action, Amount, Costs, Link, Op, Plan, Sizes, StageSizes, build, finish, rules, simulate, verify
from bpipe.schedules.by_name import forward_plan
from bpipe.simulator.critical import critical_path
from bpipe.tools.chrome import save_trace
from bpipe.tools.trace_record import load_trace
from tests.amounts import amounts, changed
from tests.schedules.mutations import ORDERING, STRUCTURAL, Mutation, assert_caught, at_other_place, damaged, lanes, refused
from tests.schedules.replay import crossings, occupied, replay
from tests.schedules.shape_of_plan import reshaped, shape_of
from tests.schedules.skip_mutations import HARMS, WAITS, of_skips
from tests.tiers import examples
from tests.tools.chrome_schema import violations
from tests.tools.test_chrome import bound

Skips = tuple[tuple[int, ...], ...]
NAMES = [rule.name for rule in rules() if not rule.local]  # of those that take skips

# A U: stage 0 hands a value to stage 3, and stage 1 hands one to stages 2 and 3. What stage 2 gets is in the message from stage 1.
U = """\
bpipe-plan 2 name=1f1b slots=-,-,-,-
flow chain [[0,1,2,3],2,true]
flow skips [[[0,3],[1,2,3]]]
rank 0: \
0F0 0SEND_F0 0SEND_F0>3 0RECV_B0<3 0RECV_B0 \
0F1 0SEND_F1 0SEND_F1>3 0RECV_B1<3 0RECV_B1 0WAIT_SEND_F0>3 0WAIT_SEND_F0 0WAIT_RECV_B0 0WAIT_RECV_B0<3 \
0B0 0WAIT_SEND_F1>3 0WAIT_SEND_F1 0WAIT_RECV_B1 0WAIT_RECV_B1<3 \
0B1
rank 1: \
1RECV_F0 1RECV_F1 1WAIT_RECV_F0 \
1F0 1SEND_F0 1SEND_F0>3 1RECV_B0<3 1RECV_B0 1WAIT_RECV_F1 \
1F1 1SEND_F1 1SEND_F1>3 1RECV_B1<3 1RECV_B1 1WAIT_SEND_F0>3 1WAIT_SEND_F0 1WAIT_RECV_B0 1WAIT_RECV_B0<3 \
1B0 1SEND_B0 1WAIT_SEND_F1>3 1WAIT_SEND_F1 1WAIT_RECV_B1 1WAIT_RECV_B1<3 \
1B1 1SEND_B1 1WAIT_SEND_B1 1WAIT_SEND_B0
rank 2: \
2RECV_F0 2RECV_F1 2WAIT_RECV_F0 \
2F0 2SEND_F0 2RECV_B0 2WAIT_RECV_F1 \
2F1 2SEND_F1 2RECV_B1 2WAIT_SEND_F0 2WAIT_RECV_B0 \
2B0 2SEND_B0 2WAIT_SEND_F1 2WAIT_RECV_B1 \
2B1 2SEND_B1 2WAIT_SEND_B1 2WAIT_SEND_B0
rank 3: \
3RECV_F0<1 3RECV_F1<1 3RECV_F0<0 3RECV_F1<0 3RECV_F0 3WAIT_RECV_F0<0 3WAIT_RECV_F0<1 3WAIT_RECV_F0 \
3F0 3RECV_F1 3WAIT_RECV_F1<0 3WAIT_RECV_F1<1 \
3B0 3SEND_B0 3SEND_B0>1 3SEND_B0>0 3WAIT_RECV_F1 \
3F1 \
3B1 3SEND_B1 3SEND_B1>1 3SEND_B1>0 3WAIT_SEND_B1>0 3WAIT_SEND_B1>1 3WAIT_SEND_B1 3WAIT_SEND_B0>0 3WAIT_SEND_B0>1 3WAIT_SEND_B0
serve 0:
serve 1:
serve 2:
serve 3:
"""


def with_skips(plan: Plan, *skips: tuple[int, ...]) -> Plan:
    """The computations of a plan, with skips; what it evicts stays."""
    return reshaped(without_transfers(plan), skips=skips)


def passing(plan: Plan, direction: int) -> list[int]:
    """The units that pass the stages of a direction."""
    units = range(plan.num_microbatches * plan.slices)
    return [unit for unit in units if unit // plan.slices % shape_of(plan).directions == direction]


def expected_crossings(plan: Plan) -> Counter[tuple[object, ...]]:
    """Once to each rank that uses a value, other than the one that makes it."""
    depth = len(plan.stage_ranks) // shape_of(plan).directions
    found: Counter[tuple[object, ...]] = Counter()
    for direction, (place, skip) in product(range(shape_of(plan).directions), enumerate(shape_of(plan).skips)):
        source, *users = (direction * depth + stage for stage in skip)
        for rank in {plan.stage_ranks[user] for user in users} - {plan.stage_ranks[source]}:
            found.update((rank, place, source, unit) for unit in passing(plan, direction))
    return found


# What a plan with skips is.


def test_a_small_plan_in_full() -> None:
    plan = finish(with_skips(build("1f1b", 4, 2), (0, 3), (1, 2, 3)))
    assert plan.to_text() == U
    assert Plan.from_text(U) == plan
    assert replay(plan) is None
    assert crossings(plan) == Counter({(3, 0, 0, 0): 1, (3, 0, 0, 1): 1} | {(r, 1, 1, u): 1 for r in (2, 3) for u in (0, 1)})


def test_a_rank_gets_a_value_once() -> None:
    """Stages 1 and 4 on rank 1 use what stage 0 makes, and stage 3 on its own rank: one message, which has the output, too."""
    plan = finish(with_skips(build("interleaved_1f1b", 6, 3, num_ranks=3), (0, 1, 3, 4)))
    plain = build("interleaved_1f1b", 6, 3, num_ranks=3)
    assert plan.actions == plain.actions
    assert replay(plan) is None and set(crossings(plan)) == {(1, 0, 0, unit) for unit in range(3)}


# Any plan is sound.


@st.composite
def bases(draw: st.DrawFn) -> Plan:
    """Computations of any schedule, with any skips."""
    name = draw(st.sampled_from(NAMES))
    rule = next(rule for rule in rules() if rule.name == name)
    p, m = draw(st.sampled_from((2, 4) if rule.placement.directions == 2 else (2, 3, 4))), draw(st.integers(1, 6))
    m = next(number for number in (m, p, 2 * p) if rule.allows(p, number))
    per_rank = rule.default_stages_per_rank
    slices = draw(st.integers(1, 3)) if name in ("seq_1f1b", "tera_pipe") else 1
    plan = build(name, p * per_rank, m, num_ranks=p, slices=slices, slots=[None] * p)
    stages = st.lists(st.integers(0, plan.depth - 1), min_size=2, max_size=5, unique=True).map(sorted).map(tuple)
    return with_skips(plan, *sorted(draw(st.sets(stages, min_size=1, max_size=5))))


def assert_sound(plan: Plan, base: Plan) -> None:
    """It computes what its base does, in the same order, and each value takes its way once."""
    verify(plan)
    assert replay(plan) is None
    assert Plan.from_text(plan.to_text()) == plan
    assert crossings(plan) == expected_crossings(plan)
    assert occupied(plan) == plan.peak_slots
    for rank in range(plan.num_ranks):
        assert [action for action in plan.compute(rank) if action.op is not Op.R] == base.compute(rank)
    assert sum(map(len, issue_orders(plan))) >= sum(map(len, plan.actions))
    assert len(linearise(plan)) == sum(map(len, lanes(plan)))
    assert simulate(plan, Costs()).makespan_s > 0


def variants(base: Plan) -> Iterator[Plan]:
    """The plan; one slot less, by evictions and by second forwards; and much less."""
    plain = finish(base)
    yield plain
    highest, lowest = max(plain.peak_slots), min(plain.peak_slots)
    for slots in {highest - 1, (highest + lowest) // 2 + 1} - {highest}:
        with suppress(BudgetError):
            yield finish(balance(base, slots=max(slots, 1)))
    with suppress(BudgetError):
        yield finish(recompute(base, slots=max(highest - 1, 1)))


def assert_all_sound(base: Plan) -> None:
    for plan in variants(base):
        assert_sound(plan, base)
    forwards = forward_plan(finish(base))
    assert replay(forwards) is None and crossings(forwards) == expected_crossings(base)
    assert simulate(finish(base), Costs()).makespan_s >= simulate(finish(reshaped(base, skips=())), Costs()).makespan_s


@given(bases())
@settings(max_examples=examples(25))
def test_any_plan_is_sound(base: Plan) -> None:
    assert_all_sound(base)


@given(bases())
@settings(max_examples=examples(150))
def test_very_many_plans_are_sound(base: Plan) -> None:
    assert_all_sound(base)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_takes_skips(name: str) -> None:
    """From the first stage to the last, by the last but one."""
    rule = next(rule for rule in rules() if rule.name == name)
    plain = build(name, 4 * rule.default_stages_per_rank, 8, num_ranks=4, slots=[None] * 4)
    base = with_skips(plain, (0, plain.depth - 2, plain.depth - 1), (0, plain.depth - 1), (1, plain.depth - 1))
    assert_sound(finish(base), base)


# Damaged plans.


SMALL: dict[str, Callable[[], Plan]] = {
    "a U": lambda: Plan.from_text(U),
    "two stages on a rank": lambda: finish(with_skips(build("interleaved_1f1b", 6, 3, num_ranks=3), (0, 2, 5), (0, 4), (1, 3))),
    "halves": lambda: finish(with_skips(build("zb_h1", 4, 3), (0, 2, 3), (1, 3))),
    "two directions": lambda: finish(with_skips(build("chimera", 8, 4, num_ranks=4), (0, 2), (0, 3), (1, 3))),
    "slices": lambda: finish(with_skips(build("seq_1f1b", 4, 2, slices=2), (0, 2), (0, 3), (1, 3))),
    "evictions": lambda: finish(balance(with_skips(build("1f1b", 4, 4), (0, 2), (0, 3), (1, 3)), slots=3)),
    "second forwards": lambda: finish(recompute(with_skips(build("1f1b", 4, 3), (0, 2, 3), (1, 3)), slots=2)),
}


@cache
def small(name: str) -> Plan:
    return SMALL[name]()


def agree(mutant: Plan) -> bool:
    """Whether a mutant does harm: the verifier and the machine say the same."""
    harm = replay(mutant)
    assert (harm is not None) is refused(mutant), harm
    return harm is not None


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", SMALL)
def test_harm_is_caught(name: str, harm: str) -> None:
    """By the verifier and by the machine alike, which knows nothing of it."""
    plan, count = small(name), 0
    for mutant in HARMS[harm](plan):
        assert mutant != plan and agree(mutant)
        count += 1
    assert count >= (harm != "under_way" or name == "evictions")


@pytest.mark.parametrize("name", SMALL)
def test_other_skips_than_those_of_the_messages(name: str) -> None:
    """One dropped, or one more: harmful where it makes a difference to the messages."""
    plan, verdicts = small(name), Counter[bool]()
    for place in range(len(shape_of(plan).skips)):
        verdicts[agree(reshaped(plan, skips=shape_of(plan).skips[:place] + shape_of(plan).skips[place + 1 :]))] += 1
    for source, user in product(range(plan.depth), repeat=2):
        if source < user and (source, user) not in shape_of(plan).skips:
            other = reshaped(plan, skips=tuple(sorted((*shape_of(plan).skips, (source, user)))))
            verdicts[agree(other)] += 1
    assert verdicts[True] and verdicts[False]
    assert agree(reshaped(plan, skips=()))


def test_one_of_the_messages_skips_dropped_from_the_header() -> None:
    plan = Plan.from_text(U)
    for skips in (((0, 3),), ((1, 2, 3),), ((0, 3), (1, 2))):
        assert agree(reshaped(plan, skips=skips))
    with pytest.raises(PlanError, match="0SEND_F0>3 is not part of this plan"):
        verify(reshaped(plan, skips=((1, 2, 3),)))
    with pytest.raises(PlanError, match="0SEND_F0>2 is missing"):
        verify(reshaped(plan, skips=((0, 2), (0, 3), (1, 2, 3))))


def test_no_harmful_place_of_a_message_is_missed() -> None:
    """Each message of skips, and each wait, at each other place of its lane."""
    plan = finish(with_skips(build("1f1b", 3, 2), (0, 2)))
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for rank, at, _ in of_skips(plan, [*WAITS, *WAITS.values()]):
        for to in range(len(plan.actions[rank])):
            mutant = at_other_place(plan, rank, at, to)
            verdicts[replay(mutant) is not None, refused(mutant)] += mutant != plan
    assert verdicts[True, False] == 0
    assert verdicts[True, True] > 100 and verdicts[False, False] > 30


@pytest.mark.parametrize("name", SMALL)
def test_no_harmful_place_of_any_action_is_missed(name: str) -> None:
    plan = small(name)
    for lane, actions in enumerate(lanes(plan)):
        for at, _ in enumerate(actions):
            for to in range(7 * at % 31, len(actions), 31):  # some places, others for each action
                assert_caught(at_other_place(plan, lane, at, to))


@given(st.sampled_from(sorted(SMALL)), st.sampled_from(STRUCTURAL), st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_structural_mutations_are_caught(name: str, mutation: Mutation, random: Random) -> None:
    mutant = mutation(small(name), random)
    assert mutant is None or (replay(mutant) is not None and refused(mutant))


@given(bases(), st.lists(st.sampled_from(ORDERING * 3 + STRUCTURAL), min_size=1, max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=examples(80))
def test_harmful_mutations_are_caught(base: Plan, chosen: list[Mutation], random: Random) -> None:
    for plan in variants(base):
        for _ in range(8):
            assert_caught(damaged(plan, chosen, random))


# What is refused as such.


@pytest.mark.parametrize(
    "skips",
    [
        ((2, 1),),
        ((1, 1),),
        ((0, 3, 2),),
        ((0, 2, 2),),
        ((1, 3), (0, 2)),
        ((0, 2), (0, 2)),
        ((0, 4),),
        ((4, 5),),
        ((0,),),
        ((-1, 2),),
        ((),),
        ((0.5, 2),),
        ((True, 2),),
        ("02",),
    ],
)
def test_bad_skips_are_refused(skips: Any) -> None:
    """To an earlier stage, to itself, unordered, twice, or of a stage that does not exist."""
    for base in (build("1f1b", 4, 2), build("chimera", 8, 4, num_ranks=4)):
        with pytest.raises(ValueError, match="skip"):
            reshaped(base, skips=skips)
        with pytest.raises(PlanError, match="not a plan"):
            Plan.from_text(base.to_text().replace("rank 0:", f"flow skips [{json.dumps(skips)}]\nrank 0:"))


@pytest.mark.parametrize("unit", ["3", "3/1"])
@pytest.mark.parametrize("peer", ["", "@7"])
@pytest.mark.parametrize("op", [*WAITS, *WAITS.values()])
def test_messages_of_skips_are_read_as_written(op: Op, peer: str, unit: str) -> None:
    slices = 2 if "/" in unit else 1
    text = f"4{op}{unit}{'>' if 'SEND' in op else '<'}0{peer}"
    action = Action.parse(text, Units(slices))
    assert action == Action(op, 4, 7 if slices == 2 else 3, 1, 7 if peer else None)
    assert f"{action.text(Units(slices))}{action.at_peer}" == text


NO_MESSAGES = """
    0F3>5 0B3<5 0R3>5 0EVICT3>5 0LOAD3<5 0ACCEPT3<5 0UNSHARD>5 0SEND_F3<5 5RECV_F3>0 5SEND_B3<0 0RECV_B3>5 0WAIT_SEND_F3<5
    5WAIT_RECV_F3>0 0SEND_F3.6 5RECV_F3.1 0WAIT_RECV_B3.6 0SEND_F3>5.1 0SEND_F3.1>5 0SEND_F3>5>6 0SEND_F3> 0SEND_F3>-1
    0SEND_F3>1234567890 0SEND_F>5 0SEND_F3@1>5 >5
"""


@pytest.mark.parametrize("text", NO_MESSAGES.split())
def test_what_is_no_message_of_skips_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_messages_with_stages_that_do_not_exist_are_refused() -> None:
    for text in (U.replace("0SEND_F0>3", "0SEND_F0>4"), U.replace("0RECV_B0<3", "0RECV_B0<123456789@3")):
        with pytest.raises(PlanError, match="names a stage that does not exist: there are 4"):
            verify(Plan.from_text(text))


# What shows and counts plans.


def test_the_grid_is_that_of_the_computations() -> None:
    plan, plain = Plan.from_text(U), build("1f1b", 4, 2)
    assert rows(plan) == rows(plain) and str(plan) == str(plain)


def test_a_csv_has_no_skips() -> None:
    with pytest.raises(PlanError, match="has skips, which torch"):
        Plan.from_text(U).to_csv()


@pytest.mark.parametrize("name", SMALL)
def test_traces_have_arrows_between_the_ends(name: str, tmp_path: Path) -> None:
    plan = small(name)
    timeline = simulate(plan, Costs(forward_s=1.0, backward_s=2.0, output_bytes=8, link=Link(latency_s=0.01, bytes_per_s=80.0)))
    save_trace(timeline, path := tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    assert violations(trace) == [] and load_trace(path)[0].plan == plan
    sends = [a for lane in plan.actions for a in lane if a.op in (Op.SEND_F, Op.SEND_B)]
    expected = {(plan.show(send), plan.show(Action(*plan.other_end(send)))) for send in sends}
    assert any(">" in tail and "<" in head for tail, head in expected)
    assert {pair for pair in bound(trace["traceEvents"]) if "SEND" in pair[0]} == expected
    events = {event["args"]["action"]: event["args"] for event in trace["traceEvents"] if event["ph"] == "X"}
    _, _, sent = of_skips(plan, [Op.SEND_F])[0]
    told = events[plan.show(sent)]
    assert told["then"] == f"its skips for stage {sent.part - 1} are being sent" and "part" not in told
    assert sum(1 for _ in critical_path(timeline)) > 0


def test_both_ends_of_a_message_carry_the_same_bytes() -> None:
    plan = Plan.from_text(U)
    costs = Costs(output_bytes=[1, 10, 100, 1000], gradient_bytes=[2, 20, 200, 2000])
    carried = {(rank, *a.identity): costs.carried(a) for rank, lane in enumerate(plan.actions) for a in lane if a.op in WAITS}
    for rank, _, action in of_skips(plan, [*WAITS]):
        assert action.peer is not None
        other = (action.peer, *plan.other_end(action))
        size = 10 ** min(action.stage, action.part - 1) * (2 if action.op in (Op.SEND_B, Op.RECV_B) else 1)
        assert carried[rank, *action.identity] == carried[other] == size


def test_messages_carry_the_values_that_sizes_name() -> None:
    """Not the output of their maker, which goes to the next stage; stage 2 gets its value in the message from stage 1."""
    plan = Plan.from_text(U)
    of_values = ("0-3", 100, 50), ("1-2-3", 7, 0)
    stages = [
        StageSizes(
            parts=(8,),
            amounts=(
                *amounts(received=1000, sent=1000),
                *(Amount(name, size, gradient=back) for name, size, back in of_values if str(stage) in name),
            ),
        )
        for stage in range(4)
    ]
    plan = replace(plan, sizes=(sizes := Sizes(stages=tuple(stages), static=(0,) * 4)))
    for _, _, action in of_skips(plan, [*WAITS]):
        size, back = (100, 50) if min(action.stage, action.part - 1) == 0 else (7, 0)
        assert sizes.carried(action, plan.flow) == (back if action.op in (Op.SEND_B, Op.RECV_B) else size)
    lone = replace(plan, sizes=Sizes(stages=tuple(changed(one, received=0, sent=0) for one in stages), static=(0,) * 4))
    assert simulate(lone, Costs(forward_s=0.0, backward_s=0.0, link=Link(bytes_per_s=1.0))).makespan_s == 2 * (100 + 50)


@pytest.mark.parametrize("num_parts", [1, 5])
def test_messages_of_skips_are_no_parts_of_what_is_saved(num_parts: int) -> None:
    """Sizes say nothing of them: a plan in bytes is verified and balanced as without."""
    stage = StageSizes(parts=(8,) * num_parts, amounts=amounts(received=4, sent=4))
    sizes = Sizes(stages=(changed(stage, received=0), stage, stage, stage), static=(0,) * 4)
    plan, plain = (replace(one, sizes=sizes) for one in (with_skips(build("1f1b", 4, 6), (0, 2, 3), (1, 3)), build("1f1b", 4, 6)))
    assert finish(plan).device_peak_bytes == plain.device_peak_bytes
    budget = max(plain.device_peak_bytes) - 2 * num_parts
    balanced = finish(balance(plan, sizes=sizes, budgets=budget))
    assert replay(balanced) is None and max(balanced.device_peak_bytes) <= budget
    assert any(action.op is Op.EVICT for lane in balanced.actions for action in lane)
