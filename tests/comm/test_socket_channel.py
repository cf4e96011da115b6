"""A channel's own connection: order, lengths, what the kernel has no room for, and its end."""

from __future__ import annotations

import fcntl
import resource
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.transport.socket_channel import LENGTH, MOST_NOTE_BYTES, NOTED, Receiver, Sender
from bpipe.errors import CommError, TransferError
from tests.patience import ended
from tests.tiers import examples

NAME = "forward messages from rank 0 to 1"
MOST = 1000


class Pair(NamedTuple):
    """Both ends, and what the sender writes to."""

    sender: Sender
    receiver: Receiver
    raw: socket.socket


@contextmanager
def connected(room: int = 0) -> Iterator[Pair]:
    """Two ends, between which the kernel keeps about so many bytes; 0: as many as usual."""
    ours, theirs = socket.socketpair()
    if room:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    with ours, theirs:
        yield Pair(Sender(ours, NAME), Receiver(theirs, NAME), ours)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected() as pair:
        yield pair


@pytest.fixture
def narrow() -> Iterator[Pair]:
    with connected(room=4096) as pair:
        yield pair


def numbers(start: int, size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(start, start + size).to(dtype)


MESSAGES = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from([1, 7, 100, 5000]), max_size=600)), min_size=1, max_size=6
)  # whether a header goes before, and how large the tensors are


@given(MESSAGES, st.sampled_from([0, 4096]), st.randoms(use_true_random=False))
@settings(max_examples=examples(30), deadline=None)
def test_what_arrives_is_what_was_sent(messages: list[tuple[bool, list[int]]], room: int, random: Random) -> None:
    """However little the kernel takes at once, and in whatever order receives without a header are waited for."""
    sent = [[numbers(index, size, torch.bfloat16) for size in sizes] for index, (_, sizes) in enumerate(messages)]
    landed = [[torch.empty(size, dtype=torch.bfloat16) for size in sizes] for _, sizes in messages]
    with connected(room) as pair:
        under_way = [pair.sender.send(b"a header" if has_header else None, one) for (has_header, _), one in zip(messages, sent)]
        receipts = []
        for (has_header, _), landing in zip(messages, landed):
            assert not has_header or pair.receiver.read_header(MOST) == b"a header"
            receipts.append(pair.receiver.receive(landing))
        for transfer in [*random.sample(receipts, len(receipts)), *under_way]:
            transfer.wait()
    for tensors, landing in zip(sent, landed):
        assert all(map(torch.equal, tensors, landing))


