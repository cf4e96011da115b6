"""Wires between ranks of one process: first in, first out, and nothing that would wait for ever."""

from __future__ import annotations

import pytest
import torch

from bpipe.comm.health.collective import Collective
from bpipe.comm.transport.in_process import LoopbackTransport, Wires
from bpipe.errors import CommError
from bpipe.schedules import Channel, Purpose

CHANNEL = Channel(Purpose.FORWARD, 0, 1)


def transport() -> LoopbackTransport:
    return LoopbackTransport(Wires(), torch.device("cpu"))


def message(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.parametrize("sends_first", [True, False])
def test_messages_are_first_in_first_out(sends_first: bool) -> None:
    ends = transport()
    received = [message(0), message(0), message(0)]
    if sends_first:
        transfers = [ends.send(CHANNEL, [message(i)]) for i in (1, 2, 3)]
        transfers += [ends.receive(CHANNEL, [target]) for target in received]
    else:
        transfers = [ends.receive(CHANNEL, [target]) for target in received]
        transfers += [ends.send(CHANNEL, [message(i)]) for i in (1, 2, 3)]
    for transfer in transfers:
        transfer.wait()
    assert [target.item() for target in received] == [1, 2, 3]


def test_channels_are_apart_and_headers_in_order() -> None:
    ends = transport()
    other = CHANNEL._replace(purpose=Purpose.EVICT)
    ends.send(CHANNEL, [message(1)], b"first")
    ends.send(other, [message(2)], b"other")
    ends.send(CHANNEL, [message(3)], b"second")
    target = message(0)
    ends.receive(other, [target]).wait()
    assert target.item() == 2
    assert [ends.receive_header(channel) for channel in (CHANNEL, other, CHANNEL)] == [b"first", b"other", b"second"]


def test_a_wait_that_would_last_for_ever() -> None:
    ends = transport()
    for posted in (ends.send(CHANNEL, [message(1)]), ends.receive(CHANNEL._replace(src=1, dst=0), [message(0)])):
        with pytest.raises(CommError, match="before its other end was posted"):
            posted.wait()


def test_sizes_that_differ() -> None:
    ends = transport()
    ends.send(CHANNEL, [message(1, 2)])
    with pytest.raises(CommError, match=r"messages of \[2\] bytes were sent and \[3\] received"):
        ends.receive(CHANNEL, [message(0, 0, 0)])


def test_there_is_nothing_to_agree_on_alone() -> None:
    with pytest.raises(CommError, match=r"inside Loopback\.step"):
        transport().exchange(Collective.STEP, b"")


def test_what_a_failed_step_left_is_forgotten() -> None:
    wires = Wires()
    ends = LoopbackTransport(wires, torch.device("cpu"))
    ends.send(CHANNEL, [message(1)], b"stale")
    wires.clear()
    ends.send(CHANNEL, [message(2)], b"fresh")
    target = message(0)
    ends.receive(CHANNEL, [target]).wait()
    assert (target.item(), ends.receive_header(CHANNEL)) == (2, b"fresh")


def test_ends_that_do_not_agree_on_notes_are_an_error() -> None:
    for sends, receives in ((True, False), (False, True)):
        ends, tensor = transport(), torch.zeros(2)
        ends.send(CHANNEL, [tensor], may_have_note=sends)
        with pytest.raises(CommError, match="do not agree whether a message may come with a note"):
            ends.receive(CHANNEL, [tensor], may_have_note=receives)
