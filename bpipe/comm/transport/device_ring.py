"""Messages from one GPU to another of the same host, by copies of the devices instead of a communicator's kernels.

The receiver lends some chunks of its device's memory. A stream of the sender copies a message into them, piece by piece, and a
stream of the receiver copies it out. Each writes how many pieces it has done into a number that the other's stream waits for. So no
host waits, and no multiprocessor is taken while a device does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import torch

from bpipe.comm.health.activity import Activity
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.device import Event, Stream, current, current_stream, on_stream
from bpipe.device.counters import PAGE, Counters
from bpipe.environment import copies_messages
from bpipe.errors import CommError
from bpipe.memory.device_buffers import Borrowed, LentBuffers
from bpipe.memory.shared_file import SharedFile
from bpipe.plan.reserved import Reserved

__all__: list[str] = []

CHUNK = 8 * 1024**2  # bytes: its copy takes much longer than to queue it
NUM_CHUNKS = 2  # one is filled while the other one is emptied
FILLED, EMPTIED = 0, 8  # counters, in cache lines of their own: the pieces that the sender and the receiver have done
END = 2**62  # more pieces than there will be
POLL_S = 0.001


class DeviceRing:
    """One end of a channel, with the methods of a communicator of two ranks that bpipe uses (`communicators.py`).

    Args:
        chunks: the receiver's memory, uint8 [NUM_CHUNKS * CHUNK].
        counters: of which both ends have the memory.
        device: this rank's.
        stream: on which this end copies, and nobody else.
        sends: whether it is the sender's end.
        give_back: called once nothing that was queued uses the chunks any more.
    """

    supports_coalescing = True

    def __init__(
        self,
        chunks: torch.Tensor,
        counters: Counters,
        device: torch.device,
        stream: Stream,
        give_back: Callable[[], None],
        *,
        sends: bool,
    ) -> None:
        self._chunks: Sequence[torch.Tensor] = chunks.split(CHUNK)
        self._counters, self._device, self._stream, self._give_back, self._sends = counters, device, stream, give_back, sends
        self._num_pieces = 0
        self._group: list[torch.Tensor] | None = None
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's device that the ring takes: the receiver's."""
        return 0 if self._sends else NUM_CHUNKS * CHUNK

    def _start_coalescing(self) -> None:
        self._group = []

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        assert self._group is not None and self._sends
        self._group += map(_bytes_of, tensors)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        assert self._group is not None and not self._sends
        self._group += map(_bytes_of, tensors)

    def _end_coalescing(self) -> Any:
        group, self._group = self._group, None
        if not group:
            raise RuntimeError("a group that was not begun, or of no transfer")
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            for pieces in _in_chunks(group):
                self._copy(pieces)
            return Copies(self._stream.record_event(), self._device)

    def _copy(self, pieces: Sequence[torch.Tensor]) -> None:
        """Queue the copies of as many bytes as a chunk has, at most."""
        chunk, number, start = self._chunks[self._num_pieces % NUM_CHUNKS], self._num_pieces + 1, 0
        if not self._sends:
            self._counters.wait(FILLED, number, self._stream)
        elif number > NUM_CHUNKS:
            self._counters.wait(EMPTIED, number - NUM_CHUNKS, self._stream)
        for piece in pieces:
            room = chunk[start : start + piece.numel()]
            start += piece.numel()
            source, target = (piece, room) if self._sends else (room, piece)
            target.copy_(source, non_blocking=True)
        self._counters.write(FILLED if self._sends else EMPTIED, number, self._stream)
        self._num_pieces = number

    def abort(self) -> None:
        """End all waits of this end's stream, and give the chunks back. Does not block: a thread waits. Any thread may call it."""
        if not self._is_over:
            self._is_over = True
            with suppress(RuntimeError):  # the interpreter ends, and with it the process
                threading.Thread(target=self._end, name="bpipe-ring-end", daemon=True).start()

    def _end(self) -> None:
        try:
            with current(self._device):
                self._end_waits()
                while not self._stream.query():
                    time.sleep(POLL_S)
                    self._end_waits()  # again and again: the other end's stream may still write smaller numbers
                self._counters.close()
        finally:
            self._chunks = []
            self._give_back()

    def _end_waits(self) -> None:
        """Write what the stream waits for. First of all, because a question to the device may wait for room in a full queue."""
        self._counters.set(EMPTIED if self._sends else FILLED, END)


class Copies:
    """Copies on a stream: the current stream waits for them, the host does not."""

    def __init__(self, end: Event, device: torch.device) -> None:
        self._end, self._device = end, device

    def wait(self) -> bool:
        current_stream(self._device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end.query())


def open_ring(
    link: LocalLink, file: SharedFile, device: torch.device, stream: Stream, activity: Activity, *, sends: bool
) -> DeviceRing:
    """Make one end of a channel; the sender's end blocks until the receiver lends the memory.

    Args:
        link: to the process at the other end.
        file: which both have.
        device: this rank's.
        stream: on which this end copies, and nobody else.
        activity: of this rank.
        sends: whether it is the sender's end.

    Raises:
        CommError: the device or the host cannot do this.
    """
    if sends:
        (lent,) = link.import_memory(1)
        borrowed = Borrowed(lent, device, stream, activity)
        chunks, give_back = borrowed.memory, borrowed.give_back
    else:
        buffers = LentBuffers(Reserved((NUM_CHUNKS * CHUNK,), {}), device, activity)
        with buffers.offered() as offered:
            link.export_memory(offered)
        chunks, give_back = buffers.memory, buffers.clear
    try:
        file.grow(PAGE)
        return DeviceRing(chunks, Counters(file.map(0, PAGE), device), device, stream, give_back, sends=sends)
    except BaseException:
        give_back()
        raise


def why_no_ring(device: torch.device, stream: Stream) -> str:
    """Return why this rank does not copy messages, found out by trying as far as one rank can; empty if it does.

    Args:
        device: this rank's.
        stream: on which to try.
    """
    if not copies_messages():
        return "BPIPE_COPY_MESSAGES is 0"
    file = SharedFile()
    try:
        file.grow(PAGE)
        counters = Counters(file.map(0, PAGE), device)
        with current(device), closing(counters):
            counters.write(FILLED, 1, stream)
            counters.wait(FILLED, 1, stream)
            stream.synchronize()
    except CommError as error:
        return str(error)
    finally:
        file.close()
    return ""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 [size]."""
    return tensor.detach().view(-1).view(torch.uint8)


def _in_chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the pieces of a message, uint8 [size] each, that go into each chunk; both ends cut alike."""
    pieces: list[torch.Tensor] = []
    free = CHUNK
    for tensor in tensors:
        begin, size = 0, tensor.numel()
        while begin < size:
            piece = tensor[begin : begin + free]
            pieces.append(piece)
            begin, free = begin + piece.numel(), free - piece.numel()
            if not free:
                yield pieces
                pieces, free = [], CHUNK
    if pieces:
        yield pieces