def test_a_send_never_blocks_and_keeps_its_tensors_until_they_are_gone(narrow: Pair) -> None:
    tensor = numbers(0, 100_000)
    large = narrow.sender.send(None, [tensor])
    small = narrow.sender.send(b"behind it", None)
    waiting = threading.Thread(target=large.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # the receiver has read nothing
    landing = torch.empty_like(tensor)
    narrow.receiver.receive([landing]).wait()
    ended(waiting)
    assert torch.equal(landing, tensor)
    assert narrow.receiver.read_header(MOST) == b"behind it"
    small.wait()


def test_a_small_send_is_over_at_once(pair: Pair) -> None:
    tensor = numbers(0, 10)
    pair.sender.send(None, [tensor]).wait()
    tensor.zero_()  # the sender's again
    landing = torch.empty_like(tensor)
    pair.receiver.receive([landing]).wait()
    assert torch.equal(landing, numbers(0, 10))


@pytest.mark.parametrize("size", [3, 5])
def test_a_message_has_the_size_that_is_expected(pair: Pair, size: int) -> None:
    pair.sender.send(None, [numbers(0, size)])
    receipt = pair.receiver.receive([torch.empty(4, dtype=torch.int64)])
    with pytest.raises(CommError, match=f"^{NAME}: a message of {8 * size} bytes arrived where 32 were expected"):
        receipt.wait()


def test_a_header_may_not_be_longer_than_said(pair: Pair) -> None:
    pair.raw.sendall(LENGTH.pack(2**60))
    with pytest.raises(CommError, match=f"a header of {2**60} bytes arrived, which may have {MOST}"):
        pair.receiver.read_header(MOST)


@pytest.mark.parametrize("end", ["receiver", "sender"])
def test_whoever_waits_is_released_from_another_thread(pair: Pair, end: str) -> None:
    receipt = pair.receiver.receive([torch.empty(4)])
    threading.Timer(0.05, getattr(pair, end).end).start()
    with pytest.raises(TransferError, match=f"^a transfer failed: the connection of {NAME} ended"):
        receipt.wait()


def test_a_send_under_way_is_released_as_well(narrow: Pair) -> None:
    transfer = narrow.sender.send(None, [numbers(0, 100_000)])
    threading.Timer(0.05, narrow.sender.end).start()
    with pytest.raises(TransferError, match="ended"):
        transfer.wait()


def test_what_was_sent_arrives_though_the_sender_is_gone(pair: Pair) -> None:
    pair.sender.send(None, [numbers(0, 4)])
    pair.sender.close()
    landing = torch.empty(4, dtype=torch.int64)
    pair.receiver.receive([landing]).wait()
    assert landing.tolist() == [0, 1, 2, 3]
    with pytest.raises(TransferError, match="its other end is gone"):
        pair.receiver.read_header(MOST)


def test_nothing_can_be_sent_to_a_receiver_that_is_gone(pair: Pair) -> None:
    pair.receiver.close()
    with pytest.raises(TransferError, match="ended"):
        pair.sender.send(b"nobody reads this", None)


def test_a_header_cut_off_in_the_middle(pair: Pair) -> None:
    pair.raw.sendall(LENGTH.pack(10) + b"half")
    pair.raw.shutdown(socket.SHUT_WR)
    with pytest.raises(TransferError, match="its other end is gone"):
        pair.receiver.read_header(MOST)


class Failing:
    """A connection that takes a little, and then fails, once."""

    def __init__(self) -> None:
        self.outcomes = [10, BlockingIOError(), OSError("no buffer space"), 100]
        self.has_ended = False

    def sendmsg(self, parts: object, ancillary: object, flags: int) -> int:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def shutdown(self, how: int) -> None:
        self.has_ended = True


def test_nothing_follows_what_did_not_get_through() -> None:
    """Behind a hole, the next message would be taken for a part of it."""
    connection: Any = Failing()
    sender = Sender(connection, NAME)
    transfer = sender.send(None, [numbers(0, 10)])
    with pytest.raises(TransferError, match="no buffer space"):
        transfer.wait()
    assert connection.has_ended
    with pytest.raises(TransferError, match="no buffer space"):
        sender.send(None, [numbers(0, 1)])
    assert connection.outcomes == [100]


def test_a_receipt_that_failed_fails_again(pair: Pair) -> None:
    pair.sender.send(None, [numbers(0, 3)])
    receipt = pair.receiver.receive([torch.empty(4, dtype=torch.int64)])
    pair.sender.close()
    for _ in range(2):
        with pytest.raises(CommError):
            receipt.wait()


PROGRAM = """
import socket, threading, torch
from bpipe.comm.transport.socket_channel import Sender
from tests.tiers import examples
ours, theirs = socket.socketpair()
sender = Sender(ours, "a channel")
transfer = sender.send(None, [torch.zeros(10**7)])
threading.Thread(target=transfer.wait, daemon=True).start()
print("main is done")
"""


def test_a_process_ends_though_nobody_reads_what_it_sends() -> None:
    program = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert program.stdout == "main is done\n"


# Notes.


def test_a_note_comes_with_its_message_and_with_no_other(pair: Pair) -> None:
    targets = [numbers(0, 3), numbers(0, 0), numbers(0, 2)]
    receipts = [pair.receiver.receive([target]) for target in targets]
    pair.sender.send(None, [numbers(1, 3)], b"one")
    pair.sender.send(None, [numbers(0, 0)], b"")
    pair.sender.send(None, [numbers(7, 2)])
    pair.sender.send(b"header", [numbers(4, 1)], b"last" * 1000)
    assert [receipts[i].wait() for i in (2, 0, 1)] == [None, b"one", b""]
    assert [target.tolist() for target in targets] == [[1, 2, 3], [], [7, 8]]
    assert pair.receiver.read_header(MOST) == b"header"
    assert pair.receiver.receive([numbers(0, 1)]).wait() == b"last" * 1000


def test_a_note_of_another_length_than_it_may_have_is_an_error(pair: Pair) -> None:
    pair.raw.sendall(LENGTH.pack(NOTED) + LENGTH.pack(MOST_NOTE_BYTES + 1))
    with pytest.raises(CommError, match="a note of"):
        pair.receiver.receive([]).wait()


def test_a_note_that_is_announced_takes_no_memory_before_it_comes(pair: Pair) -> None:
    announced = 2**28
    pair.raw.sendall(LENGTH.pack(NOTED) + LENGTH.pack(announced) + b"less")
    pair.raw.shutdown(socket.SHUT_WR)
    receipt = pair.receiver.receive([])
    tracemalloc.start()
    with pytest.raises(TransferError, match="its other end is gone"):
        receipt.wait()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < announced / 4


def test_a_note_larger_than_all_memory_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.device.total_bytes", lambda device: 1000)
    pair.raw.sendall(LENGTH.pack(NOTED) + LENGTH.pack(1001))
    with pytest.raises(CommError, match=r"a note: 1001 bytes are announced, and all memory of .* has 1000"):
        pair.receiver.receive([]).wait()


def test_a_note_in_pieces_is_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.comm.transport.socket_channel.MOST_AHEAD", 7)
    note = bytes(range(256))
    pair.sender.send(None, [], note)
    assert pair.receiver.receive([]).wait() == note


def test_a_message_is_seen_to_come_though_a_process_has_more_than_1024_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), limits[1]))
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 2000)) as high:
            sender, receipt = Sender(ours, NAME), Receiver(high, NAME).receive([torch.empty(1)])
            assert not receipt.has_come()
            sender.send(None, [torch.ones(1)])
            assert receipt.has_come() and receipt.wait() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_end_is_seen_to_have_come(pair: Pair) -> None:
    receipt = pair.receiver.receive([torch.empty(1)])
    pair.raw.close()
    assert receipt.has_come()
    with pytest.raises(TransferError, match="its other end is gone"):
        receipt.wait()
