"""The memory a plan predicts is the memory it uses, by a count that is independent of the ledger; and it stays flat."""

from __future__ import annotations

import gc
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
import bpipe.engine.acceptor
from bpipe.engine.run import Observer
from bpipe.memory.shared_buffers import ALIGNED, HEAD, SharedBuffers
from bpipe.plan.action import SERVED
from bpipe.schedules import Op, Purpose
from tests.models import Block
from tests.ranks import run_ranks
from tests.storages import StorageCount


class Watched(Observer):
    """Steps of a schedule during which live storages are counted after every action of this rank's compute lane."""

    def __init__(self, schedule: bpipe.Schedule, module: nn.Module) -> None:
        self.schedule, self.module = schedule, module
        self.peak = 0
        self._count = StorageCount()
        self._between_stages: dict[int, list[torch.Tensor]] = {}
        schedule.session.observer = self
        self._watch_transport(schedule.session.context.transport)

    def _watch_transport(self, transport: Any) -> None:
        """Messages between stages are no activations while they travel; nor is an input before its forward runs."""
        for name in ("send", "receive"):
            original = getattr(transport, name)

            def post(channel: Any, tensors: Any, *rest: Any, original: Any = original, **more: Any) -> Any:
                transfer = original(channel, tensors, *rest, **more)
                if channel.purpose in (Purpose.FORWARD, Purpose.BACKWARD):
                    self._between_stages[id(transfer)] = list(tensors)
                    wait = transfer.wait
                    transfer.wait = lambda: (wait(), self._between_stages.pop(id(transfer)))[0]
                return transfer

            setattr(transport, name, post)

    def after(self, run: Any, action: Any) -> None:
        if action.op in SERVED:
            return  # another thread's; the buffers it fills are counted
        is_last = action.stage == self.schedule.plan.num_stages - 1
        if action.op in (Op.B, Op.WAIT_RECV_F, Op.WAIT_RECV_B) or (action.op is Op.F and not is_last):
            return  # a result or an input that the action right behind this one takes away
        travelling = [tensor for tensors in self._between_stages.values() for tensor in tensors]
        parameters = list(self.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        known = [*travelling, *parameters, *gradients, *self.module.buffers(), *self.batch, *self.losses]
        self.peak = max(self.peak, self._count.live_bytes(without=known) + self._lent_bytes())

    def _lent_bytes(self) -> int:
        """What this process lends to evictors of its host, as the kernel counts it."""
        lent = self.schedule.session.context.memory.remote_buffers.values()
        return sum(_bytes_of_rooms(buffers) for buffers in lent if isinstance(buffers, SharedBuffers))

    def step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        self.peak, self.losses, self.batch = 0, [], (x, target)
        loss_fn, serve = self.schedule.session.context.loss_fn, bpipe.engine.acceptor.AcceptorThread.run

        def remembered(*loss_args: Any) -> torch.Tensor:
            loss = loss_fn(*loss_args)
            self.losses.append(loss.detach())
            return loss

        def counted(server: Any) -> None:
            with self._count.mode():
                serve(server)

        self.schedule.session.context.loss_fn, bpipe.engine.acceptor.AcceptorThread.run = remembered, counted
        with self._count.mode():
            self.schedule.step(x, target=target, return_outputs=False)
        self.schedule.session.context.loss_fn, bpipe.engine.acceptor.AcceptorThread.run = loss_fn, serve


def _bytes_of_rooms(buffers: SharedBuffers) -> int:
    """The bytes of buffers for an evictor, if the kernel counts as many beside what stands before and between the rooms."""
    num_rooms, size = len(buffers._reserved.sizes), os.fstat(buffers.file.descriptor).st_size
    rest = size - HEAD - buffers.num_bytes if buffers.num_bytes else 0
    assert num_rooms * HEAD * (buffers.num_bytes > 0) <= rest < num_rooms * (HEAD + ALIGNED)
    return buffers.num_bytes


def stage_of_a_language_model(rank: int, p: int, width: int) -> nn.Module:
    torch.manual_seed(rank)
    blocks = [Block(width, 4, 0.0) for _ in range(2)]
    first = [nn.Embedding(256, width)] if rank == 0 else []
    last = [nn.LayerNorm(width), nn.Linear(width, 256)] if rank == p - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def next_byte(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def measure(rank: int, module: nn.Module, p: int, m: int, schedule: str, tokens: int, size: int) -> tuple[float, float, float]:
    """The peak of a step in bytes: counted, entered in the ledger, and predicted."""
    watched = Watched(getattr(bpipe, schedule)(bpipe.PipelineStage(module, rank, p, "cpu"), m, loss_fn=next_byte), module)
    text = torch.randint(256, (size * m, tokens + 1), generator=torch.Generator().manual_seed(3))
    for _ in range(2):  # the first step learns shapes, and reserves its buffers as remote activations arrive
        watched.step(text[:, :-1].contiguous(), target=text[:, 1:].contiguous())
    stats = watched.schedule.stats
    assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"] > stats["peak_bytes"] + stats["static_bytes"]
    return watched.peak, stats["peak_bytes"], stats["predicted_peak_bytes"]


SCHEDULES = ["OneFOneB", "BalancedOneFOneB", "GPipe"]


def measure_blocks(rank: int, p: int, m: int) -> list[tuple[float, float, float]]:
    return [measure(rank, stage_of_a_language_model(rank, p, 64), p, m, schedule, 64, 2) for schedule in SCHEDULES]


def measure_main_job(rank: int, p: int, m: int) -> list[tuple[float, float, float]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from gpt import GPTConfig, build_stage

    config = GPTConfig()
    module = build_stage(config, rank, p, device=torch.device("cpu"), seed=0)
    return [measure(rank, module, p, m, schedule, config.sequence_length, 1) for schedule in SCHEDULES[:2]]


@pytest.mark.parametrize(
    "function, p, m",
    [(measure_blocks, 4, 8), (measure_blocks, 5, 7), (measure_main_job, 4, 8)],
)
def test_counted_peak_equals_the_predicted_one(function, p, m):
    for peaks_of_rank in run_ranks(function, p, p, m):
        for counted, entered, predicted in peaks_of_rank:
            assert counted == entered == predicted


@pytest.mark.parametrize("p", range(1, 17))
def test_the_bound_holds_in_the_ledger_of_a_loopback(p):
    loopback = bpipe.Loopback(p)
    stages = [bpipe.PipelineStage(nn.Linear(4, 4), i, p, "cpu", loopback.rank(i)) for i in range(p)]
    for m in sorted({1, 2, max(p - 1, 1), p, p + 1, 2 * p, 4 * p}) if p <= 8 else (p + 1, 2 * p):
        schedules = [bpipe.BalancedOneFOneB(stage, m, loss_fn=nn.functional.mse_loss) for stage in stages]
        loopback.step(schedules, torch.ones(m, 4), target=torch.ones(m, 4))
        peaks = [schedule.stats["peak_slots"] for schedule in schedules]
        assert peaks == list(schedules[0].plan.peak_slots)
        assert max(peaks) <= -(-(p + 2) // 2)


def count_over_steps(rank: int, p: int, num_steps: int) -> list[tuple[int, float]]:
    module = stage_of_a_language_model(rank, p, 32)
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(module, rank, p, "cpu"), 2 * p, loss_fn=next_byte)
    text = torch.randint(256, (2 * p, 17), generator=torch.Generator().manual_seed(3))
    counts = []
    for step in range(1, num_steps + 1):
        if step in (3, num_steps):
            gc.collect()
            gc.disable()  # what a step leaves behind must be gone without the collector
        schedule.step(text[:, :-1], target=text[:, 1:], return_outputs=False)
        if step in (3, num_steps):
            counts.append((live_tensors(), resident_bytes()))
            gc.enable()
    return counts


def live_tensors() -> int:
    """Bytes of the storages under all tensors that Python knows."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}.values())


def resident_bytes() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_memory_is_flat_over_steps():
    for (live_early, resident_early), (live_late, resident_late) in run_ranks(count_over_steps, 4, 4, 200):
        assert live_late == live_early
        assert resident_late <= resident_early * 1.01


def peaks_of(rank: int, p: int, *numbers: int) -> list[int]:
    module, peaks = stage_of_a_language_model(rank, p, 32), []
    for m in numbers:
        watched = Watched(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, p, "cpu"), m, loss_fn=next_byte), module)
        text = torch.randint(256, (m, 17), generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            watched.step(text[:, :-1].contiguous(), target=text[:, 1:].contiguous())
        peaks.append(watched.peak)
    return peaks


def test_peak_does_not_grow_with_the_number_of_microbatches():
    for few, many in run_ranks(peaks_of, 4, 4, 8, 32):
        assert few == many > 0


class Keeping(nn.Module):
    """Keeps what it has computed until another module takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.linear(x))
        return self.kept * self.kept


class Taking(nn.Module):
    """Takes away what another module keeps."""

    def __init__(self, other: Keeping) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.others[0].kept = None
        result: torch.Tensor = self.linear(x)
        return result


def test_what_a_module_has_let_go_before_the_backward_is_the_microbatchs():
    first, rank = Keeping(), bpipe.Loopback(1).rank(0)
    stages = [bpipe.PipelineStage(module, index, 2, "cpu", group=rank) for index, module in enumerate((first, Taking(first)))]
    schedule = bpipe.Interleaved1F1B(stages, 1, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(torch.ones(8, 16), target=torch.ones(8, 16))
    assert schedule.stats["held_bytes"] == 0
    assert schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"] > 0
