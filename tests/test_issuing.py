"""The order in which one thread issues a step to a device, run where transfers hold the host up: all is right but for its place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.comm.transport.c10d import C10dTransport
from bpipe.engine.recorder import Recorder
from bpipe.errors import ConfigurationError, RankFailedError, StageError, TransferTimeoutError
from bpipe.plan.action import COMPUTE
from bpipe.schedules import Op
from tests.accelerator.work import RULES, as_rank, batch_of, modules_of
from tests.models import held_by
from tests.patience import until
from tests.ranks import run_ranks

RANKS, MICROBATCHES = 4, 8


def issue() -> None:
    """Let this process's pipelines take that order, as over NCCL."""
    made = C10dTransport.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.waits_on_device = True

    C10dTransport.__init__ = init  # type: ignore[method-assign]


def issuing(rank: int, name: str) -> Any:
    issue()
    return as_rank(rank, name, "cpu", num_ranks=RANKS)


def plainly(rank: int, name: str) -> Any:
    return as_rank(rank, name, "cpu", num_ranks=RANKS)


@pytest.mark.parametrize("name", ["breadth_first", "zbv", "zb_h2", "parts", "bytes"])
def test_gradients(name):
    for found, expected in zip(run_ranks(issuing, RANKS, name), run_ranks(plainly, RANKS, name)):
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


class Meddling(nn.Module):
    """Changes, in its second forward, the output of its first one: with other computations between, that has not been sent."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.outputs = inner, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.outputs:
            with torch.no_grad():
                self.outputs[-1].add_(100)
        self.outputs.append(self.inner(x))
        return self.outputs[-1]


def changed_in_place(rank: int) -> None:
    issue()
    held = held_by(RULES["breadth_first"], RANKS, 2 * RANKS)[rank]
    modules = modules_of(2 * RANKS)
    modules[3] = Meddling(modules[3])
    stages = [bpipe.PipelineStage(modules[i], i, 2 * RANKS, "cpu") for i in held]
    schedule = bpipe.BreadthFirst(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=20))
    x = batch_of(0, MICROBATCHES)
    schedule.step(x, target=x, return_outputs=False)


def test_an_output_that_changes_before_it_is_sent_is_refused():
    found = run_ranks(changed_in_place, RANKS, expect_errors=True)
    assert isinstance(found[3], StageError) and "was modified in place while it was being sent" in str(found[3])
    assert all(isinstance(found[rank], RankFailedError) for rank in (0, 1, 2))


def silent(rank: int) -> str:
    """A rank that computes until the others have given it up: what they say, which wait for its headers or for each other."""
    issue()
    module = modules_of(RANKS)[rank]
    schedule = bpipe.OneFOneB(
        bpipe.PipelineStage(module, rank, RANKS, "cpu"), MICROBATCHES, nn.functional.mse_loss, options=bpipe.Options(timeout_s=2)
    )
    transport: Any = schedule.session.context.transport
    if rank == 1:
        module.register_forward_pre_hook(
            lambda *_: until(lambda: transport.control.failure, "the others give up a rank that computes")
        )
    x = batch_of(0, MICROBATCHES)
    with pytest.raises(TransferTimeoutError) as caught:
        schedule.step(x, target=x, return_outputs=False)
    return str(caught.value)


def test_a_wait_for_a_header_is_timed_out_and_named():
    found = run_ranks(silent, RANKS)
    waits = "0 has waited .* 0RECV_B0, for rank 1|2 has waited .* 2RECV_F0, for rank 1|3 has waited .* 3RECV_F0, for rank 2"
    assert re.search(f"rank ({waits})", found[2])  # all three wait as long: any of them may say it first


def traced(rank: int) -> list[tuple[str, int]]:
    """The actions of a rank's lane in the order in which they began."""
    issue()
    schedule = bpipe.BalancedOneFOneB(
        bpipe.PipelineStage(modules_of(RANKS)[rank], rank, RANKS, "cpu"), MICROBATCHES, nn.functional.mse_loss
    )
    recorder = schedule.session.observer = Recorder(None)
    x = batch_of(0, MICROBATCHES)
    schedule.step(x, target=x, return_outputs=False)
    order = schedule.session.context.lanes._issue_order(schedule.plan, rank)
    lane = schedule.plan.actions[rank]
    began = sorted(range(len(lane)), key=recorder.records[0].begin_ns.__getitem__)
    assert [lane[place] for place in began] == [action for _, action in order if action in set(lane)]
    return [(str(lane[place]), place) for place in began if lane[place].op in COMPUTE | {Op.RECV_F}]


def test_a_trace_has_each_action_at_its_own_time():
    assert all(run_ranks(traced, RANKS))


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "8"])
def test_numbers_of_transfers_that_are_none_are_refused(number):
    stage = bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
    with pytest.raises(ConfigurationError, match="transfers_at_once="):
        bpipe.OneFOneB(stage, MICROBATCHES, nn.functional.mse_loss, options=bpipe.Options(transfers_at_once=number))
