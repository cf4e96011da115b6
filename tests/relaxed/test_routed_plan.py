"""Microbatches dealt to replicas by speed, and the plans of their paths: proven like any other, and nearly as fast as can be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bpipe
import bpipe.relaxed.paths as module
from bpipe.errors import ConfigurationError, PlanError
from bpipe.flow.shaping import shaped
from bpipe.plan.issue_order import issue_orders
from bpipe.relaxed import deal, routed_plan
from bpipe.relaxed.paths import most_in_flight
from bpipe.schedules import Action, Costs, Op, Plan, build, simulate, verify
from bpipe.schedules.by_name import forward_plan
from tests.schedules.mutations import ORDERING, STRUCTURAL, Mutation, assert_caught, refused
from tests.schedules.replay import replay
from tests.schedules.shape_of_plan import reshaped, shape_of
from tests.tiers import examples


@st.composite
def routed(draw: st.DrawFn) -> Plan:
    depth, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    one = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.3])
    speeds = draw(st.lists(st.lists(one, min_size=depth, max_size=depth), min_size=replicas, max_size=replicas))
    speeds[0] = [speed or 1.0 for speed in speeds[0]]
    return routed_plan(draw(st.integers(1, 8)), speeds, in_flight=draw(st.sampled_from([0.5, 1.0, 2.0])))


# Dealing


def test_speeds_1_2_4_get_8_16_32() -> None:
    dealt = deal(56, [1, 2, 4])
    assert [dealt.count(replica) for replica in range(3)] == [8, 16, 32]
    assert deal(56, [1 / 7, 2 / 7, 4 / 7]) == dealt, "the unit does not matter, not even to the last bit"


@given(st.integers(0, 200), st.lists(st.floats(0.05, 20), min_size=1, max_size=5))
def test_shares_are_within_one_of_those_of_the_speeds(m: int, speeds: list[float]) -> None:
    """Nobody is given work for longer than another one plus one microbatch."""
    dealt = deal(m, speeds)
    assert len(dealt) == m
    times = [dealt.count(replica) / speed for replica, speed in enumerate(speeds)]
    assert all(time - 1 / speed <= min(times) + 1e-9 for time, speed in zip(times, speeds) if time)


def test_who_is_not_there_gets_nothing() -> None:
    assert set(deal(9, [0, 1, 0, 2])) == {1, 3}
    for speeds in ([0, 0], [], [1, -1], [float("nan")], [float("inf")]):
        with pytest.raises(ConfigurationError, match="throughputs"):
            deal(3, speeds)
    with pytest.raises(ConfigurationError, match="give each replica one for each stage"):
        routed_plan(3, [[1, 1], [1]])
    with pytest.raises(ConfigurationError, match="no replica is there"):
        routed_plan(3, [[1, 0], [1, 0]])


# Plans


def test_the_picture() -> None:
    assert all(f"    {line.rstrip()}" in (module.__doc__ or "") for line in str(routed_plan(6, [[1, 1], [2, 1]])).splitlines())


@given(routed())
def test_plans_are_sound(plan: Plan) -> None:
    """Verified as they are made; an independent machine runs them, they read back as text, and run where only devices wait."""
    assert replay(plan) is None
    assert Plan.from_text(plan.to_text()) == plan
    issue_orders(plan)
    assert simulate(plan, Costs()).makespan_s > 0


@given(routed(), st.lists(st.sampled_from(STRUCTURAL + ORDERING), min_size=1, max_size=2), st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_harmful_mutations_are_caught(plan: Plan, chosen: list[Mutation], random: Random) -> None:
    for mutation in chosen:
        mutant = mutation(plan, random)
        if mutant is not None:
            assert_caught(mutant)


NO_PEER = "0SEND_F0 on rank 0 with peer 1: expected rank 0 and no peer"
TWICE = "alternatives", (0, 1, 2, 3), ((0, 1), (2, 3)), True


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda plan: reshaped(plan, paths=shape_of(plan).paths[1:]), NO_PEER),
        (lambda plan: reshaped(plan, paths=((0, 3), *shape_of(plan).paths[1:])), "expected rank 0 and peer 3"),
        (lambda plan: reshaped(plan, paths=((1, 0), *shape_of(plan).paths[1:])), r"takes stages \(1, 0\)"),
        (lambda plan: reshaped(plan, paths=((0, 5), *shape_of(plan).paths[1:])), r"takes stages \(0, 5\)"),
        (lambda plan: reshaped(plan, stage_ranks=(0, 0, 2, 3)), NO_PEER),
        (lambda plan: replace(plan, flow=shaped(plan.flow, *TWICE)), "alternatives already"),
    ],
)
def test_wrong_paths_are_refused(change: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        verify(change(routed_plan(6, [[1, 1], [2, 1]])))  # type: ignore[operator]


def test_who_does_not_run_paths_says_so() -> None:
    plan = routed_plan(4, [[1], [1]])
    loopback = bpipe.Loopback(2)
    with pytest.raises(ConfigurationError, match=r"paths through replicas, whose gradients only bpipe\.Routes adds up"):
        bpipe.FromPlan(bpipe.PipelineStage(nn.Linear(2, 2), 0, 2, group=loopback.rank(0)), plan)
    with pytest.raises(PlanError, match="has alternatives, which torch"):
        plan.to_csv()


def test_forwards_alone() -> None:
    plan = forward_plan(routed_plan(5, [[1, 1], [2, 1]]))
    assert shape_of(plan).paths
    assert replay(plan) is None


def test_a_stage_takes_its_microbatches_in_order_with_gaps() -> None:
    plan = routed_plan(6, [[1, 1], [2, 1]])
    rank, names = 1, {0: 2, 2: 0}
    lanes = [[a._replace(microbatch=names.get(a.microbatch, a.microbatch)) for a in lane] for lane in plan.actions]
    paths = shape_of(plan).paths
    swapped = reshaped(replace(plan, actions=tuple(map(tuple, lanes))), paths=tuple(paths[names.get(i, i)] for i in range(6)))
    assert [action.microbatch for action in swapped.compute(rank) if action.op is Op.F] == [2, 0, 4]
    with pytest.raises(PlanError, match="1F2 stands before 1F0"):
        verify(swapped)


def test_a_wrong_peer_is_named_with_the_right_one() -> None:
    plan = routed_plan(6, [[1, 1], [2, 1]])
    lane = tuple(Action.parse("0SEND_F0@3") if str(action) == "0SEND_F0" else action for action in plan.actions[0])
    with pytest.raises(PlanError, match="0SEND_F0 on rank 0 with peer 3: expected rank 0 and peer 1"):
        verify(replace(plan, actions=(lane, *plan.actions[1:])))


@pytest.mark.parametrize("op", [Op.SEND_F, Op.WAIT_SEND_F, Op.RECV_B, Op.WAIT_RECV_B])
def test_peers_that_are_exchanged_are_refused(op: Op) -> None:
    """Each is a peer of the stage, but not of this microbatch's message."""
    plan = routed_plan(4, [[1, 1], [1, 1]], ((0, 1), (0, 3), (2, 1), (2, 3)))
    peers = {action.peer: action for action in plan.actions[0] if action.op is op}
    assert set(peers) == {1, 3}
    lane = tuple(a._replace(peer=4 - a.peer) if a.op is op and a.peer is not None else a for a in plan.actions[0])
    with pytest.raises(PlanError, match=rf"0{op.value}0 on rank 0 with peer 3: expected rank 0 and peer 1"):
        verify(replace(plan, actions=(lane, *plan.actions[1:])))


