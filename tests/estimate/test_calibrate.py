"""Costs from a trace: those of a simulated step come back from what a trace would have recorded of it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.estimate import measured_links as links
from bpipe.estimate.calibrate import calibrated
from bpipe.estimate.contention import Worked, lost_share
from bpipe.passes.balance.balance import balance
from bpipe.plan.action import HOST, START_OF
from bpipe.schedules import Action, Costs, Destinations, Lane, Link, Op, Plan, Sizes, StageSizes, build, finish, simulate
from bpipe.simulator.measured import Measured
from tests.amounts import amounts
from tests.models import Block, mse
from tests.tiers import examples

P, M = 4, 8
PLANS = {
    "1f1b": build("1f1b", P, M),
    "gpipe": build("gpipe", P, M),
    "balanced": build("balanced_1f1b", P, M),
    "halves": build("zb_h1", P, M),
    "host": finish(balance(build("1f1b", P, M), slots=3, to=Destinations(host="only"))),
    "slices": build("seq_1f1b", P, M, slices=2),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products on busy cores: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def traced(plan: Plan, costs: Costs, errors_s: Sequence[float] = (0.0, *[1e-6] * (P - 1))) -> Measured:
    """What a trace would say of a simulated step: when ends were posted and waited for, not when links carried what."""
    timeline = simulate(plan, costs)
    sizes = {
        stage: (
            StageSizes(
                parts=(costs.movable(stage),),
                fixed=costs.saved(stage) - costs.movable(stage),
                amounts=amounts(
                    received=costs.carried(Action(Op.SEND_B, stage, 0)) if stage else 0,
                    sent=costs.carried(Action(Op.SEND_F, stage, 0)),
                ),
            ),
        )
        for stage in range(plan.num_stages)
    }
    return Measured(
        plan=plan,
        actions=tuple(map(posted, plan.actions, timeline.actions)),
        served=tuple(map(posted, plan.served, timeline.served)),
        source="measured",
        step=0,
        began_s=0.0,
        device=(Lane(begin_s=array("d"), end_s=array("d")),) * plan.num_ranks,
        clock_error_s=tuple(errors_s),
        stage_sizes=sizes,
    )


def posted(actions: Sequence[Action], lane: Lane) -> Lane:
    """A lane whose transfers begin when the lane posts them, and end when it has waited for them."""
    ends = {action.start_identity: end for action, end in zip(actions, lane.end_s) if action.op in START_OF}
    begin_s, end_s, now = array("d"), array("d"), dict.fromkeys([None, *(action.peer for action in actions)], 0.0)
    is_served = bool(actions) and actions[0].op in (Op.ACCEPT, Op.RETURN)
    for action, begin, end in zip(actions, lane.begin_s, lane.end_s):
        chain = action.peer if is_served else None  # what a rank does for each evictor is a lane of its own
        begin_s.append(now[chain] if action.is_post else begin)
        end_s.append(ends[action.identity] if action.is_post else end)
        now[chain] = now[chain] if action.is_post else end
    return replace(lane, begin_s=begin_s, end_s=end_s)


def has_gaps(timeline: Measured, costs: Costs) -> bool:
    """Whether a transfer began while the one before it had departed and not arrived: the trace shows both as one, and longer."""
    for (src, dst), found in links.flights(simulate(timeline.plan, costs), sizes_of(timeline)).items():
        latency = costs.link_between(src, dst).latency_s
        if any(one.end_s - latency + 1e-9 < two.begin_s < one.end_s for one, two in pairwise(found)):
            return True
    return False

def sizes_of(timeline: Measured) -> Sizes:
    assert timeline.sizes is not None
    return timeline.sizes



def seconds(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most).map(lambda value: round(value, 4))


@st.composite
def costs_of_stages(draw: st.DrawFn, latencies: st.SearchStrategy[float]) -> Costs:
    link, cross, host = (Link(latency_s=draw(latencies), bytes_per_s=draw(st.integers(1, 50)) * 2e8) for _ in range(3))
    return Costs(
        forward_s=draw(st.lists(seconds(0.05, 0.3), min_size=P, max_size=P)),
        backward_s=draw(st.lists(seconds(0.05, 0.5), min_size=P, max_size=P)),
        input_s=draw(st.lists(seconds(0.02, 0.05), min_size=P, max_size=P)),
        weight_s=draw(seconds(0.02, 0.2)),
        saved_bytes=draw(st.lists(st.integers(3 * 10**7, 9 * 10**7), min_size=P, max_size=P)),
        output_bytes=draw(st.lists(st.integers(10**7, 5 * 10**7), min_size=P, max_size=P)),
        link=link,
        cross_link=draw(st.sampled_from([None, cross])),
        host_link=draw(st.sampled_from([None, host])),
        nodes=draw(st.sampled_from([None, (0, 0, 1, 1), (0, 1, 1, 0)])),
    )


@settings(max_examples=examples(40))
@given(st.sampled_from(sorted(PLANS.keys() - {"slices"})), costs_of_stages(st.sampled_from([0.0, 0.001, 0.004])))
def test_links_and_seconds_come_back(name: str, costs: Costs) -> None:
    plan = PLANS[name]
    timeline = traced(plan, costs)
    assume(not has_gaps(timeline, costs))
    found = calibrated([timeline], plan, nodes=costs.nodes)
    ops = {action.op for rank in range(P) for action in plan.compute(rank)}
    assert all(
        found.seconds(op, stage, unit) == pytest.approx(costs.seconds(op, stage, unit))
        for op in ops
        for stage in range(P)
        for unit in range(M)
    )
    assert [found.carried(Action(op, 1, 0)) for op in (Op.SEND_F, Op.SEND_B, Op.EVICT)] == [
        costs.carried(Action(op, 1, 0)) for op in (Op.SEND_F, Op.SEND_B, Op.EVICT)
    ]
    assert found.slowdown == 1.0
    kinds: dict[str, tuple[Link, set[int]]] = {}
    for (src, dst), of_way in links.flights(timeline, sizes_of(timeline)).items():
        is_near = costs.nodes is None or HOST in (src, dst) or costs.nodes[src] == costs.nodes[dst]
        kind = "host_link" if HOST in (src, dst) else "link" if is_near else "cross_link"
        kinds.setdefault(kind, (costs.link_between(src, dst), set()))[1].update(one.num_bytes for one in of_way if one.is_seen)
    assert "link" in kinds
    for kind, (expected, sizes) in kinds.items():
        mine = getattr(found, kind)
        assert (mine is not None) == bool(sizes)  # the host may store without anyone's waiting for it
        for num_bytes in sizes:
            taken = [link.latency_s + num_bytes / link.bytes_per_s for link in (mine, expected)]
            assert taken[0] == pytest.approx(taken[1], rel=0.01), kind
        if len(sizes) > 1:
            assert mine.latency_s == pytest.approx(expected.latency_s, abs=1e-6)


@settings(max_examples=examples(40))
@given(st.sampled_from(["1f1b", "gpipe", "halves"]), costs_of_stages(st.just(0.0)), st.sampled_from([1.1, 1.5, 3.0]))
def test_slowdown_comes_back(name: str, costs: Costs, slowdown: float) -> None:
    """Where computations with as many and with fewer transfers beside them are there; else the costs are as slow as the trace."""
    costs = replace(costs, slowdown=slowdown, nodes=None, output_bytes=4 * 10**7)
    timeline = traced(PLANS[name], costs)
    found = calibrated([timeline], PLANS[name])
    if found.slowdown > 1:
        assert found.slowdown == pytest.approx(slowdown, rel=1e-3)
        assert found.seconds(Op.F, 0, 3) == pytest.approx(costs.seconds(Op.F, 0, 3), rel=1e-3)
        assert found.link.bytes_per_s == pytest.approx(costs.link.bytes_per_s, rel=1e-3)


def test_a_slowdown_that_shows_is_found() -> None:
    costs = Costs(forward_s=0.1, output_bytes=10**8, link=Link(bytes_per_s=2e9), slowdown=1.5)
    found = calibrated([traced(PLANS["1f1b"], costs)], PLANS["gpipe"])
    assert found.slowdown == pytest.approx(1.5)
    assert [found.seconds(op, 2, 5) for op in (Op.F, Op.B)] == pytest.approx([0.1, 0.2])
    assert simulate(PLANS["gpipe"], found).makespan_s == pytest.approx(simulate(PLANS["gpipe"], costs).makespan_s)


def test_what_varies_by_itself_is_no_slowdown() -> None:
    """Three quarters of the comparisons must say so: by chance half of them do."""
    alike = [Worked(1.0 + 0.1 * (i * 7 % 5), 0.9 * (i % 2)) for i in range(20)]
    assert lost_share([alike]) == 0.0
    assert lost_share([[Worked(1.0, 0.4), Worked(1.2, 0.4)]]) == 0.0  # as many transfers beside both
    slower = [Worked(1.0 + 0.3 * (i % 2) + 0.01 * (i * 7 % 5), 0.9 * (i % 2)) for i in range(20)]
    assert lost_share([slower]) == pytest.approx(1 / 3, abs=0.03)


SHOWN = Costs(forward_s=0.1, output_bytes=10**7, link=Link(bytes_per_s=1e9))  # transfers of 10 ms


def test_late_ends_are_outliers() -> None:
    """A receiver that is woken late in a minority of the transfers changes nothing."""
    timeline = traced(PLANS["gpipe"], SHOWN)
    lane = timeline.actions[1]
    begin_s, end_s = array("d", lane.begin_s), array("d", lane.end_s)
    received = [i for i, action in enumerate(PLANS["gpipe"].actions[1]) if action.op is Op.RECV_F][::3]
    for post in received:
        action = PLANS["gpipe"].actions[1][post]
        wait = PLANS["gpipe"].actions[1].index(action._replace(op=Op.WAIT_RECV_F))
        end_s[post] = end_s[wait] = end_s[wait] + 0.05
    late = replace(timeline, actions=(timeline.actions[0], replace(lane, begin_s=begin_s, end_s=end_s), *timeline.actions[2:]))
    assert calibrated([late], PLANS["gpipe"]).link.bytes_per_s == pytest.approx(1e9)


def test_clocks_that_may_be_wrong_by_more_than_a_transfer_takes() -> None:
    plan = PLANS["1f1b"]
    assert calibrated([traced(plan, SHOWN, [0.004] * P)], plan).link.bytes_per_s == pytest.approx(1e9)
    assert calibrated([traced(plan, SHOWN, [0.006] * P)], plan).link == Link()


def test_transfers_that_wait_for_their_link_take_no_longer() -> None:
    """Both ranks post twice as fast as the link carries: most of what a transfer seems to take is that of the ones before it."""
    plan, costs = build("gpipe", 2, M), Costs(forward_s=0.1, backward_s=0.1, output_bytes=2 * 10**8, link=Link(bytes_per_s=1e9))
    assert calibrated([traced(plan, costs, [0.0, 1e-6])], plan).link.bytes_per_s == pytest.approx(1e9)


def test_ranks_that_take_turns_say_nothing() -> None:
    """One clock without any error is that of a loopback, where a lane waits while others compute."""
    assert calibrated([traced(PLANS["1f1b"], SHOWN, [0.0] * P)], PLANS["1f1b"]).link == Link()


def test_what_only_a_device_waits_for_says_nothing() -> None:
    plan, timeline = PLANS["1f1b"], traced(PLANS["1f1b"], SHOWN)
    spans = [list(timeline.computations(rank)) for rank in range(P)]
    device = tuple(Lane(begin_s=array("d", [s.begin_s for s in of]), end_s=array("d", [s.end_s for s in of])) for of in spans)
    assert calibrated([replace(timeline, device=device)], plan).link == Link()


def test_transfers_that_nobody_waits_for_say_nothing() -> None:
    """Each lane comes later than its transfers, and finds them complete, whenever they were."""
    timeline = traced(PLANS["1f1b"], SHOWN)
    late = []
    for actions, lane in zip(PLANS["1f1b"].actions, timeline.actions):
        ends = [end if action.op in START_OF else begin for action, begin, end in zip(actions, lane.begin_s, lane.end_s)]
        late.append(replace(lane, begin_s=array("d", ends)))
    assert calibrated([timeline], PLANS["1f1b"]).link.bytes_per_s == pytest.approx(1e9)
    assert calibrated([replace(timeline, actions=tuple(late))], PLANS["1f1b"]).link == Link()


def test_a_host_s_link_is_one_of_its_own() -> None:
    costs = Costs(forward_s=0.1, saved_bytes=10**8, output_bytes=10**7, link=Link(bytes_per_s=1e9), host_link=Link(bytes_per_s=2e8))
    found = calibrated([traced(PLANS["host"], costs)], PLANS["host"])
    assert found.host_link is not None and found.host_link.bytes_per_s == pytest.approx(2e8)
    assert found.link.bytes_per_s == pytest.approx(1e9)


def test_nodes_are_those_of_the_traced_ranks() -> None:
    with pytest.raises(ConfigurationError, match="nodes has 2 entries: give one for each of the 4 traced ranks"):
        calibrated([traced(PLANS["1f1b"], SHOWN)], PLANS["1f1b"], nodes=[0, 1])


def test_halves_tell_of_the_whole_and_not_the_other_way_round() -> None:
    halved = traced(PLANS["halves"], Costs(forward_s=1.0, input_s=1.25, weight_s=0.5))
    found = calibrated([halved], PLANS["1f1b"])
    assert [found.seconds(Op.B, stage, 3) for stage in range(P)] == pytest.approx([1.75] * P)
    with pytest.raises(ConfigurationError, match=r"no I of stage 0 alone.*bpipe\.profile measures halves of backwards, too"):
        calibrated([traced(PLANS["1f1b"], Costs())], PLANS["halves"])


def test_links_of_slices() -> None:
    costs = Costs(forward_s=0.1, output_bytes=10**7, link=Link(bytes_per_s=1e9))
    for plan in (PLANS["slices"], build("tera_pipe", P, 3, slices=2)):
        found = calibrated([traced(PLANS["slices"], costs)], plan)
        assert found.link.bytes_per_s == pytest.approx(1e9) and found.carried(Action(Op.SEND_F, 0, 1)) == 10**7
    whole = calibrated([traced(PLANS["1f1b"], costs)], PLANS["slices"])
    assert whole.link.bytes_per_s == pytest.approx(1e9) and whole.carried(Action(Op.SEND_F, 0, 1)) == 5 * 10**6


# Steps that ran


def stepped(folder: str, rule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB) -> tuple[list[bpipe.Schedule], list[Measured]]:
    torch.manual_seed(0)
    loopback = bpipe.Loopback(P)
    modules: list[nn.Module] = [Block(32, 4, 0.0) for _ in range(P)]
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [rule(stage, M, loss_fn=mse) for stage in stages]
    with bpipe.trace(schedules, folder) as trace:
        for _ in range(2):
            loopback.step(schedules, torch.randn(2 * M, 16, 32), target=torch.randn(2 * M, 16, 32))
        loopback.eval(schedules, torch.randn(2 * M, 16, 32))
    return schedules, trace.timelines


def test_bytes_of_a_plan_that_counts_slots_are_those_that_its_steps_measured(tmp_path) -> None:
    schedules, timelines = stepped(str(tmp_path))
    read = bpipe.load_trace(tmp_path)
    assert read == timelines and not read[2].stage_sizes
    costs = calibrated(read, schedules[0].plan)
    for stage in range(P - 1):
        (one,) = bpipe.profile(Block(32, 4, 0.0), torch.randn(2, 16, 32), [2], is_first=stage == 0, repeats=1).measurements
        assert (costs.saved(stage), costs.movable(stage)) == (one.own_bytes, one.movable_bytes)
        assert costs.carried(Action(Op.SEND_F, stage, 0)) == one.output_bytes == 2 * 16 * 32 * 4
        assert costs.carried(Action(Op.RECV_B, stage, 0)) == 2 * 16 * 32 * 4
    simulated = simulate(schedules[0].plan, costs)
    for rank in range(P):
        assert simulated.peak_bytes(rank) == read[1].peak_bytes(rank)
        assert simulated.actions[rank].static_bytes == read[1].actions[rank].static_bytes
    assert (costs.link, costs.host_link, costs.slowdown) == (Link(), None, 1.0)


def test_traces_without_sizes_and_with_wrong_ones(tmp_path) -> None:
    """Without any, as of evaluations, bytes are what a rank's memory grows by, and messages and links are not known."""
    schedules, _ = stepped(str(tmp_path))
    sizes = [[1], 0, None, []]
    for changed, match in (({}, ""), ({"0": [sizes[:1]]}, "a damaged trace"), ({"9": [sizes]}, "of other stages or slices")):
        for file in tmp_path.iterdir():
            trace = json.loads(file.read_text())
            for timeline in trace["record"]["timelines"]:
                timeline[6][3] = changed
            file.write_text(json.dumps(trace))
        if not changed:
            costs = calibrated(bpipe.load_trace(tmp_path), schedules[0].plan)
            assert costs.saved(0) > 0 and costs.gradient_bytes is None and costs.link == Link()
        else:
            with pytest.raises(ConfigurationError, match=match):
                bpipe.load_trace(tmp_path)


def test_what_nobody_waited_for_bounds_a_bandwidth_that_small_messages_show() -> None:
    """Messages of 1 kB take 1 ms: by themselves they look like a link of 1 MB/s, for which an eviction of 1 MB would take 1 s."""
    messages = [links.Flight(1000, 0.1 * number, 0.1 * number + 1e-3, True, 0.0) for number in range(4)]
    evictions = [links.Flight(1_000_000, 1 + number, 1.1 + number, False, 0.0) for number in range(4)]
    alone, found = links.fitted([messages]), links.fitted([[*messages, *evictions]])
    assert alone is not None and found is not None
    assert (alone.latency_s, alone.bytes_per_s) == (0.0, pytest.approx(1e6))
    assert found.latency_s + 1000 / found.bytes_per_s == pytest.approx(1e-3)
    assert found.latency_s + 1_000_000 / found.bytes_per_s == pytest.approx(0.1)
    late = [one._replace(end_s=one.begin_s + 2.0) for one in evictions[::2]]  # these tell nothing
    assert links.fitted([[*messages, *late]]) == alone
    assert links.fitted([evictions]) is None
