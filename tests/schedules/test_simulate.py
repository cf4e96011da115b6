"""The simulator: against a second one, against FACTS.md, and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError, PlanError
from bpipe.flow.shaping import shaped
from bpipe.passes.balance.balance import balance
from bpipe.plan.action import HOST
from bpipe.plan.destinations import Destinations
from bpipe.schedules import Action, Amount, Costs, Link, Op, Plan, Sizes, StageSizes, build, finish, simulate
from bpipe.schedules.by_name import forward_plan
from bpipe.simulator.critical import critical_path
from bpipe.simulator.simulation import _slowed_end
from tests.amounts import changed, number_of
from tests.schedules import ticks
from tests.schedules.shape_of_plan import reshaped
from tests.schedules.sized import sized_plans
from tests.schedules.strategies import plans

WHOLE = st.integers(1, 9)

pytestmark = pytest.mark.usefixtures("little_effort")


@st.composite
def plans_and_costs(draw: st.DrawFn) -> tuple[Plan, Costs]:
    """A plan in which no link carries two channels, so that ties cannot be resolved in two ways; costs in whole units."""
    plan = draw(plans())
    channels = plan.channels()
    assume(len({(c.src, c.dst) for c in channels}) == len(channels))
    p, m = plan.num_stages, plan.num_microbatches
    per_stage = st.lists(WHOLE, min_size=p, max_size=p)
    series = st.lists(st.lists(WHOLE, min_size=m, max_size=m), min_size=p, max_size=p)
    saved = draw(per_stage)
    return plan, Costs(
        forward_s=draw(st.one_of(WHOLE, per_stage, series)),
        backward_s=draw(st.one_of(st.integers(2, 9).map(lambda n: 2 * n), per_stage)),
        input_s=draw(WHOLE),
        weight_s=draw(WHOLE),
        saved_bytes=saved,
        movable_bytes=[draw(st.integers(1, most)) for most in saved],
        output_bytes=draw(per_stage),
        gradient_bytes=draw(st.one_of(st.none(), per_stage)),
        link=Link(bytes_per_s=1),
    )


@st.composite
def sized_plans_and_costs(draw: st.DrawFn) -> tuple[Plan, Costs]:
    """A plan in bytes, and in each message at least one."""
    plan = draw(sized_plans())
    assert plan.sizes is not None
    messages = [{name: max(1, number_of(one, name)) for name in ("sent", "received")} for one in plan.sizes.stages]
    stages = tuple(changed(one, **of_stage) for one, of_stage in zip(plan.sizes.stages, messages))
    plan = replace(plan, sizes=replace(plan.sizes, stages=stages))
    channels = plan.channels()
    assume(len({(c.src, c.dst) for c in channels}) == len(channels))
    seconds = st.lists(WHOLE, min_size=plan.num_stages, max_size=plan.num_stages)
    return plan, Costs(
        forward_s=draw(seconds),
        backward_s=draw(seconds.map(lambda series: [2 * s for s in series])),
        output_bytes=draw(WHOLE),  # which a plan with sizes does not take
        link=Link(bytes_per_s=1),
        host_link=Link(bytes_per_s=draw(st.sampled_from([1, 0.5]))),
    )


@given(plans_and_costs() | sized_plans_and_costs())
def test_every_action_ends_when_a_second_simulator_says(pair: tuple[Plan, Costs]) -> None:
    plan, costs = pair
    timeline = simulate(plan, costs)

    def computing(action: Action) -> int:
        return int(costs.seconds(*action[:3])) // (plan.num_parts(action.stage) if action.part else 1)

    def sent(action: Action) -> int:
        return costs.carried(action) if plan.sizes is None else plan.sizes.stages[action.stage]["out"].num_bytes

    def received(action: Action) -> int:
        return costs.carried(action) if plan.sizes is None else plan.sizes.stages[action.stage]["in"].num_bytes

    def moved(action: Action) -> int:
        return costs.carried(action) if plan.sizes is None else plan.sizes.moved(action)

    def carrying(action: Action) -> int:
        size = {Op.SEND_F: sent, Op.SEND_B: received}.get(action.op, moved)(action)
        return int(size / costs.link_between(0, -1 if action.peer == HOST else 0).bytes_per_s)

    expected = ticks.run(plan, computing, carrying)
    for rank in range(plan.num_ranks):
        for span in (*timeline.spans(rank), *timeline.served_spans(rank)):
            if span.action.op.value.startswith("WAIT_") or span.action.op in (Op.F, Op.B, Op.I, Op.W):
                assert span.end_s == expected[str(span.action)], span


@given(plans_and_costs() | sized_plans_and_costs())
def test_the_critical_path_covers_the_makespan(pair: tuple[Plan, Costs]) -> None:
    timeline = simulate(*pair)
    path = [step.span for step in critical_path(timeline)]
    assert path[0].begin_s == 0 and path[-1].end_s == max(timeline.span_s(rank)[1] for rank in range(timeline.num_ranks))
    assert all(earlier.end_s == later.begin_s for earlier, later in pairwise(path))


@given(plans_and_costs())
def test_bytes_on_a_rank_are_counted_from_its_actions(pair: tuple[Plan, Costs]) -> None:
    plan, costs = pair
    timeline = simulate(plan, costs)
    for rank in range(plan.num_ranks):
        remote_buffers = 0
        for peer in range(plan.num_ranks):
            remotes, most = 0, 0
            for action in plan.served[rank]:
                if action.peer == peer:
                    remotes += {Op.ACCEPT: 1, Op.WAIT_RETURN: -1}.get(action.op, 0) * costs.movable_bytes[action.stage]
                    most = max(most, remotes)
            remote_buffers += most
        own, most = 0, 0
        for op, stage, *_ in plan.actions[rank]:
            saved, movable = costs.saved_bytes[stage], costs.movable_bytes[stage]
            own += {Op.F: saved, Op.LOAD: movable}.get(op, 0)
            most = max(most, own)
            own -= {Op.B: saved, Op.W: saved, Op.WAIT_EVICT: movable}.get(op, 0)
        assert timeline.peak_bytes(rank) == most + remote_buffers
        moments = list(timeline.memory(rank))
        static = timeline.device_peak_bytes(rank) - timeline.peak_bytes(rank)
        assert static == sum(costs.static(stage) for stage, owner in enumerate(plan.stage_ranks) if owner == rank)
        assert max((held.activation_bytes for held in moments), default=0) == timeline.peak_bytes(rank)
        assert all(held.device_bytes == held.activation_bytes + static for held in moments)
        assert [held.begin_s for held in moments] == sorted(held.begin_s for held in moments)


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "balanced_1f1b"])
def test_makespan_bubble_and_peak_are_the_tables(name: str, p: int) -> None:
    """FACTS.md, table of schedules: makespan m(F+B) + (p-1)(F+B); peaks m, min(p-x, m) and at most ceil((p+2)/2)."""
    for m in (1, p, 2 * p, 4 * p):
        plan = build(name, p, m)
        timeline = simulate(plan, Costs(forward_s=1.5, backward_s=2.5, saved_bytes=1))
        assert timeline.makespan_s == (m + p - 1) * 4.0
        assert all(timeline.bubble_s(x) == (p - 1) * 4.0 for x in range(p))
        peaks = [timeline.peak_bytes(x) for x in range(p)]
        assert peaks == list(plan.peak_slots)
        if name == "gpipe":
            assert peaks == [m] * p
        elif name == "1f1b":
            assert peaks == [min(p - x, m) for x in range(p)]
        else:
            assert max(peaks) <= (p + 3) // 2


def test_span_bubbles_of_1f1b() -> None:
    """FACTS.md, (S) p=8 m=32: the largest idle share of a rank's span is .179 at F=I=W, a backward of two forwards."""
    timeline = simulate(build("1f1b", 8, 32), Costs())
    spans = [timeline.span_s(x) for x in range(8)]
    assert max(timeline.span_bubble_s(x) / (end - begin) for x, (begin, end) in enumerate(spans)) == pytest.approx(0.179, abs=5e-4)


