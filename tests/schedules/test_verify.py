"""The verifier against an independent replay: every plan that does harm is refused, and every generated one is sound."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import PlanError
from bpipe.plan.order import linearise
from bpipe.schedules import Action, Amount, Op, Plan, Sizes, StageSizes, build, finish, one_f_one_b, verify
from tests.schedules import mutations
from tests.schedules.lines import lines_of
from tests.schedules.mutations import ORDERING, STRUCTURAL, Mutation, assert_caught, damaged, lanes, refused
from tests.schedules.replay import occupied, replay
from tests.schedules.shape_of_plan import reshaped
from tests.schedules.strategies import computations, gathering_plans, plans, split
from tests.tiers import examples

MUTANTS = 12  # of each plan


# Sound plans.


@given(plans())
@settings(max_examples=examples(200))
def test_generated_plans_verify_and_run(plan: Plan) -> None:
    verify(plan)
    assert occupied(plan) == plan.peak_slots
    assert all(budget is None or peak <= budget for peak, budget in zip(plan.peak_slots, plan.slots))


@given(plans())
def test_one_order_of_everything(plan: Plan) -> None:
    """It is each lane in its order: a plan is a projection of it."""
    order = linearise(plan)
    assert len(order) == sum(map(len, lanes(plan)))
    for rank in range(plan.num_ranks):
        mine = [action for r, action in order if r == rank]
        assert [action for action in mine if action in set(plan.actions[rank])] == list(plan.actions[rank])
        for peer, chain in plan.chains(rank).items():
            assert [action for action in mine if action.peer == peer and action in set(chain)] == list(chain)


# Damaged plans.


@given(plans() | gathering_plans(), st.sampled_from(STRUCTURAL), st.randoms(use_true_random=False))
@settings(max_examples=examples(400))
def test_structural_mutations_are_caught(plan: Plan, mutation: Mutation, random: Random) -> None:
    mutant = mutation(plan, random)
    if mutant is not None:
        assert replay(mutant) is not None
        assert refused(mutant)


@given(
    plans() | gathering_plans(),
    st.lists(st.sampled_from(ORDERING * 3 + STRUCTURAL), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(200))
def test_harmful_mutations_are_caught(plan: Plan, chosen: list[Mutation], random: Random) -> None:
    for _ in range(MUTANTS):
        assert_caught(damaged(plan, chosen, random))


def reorderings(plan: Plan) -> Iterator[Plan]:
    """Each action at each other place of its lane, and each two actions of a lane exchanged."""
    for index, lane in enumerate(lanes(plan)):
        for one in range(len(lane)):
            for other in range(len(lane)):
                yield mutations.at_other_place(plan, index, one, other)
                if one < other:
                    yield mutations.exchanged(plan, index, one, other)


def exact(plan: Plan) -> Plan:
    """Finished, with budgets that leave no slot unused."""
    return finish(replace(plan, slots=plan.peak_slots))


def unlimited(plan: Plan) -> Plan:
    return replace(plan, slots=(None,) * plan.num_ranks)


SMALL: dict[str, Callable[[], Plan]] = {
    "fits": lambda: build("1f1b", 2, 3, slots=(2, 1)),
    "no room to spare": lambda: build("gpipe", 2, 5, slots=(3, 7)),
    "an acceptor busy itself": lambda: build("gpipe", 3, 4, slots=(3, 4, 5)),
    "eager": lambda: build("balanced_1f1b", 4, 4, rule="eager"),
    "evictions without a budget": lambda: unlimited(build("gpipe", 2, 5, slots=(3, 7))),
    "halves": lambda: exact(computations([split(lane, frozenset({1}), 0) for lane in one_f_one_b.order(2, 3)], (0, 1))),
    "weights gathered": lambda: build("breadth_first", 4, 2),
    "two stages on a rank": lambda: finish(computations(one_f_one_b.order(4, 2), (0, 1, 1, 0))),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_harmful_reordering_is_missed(name: str) -> None:
    """Each third of them, hundreds a plan; and the verifier is not so strict that it refuses what does no harm.

    It does refuse an output still on its way when its microbatch runs backward, whether or not the budget has the slot.
    """
    plan = SMALL[name]()
    assert replay(plan) is None
    some = [mutant for mutant in islice(reorderings(plan), None, None, 3) if mutant != plan]
    verdicts = Counter((replay(mutant) is not None, refused(mutant)) for mutant in some)
    assert verdicts[True, False] == 0
    assert verdicts[True, True] > 150
    assert verdicts[False, False] > verdicts[False, True]


@pytest.mark.parametrize("name", SMALL)
def test_no_dropped_or_doubled_action_is_missed(name: str) -> None:
    plan = SMALL[name]()
    for index, lane in enumerate(lanes(plan)):
        for at in range(len(lane)):
            for changed in (lane[:at] + lane[at + 1 :], lane[: at + 1] + lane[at:]):
                mutant = mutations.with_lanes(plan, {index: changed})
                assert replay(mutant)
                assert refused(mutant)


@pytest.mark.parametrize("rank", range(4))
def test_a_budget_lowered_by_one(rank: int) -> None:
    plan = build("balanced_1f1b", 4, 8)
    slots = tuple(peak - (r == rank) for r, peak in enumerate(plan.peak_slots))
    verify(replace(plan, slots=plan.peak_slots))
    own = rf"rank {rank} occupies \d slots of its own and \d for remote activations and static bytes"
    said = rf"{own}, over its budget of {slots[rank]}"
    with pytest.raises(PlanError, match=said):
        verify(replace(plan, slots=slots))


def test_the_replay_knows_every_harm() -> None:
    """Else the tests above would show little."""
    seen: Counter[str] = Counter()
    random = Random(0)
    for plan in [*(make() for make in SMALL.values()), build("balanced_1f1b", 5, 7)]:
        for mutation in STRUCTURAL + ORDERING:
            for _ in range(20):
                mutant = mutation(plan, random)
                seen[(replay(mutant) or "none").split(":")[0] if mutant else "none"] += 1
    known = {"missing token", "wrong token", "out of order", "undone", "started twice", "never started", "wrong lane", "misplaced"}
    assert {"budget", "deadlock", "channel to itself", *known} <= set(seen)


# What a violation says.


def test_every_violation_is_reported_at_once_with_the_place_of_the_first() -> None:
    plan = build("1f1b", 2, 3)
    first, second = list(plan.actions[0]), list(plan.actions[1])
    first.remove(Action(Op.F, 0, 2))
    second.append(Action(Op.B, 1, 0))
    with pytest.raises(PlanError) as raised:
        verify(replace(plan, actions=(tuple(first), tuple(second))))
    message = str(raised.value)
    assert "1B0 stands a second time" in message.splitlines()[0]
    assert "0F2 is missing" in message
    marked = [line.split() for line in message.splitlines() if line.endswith("<-- ERROR HERE")]
    assert marked == [[str(len(second) - 1), "1B0", "<--", "ERROR", "HERE"]]


def test_of_many_violations_the_first_are_shown_and_the_rest_are_counted() -> None:
    plan = build("1f1b", 4, 12)
    silent = replace(plan, actions=tuple(tuple(one for one in lane if one.op is not Op.SEND_F) for lane in plan.actions))
    with pytest.raises(PlanError) as raised:
        verify(silent)
    first, *shown = str(raised.value).splitlines()
    missing = [f"{rank}SEND_F{microbatch} is missing" for rank in range(3) for microbatch in range(12)]
    assert first == f"plan '1f1b' breaks 36 rules: {missing[0]}"
    assert [line.rpartition(": ")[2] for line in shown[:20]] == missing[:20]
    assert shown[20:22] == ["  ... and 16 more", ""]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda plan: replace(plan, flow=replace(plan.flow, stage_ranks=())), "shape"),
        (lambda plan: reshaped(plan, stage_ranks=(0, 1, 2, 4)), "shape"),
        (lambda plan: replace(plan, served=plan.served[:3]), "shape"),
        (lambda plan: replace(plan, slots=()), "shape"),
        (lambda plan: replace(plan, flow=replace(plan.flow, routes=((0,),) * 4)), "shape"),
        (lambda plan: replace(plan, actions=((), (), (), ())), "shape"),
        (lambda plan: replace(plan, served=((), (), (), plan.served[3][::-1])), "ordered"),
        (lambda plan: replace(plan, served=(plan.served[3], (), (), ())), "belongs"),
        (lambda plan: replace(plan, slots=(3, 3, 2, 2)), "affordable"),
        (lambda plan: replace(plan, actions=(plan.actions[0][1:], *plan.actions[1:])), "complete"),
    ],
)
def test_a_violation_names_its_rule(change, rule: str) -> None:
    with pytest.raises(PlanError, match=rf"(?m)^  {rule}: "):
        verify(change(build("balanced_1f1b", 4, 8)))


@pytest.mark.parametrize("backward", [Op.B, Op.I, Op.W])
def test_an_output_has_arrived_before_its_backward_gives_memory_back(backward: Op) -> None:
    """Also before the input half, after which less may be saved: with a budget that does not count what is under way."""
    halves = frozenset({0}) if backward is Op.B else frozenset[int]()
    plan = finish(computations([split(lane, halves, 1) for lane in one_f_one_b.order(2, 1)], (0, 1)))
    lane = list(plan.actions[0])
    lane.remove(completion := Action(Op.WAIT_SEND_F, 0, 0, peer=1))
    lane.insert(1 + lane.index(Action(backward, 0, 0)), completion)
    late = replace(plan, actions=(tuple(lane), plan.actions[1]))
    with pytest.raises(PlanError, match=rf"0{backward}0 stands before 0WAIT_SEND_F0"):
        verify(late)


def test_an_output_under_way_counts_when_the_saved_bytes_are_gone() -> None:
    """By hand: 8 saved, the output among them, and 8 of its gradient; 8 more if the first output is still under way then."""
    lanes = [[Action.parse(f"{stage}{text}") for text in ["F0", "I0", "F1", "I1", "W0", "W1"]] for stage in range(2)]
    stage = StageSizes(parts=(8,), between=0, amounts=(Amount("out", 8, kept=8),))
    sizes = Sizes(stages=(stage, stage), static=(0, 0))
    plan = finish(replace(computations(lanes, (0, 1)), sizes=sizes, budgets=(16, None)))
    assert plan.device_peak_bytes[0] == 16 and replay(plan) is None
    lane = list(plan.actions[0])
    lane.remove(completion := Action(Op.WAIT_SEND_F, 0, 0, peer=1))
    lane.insert(lane.index(Action(Op.W, 0, 0)), completion)
    late = replace(plan, actions=(tuple(lane), plan.actions[1]))
    assert replay(late) == "budget: rank 0 occupies 24 bytes of 16" and refused(late)


@pytest.mark.parametrize("op", [Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
@pytest.mark.parametrize("change", [{"microbatch": 1}, {"part": 1}, {"peer": 1}])
def test_what_is_of_a_whole_stage_names_nothing_else(op: Op, change: dict[str, int]) -> None:
    plan = build("breadth_first", 4, 2)
    renamed = tuple(tuple(a._replace(**change) if a.op is op else a for a in lane) for lane in plan.actions)
    with pytest.raises(PlanError, match=rf"(?m)^  (shape|belongs): rank 0, action \d+: \d{op}"):
        verify(replace(plan, actions=renamed))


# What it costs.


def test_planning_is_work_near_to_linear() -> None:
    """Of four times as many microbatches: linear is 4, quadratic 16."""
    few, many = (lines_of(lambda m=m: build("balanced_1f1b", 16, m)) for m in (32, 128))
    assert many < 6 * few


def test_planning_is_quick_and_linear() -> None:
    """In process time, and the best of a few runs, beside work of the same minute: machines change their speed."""

    def seconds(num_microbatches: int) -> tuple[float, float]:
        """Of planning and proving, and of making as many actions."""
        began = time.process_time()
        plan = build("balanced_1f1b", 64, num_microbatches)
        planned = time.process_time()
        assert max(plan.peak_slots) == 33
        counted = time.process_time()
        made = [Action(Op.F, 0, n) for n in range(sum(map(len, plan.actions + plan.served)))]
        assert made
        return planned - began, time.process_time() - counted

    few = min(seconds(128)[0] for _ in range(2))
    for _ in range(4):
        many, making = seconds(1024)
        if many < min(20 * making, 16 * few):  # 9 to 13; and of eight times as many microbatches: linear is 8, quadratic 64
            return
    pytest.fail(f"64 stages: {few:.2f} s for 128 microbatches, {many:.2f} s for 1024, {making:.2f} s to make as many actions")


def test_schedules_import_no_torch() -> None:
    code = "import bpipe.schedules as s, sys; s.build('balanced_1f1b', 4, 8); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
