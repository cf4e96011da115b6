"""Symmetric memory between two processes: what signals order is right, and what nothing orders is reported, delays or not."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from tests.accelerator.device import KIND, MODULE, reports, simulator
from tests.ranks import run_ranks

SIZE, ROUNDS = 1 << 16, 4
DATA, SEEN = 0, 1  # channels
PATIENCE_MS = 20_000

Peers = Any  # torch's _SymmetricMemory


def numbers(round: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(round))


def room(peers: Peers, rank: int) -> torch.Tensor:
    return peers.get_buffer(rank, (SIZE,), torch.float32)


def written_and_read(rank: int, peers: Peers) -> None:
    """Rank 0 writes into rank 1's room, round after round, each with a signal, and rank 1 says when it has read it."""
    for round in range(ROUNDS):
        if rank == 0:
            if round:
                peers.wait_signal(1, SEEN, PATIENCE_MS)
            room(peers, 1).copy_(numbers(round).to(KIND))
            peers.put_signal(1, DATA, PATIENCE_MS)
        else:
            peers.wait_signal(0, DATA, PATIENCE_MS)
            found = room(peers, 1) * 1
            peers.put_signal(0, SEEN, PATIENCE_MS)
            assert torch.equal(found.cpu(), numbers(round))
    if rank == 0:
        peers.wait_signal(1, SEEN, PATIENCE_MS)


def left_with_a_peer(rank: int, peers: Peers) -> None:
    """Rank 0 keeps its own tensors in rank 1's room, which does nothing for it: two streams, ordered by an event."""
    if rank == 1:
        return
    there, back = MODULE.Stream(), MODULE.Stream()
    for round in range(ROUNDS):
        x, y = numbers(round).to(KIND), torch.empty(SIZE, device=KIND)
        there.wait_stream(MODULE.current_stream())
        with MODULE.stream(there):
            room(peers, 1).copy_(x)
        back.wait_event(there.record_event())
        with MODULE.stream(back):
            y.copy_(room(peers, 1))
        there.wait_stream(back)
        MODULE.current_stream().wait_stream(there)
        assert torch.equal(y.cpu(), numbers(round))


def on_another_stream(rank: int, peers: Peers) -> None:
    """What one stream is signalled, another knows behind an event."""
    if rank == 0:
        room(peers, 1).copy_(numbers(0).to(KIND))
        peers.put_signal(1, DATA, PATIENCE_MS)
        return
    side = MODULE.Stream()
    with MODULE.stream(side):
        peers.wait_signal(0, DATA, PATIENCE_MS)
    MODULE.current_stream().wait_stream(side)
    assert torch.equal(room(peers, 1).cpu(), numbers(0))


def by_a_barrier(rank: int, peers: Peers) -> None:
    room(peers, 1 - rank).copy_(numbers(rank).to(KIND))
    peers.barrier(DATA, PATIENCE_MS)
    assert torch.equal(room(peers, rank).cpu(), numbers(1 - rank))


def by_the_hosts(rank: int, peers: Peers) -> None:
    """No signal: rank 0's host waits for its device, and tells rank 1's."""
    store = dist.PrefixStore("by the hosts", dist.distributed_c10d._get_default_store())
    if rank == 0:
        room(peers, 1).copy_(numbers(0).to(KIND))
        MODULE.synchronize()
        store.set("told", json.dumps(simulator.told()))
        return
    simulator.hear(json.loads(store.get("told")))
    assert torch.equal(room(peers, 1).cpu(), numbers(0))


def back_by_the_peer(rank: int, peers: Peers) -> None:
    """Rank 0 writes on one stream and reads on another, which knows of the write from rank 1 alone."""
    if rank == 1:
        peers.wait_signal(0, DATA, PATIENCE_MS)
        peers.put_signal(0, SEEN, PATIENCE_MS)
        return
    room(peers, 1).copy_(numbers(0).to(KIND))
    peers.put_signal(1, DATA, PATIENCE_MS)
    with MODULE.stream(MODULE.Stream()):
        peers.wait_signal(1, SEEN, PATIENCE_MS)
        room(peers, 1).sum()