# FACTS.md, "Placing evictions without knowing times": worst makespan over plain's, p = 4..32, at m = 2p and 4p.
ALLOWED = {0.5: (1.0, 1.0), 1.0: (1.0, 1.0), 1.25: (1.025, 1.045), 1.5: (1.05, 1.09), 2.0: (1.12, 1.18), 3.0: (1.31, 1.51)}


@cache
def balanced(p: int, m: int) -> Plan:
    return build("balanced_1f1b", p, m)


@pytest.mark.parametrize("tx", ALLOWED)
@pytest.mark.parametrize("ranks", [range(4, 17), range(17, 33)], ids=["p from 4", "p from 17"])
def test_evictions_cost_nothing_up_to_a_forward_and_no_more_than_known_above(ranks: range, tx: float) -> None:
    costs = Costs(saved_bytes=1, link=Link(bytes_per_s=1 / tx))
    for times, allowed in zip((2, 4), ALLOWED[tx]):
        ratios = []
        for p in ranks:
            m = times * p
            ratios.append(simulate(balanced(p, m), costs).makespan_s / (3 * (m + p - 1)))
        assert max(ratios) <= allowed + 1e-12
        assert min(ratios) >= 1.0


def to_host() -> Plan:
    """Two microbatches on one rank, of which the first's only byte goes to the host and comes back."""
    lane = ["0F0", "0EVICT0@host", "0F1", "0WAIT_EVICT0@host", "0LOAD0@host", "0B1", "0WAIT_LOAD0@host", "0B0"]
    actions = (tuple(map(Action.parse, lane)),)
    flow = shaped(None, "chain", (0,), 2)
    return Plan(name="to_host", flow=flow, actions=actions, served=((),), slots=(None,), sizes=Sizes.of([1]))


