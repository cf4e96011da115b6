"""Which ranks share a host is found out by trying; strangers at the door do no harm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe import logs
from bpipe.comm.rendezvous import local_door
from bpipe.comm.rendezvous.incoming import MOST_SILENT
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.engine import lanes
from bpipe.errors import TransferError
from bpipe.memory.shared_buffers import SharedBuffers
from bpipe.memory.shared_file import Lent, SharedFile
from tests.ranks import run_ranks

RANKS, MICROBATCHES, WIDTH = 4, 6, 300  # 2 x 300 x 300 floats between stages: a large message


def warnings_of_bpipe() -> list[str]:
    """The warnings that this process is going to write, as they come."""
    said: list[str] = []
    logs.LOG.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign, assignment]
    return said


def gradients(rank: int, shares: dict[int, str]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """One rank: the gradients of two steps, and how it moved its tensors."""
    os.environ["BPIPE_SHARED_MEMORY"] = shares.get(rank, "1")
    served: list[Any] = []
    serve = lanes.AcceptorThread.run
    lanes.AcceptorThread.run = lambda self: (served.append(self), serve(self))[1]  # type: ignore[method-assign, func-returns-value]
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2 * MICROBATCHES, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    stage = bpipe.PipelineStage(module, rank, RANKS, "cpu")
    schedule = bpipe.BalancedOneFOneB(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(x, target=x, return_outputs=False)
    context = schedule.session.context
    seen = {
        "threads": len(served),
        "gloo": len(context.transport._gloo),
        "lent": sum(isinstance(one, SharedBuffers) for one in context.memory.remote_buffers.values()),
        "reached": len(context.memory.stores),
        "bytes": {
            name: schedule.stats[name] for name in ("peak_bytes", "evicted_bytes", "remote_buffer_bytes", "device_peak_bytes")
        },
    }
    dist.barrier()
    schedule.close()
    return [p.grad for p in module.parameters() if p.grad is not None], seen


@pytest.mark.parametrize("without", [(0,), (0, 1, 2, 3)], ids=["one rank shares nothing", "no rank shares"])
def test_a_step_is_the_same_with_and_without_shared_memory(without: tuple[int, ...], one_thread: None) -> None:
    shared = run_ranks(gradients, RANKS, {})
    other = run_ranks(gradients, RANKS, dict.fromkeys(without, "0"))
    for rank, ((ours, seen), (theirs, otherwise)) in enumerate(zip(shared, other)):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == 4
        assert seen["bytes"] == otherwise["bytes"]
        assert (seen["threads"], seen["gloo"]) == (0, 0)
        assert (seen["lent"], seen["reached"]) == ((0, 1) if rank == 0 else (1, 0) if rank == RANKS - 1 else (0, 0))
        assert (otherwise["threads"], otherwise["lent"], otherwise["reached"]) == (2 * (rank == RANKS - 1), 0, 0)
        assert bool(otherwise["gloo"]) == (rank in without or rank - 1 in without or rank + 1 in without or rank == RANKS - 1)


def beside_strangers(rank: int) -> tuple[int, int, list[str]]:
    """One rank, whose door others find first: they say nothing, or nonsense, or pass on files, and fill the queue."""
    strangers, said, file = [], warnings_of_bpipe(), SharedFile()

    class BesetDoor(local_door.Door):
        def __init__(self, say_why: Callable[[str], None]) -> None:
            super().__init__(say_why)
            for text in (b"", b"nonsense" * 100, bytes(200)):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(self.name)
                if text:
                    socket.send_fds(stranger, [text], [file.descriptor])
                strangers.append(stranger)
            with suppress(BlockingIOError):  # there is no room for more
                while True:
                    strangers.append(socket.socket(socket.AF_UNIX))
                    strangers[-1].setblocking(False)
                    strangers[-1].connect(self.name)

    local_door.Door = BesetDoor  # type: ignore[misc]
    found, seen = gradients(rank, {})
    assert len(strangers) > MOST_SILENT
    return len(found), seen["gloo"], said


def test_strangers_at_the_door(one_thread: None) -> None:
    assert run_ranks(beside_strangers, RANKS) == [(4, 0, [])] * RANKS


def test_an_end_that_is_gone_is_an_error() -> None:
    ours, theirs = map(LocalLink, socket.socketpair(socket.AF_UNIX))
    theirs.close()
    file = SharedFile()
    with pytest.raises(TransferError, match="cannot be shared with another process of this host"):
        ours.export_memory([Lent(file.descriptor)])
    with pytest.raises(TransferError, match="another process of this host is gone"):
        ours.send_text("anything")
    with pytest.raises(TransferError, match="another process of this host is gone"):
        ours.receive_text()
    with pytest.raises(TransferError, match="shares 0 pieces of memory where 2 were expected"):
        ours.import_memory(2)
    ours.close()


def test_files_arrive_as_the_same_memory() -> None:
    ours, theirs = map(LocalLink, socket.socketpair(socket.AF_UNIX))
    file, other = SharedFile(), SharedFile()
    file.grow(10)
    ours.export_memory([Lent(file.descriptor), Lent(other.descriptor, b"empty")])
    taken = theirs.import_memory(2)
    assert [one.data for one in taken] == [b"", b"empty"]
    first, second = (SharedFile(one.descriptor) for one in taken)
    file.map()[:] = 7
    assert first.map().sum() == 70 and second.num_bytes == 0
    ours.close()
    theirs.close()
