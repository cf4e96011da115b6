"""Tensors through memory that two processes share: whole, in order, one copy in and one copy out."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.transport import ring as ring_module
from bpipe.comm.transport import socket_channel
from bpipe.comm.transport.ring import NUM_CHUNKS, Ring
from bpipe.comm.transport.socket_channel import Receiver, Sender
from bpipe.errors import CommError, TransferError
from bpipe.memory.shared_file import SharedFile, no_memory
from tests.patience import ended
from tests.tiers import examples

CHUNK, SMALL = 64, 16  # of these tests
NAME = "forward messages from rank 0 to 1"
NEVER: Any = None  # called: there is memory


@pytest.fixture(autouse=True)
def little_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "CHUNK", CHUNK)
    monkeypatch.setattr(socket_channel, "SMALL", SMALL)


@contextmanager
def connected(say_why: Any = NEVER) -> Iterator[tuple[Sender, Receiver]]:
    """Two ends, each with its own descriptor of the same memory, as in two processes."""
    ours, theirs = socket.socketpair()
    file = SharedFile()
    with ours, theirs:
        sender = Sender(ours, NAME, Ring(file, ours, say_why))
        receiver = Receiver(theirs, NAME, Ring(SharedFile(os.dup(file.descriptor)), theirs, NEVER))
        yield sender, receiver
        sender.end()
        sender.close()
        receiver.close()


def numbers(start: int, size: int) -> torch.Tensor:
    return (torch.arange(start, start + size) % 251).to(torch.uint8)


MESSAGES = st.lists(
    st.tuples(st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4), st.one_of(st.none(), st.binary(max_size=9))), max_size=8
)


@settings(deadline=None, max_examples=examples(60))
@given(MESSAGES, st.booleans())
def test_messages_arrive_whole_and_in_order(messages: list[tuple[list[int], bytes | None]], reads_at_once: bool) -> None:
    """Large and small ones, with and without a note, posted before they are sent or behind, and waited for in any order."""
    with connected() as (sender, receiver):
        all_arrive(sender, receiver, messages, reads_at_once=reads_at_once)


def all_arrive(sender: Sender, receiver: Receiver, messages: list[tuple[list[int], bytes | None]], *, reads_at_once: bool) -> None:
    sent = [([numbers(7 * i + k, size) for k, size in enumerate(sizes)], note) for i, (sizes, note) in enumerate(messages)]
    found = [[torch.zeros_like(tensor) for tensor in tensors] for tensors, _ in sent]
    receipts = [receiver.receive(tensors) for tensors in found] if reads_at_once else []
    sends = [sender.send(None, tensors, note) for tensors, note in sent]
    receipts = receipts or [receiver.receive(tensors) for tensors in found]
    notes = [receipt.wait() for receipt in reversed(receipts)][::-1]
    for send in sends:
        send.wait()
    assert notes == [note for _, note in messages]
    assert all(torch.equal(a, b) for (tensors, _), got in zip(sent, found) for a, b in zip(tensors, got))


@settings(deadline=None, max_examples=examples(60))
@given(MESSAGES, st.booleans())
def test_messages_arrive_over_the_connection_if_there_is_no_memory(
    messages: list[tuple[list[int], bytes | None]], reads_at_once: bool
) -> None:
    """The receiver learns of it with the first large message."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedFile, "grow", no_memory_at_all)
        with connected(said.append) as (sender, receiver):
            all_arrive(sender, receiver, messages, reads_at_once=reads_at_once)
            assert sender.num_bytes == receiver.num_bytes == 0
    assert said == ["7 bytes of it cannot be reserved (as the test says)"] * any(sum(sizes) > SMALL for sizes, _ in messages)


def no_memory_at_all(self: SharedFile, num_bytes: int) -> None:
    raise no_memory(7, "as the test says")


def test_a_receiver_that_may_not_map_the_memory_says_what_to_do() -> None:
    with connected() as (sender, receiver):
        receiver._ring._file.map = lambda *_: no_memory_at_all(SharedFile(), 0)  # type: ignore[union-attr, method-assign, assignment]
        receipt = receiver.receive([torch.zeros(2 * CHUNK, dtype=torch.uint8)])
        sender.send(None, [numbers(0, 2 * CHUNK)])
        with pytest.raises(CommError, match="BPIPE_SHARED_MEMORY=0"):
            receipt.wait()