def test_a_host_takes_and_gives_on_a_link_of_its_own() -> None:
    """By hand: F 1, B 2, 4 seconds each way on the host's link: away from 1 to 5, back from 5 to 9."""
    timeline = simulate(to_host(), Costs(host_link=Link(bytes_per_s=0.25)))
    moves = {span.action.op: (span.begin_s, span.end_s) for span in timeline.transfers(0)}
    assert moves == {Op.EVICT: (1, 5), Op.LOAD: (5, 9)}
    assert [span.begin_s for span in timeline.computations(0)] == [0, 1, 5, 9]
    assert timeline.exposed_s(0) == {Op.WAIT_EVICT: 3, Op.WAIT_LOAD: 2}
    assert [str(step.span.action) for step in critical_path(timeline)] == ["0F0", "0EVICT0", "0LOAD0", "0B0"]


def test_transfers_with_the_host_slow_their_own_rank_alone() -> None:
    """By hand: the second forward takes twice as long beside an eviction; on the other rank nothing moves."""
    plan = to_host()
    lanes = (*plan.actions, (Action(Op.F, 1, 0), Action(Op.F, 1, 1), Action(Op.B, 1, 1), Action(Op.B, 1, 0)))
    apart = replace(plan, actions=lanes, served=((), ()), slots=(None, None), sizes=Sizes.of([1, 1]))
    apart = reshaped(apart, stage_ranks=(0, 1))
    timeline = simulate(apart, Costs(host_link=Link(bytes_per_s=0.25), slowdown=2.0))
    assert [span.seconds for span in timeline.computations(0)] == [1, 2, 4, 2]
    assert [span.seconds for span in timeline.computations(1)] == [1, 1, 2, 2]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    """By hand: GPipe over two ranks, F = 1, an output takes 3 units: the second stage's forwards start at 4, 7 and 10."""
    timeline = simulate(build("gpipe", 2, 3), Costs(output_bytes=3, gradient_bytes=0, link=Link(bytes_per_s=1)))
    forwards = [span.begin_s for span in timeline.computations(1) if span.action.op is Op.F]
    assert forwards == [4, 7, 10]
    sends = [(span.begin_s, span.end_s) for span in timeline.transfers(0) if span.action.op is Op.SEND_F]
    assert sends == [(1, 4), (4, 7), (7, 10)]


