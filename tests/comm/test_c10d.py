"""Channels over gloo, between processes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bpipe.comm.health.collective import Collective
from bpipe.comm.rendezvous.store_keys import WrittenKeys
from bpipe.comm.transport.base import Transfer
from bpipe.comm.transport.c10d import C10dTransport
from bpipe.comm.wire.header import Subject, pack_eviction
from bpipe.errors import CommError, ConfigurationError
from bpipe.schedules import Channel, Purpose
from tests.faults.case import Setup
from tests.faults.pipeline import Pipeline
from tests.patience import PATIENCE_S, outcome
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SUBJECT = Subject(0, 0, 0)
CHANNELS = [
    Channel(Purpose.FORWARD, 0, 1),
    Channel(Purpose.BACKWARD, 1, 0),
    Channel(Purpose.EVICT, 0, 1),
    Channel(Purpose.RETURN, 1, 0),
    Channel(Purpose.EVICT, 1, 0),
    Channel(Purpose.RETURN, 0, 1),
]


def opened(group: Any = None, group_ranks: tuple[int, ...] = (0, 1), kind: type[C10dTransport] = C10dTransport) -> C10dTransport:
    transport = kind(group, CPU)
    transport.exchange(Collective.STEP, b"hello")
    transport.connect(CHANNELS, group_ranks)
    return transport


def wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def contents(channel: Channel, index: int, size: int) -> torch.Tensor:
    """What message `index` of a channel says, different from its neighbours'."""
    return torch.full((size,), (7 * index + 31 * CHANNELS.index(channel)) % 251, dtype=torch.uint8)


def exchange(transport: C10dTransport, sizes: list[int]) -> int:
    """Send a message of each size on every channel at once, receive all of them, and count those that are as expected."""
    sent = [
        transport.send(channel, [contents(channel, index, size)])
        for index, size in enumerate(sizes)
        for channel in CHANNELS
        if channel.src == transport.rank
    ]
    received = {
        (channel, index): torch.empty(size, dtype=torch.uint8)
        for channel in reversed(CHANNELS)
        if channel.dst == transport.rank
        for index, size in enumerate(sizes)
    }
    wait([transport.receive(channel, [tensor]) for (channel, _), tensor in received.items()])
    wait(sent)
    return sum(torch.equal(tensor, contents(channel, index, tensor.numel())) for (channel, index), tensor in received.items())


def many_messages(rank: int) -> int:
    sizes = [random.Random(0).choice([0, 1, 100, 4096, 300_000]) for _ in range(40)]
    return exchange(opened(), sizes)


def test_each_channel_is_first_in_first_out_and_on_its_own() -> None:
    assert run_ranks(many_messages, 2) == [40 * 3, 40 * 3]


def large_messages(rank: int) -> int:
    return exchange(opened(), [16 * 1024**2])


def test_large_messages_both_ways_at_once() -> None:
    assert run_ranks(large_messages, 2) == [3, 3]


LENGTHS = [0, 1, 100, 1000, 65535]


def headers_of_many_lengths(rank: int) -> list[bool]:
    """Headers and payloads of one channel keep their order, and headers overtake nothing."""
    transport = opened()
    channel = Channel(Purpose.EVICT, 0, 1)
    headers = [pack_eviction(SUBJECT, 0, list(range(count))) for count in LENGTHS]
    if rank == 0:
        wait([transport.send(channel, [torch.full((5,), i, dtype=torch.uint8)], header) for i, header in enumerate(headers)])
        return []
    results = []
    for index, header in enumerate(headers):
        data = transport.receive_header(channel)
        payload = torch.empty(5, dtype=torch.uint8)
        transport.receive(channel, [payload]).wait()
        results.append(data == header and payload.tolist() == [index] * 5)
    return results


def test_headers_of_any_length() -> None:
    assert run_ranks(headers_of_many_lengths, 2)[1] == [True] * len(LENGTHS)