def test_headers_stand_between_large_messages() -> None:
    with connected() as (sender, receiver):
        sends = [sender.send(bytes([i]), [numbers(i, 3 * CHUNK)]) for i in range(3)]
        for i in range(3):
            assert receiver.read_header(10) == bytes([i])
            target = torch.zeros(3 * CHUNK, dtype=torch.uint8)
            receiver.receive([target]).wait()
            assert torch.equal(target, numbers(i, 3 * CHUNK))
        for send in sends:
            send.wait()


def test_a_wait_does_not_wait_for_what_is_posted_behind() -> None:
    with connected() as (sender, receiver):
        small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(2 * CHUNK, dtype=torch.uint8)
        first, _ = receiver.receive([small]), receiver.receive([large])  # the second is never sent
        sender.send(None, [numbers(5, 1)])
        done = threading.Thread(target=first.wait, daemon=True)
        done.start()
        ended(done)
        assert small.item() == 5


def test_bytes_are_copied_once_in_and_once_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copyto = np.copyto

    def counting(target: Any, source: Any) -> None:
        copied.append(source.nbytes)
        copyto(target, source)

    monkeypatch.setattr(ring_module.np, "copyto", counting)
    with connected() as (sender, receiver):
        target = torch.zeros(10 * CHUNK + 3, dtype=torch.uint8)
        receipt, send = receiver.receive([target]), sender.send(None, [numbers(0, 10 * CHUNK + 3)])
        receipt.wait()
        send.wait()
    assert sum(copied) == 2 * target.nbytes


def test_memory_is_taken_with_the_first_large_message() -> None:
    with connected() as (sender, receiver):
        sender.send(None, [numbers(0, SMALL)])
        receiver.receive([torch.zeros(SMALL, dtype=torch.uint8)]).wait()
        assert sender.num_bytes == 0
        receipt, send = receiver.receive([torch.zeros(SMALL + 1, dtype=torch.uint8)]), sender.send(None, [numbers(0, SMALL + 1)])
        receipt.wait()
        send.wait()
        assert sender.num_bytes == receiver.num_bytes == NUM_CHUNKS * CHUNK


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_end_that_is_gone_ends_the_waits_of_the_other(who: str) -> None:
    with connected() as (sender, receiver):
        receipt, send = receiver.receive([torch.zeros(8 * CHUNK, dtype=torch.uint8)]), None
        if who == "receiver":
            send = sender.send(None, [numbers(0, 80 * CHUNK)])  # longer than is expected
        (sender if who == "sender" else receiver).end()
        with pytest.raises(TransferError, match=NAME):
            (receipt if send is None else send).wait()


def test_a_byte_that_is_none_of_ours_is_refused() -> None:
    with connected() as (sender, receiver):
        receipt = receiver.receive([torch.zeros(2 * CHUNK, dtype=torch.uint8)])
        sender._connection.sendall(socket_channel.LENGTH.pack(2 * CHUNK) + b"\7")
        with pytest.raises(TransferError, match=r"b'\\x07' came in place of"):
            receipt.wait()


def send_and_close(sender: Sender, size: int) -> None:
    sender.send(None, [numbers(0, size)]).wait()
    sender.close()


@pytest.mark.parametrize("size", [SMALL + 1, CHUNK, NUM_CHUNKS * CHUNK, 5 * CHUNK])
def test_a_sender_that_closes_at_once_loses_nothing(size: int) -> None:
    """Over TCP, whose kernel drops what has arrived if its other end is closed with something to read."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        file = SharedFile()
        sender, receiver = Sender(ours, NAME, Ring(file, ours, NEVER)), Receiver(theirs, NAME, Ring(file, theirs, NEVER))
        done = threading.Thread(target=send_and_close, args=(sender, size))
        done.start()
        target = torch.zeros(size, dtype=torch.uint8)
        receiver.receive([target]).wait()
        done.join()
        receiver.close()
        assert torch.equal(target, numbers(0, size))
