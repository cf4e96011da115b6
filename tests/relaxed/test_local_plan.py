"""The plan of local learning: how long it takes, what it holds, what it sends, and which plans of its kind are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError, PlanError
from bpipe.passes.communicate import computations_only
from bpipe.plan.issue_order import issue_orders
from bpipe.schedules import Costs, Op, Plan, Sizes, StageSizes, build, check_rule, finish, simulate, verify
from bpipe.schedules.by_name import forward_plan
from bpipe.schedules.registry import rule_named
from tests.amounts import amounts
from tests.schedules.replay import occupied, occupied_bytes, replay
from tests.schedules.shape_of_plan import reshaped, shape_of
from tests.tiers import examples

FEW = st.integers(0, 9)


@pytest.mark.parametrize(("p", "m", "step", "of_1f1b"), [(4, 8, 27, 33), (8, 16, 55, 69)])
def test_a_step_takes_m_turns_and_the_forwards_before_the_last_rank(p: int, m: int, step: int, of_1f1b: int) -> None:
    costs = Costs(forward_s=1.0, backward_s=2.0)
    assert simulate(build("local_learning", p, m), costs).makespan_s == step == 3 * m + p - 1
    assert simulate(build("1f1b", p, m), costs).makespan_s == of_1f1b


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 1), (5, 3), (8, 16)])
def test_every_rank_holds_one_microbatch_and_sends_no_gradient(p: int, m: int) -> None:
    plan = check_rule(rule_named("local_learning"), p, m)
    assert plan.peak_slots == occupied(plan) == (1,) * p
    assert replay(plan) is replay(forward_plan(plan)) is None
    assert not {a.op for lane in plan.actions for a in lane} & {Op.SEND_B, Op.RECV_B, Op.WAIT_SEND_B, Op.WAIT_RECV_B}
    assert Plan.from_text(plan.to_text()) == plan and shape_of(forward_plan(plan)).local
    assert plan.fingerprint() != reshaped(plan, local=False).fingerprint()
    assert list(map(len, issue_orders(plan))) == list(map(len, plan.actions))


def test_a_rank_runs_at_most_two_messages_ahead() -> None:
    """The queue forward is bounded: the next forward but one begins when the message has arrived."""
    for lane in build("local_learning", 4, 8).actions[:-1]:
        under_way = most = 0
        for action in lane:
            under_way += (action.op is Op.SEND_F) - (action.op is Op.WAIT_SEND_F)
            most = max(most, under_way)
            assert action.op is not Op.F or under_way <= 1
        assert most == 2 and under_way == 0


@st.composite
def sized(draw: st.DrawFn) -> Plan:
    """A plan with any sizes, predictions beside the messages among them."""
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    sent, stages = [draw(FEW) for _ in range(p)], []
    for stage in range(p):
        saved, results = draw(FEW), draw(FEW)
        received = sent[stage - 1] if stage else 0
        kept = [draw(st.integers(0, min(message, saved))) for message in (received, sent[stage], results)]
        messages = {"received": received, "sent": sent[stage], "kept_received": kept[0], "kept_sent": kept[1]}
        stages.append(StageSizes(parts=(saved,), amounts=amounts(**messages, results=results, kept_results=kept[2])))
    return replace(build("local_learning", p, m), sizes=Sizes(stages=tuple(stages), static=(0,) * p))


@given(sized())
@settings(max_examples=examples(60))
def test_bytes_are_those_that_an_independent_count_finds(plan: Plan) -> None:
    verify(plan)
    assert occupied_bytes(plan) == plan.device_peak_bytes
    assert Plan.from_text(plan.to_text()) == plan


def swapped(plan: Plan, rank: int, one: str, other: str) -> Plan:
    """A plan in which two actions of a rank have changed places."""
    names = [str(action) for action in plan.actions[rank]]
    lane, at = list(plan.actions[rank]), (names.index(one), names.index(other))
    lane[at[0]], lane[at[1]] = lane[at[1]], lane[at[0]]
    return replace(plan, actions=(*plan.actions[:rank], tuple(lane), *plan.actions[rank + 1 :]))


def test_other_plans_whose_gradients_stay_are_refused() -> None:
    plan = build("local_learning", 3, 3)
    with pytest.raises(PlanError, match="1SEND_B0 is missing"):
        verify(reshaped(plan, local=False))
    with pytest.raises(PlanError, match="0RECV_B0 on rank 0 with peer 1: expected rank 0 and no peer"):
        verify(reshaped(build("1f1b", 3, 3), local=True))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "gpipe", "zbv"])
def test_other_orders_keep_gradients_in_their_stages_too(name: str) -> None:
    plan = finish(reshaped(computations_only(build(name, 4, 4, num_ranks=None if name == "gpipe" else 2)), local=True))
    assert replay(plan) is None


def test_what_it_cannot_be_built_with() -> None:
    with pytest.raises(ConfigurationError, match="runs whole microbatches"):
        build("local_learning", 4, 4, slices=2)
    with pytest.raises(ConfigurationError, match="no forward side by side"):
        build("local_learning", 4, 4, overlapped=True)
    with pytest.raises(ConfigurationError, match="one stage per rank"):
        build("local_learning", 4, 4, num_ranks=2)
    with pytest.raises(PlanError, match="has local, which torch"):
        build("local_learning", 4, 4).to_csv()
