"""What is freed can be allocated again at once, at every action; and a host may wait for its device anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import bpipe
from bpipe.comm.health.activity import State
from bpipe.engine.run import Run
from bpipe.schedules import Action
from tests.accelerator.device import KIND, MODULE, reports, simulator
from tests.accelerator.on_device.test_equality import EVICTING, assert_same, on_cpu
from tests.accelerator.work import as_rank, lends
from tests.ranks import run_ranks

RANKS = 4


def before_each_action(call: Any) -> None:
    execute = Run.execute

    def executing(self: Run, action: Action) -> None:
        call()
        execute(self, action)

    Run.execute = executing  # type: ignore[method-assign]


def watched(rank: int, name: str) -> tuple[int, int, int]:
    """The most bytes that were freed and not yet to be had again, and the peaks without and with them."""
    from tests.accelerator import nccl as transports

    transports.install(nccl=True, lends=lends(name))
    simulator.configure(True, 500, 0.2, rank)
    most = [0]

    def look() -> None:
        most[0] = max(most[0], simulator.statistics(0)["deferred"])

    before_each_action(look)
    as_rank(rank, name, KIND, num_ranks=RANKS)
    found = simulator.statistics(0)
    return most[0], found["peak"], found["peak_held"]


@pytest.mark.parametrize("name", EVICTING)
def test_what_is_freed_is_free(name: str) -> None:
    for deferred, peak, peak_held in run_ranks(watched, RANKS, name):
        assert deferred == 0
        assert peak_held == peak


def pinned_on(rank: int) -> tuple[int, int]:
    """What a rank keeps on its host, and what it has pinned for that."""
    from tests.accelerator import nccl as transports
    from tests.accelerator.work import RULES, batch_of, modules_of

    transports.install(nccl=True)
    stage = bpipe.PipelineStage(modules_of(RANKS)[rank].to(KIND), rank, RANKS, KIND)
    schedule = RULES["host"](stage, 8, loss_fn=torch.nn.functional.mse_loss, options=bpipe.Options(timeout_s=20))
    for step in range(2):
        x = batch_of(step, 8).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
    kept, pinned = schedule.stats["host_peak_bytes"], simulator.statistics(0)["pinned"]
    schedule.close()
    return kept, pinned


@pytest.mark.skipif(KIND != "cuda", reason="of the two makes CUDA's runtime alone pins memory that is there already")
def test_the_host_pins_no_more_than_it_keeps() -> None:
    found = run_ranks(pinned_on, RANKS)
    assert found[0][0] > 0
    assert all(kept == pinned for kept, pinned in found)


def waiting(rank: int, name: str, queues: int) -> Any:
    """One rank, whose host waits for its device before each action."""
    from tests.accelerator import nccl as transports

    simulator.set_connections(queues)
    transports.install(nccl=True, most_kernels=1, lends=False)
    simulator.configure(True, 100, 0.1, rank)
    before_each_action(MODULE.synchronize)
    return as_rank(rank, name, KIND, num_ranks=RANKS, transfers_at_once=1), reports()


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("name", ["balanced_1f1b", "host"])
def test_a_host_may_wait_for_its_device_anywhere(name: str, queues: int) -> None:
    """As the allocator does where memory is short, and CUDA where it loads a kernel or pins memory."""
    expected = run_ranks(on_cpu, RANKS, name, RANKS)
    for (found, reported), same in zip(run_ranks(partial(waiting, queues=queues), RANKS, name), expected):
        assert_same(found, same)
        assert not reported


def allocated_in_steps(rank: int) -> list[int]:
    """The bytes of buffers that a rank makes in its steps after the measuring one; before them, it has made all."""
    from bpipe.memory.remote_buffers import RemoteBuffers
    from tests.accelerator import nccl as transports
    from tests.accelerator.work import RULES, batch_of, modules_of

    transports.install(nccl=True)
    stage = bpipe.PipelineStage(modules_of(RANKS)[rank].to(KIND), rank, RANKS, KIND)
    schedule = RULES["bytes"](stage, 8, loss_fn=torch.nn.functional.mse_loss, options=bpipe.Options(timeout_s=20))
    made: list[int] = []
    grow = RemoteBuffers._grow

    def growing(self: RemoteBuffers, room: int, num_bytes: int) -> None:
        before = self.num_bytes
        grow(self, room, num_bytes)
        if schedule.session.context.transport.control.activity.state is State.RUNNING:
            made.append(self.num_bytes - before)

    RemoteBuffers._grow = growing  # type: ignore[method-assign]
    for step in range(3):
        x = batch_of(step, 8).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
    remote_buffer_bytes = int(schedule.stats["remote_buffer_bytes"])
    schedule.close()
    return [remote_buffer_bytes, sum(made)]


def test_no_room_is_made_in_a_step_whose_plan_knows_its_size() -> None:
    found = run_ranks(allocated_in_steps, RANKS)
    assert any(remote_buffer_bytes for remote_buffer_bytes, _ in found)
    assert all(made == 0 for _, made in found)