def several_tensors(rank: int) -> list[list[int]]:
    transport = opened()
    channel = Channel(Purpose.FORWARD, 0, 1)
    messages = [[], [b""], [b"", b"ab", b""], [b"cde", b"", b"f"]]
    if rank == 0:
        wait([transport.send(channel, [torch.tensor(list(part), dtype=torch.uint8) for part in parts]) for parts in messages])
        return []
    received = [[torch.empty(len(part), dtype=torch.uint8) for part in parts] for parts in messages]
    wait([transport.receive(channel, parts) for parts in received])
    return [[tensor.tolist() for tensor in parts] for parts in received]


def test_empty_tensors_and_messages() -> None:
    expected = [[], [b""], [b"", b"ab", b""], [b"cde", b"", b"f"]]
    assert run_ranks(several_tensors, 2)[1] == [[list(part) for part in parts] for parts in expected]


def records(rank: int) -> list[bytes]:
    transport = C10dTransport(None, CPU)
    first = transport.exchange(Collective.STEP, bytes([rank]) * 300)
    return [part[:2] for part in first + transport.exchange(Collective.STEP, b"step" + bytes([rank]))]


def test_records_come_by_rank() -> None:
    expected = [b"\0\0", b"\1\1", b"\2\2", b"st", b"st", b"st"]
    assert run_ranks(records, 3) == [expected] * 3


def pipelines_and_keys(rank: int, num_pipelines: int) -> list[int]:
    """How many keys the store has after the first one and after all, of which every other one has only met and is dropped."""
    store, counts = dist.distributed_c10d._get_default_store(), []
    for index in range(num_pipelines):
        transport = opened() if index % 2 else C10dTransport(None, CPU)
        transport.enlist()
        transport.exchange(Collective.STEP, b"")
        transport.close()
        dist.barrier()  # the other rank has removed its keys, too
        counts.append(store.num_keys())
        dist.barrier()  # and begins the next pipeline
    return [counts[0], counts[-1]]


@pytest.mark.parametrize("num_pipelines", [5, 100])
def test_pipelines_leave_no_keys_in_the_store(num_pipelines: int) -> None:
    before = run_ranks(keys_before, 2)
    assert run_ranks(pipelines_and_keys, 2, num_pipelines) == [[count] * 2 for count in before]


def keys_of_a_step(rank: int, num_ranks: int, late: str) -> list[int]:
    """How many keys the store has before a pipeline, after its only step, and after it is closed; large tensors go over gloo."""
    os.environ |= {"BPIPE_SHARED_MEMORY": "0", "TORCH_GLOO_LAZY_INIT": late}
    store, pipeline, counts = dist.distributed_c10d._get_default_store(), Pipeline(rank, num_ranks, Setup()), list[int]()

    def count() -> None:
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()

    count()
    pipeline.check_step()
    count()
    pipeline.schedule.close()
    count()
    return counts


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_pipeline_leaves_no_keys_after_one_step(late: str) -> None:
    for before, after_step, closed in run_ranks(keys_of_a_step, 4, 4, late):
        assert closed == before
        assert (after_step > before) == (late == "1")  # gloo may still read them


def keys_of_a_meeting_that_failed(rank: int) -> list[int]:
    """Rank 1 does not come."""
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    dist.barrier()
    if rank == 0:
        transport = C10dTransport(None, CPU, timeout_s=3.0)  # it has looked for rank 1 by then
        with pytest.raises(CommError, match=r"ranks \[1\] have not reached their first step"):
            transport.exchange(Collective.STEP, b"")
    counts = [before, store.num_keys()]
    dist.barrier()
    return counts


def test_a_meeting_that_failed_leaves_no_keys() -> None:
    before, after = run_ranks(keys_of_a_meeting_that_failed, 2)[0]
    assert before == after


def keys_before(rank: int) -> int:
    dist.barrier()
    return int(dist.distributed_c10d._get_default_store().num_keys())


HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_removing_keys_does_not_wait_for_a_store_whose_host_is_frozen() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        store = dist.TCPStore("localhost", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        keys = WrittenKeys()
        for key in ("first", "second"):
            store.set(key, "value")
            keys.add(store, key)
        os.kill(host.pid, signal.SIGSTOP)
        try:
            outcome(lambda: (keys.remove(), keys.wait(0.1)))  # while it is frozen
        finally:
            os.kill(host.pid, signal.SIGCONT)
        keys.wait(PATIENCE_S)
        assert not store.check(["first"]) and not store.check(["second"])
        host.communicate()


def second_attempt(rank: int) -> list[int]:
    """Ranks whose earlier processes made different numbers of pipelines over the store, and ended before they met."""
    earlier = run_in_fork(rank + 1)
    later = C10dTransport(None, CPU)
    later.enlist()
    later.exchange(Collective.STEP, b"")
    return [earlier, later.identity]


def run_in_fork(num_pipelines: int) -> int:
    reads, writes = os.pipe()
    if not (child := os.fork()):
        made = [C10dTransport(None, CPU) for _ in range(num_pipelines)]
        for one in made:
            one.enlist()
        os.write(writes, bytes([made[-1].identity]))
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reads, 1)[0]


def test_pipelines_of_processes_that_have_ended_are_not_counted() -> None:
    assert run_ranks(second_attempt, 2) == [[1, 1], [2, 1]]


class Late(C10dTransport):
    """Joins its groups late, when the other rank has looked for it already."""

    def _connect_gloo(self, channels: Sequence[Channel]) -> None:
        time.sleep(0.1)
        super()._connect_gloo(channels)


def pipelines_in_succession(rank: int) -> list[int]:
    """Rank 0 closes each of its pipelines, rank 1 none, and a receive that never came true is left behind in each."""
    kept, counts = [], []
    for _ in range(3):
        transport = opened(kind=C10dTransport if rank else Late)
        counts.append(exchange(transport, [10, 1000]))
        transport.receive(CHANNELS[1 - rank], [torch.empty(10, dtype=torch.uint8)])
        kept.append(transport)
        if rank == 0:
            transport.close()
    return counts


def test_pipelines_in_succession_do_not_hear_each_other() -> None:
    assert run_ranks(pipelines_in_succession, 2) == [[6, 6, 6]] * 2


def subgroup(rank: int) -> list[int]:
    """The plan's rank 0 is the last of a group of two out of three processes."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    transport = opened(group, (1, 0))
    channel = Channel(Purpose.FORWARD, 0, 1)
    if rank == 2:
        transport.send(channel, [torch.arange(3, dtype=torch.uint8)]).wait()
        return [transport.rank, transport.size]
    received = torch.empty(3, dtype=torch.uint8)
    transport.receive(channel, [received]).wait()
    return received.tolist()


def test_groups_within_the_world_and_ranks_in_any_order() -> None:
    assert run_ranks(subgroup, 3) == [[], [0, 1, 2], [1, 2]]


def leaves(rank: int) -> str:
    transport = opened()
    if rank:
        return "gone"
    try:
        transport.receive(Channel(Purpose.BACKWARD, 1, 0), [torch.empty(9, dtype=torch.uint8)]).wait()
    except CommError as error:
        return str(error)
    return "nothing"


def test_a_peer_that_leaves_is_an_error() -> None:
    first, _ = run_ranks(leaves, 2)
    assert first.startswith("a transfer failed: ")


def cannot_find_its_address(rank: int) -> str:
    addresses, has_given_up = pytest.MonkeyPatch(), threading.Event()
    addresses.setattr("bpipe.comm.rendezvous.meeting.own_addresses", lambda store: has_given_up.wait())
    transport = C10dTransport(None, CPU, timeout_s=0.2)
    try:
        transport.exchange(Collective.STEP, b"")
    except CommError as error:
        return str(error)
    finally:
        has_given_up.set()
    return "nothing"


def test_a_timeout_says_what_it_waited_for() -> None:
    """Before the first look at who has come, too."""
    (text,) = {re.sub(r"[\d.]+", "N", one) for one in run_ranks(cannot_find_its_address, 2)}
    assert text == (
        "rank N has waited N s to connect to the other ranks: it looks for its own addresses, and writes them to the process "
        "group's store: longer than timeout_s=N"
    )


def closes_twice(rank: int) -> bool:
    fresh, transport = C10dTransport(None, CPU), opened()
    for _ in range(2):
        fresh.close()
        transport.close()
    return True


def test_close_more_than_once_and_before_opening() -> None:
    assert run_ranks(closes_twice, 1) == [True]


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match=r"call torch.distributed.init_process_group .* or give the stages group=Loopback"):
        C10dTransport(None, CPU)