def test_messages_of_a_plan_in_bytes_are_its_own() -> None:
    """By hand, m = 1, F 1, B 2 on each of three ranks: outputs of 3 and 4 bytes, gradients of 5 and 6, in a second a byte."""
    messages = ((0, 0, 3), (3, 5, 4), (4, 6, 0))
    of_stages = [(Amount("in", came, gradient=gradient), Amount("out", sent)) for came, gradient, sent in messages]
    stages = [StageSizes(parts=(1,), amounts=of_stage) for of_stage in of_stages]
    plan = replace(build("1f1b", 3, 1), sizes=Sizes(stages=tuple(stages), static=(0, 0, 0)))
    for output_bytes in (0, 100):
        timeline = simulate(plan, Costs(output_bytes=output_bytes, link=Link(bytes_per_s=1)))
        begins = [[span.begin_s for span in timeline.computations(rank)] for rank in range(3)]
        assert begins == [[0, 25], [4, 18], [9, 10]]


def test_a_message_of_views_carries_what_its_receiver_gets() -> None:
    """Two views of 3 bytes are one storage where they are made, and two where they arrive."""
    stages = [StageSizes(parts=(1,), amounts=(Amount("in", came), Amount("out", sent))) for came, sent in ((0, 3), (6, 0))]
    sizes, flow = Sizes(stages=tuple(stages), static=(0, 0)), build("1f1b", 2, 1).flow
    assert [sizes.carried(Action(op, stage, 0), flow) for op, stage in ((Op.SEND_F, 0), (Op.RECV_F, 1))] == [6, 6]


def test_latency_is_not_occupancy() -> None:
    """By hand: as above with 1 unit on the link and 5 of latency: arrivals at 7 and 8."""
    costs = Costs(output_bytes=1, gradient_bytes=0, link=Link(bytes_per_s=1, latency_s=5))
    timeline = simulate(build("gpipe", 2, 2), costs)
    assert [span.begin_s for span in timeline.computations(1) if span.action.op is Op.F] == [7, 8]


def test_links_by_node() -> None:
    costs = Costs(output_bytes=6, gradient_bytes=0, link=Link(bytes_per_s=6), cross_link=Link(bytes_per_s=2), nodes=[0, 0, 1])
    timeline = simulate(build("gpipe", 3, 1), costs)
    assert [next(timeline.computations(rank)).begin_s for rank in range(3)] == [0, 2, 6]


def test_exposed_time_is_the_transfers_and_not_the_bubbles() -> None:
    """By hand: rank 1 waits for one unit of rank 0's forward, which is bubble, then for two of the transfer."""
    timeline = simulate(build("gpipe", 2, 1), Costs(output_bytes=2, gradient_bytes=0, link=Link(bytes_per_s=1)))
    assert timeline.exposed_s(1)[Op.WAIT_RECV_F] == 2
    assert sum(span.seconds for span in timeline.waits(1)) == 3


def test_a_computation_slows_down_while_a_transfer_runs() -> None:
    """By hand: rank 0's second forward begins at 1 with a transfer of 1 unit: half of the work is left at 2, done by 2.5."""
    costs = Costs(output_bytes=1, gradient_bytes=0, link=Link(bytes_per_s=1), slowdown=2.0)
    timeline = simulate(build("gpipe", 2, 2), costs)
    assert [span.end_s for span in timeline.computations(0) if span.action.op is Op.F] == [1, 2.5]


