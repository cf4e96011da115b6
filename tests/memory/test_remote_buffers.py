"""Buffers are reserved once, used again and again, and no more than the plan says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.transport.in_process import LoopbackTransport, Wires
from bpipe.engine.remembered import Memory
from bpipe.errors import CommError
from bpipe.memory.host_buffers import HostBuffers
from bpipe.memory.remote_buffers import RemoteBuffers
from bpipe.passes.balance.balance import balance
from bpipe.plan.action import PartKey
from bpipe.plan.destinations import Destinations
from bpipe.plan.reserved import Reserved, reserve
from bpipe.schedules import Action, Op, Sizes, build
from tests.tiers import examples

CPU = torch.device("cpu")
Event = tuple[bool, int]  # whether a remote activation arrives or leaves, and which


def remote_buffers(sizes: list[int], buffer_of: dict[int, int], *, in_bytes: bool = True) -> RemoteBuffers:
    """Buffers for microbatches of stage 0."""
    reserved = Reserved(tuple(sizes), {(0, microbatch, 0): room for microbatch, room in buffer_of.items()})
    return RemoteBuffers(reserved, CPU, in_bytes=in_bytes)


def remote(microbatch: int) -> PartKey:
    return 0, microbatch, 0


def test_nothing_is_reserved_before_the_first_guest() -> None:
    assert remote_buffers([64] * 3, {0: 0}).num_bytes == 0


def test_all_rooms_are_reserved_with_the_first_guest() -> None:
    planned = remote_buffers([70, 30, 100], {0: 2})
    parts = planned.take(remote(0), [70, 30])
    assert [(part.dtype, part.shape) for part in parts] == [(torch.uint8, (70,)), (torch.uint8, (30,))]
    assert planned.num_bytes == 200


def test_where_slots_are_counted_rooms_are_as_large_as_the_first_guest() -> None:
    planned = remote_buffers([1] * 3, {0: 1, 1: 0}, in_bytes=False)
    planned.take(remote(0), [70, 30])
    assert planned.num_bytes == 300
    planned.take(remote(1), [120])
    assert planned.num_bytes == 320


def test_rooms_are_used_again() -> None:
    planned = remote_buffers([64] * 2, {microbatch: microbatch % 2 for microbatch in range(50)})
    assert len({planned.take(remote(microbatch), [64])[0].data_ptr() for microbatch in range(50)}) == 2
    assert planned.num_bytes == 128


def test_a_room_grows_for_a_guest_larger_than_planned_and_stays_so() -> None:
    planned = remote_buffers([10, 10], {0: 0, 1: 1, 2: 1})
    first = planned.take(remote(0), [10])[0].fill_(7)
    place = planned.take(remote(1), [25])[0].data_ptr()
    assert planned.num_bytes == 35
    assert first.tolist() == [7] * 10
    assert planned.take(remote(2), [5])[0].data_ptr() == place


def test_a_guest_of_no_bytes_has_a_room_too() -> None:
    planned = remote_buffers([0], {0: 0, 1: 0})
    assert planned.take(remote(0), []) == []
    assert [part.numel() for part in planned.take(remote(1), [3])] == [3]


def test_clear() -> None:
    planned = remote_buffers([8, 8], {0: 0})
    planned.take(remote(0), [8])
    planned.clear()
    assert planned.num_bytes == 0
    planned.take(remote(0), [8])
    assert planned.num_bytes == 16


@pytest.mark.parametrize("stranger", [(0, 1, 0), (1, 0, 0), (0, 0, 1)])
def test_a_stranger_has_no_room(stranger: PartKey) -> None:
    with pytest.raises(KeyError):
        remote_buffers([8, 8], {0: 0}).take(stranger, [8])


# Which remote activation is in which room.


@st.composite
def visits(draw: st.DrawFn) -> tuple[list[Event], list[int]]:
    """Remote activations that come and go, and their sizes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=12))
    events: list[Event] = []
    present: list[int] = []
    coming = list(range(len(sizes)))
    while coming or present:
        arrives = bool(coming) and (not present or draw(st.booleans()))
        which = coming.pop(0) if arrives else draw(st.sampled_from(present))
        present.append(which) if arrives else present.remove(which)
        events.append((arrives, which))
    return events, sizes


def chain_of(events: list[Event]) -> list[Action]:
    return [Action(Op.ACCEPT if arrives else Op.WAIT_RETURN, 0, which, peer=1) for arrives, which in events]


@given(visits())
@settings(max_examples=examples(200))
def test_remote_activations_have_buffers_of_their_own_and_no_step_needs_more(visit: tuple[list[Event], list[int]]) -> None:
    events, sizes = visit
    reserved = reserve(chain_of(events), lambda action: sizes[action.microbatch])
    planned = RemoteBuffers(reserved, CPU, in_bytes=True)
    for _ in range(3):
        present: dict[int, torch.Tensor] = {}
        for arrives, which in events:
            if arrives:
                (present[which],) = planned.take(remote(which), [sizes[which]])
                present[which].fill_(which)
            else:
                assert (present.pop(which) == which).all()  # nobody wrote over it
        assert planned.num_bytes == sum(reserved.sizes)


@given(visits())
def test_there_are_as_many_buffers_as_remote_activations_at_once(visit: tuple[list[Event], list[int]]) -> None:
    events, _ = visit
    present, most = 0, 0
    for arrives, _ in events:
        present += 1 if arrives else -1
        most = max(most, present)
    assert len(reserve(chain_of(events)).sizes) == most


# The host's.


def test_what_is_stored_on_the_host_comes_back() -> None:
    host = HostBuffers(Reserved((5, 9), {remote(0): 0, remote(1): 1}), CPU, None, in_bytes=True)
    messages = {
        0: [torch.arange(5, dtype=torch.uint8)],
        1: [torch.full((4,), 7, dtype=torch.uint8), torch.ones(5, dtype=torch.uint8)],
    }
    for microbatch, sent in messages.items():
        host.put(remote(microbatch), [message.clone() for message in sent]).wait()
    assert host.host_bytes == 14
    for microbatch, sent in messages.items():
        arrived = [torch.zeros_like(message) for message in sent]
        host.get(remote(microbatch), arrived).wait()
        assert all(map(torch.equal, arrived, sent))
    host.clear()
    assert host.host_bytes == 0


def test_four_tebibytes_are_refused_before_they_are_allocated() -> None:
    rooms = remote_buffers([64], {0: 0})
    with pytest.raises(CommError, match=f"a remote activation: {2**42} bytes are announced"):
        rooms.take(remote(0), [2**42])


def test_buffers_are_made_before_the_step_where_the_host_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a step, an allocation may make it wait: both those for another rank and those on the host."""
    monkeypatch.setattr("bpipe.engine.remembered.is_asynchronous", lambda device: True)
    sizes, transport = Sizes.of([100] * 4, num_ranks=4), LoopbackTransport(Wires(), CPU)
    for to in (Destinations(), Destinations(host="only")):
        plan = balance(build("1f1b", 4, 8), sizes=sizes, budgets=[300] * 4, to=to)
        memories = [Memory() for _ in range(4)]
        for rank, memory in enumerate(memories):
            memory.reserve(plan, rank, transport, [0] * 4)
        assert [memory.host_bytes for memory in memories] == [plan.host_bytes(rank) for rank in range(4)]
        assert [memory.remote_buffer_bytes for memory in memories] == [plan.remote_buffer_bytes(rank) for rank in range(4)]