def test_a_plan_that_misses_most_is_refused_at_once() -> None:
    """However many routes there are, and not with a line for each microbatch that is missing."""
    plan = routed_plan(40, [[1, 1], [1, 2]])
    few = tuple(tuple(action for action in lane if action.microbatch == 39) for lane in plan.actions)
    with pytest.raises(PlanError, match="actions cannot run 4 stages") as refused:
        verify(replace(plan, actions=few))
    assert "missing" not in str(refused.value)


def test_equal_speeds_are_1f1b_on_each_replica() -> None:
    """With as much in flight as there, each replica is a pipeline of its own."""
    plan, alone = routed_plan(12, [[1] * 4] * 2, in_flight=1.0), build("1f1b", 4, 6)
    assert plan.peak_slots == 2 * alone.peak_slots
    assert simulate(plan, Costs()).makespan_s == simulate(alone, Costs()).makespan_s


@given(routed())
def test_memory_is_bounded(plan: Plan) -> None:
    """No rank holds more than its share of the microbatches in flight."""
    assert not refused(plan)
    dealt = [[path[stage % plan.depth] for path in shape_of(plan).paths].count(stage) for stage in range(plan.num_stages)]
    assert all(peak <= count for peak, count in zip(plan.peak_slots, dealt))


def test_a_fast_rank_has_more_in_flight() -> None:
    speeds = [1.0, 1.0, 3.0, 1.0]
    assert [most_in_flight(stage, 2, speeds, 1.0) for stage in range(4)] == [1, 1, 3, 1]
    assert [most_in_flight(stage, 2, speeds, 2.0) for stage in range(4)] == [2, 2, 6, 2]
    plan = routed_plan(40, [[1, 1], [3, 1]], in_flight=1.0)
    assert plan.peak_slots == (1, 1, 3, 1)


HARD = [[2.374, 1.084, 1.689], [1.532, 2.753, 3.583], [3.395, 3.391, 3.449]]


def step_by_work(plan: Plan, speeds: list[list[float]]) -> float:
    """The simulated step, by that of a stage that never waits: its work by the speed of all its replicas."""
    each = tuple(1 / (3 * speed) for replica in speeds for speed in replica)
    work = max(plan.num_microbatches / sum(stage) for stage in zip(*speeds))
    return simulate(plan, Costs(forward_s=each)).makespan_s / work


@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize(("depth", "replicas"), [(2, 3), (4, 2), (3, 3)])
def test_a_step_takes_hardly_longer_than_work_by_speed(depth: int, replicas: int, count: int) -> None:
    """With m = 32 microbatches a rank and speeds of 1 to 4: a tenth is what is asked for."""
    random = Random(depth)
    for _ in range(count):
        speeds = [[random.uniform(1, 4) for _ in range(depth)] for _ in range(replicas)]
        assert step_by_work(routed_plan(32 * depth * replicas, speeds), speeds) <= 1.06


def test_more_in_flight_makes_up_for_waits_behind_slow_ranks() -> None:
    found = [step_by_work(routed_plan(32 * 9, HARD, in_flight=most), HARD) for most in (1.0, 2.0, 2.5)]
    assert found == pytest.approx([1.444, 1.142, 1.058], abs=0.002)
