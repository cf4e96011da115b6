"""Messages between stages that devices copy to each other: the bits of the CPU, no race, and an end in time when a rank fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.comm.health.activity import Activity
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.transport import device_ring
from bpipe.comm.transport.device_ring import NUM_CHUNKS, DeviceRing
from bpipe.device import counters
from bpipe.errors import CommError, RankFailedError, RankLostError, TransferTimeoutError
from bpipe.memory.shared_file import Lent, SharedFile
from tests.accelerator.device import KIND, MODULE, reports, simulator, unordered
from tests.accelerator.work import StruckError, as_rank, batch_of, linked, modules_of, results_of
from tests.patience import PATIENCE_S, too_late, until
from tests.ranks import run_ranks

RANKS, MICROBATCHES = 4, 8
DEVICE = torch.device(KIND, 0)
SMALL = 1000  # bytes of a chunk, so that a message has several
OURS = ("bpipe-ring-end", "bpipe-borrowed", "bpipe-lent")

pytestmark = [pytest.mark.skipif(KIND != "cuda", reason="only CUDA has such numbers"), pytest.mark.usefixtures("one_thread")]


def begun(rank: int, *, queues: int = 0, chunk: int = SMALL) -> None:
    from tests.accelerator import nccl as transports

    if queues:
        simulator.set_connections(queues)
    device_ring.CHUNK = chunk
    transports.install(nccl=True, copies=True)
    simulator.configure(True, 1000, 0.2, rank)


def trained(rank: int, name: str, queues: int, device: str) -> Any:
    if device == "cpu":
        return as_rank(rank, name, device, num_ranks=RANKS)
    begun(rank, queues=queues)
    made: list[Any] = []
    connect = DeviceRing.__init__

    def counted(self: DeviceRing, *how: Any, **more: Any) -> None:
        made.append(self)
        connect(self, *how, **more)

    DeviceRing.__init__ = counted  # type: ignore[method-assign]
    found = as_rank(rank, name, device, num_ranks=RANKS)
    return found, len(made), reports()


@pytest.mark.parametrize(
    ("name", "queues"),
    [(name, queues) for name in ("1f1b", "balanced_1f1b", "parts", "zbv", "interleaved", "chimera") for queues in (0, 1)],
)
def test_a_step_is_the_same(name: str, queues: int) -> None:
    expected = run_ranks(trained, RANKS, name, queues, "cpu")
    for (found, rings, reported), same in zip(run_ranks(trained, RANKS, name, queues, KIND), expected):
        assert len(found) == len(same) and all(map(torch.equal, found, same))
        assert rings > 1 and not reported


def schedule_of(rank: int, module: nn.Module, **how: Any) -> bpipe.OneFOneB:
    stage = bpipe.PipelineStage(module.to(KIND), rank, RANKS, KIND)
    return bpipe.OneFOneB(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(**{"timeout_s": 2.0, **how}))


def two_steps(schedule: bpipe.OneFOneB, x: torch.Tensor) -> None:
    for _ in range(2):
        schedule.step(x, target=x)


def left() -> list[str]:
    """The threads of rings that have not ended, once they had the time."""
    until = time.monotonic() + PATIENCE_S
    while (found := [one.name for one in threading.enumerate() if one.name in OURS]) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def raises(*_: object) -> None:
    raise StruckError


def ends(*_: object) -> None:
    os._exit(9)


def freezes(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def struck(rank: int, strike: Callable[..., None], is_next_exact: bool) -> tuple[type[BaseException], float, list[str], list[str]]:
    """One rank, of which the second one fails in its second step: its error, after how long, what is left, and reports."""
    begun(rank)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process {rank}", str(os.getpid()))
    module = modules_of(RANKS)[rank]
    how = {} if strike is freezes else {"timeout_s": PATIENCE_S}
    schedule, x = schedule_of(rank, module, **how), batch_of(0, MICROBATCHES).to(KIND)
    schedule.step(x, target=x)
    if rank == 1:
        module.register_forward_pre_hook(strike)
    began = time.monotonic()
    with pytest.raises((RankFailedError, RankLostError, TransferTimeoutError, StruckError)) as caught:
        two_steps(schedule, x)
    seconds, error = time.monotonic() - began, caught.type
    schedule.close()
    if strike is freezes:
        with suppress(ProcessLookupError):
            os.kill(int(store.get("process 1")), signal.SIGKILL)
    del caught
    if is_next_exact:
        dist.barrier()
        again = modules_of(RANKS)[rank].to(KIND)
        other = schedule_of(rank, again, timeout_s=20.0)
        other.step(x, target=x)
        other.close()
        whole = nn.Sequential(*modules_of(RANKS))
        for xi in x.cpu().chunk(MICROBATCHES):
            (nn.functional.mse_loss(whole(xi), xi) / MICROBATCHES).backward()
        assert all(map(torch.equal, results_of([again]), results_of([whole[rank]])))
    return error, seconds, left(), unordered()


@pytest.mark.parametrize("strike", [raises, ends, freezes])
def test_all_ranks_raise(strike: Callable[..., None]) -> None:
    found = run_ranks(struck, RANKS, strike, strike is raises, expect_errors=True)
    for rank, one in enumerate(found):
        if rank == 1 and strike is not raises:
            assert "died without a word" in str(one)
            continue
        _, seconds, threads, reported = one
        assert seconds < PATIENCE_S, too_late("an error")
        assert not threads and not reported


def ring_of(rank: int) -> tuple[DeviceRing, LocalLink]:
    """One end of a ring whose chunks have 64 bytes: rank 0 sends."""
    device_ring.CHUNK = 64
    simulator.configure(True, 500, 0.3, rank)
    link = linked(rank)
    if rank == 0:
        file = SharedFile()
        link.export_memory([Lent(os.dup(file.descriptor))])
    else:
        file = SharedFile(link.import_memory(1)[0].descriptor)
    return device_ring.open_ring(link, file, DEVICE, MODULE.Stream(), Activity(), sends=rank == 0), link


def posted(ring: DeviceRing, rank: int, tensors: list[torch.Tensor]) -> Any:
    ring._start_coalescing()
    (ring.send if rank == 0 else ring.recv)(tensors, 1 - rank, 0)
    return ring._end_coalescing()


def sent(rank: int, sizes: list[list[int]]) -> tuple[bool, list[str], list[str]]:
    """Rank 0 sends messages of tensors of these sizes, whichever end is slow: whether all came, and what is left."""
    ring, link = ring_of(rank)
    is_right, works = True, []
    numbers = torch.Generator().manual_seed(0)
    for message in sizes:
        expected = [torch.randint(256, (size,), dtype=torch.uint8, generator=numbers) for size in message]
        expected = [one if one.numel() % 8 else one.view(torch.int32).view(2, -1) for one in expected]  # bytes of any kind
        tensors = [one.to(DEVICE) if rank == 0 else torch.zeros_like(one, device=DEVICE) for one in expected]
        works.append((posted(ring, rank, tensors), tensors, expected))
    for work, tensors, expected in works:
        work.wait()
        is_right &= all(torch.equal(one.cpu(), other) for one, other in zip(tensors, expected))
        assert work.is_completed()
    with pytest.raises(RuntimeError, match="of no transfer"):
        ring._end_coalescing()
    link.send_text("done")
    link.receive_text()
    ring.abort()
    del work, tensors
    works.clear()
    return is_right, left(), reports()


def test_messages_of_any_size_arrive() -> None:
    sizes = [[1], [63, 1], [64], [65], [200, 7, 304], [1, 1, 1], *[[504]] * 5]
    assert run_ranks(sent, 2, sizes) == [(True, [], [])] * 2


def waited(rank: int, waits: int) -> list[bool]:
    """Each end posts one message of a chunk more than there are chunks: which are done before the other end has posted one."""
    ring, link = ring_of(rank)
    if rank != waits:
        link.receive_text()
    works = [posted(ring, rank, [torch.full((64,), i, dtype=torch.uint8, device=DEVICE)]) for i in range(NUM_CHUNKS + 1)]
    if (rank, waits) == (0, 0):
        until(lambda: all(work.is_completed() for work in works[:NUM_CHUNKS]), "chunks that are empty are filled")
    time.sleep(0.3)  # for what should wait, and might not
    done = [work.is_completed() for work in works]
    if rank == waits:
        link.send_text("go on")
    for work in works:
        work.wait()
    MODULE.synchronize()
    assert all(work.is_completed() for work in works)
    link.send_text("done")
    link.receive_text()
    ring.abort()
    return done


@pytest.mark.parametrize(("waits", "done"), [(0, [True] * NUM_CHUNKS + [False]), (1, [False] * (NUM_CHUNKS + 1))])
def test_an_end_waits_for_the_other_one(waits: int, done: list[bool]) -> None:
    """The sender for a chunk that is empty, the receiver for one that is full."""
    assert run_ranks(waited, 2, waits)[waits] == done


REFUSALS = [("BPIPE_COPY_MESSAGES", "0", ""), ("BPIPE_SHARED_MEMORY", "0", ""), ("", "", "cuStreamWriteValue64")]


def refusing(rank: int, variable: str, value: str, missing: str) -> tuple[bool, set[str], list[str]]:
    """One rank, beside rank 0, which does not copy messages: whether its results are right, how it connects, and warnings."""
    from bpipe.comm.transport import c10d

    begun(rank)
    said: list[str] = []
    c10d.LOG.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign, assignment]
    if rank == 0 and missing:
        call = counters.call_driver

        def called(name: str, *how: Any) -> None:
            if missing in name:
                raise CommError(f"{name}: not supported")
            call(name, *how)

        counters.call_driver = called
    elif rank == 0:
        os.environ[variable] = value
    pinned: list[str] = []
    driver = counters.call_driver
    counters.call_driver = lambda name, *how: (pinned.append(name), driver(name, *how))[1]
    module = modules_of(RANKS)[rank].to(KIND)
    schedule, x = schedule_of(rank, module, timeout_s=20.0), batch_of(0, MICROBATCHES).to(KIND)
    schedule.step(x, target=x)
    made = schedule.session.context.transport._communicators._made
    kinds = {type(one).__name__ for one in made.values()}
    schedule.close()
    assert not left()
    assert sum("HostRegister" in name for name in pinned) == sum("HostUnregister" in name for name in pinned)
    whole = nn.Sequential(*modules_of(RANKS))
    for xi in x.cpu().chunk(MICROBATCHES):
        (nn.functional.mse_loss(whole(xi), xi) / MICROBATCHES).backward()
    return all(map(torch.equal, results_of([module]), results_of([whole[rank]]))), kinds, said


@pytest.mark.parametrize(("variable", "value", "missing"), REFUSALS)
def test_one_rank_that_does_not_copy(variable: str, value: str, missing: str) -> None:
    found = run_ranks(refusing, RANKS, variable, value, missing)
    nccl, ring = "SimulatedNCCL", "DeviceRing"
    assert [(is_right, kinds) for is_right, kinds, _ in found] == [(True, k) for k in ({nccl}, {nccl, ring}, {ring}, {ring})]
    for rank, (_, _, said) in enumerate(found):
        assert len(said) == {0: bool(missing), 1: 2 * (variable != "BPIPE_SHARED_MEMORY")}.get(rank, 0)
        assert all("cop" in text or "straight" in text for text in said)