@given(
    st.integers(0, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair))), max_size=4),
    st.integers(1, 4),
)
def test_slowed_work_is_the_integral_of_its_speed(begin: int, work: int, busy: list[tuple[int, int]], slowdown: int) -> None:
    end = _slowed_end(begin, work, sorted(busy), slowdown)
    left, now = work * slowdown**2, begin * slowdown  # looked at once in 1/slowdown of a unit of time
    while left > 0:
        is_busy = any(start * slowdown <= now < stop * slowdown for start, stop in busy)
        left -= 1 if is_busy else slowdown
        now += 1
    overshoot = -left / slowdown / slowdown  # the last look may have found more speed than was needed
    assert end == pytest.approx(now / slowdown - overshoot)


def test_an_evaluation_keeps_nothing() -> None:
    timeline = simulate(forward_plan(build("1f1b", 4, 8)), Costs(saved_bytes=10, static_bytes=3))
    assert timeline.makespan_s == 11
    assert [(timeline.peak_bytes(rank), timeline.device_peak_bytes(rank)) for rank in range(4)] == [(0, 3)] * 4


def test_sizes_that_do_not_fit_are_named() -> None:
    plan = build("1f1b", 4, 8)
    for costs, name in (
        (Costs(forward_s=[1.0] * 3), "forward_s has 3 entries"),
        (Costs(forward_s=[[1.0] * 7] * 4), r"forward_s\[0\] has 7 entries"),
        (Costs(saved_bytes=[1] * 5), "saved_bytes has 5 entries"),
        (Costs(saved_bytes=[[1] * 8] * 4), r"saved_bytes\[0\] has 8 entries: give one number"),
        (Costs(nodes=[0, 1]), "nodes has 2 entries"),
        (Costs(movable_bytes=3, saved_bytes=[3, 3, 2, 3]), "stage 2 would move 3 bytes but saves only 2"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            simulate(plan, costs)
    for wrong in (
        {"forward_s": -1.0},
        {"forward_s": "1"},
        {"forward_s": None},
        {"forward_s": 1e300},
        {"backward_s": float("nan")},
        {"slowdown": 0.5},
        {"saved_bytes": [-1]},
        {"saved_bytes": 0.5},
        {"saved_bytes": 2**62},
        {"saved_bytes": [[[1]] * 8] * 4},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Costs(**wrong)
    for wrong in ({"latency_s": -1.0}, {"bytes_per_s": 0.0}, {"bytes_per_s": float("nan")}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Link(**wrong)


def test_costs_are_plain_numbers_whatever_they_came_in() -> None:
    costs = Costs(forward_s=np.array([1.0, 2.0]), saved_bytes=2e9, movable_bytes=[np.int64(3), 4.0])
    assert (costs.forward_s, costs.saved_bytes, costs.movable_bytes) == ((1.0, 2.0), 2_000_000_000, (3, 4))
    assert type(costs.saved_bytes) is int


def test_a_rank_may_keep_remote_activations_alone() -> None:
    """Four stages evict to a fifth rank, which holds none."""
    plain = build("1f1b", 4, 8)
    lanes = tuple(tuple(plain.compute(rank)) for rank in range(4))
    wider = replace(plain, actions=(*lanes, ()), served=((),) * 5, slots=(None,) * 5)
    plan = finish(balance(wider, slots=(3, None, None, None, None), to=Destinations(pairs=(4, 4, 4, 4, 0))))
    timeline = simulate(plan, Costs(saved_bytes=7, static_bytes=5))
    assert timeline.makespan_s == 33 and critical_path(timeline)
    assert timeline.peak_bytes(4) == 7 * len(plan.remote_buffers(4)[0])
    with pytest.raises(ConfigurationError, match="no times of rank 4"):
        timeline.span_s(4)


def test_a_plan_that_never_ends_is_an_error() -> None:
    lanes = ((Action(Op.WAIT_RECV_F, 0, 0, peer=1),), ())
    flow = shaped(None, "chain", (0, 1), 1)
    plan = Plan(name="stuck", flow=flow, actions=lanes, served=((), ()), slots=(None, None))
    with pytest.raises(PlanError, match="rank 0 at 0WAIT_RECV_F0"):
        simulate(plan, Costs())