def parts_of_one_room(rank: int, peers: Peers) -> None:
    """Two ranks write beside each other."""
    half = peers.get_buffer(0, (SIZE // 2,), torch.float32, rank * (SIZE // 2))
    half.fill_(rank)
    peers.barrier(DATA, PATIENCE_MS)


def read_without_a_wait(rank: int, peers: Peers) -> None:
    if rank == 0:
        room(peers, 1).fill_(1)
        peers.put_signal(1, DATA, PATIENCE_MS)
    else:
        room(peers, 1).sum()
        peers.wait_signal(0, DATA, PATIENCE_MS)


def signalled_before_it_is_written(rank: int, peers: Peers) -> None:
    if rank == 0:
        peers.put_signal(1, DATA, PATIENCE_MS)
        room(peers, 1).fill_(1)
    else:
        peers.wait_signal(0, DATA, PATIENCE_MS)
        room(peers, 1).sum()


def overwritten_while_it_is_read(rank: int, peers: Peers) -> None:
    """Rank 0 does not wait until rank 1 has read."""
    for round in range(2):
        if rank == 0:
            room(peers, 1).fill_(round)
            peers.put_signal(1, DATA, PATIENCE_MS)
        else:
            peers.wait_signal(0, DATA, PATIENCE_MS)
            room(peers, 1).sum()


def signalled_on_another_stream(rank: int, peers: Peers) -> None:
    """The signal is put on a stream that does not wait for the copy."""
    if rank == 0:
        with MODULE.stream(MODULE.Stream()):
            room(peers, 1).fill_(1)
        peers.put_signal(1, DATA, PATIENCE_MS)
    else:
        peers.wait_signal(0, DATA, PATIENCE_MS)
        room(peers, 1).sum()


def waited_for_on_another_stream(rank: int, peers: Peers) -> None:
    if rank == 0:
        room(peers, 1).fill_(1)
        peers.put_signal(1, DATA, PATIENCE_MS)
    else:
        with MODULE.stream(MODULE.Stream()):
            peers.wait_signal(0, DATA, PATIENCE_MS)
        room(peers, 1).sum()


def told_before_it_is_written(rank: int, peers: Peers) -> None:
    """Rank 0's host tells what its device has not done yet."""
    store = dist.PrefixStore("too early", dist.distributed_c10d._get_default_store())
    if rank == 0:
        room(peers, 1).fill_(1)
        store.set("told", json.dumps(simulator.told()))
        return
    simulator.hear(json.loads(store.get("told")))
    room(peers, 1).sum()


def two_writers(rank: int, peers: Peers) -> None:
    room(peers, 0).fill_(rank)


def two_streams_of_one_rank(rank: int, peers: Peers) -> None:
    if rank == 0:
        room(peers, 1).fill_(1)
        with MODULE.stream(MODULE.Stream()):
            room(peers, 1).sum()


Use = Callable[[int, Peers], None]
RIGHT: list[Use] = [
    *(written_and_read, left_with_a_peer, on_another_stream, by_a_barrier, by_the_hosts, back_by_the_peer, parts_of_one_room),
]
WRONG: list[Use] = [
    *(read_without_a_wait, signalled_before_it_is_written, overwritten_while_it_is_read, signalled_on_another_stream),
    *(waited_for_on_another_stream, told_before_it_is_written, two_writers, two_streams_of_one_rank),
]


def everything(rank: int, seed: int) -> dict[str, list[str]]:
    """Each use with buffers of its own; what the checker says of it on this rank."""
    simulator.configure(True, 500, 0.3, 2 * seed + rank)
    group, found = dist.group.WORLD, {}
    for use in [*RIGHT, *WRONG]:
        x = symmetric.empty(SIZE, device=KIND)
        peers = symmetric.rendezvous(x, group)
        assert symmetric.rendezvous(x, group).buffer_ptrs == peers.buffer_ptrs  # the same
        use(rank, peers)
        found[use.__name__] = reports()
        simulator.clear_reports()
        dist.barrier()
        del x, peers
    assert simulator.statistics(0)["symmetric"] == 0
    return found


@pytest.fixture(scope="module", params=range(3))
def seen(request: pytest.FixtureRequest) -> list[dict[str, list[str]]]:
    return run_ranks(everything, 2, request.param)


@pytest.mark.parametrize("use", RIGHT)
def test_what_is_ordered_is_right(seen: list[dict[str, list[str]]], use: Use) -> None:
    assert [of_rank[use.__name__] for of_rank in seen] == [[], []]


@pytest.mark.parametrize("use", WRONG)
def test_what_is_not_is_reported(seen: list[dict[str, list[str]]], use: Use) -> None:
    """By the process whose access comes second, with the line of its code."""
    found = [report for of_rank in seen for report in of_rank[use.__name__]]
    assert found and all(report.startswith("race: ") and "that processes share" in report for report in found)
    assert all(f"in {use.__name__}" in report for report in found)


def relayed(rank: int) -> list[str]:
    """Rank 0 writes on two streams; rank 1 tells rank 2 of both, which it has seen in another order than it heard of them."""
    simulator.configure(True, 500, 0.3, rank)
    x = symmetric.empty(SIZE, device=KIND)
    peers = symmetric.rendezvous(x, dist.group.WORLD)
    parts = room(peers, 0).chunk(4)
    if rank == 0:
        streams = [MODULE.Stream() for _ in range(2)]
        for stream, part in zip(reversed(streams), parts):
            with MODULE.stream(stream):
                part.fill_(1)
            MODULE.synchronize()  # in this order into the log
        dist.barrier()
        for stream in streams:
            MODULE.current_stream().wait_stream(stream)
        peers.put_signal(1, DATA, PATIENCE_MS)
    elif rank == 1:
        dist.barrier()
        parts[3].fill_(1)  # beside what rank 0 has written, of which nothing has been heard yet
        peers.wait_signal(0, DATA, PATIENCE_MS)
        peers.put_signal(2, DATA, PATIENCE_MS)
    else:
        dist.barrier()
        peers.wait_signal(1, DATA, PATIENCE_MS)
        room(peers, 0).sum()
    found = reports()
    dist.barrier()
    return found


def test_what_a_rank_tells_of_another_one_is_that_ones() -> None:
    assert run_ranks(relayed, 3) == [[], [], []]


def heard_by_another_thread(rank: int) -> list[str]:
    """Rank 1's first thread hears of the write and records an event, for which another thread lets its stream wait."""
    store = dist.PrefixStore("by an event", dist.distributed_c10d._get_default_store())
    x = symmetric.empty(SIZE, device=KIND)
    peers = symmetric.rendezvous(x, dist.group.WORLD)
    if rank == 0:
        room(peers, 1).fill_(1)
        MODULE.synchronize()
        store.set("told", json.dumps(simulator.told()))
    else:
        events: queue.Queue[Any] = queue.Queue()

        def read() -> None:
            with MODULE.stream(MODULE.Stream()) as stream:
                stream.wait_event(events.get())
                room(peers, 1).sum()

        reader = threading.Thread(target=read)
        reader.start()
        simulator.hear(json.loads(store.get("told")))
        events.put(MODULE.Stream().record_event())
        reader.join()
    found = reports()
    dist.barrier()
    return found


def test_an_event_carries_what_the_host_has_heard() -> None:
    assert run_ranks(heard_by_another_thread, 2) == [[], []]


def timed_out(rank: int) -> list[str]:
    x = symmetric.empty(SIZE, device=KIND)
    peers = symmetric.rendezvous(x, dist.group.WORLD)
    if rank == 0:
        peers.wait_signal(1, DATA, 100)
    else:
        peers.put_signal(0, SEEN, 100)
        peers.put_signal(0, SEEN, 100)  # nobody has taken the first
    found = reports()
    dist.barrier()
    return found


def test_a_signal_that_does_not_come_ends_its_kernel() -> None:
    first, second = run_ranks(timed_out, 2)
    assert len(first) == 1 and "kernel: wait_signal from rank 1 timed out after 100 ms" in first[0]
    assert len(second) == 1 and "kernel: put_signal to rank 0 timed out after 100 ms" in second[0]


def refused(rank: int) -> list[str]:
    texts = []
    x = symmetric.empty(SIZE + rank, device=KIND)
    free, total = MODULE.mem_get_info()
    assert total - free == x.nbytes and MODULE.memory_allocated() == 0  # the allocator knows nothing of it, as CUDA's
    for call in (
        lambda: symmetric.rendezvous(x, dist.group.WORLD),
        lambda: symmetric.rendezvous(torch.empty(SIZE, device=KIND), dist.group.WORLD),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    dist.barrier()
    return texts


def test_what_is_not_symmetric_is_refused() -> None:
    for sizes, other in run_ranks(refused, 2):
        assert "bytes of symmetric memory, and rank" in sizes
        assert "not the begin of a tensor of symmetric memory" in other


def killed(rank: int) -> bool:
    """Rank 1 is killed while it holds buffers that rank 0 reaches, whose memory stays as long as rank 0 has it."""
    x = symmetric.empty(SIZE, device=KIND)
    peers = symmetric.rendezvous(x, dist.group.WORLD)
    written_and_read(rank, peers)
    MODULE.synchronize()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "symmetric" in line]
    assert len(mapped) == 2 and all("memfd" in line for line in mapped)  # no name that would outlive the processes
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    room(peers, 1).fill_(3)
    return bool((room(peers, 1) == 3).all())


def test_a_killed_process_leaves_nothing_behind() -> None:
    first, second = run_ranks(killed, 2, expect_errors=True)
    assert first is True and "died without a word" in str(second)
