"""Where a microbatch is: in one record, at any moment of a step, and in words for an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.engine.microbatch_state import MicrobatchStates
from bpipe.engine.run import Observer
from bpipe.plan.action import SERVED, SHARDING
from bpipe.plan.whereabouts import whereabouts
from bpipe.schedules import Action, Op

NUM_STAGES, M, WIDTH = 4, 8, 4


def pipeline(schedule: Any, modules: list[nn.Module], **options: Any) -> tuple[bpipe.Loopback, list[Any]]:
    loopback = bpipe.Loopback(len(modules))
    stages = [bpipe.PipelineStage(module, i, len(modules), "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    return loopback, [schedule(stage, M, loss_fn=nn.functional.mse_loss, **options) for stage in stages]


class Follower(Observer):
    """Compares each microbatch's record with the plan, before and after each action of a rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[Action, str]] = []
        self.most = 0
        self.left: MicrobatchStates | None = None

    def started(self, run: Any) -> None:
        self.left = run.microbatches

    def before(self, run: Any, action: Action) -> None:
        if action.op in SERVED:
            return
        state = run.microbatches[action.stage, action.microbatch]
        self.seen.append((action, state.whereabouts))
        self.most = max(self.most, len(run.microbatches))
        before, behind = ((action.stage + offset - 1, action.stage + offset) for offset in (0, 1))
        evicted, refilled = ({}, {}) if state.memory is None else (state.memory.evicted, state.memory.refilled)
        has = {
            Op.F: not action.stage or state.edges[before].values is not None,
            Op.SEND_F: state.edges[behind].values is not None,
            Op.EVICT: state.memory is not None and state.memory.stash is not None and state.graph is not None,
            Op.WAIT_EVICT: 0 in evicted,
            Op.LOAD: 0 in evicted and 0 not in refilled,
            Op.WAIT_LOAD: 0 in refilled,
            Op.B: state.graph is not None and not evicted,
            Op.I: state.graph is not None,
            Op.W: state.half is not None and state.graph is None,
            Op.SEND_B: state.edges[before].gradients is not None and state.graph is None,
        }
        assert has.get(action.op, True), (str(action), state)


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.BalancedOneFOneB, bpipe.ZBH1])
def test_the_record_has_what_each_action_needs_and_is_gone_in_the_end(schedule: Any) -> None:
    loopback, schedules = pipeline(schedule, [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)])
    x = torch.randn(M, WIDTH)
    for _ in range(2):
        followers = [Follower() for _ in schedules]
        for one, follower in zip(schedules, followers):
            one.session.observer = follower
        loopback.step(schedules, x, target=x, return_outputs=False)
        for rank, (one, follower) in enumerate(zip(schedules, followers)):
            plan = one.plan
            latest: dict[tuple[int, int], Action] = {}
            for action, text in follower.seen:
                before = latest.get(action.key)
                expected = "no action has run" if before is None else whereabouts(before)
                assert text == f"microbatch {action.microbatch} of stage {action.stage}: {expected}"
                latest[action.key] = action
            assert [action for action, _ in follower.seen] == [a for a in plan.actions[rank] if a.op not in SHARDING]
            assert follower.left == {}, "nothing outlives its last action"
            assert follower.most <= M
    assert any(plan_action.op is Op.EVICT for plan_action in schedules[0].plan.actions[0]) == (schedule is bpipe.BalancedOneFOneB)


def test_evaluations_leave_nothing() -> None:
    loopback, schedules = pipeline(bpipe.OneFOneB, [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)])
    followers = [Follower() for _ in schedules]
    for one, follower in zip(schedules, followers):
        one.session.observer = follower
    loopback.eval(schedules, torch.randn(M, WIDTH))
    assert all(follower.left == {} for follower in followers)


class Breaks(nn.Linear):
    """Its backward raises for one microbatch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if x[0, 0] == 5:
            out.register_hook(lambda _: 1 / 0)
        return out


def test_an_error_says_where_its_microbatch_was() -> None:
    modules = [Breaks(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES - 1))]
    loopback, schedules = pipeline(bpipe.BalancedOneFOneB, modules)
    x = torch.arange(M).float().unsqueeze(1).expand(M, WIDTH).contiguous()
    with pytest.raises(ZeroDivisionError) as caught:
        loopback.step(schedules, x, target=x)
    (note,) = caught.value.__notes__
    assert note == (
        "bpipe: rank 0, stage 0, microbatch 5, action 0B5, step 0; microbatch 5 of stage 0: the gradient of its output is here"
    )


def test_whereabouts_of_all_operations() -> None:
    for op in Op:
        text = whereabouts(Action(op, 0, 1, part=2, peer=3))
        assert bool(text) == (op not in SHARDING | {Op.FILL}) and "{" not in text
    assert whereabouts(Action(Op.EVICT, 0, 1, part=2, peer=-1)) == "part 2 of its activations is on the way to the host"
