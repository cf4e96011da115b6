"""An acceptor's buffers on its device that the evictor, in another process of the host, copies to and from by itself.

No event passes between the processes, because only one of them uses the memory at a time. The acceptor lends it when nothing that
it has queued uses it any more, and frees it when the evictor has given it back, or has ended. The evictor copies on one stream,
which is the order of all that it does there, and gives the memory back when that stream is done. In a step neither waits for the
other.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate

import torch

from bpipe.comm.health.activity import Activity
from bpipe.device import Stream, check_fits, current
from bpipe.device.available import available_bytes
from bpipe.device.handles import OpenedMemory, handle_of
from bpipe.device.pinned import pinned, return_
from bpipe.errors import CommError, TransferError
from bpipe.memory.shared_file import Lent, close_in_children
from bpipe.memory.side_copies import Copied, copy_beside
from bpipe.plan.action import PartKey
from bpipe.plan.reserved import Reserved

__all__: list[str] = []

ALIGNED = 512  # bytes, between buffers: as torch's allocator aligns tensors
STEPS = struct.Struct(">Q")
POLL_S = 0.005
ENDS_S = 0.5  # until a device has ended what a process had queued that has ended


def _ends(sizes: Sequence[int]) -> list[int]:
    """Return where buffers of these sizes end in one block of memory, the room up to the next one included."""
    return list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))


class LentBuffers:
    """The acceptor's end: buffers for one evictor, whose sizes both know, in one block of memory.

    Args:
        reserved: the bytes of each buffer.
        device: where they are.
        activity: has the number of steps that this rank has finished.
    """

    def __init__(self, reserved: Reserved, device: torch.device, activity: Activity) -> None:
        self._sizes, self._device, self._activity = reserved.sizes, device, activity
        self._memory: list[torch.Tensor] = []
        self._lease: socket.socket | None = None  # open at the evictor's end as long as it has the memory

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(self._sizes) if self._memory else 0

    @property
    def memory(self) -> torch.Tensor:
        """All buffers, uint8 [size]."""
        return self._memory[0]

    @contextmanager
    def offered(self) -> Iterator[list[Lent]]:
        """Take the memory, and open a context to pass it on to the evictor in.

        Raises:
            CommError: the device's driver cannot lend it.
        """
        total = max(1, *_ends(self._sizes))
        check_fits(total, self._device, "remote activations")
        memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        handle = handle_of(memory)
        self._lease, theirs = socket.socketpair(socket.AF_UNIX)
        close_in_children(self._lease)  # or the evictor would not see this process end
        self._memory.append(memory)
        with theirs:
            yield [Lent(theirs.fileno(), handle)]

    def recall(self) -> None:
        """Ask for the memory: the evictor gives it back as soon as it has finished all steps that this rank has finished.

        Not after a failure: the evictor may still run the step that failed, and no later one tells that it does not.
        """
        if self._lease is not None:
            with suppress(OSError):
                self._lease.sendall(STEPS.pack(self._activity.step))

    def wait(self) -> None:
        """Wait until the evictor has given the memory back, or has ended, and free it."""
        if self._lease is not None:
            word = b""
            with suppress(OSError):
                word = self._lease.recv(1)
            if not word:
                time.sleep(ENDS_S)
            self._memory.clear()
            self._lease.close()

    def clear(self) -> None:
        """Free the memory as soon as the evictor has given it back. Does not block: a thread waits."""
        if self._memory:
            with suppress(RuntimeError):  # the interpreter ends, and with it the process, which frees all memory
                threading.Thread(target=self.wait, name="bpipe-lent", daemon=True).start()


class Borrowed:
    """Memory that another process lends, on this device as far as torch is concerned.

    Args:
        lent: the memory.
        device: this rank's.
        stream: on which it is used, and on no other.
        activity: has the number of steps that this rank has finished.
        forget: called before it is unmapped, by a thread: drops all tensors of it.

    Raises:
        CommError: this device does not reach it.
    """

    def __init__(
        self, lent: Lent, device: torch.device, stream: Stream, activity: Activity, forget: Callable[[], None] = lambda: None
    ) -> None:
        self._device, self._stream, self._activity, self._forget = device, stream, activity, forget
        with ExitStack() as unless_done:
            self.lease = unless_done.enter_context(socket.socket(fileno=lent.descriptor))
            close_in_children(self.lease)
            self._opened = OpenedMemory(lent.data, device)
            unless_done.pop_all()
        self._is_over = threading.Event()
        threading.Thread(target=self._give_back, name="bpipe-borrowed", daemon=True).start()

    @property
    def memory(self) -> torch.Tensor:
        """All of it, uint8 [size]."""
        return self._opened.memory

    def give_back(self) -> None:
        """Give it back, once all that was queued on its stream has ended. Does not block: a thread waits."""
        self._is_over.set()
        with suppress(OSError):
            self.lease.shutdown(socket.SHUT_RD)

    def _give_back(self) -> None:
        """Wait until the memory is given up, here or by the acceptor, and then for the copies; unmap it, and say so."""
        asked = b""
        with suppress(OSError):
            asked = self.lease.recv(STEPS.size, socket.MSG_WAITALL)
        if len(asked) < STEPS.size:  # its process has ended, and a step of this rank may not know it yet
            self._is_over.wait()
        while not self._is_over.is_set() and self._activity.step < STEPS.unpack(asked)[0]:
            self._is_over.wait(POLL_S)
        with current(self._device):
            self._stream.synchronize()
            self._forget()
            self._opened.close()
        with suppress(OSError), self.lease:
            self.lease.sendall(b"\1")
            self.lease.shutdown(socket.SHUT_RDWR)


class DevicePeerMemory:
    """The evictor's end: a store on another rank's device, which does nothing for what is kept there.

    Which microbatch is in a buffer is noted in this object: no other process writes there, and to read a mark on the device, the
    host would have to wait for it. A microbatch that takes more than its buffer, because it takes more than planned, or than any
    before, stays on the host for once: this rank cannot make another rank's memory larger, and larger buffers come with the next
    step.

    Args:
        reserved: which buffer holds which remote activation, and the bytes of each buffer.
        lent: the memory.
        device: this rank's.
        stream: on which it copies, and nobody else.
        activity: has the number of steps that this rank has finished.
        name: the other rank's, for messages.

    Raises:
        CommError: this device does not reach the memory.
    """

    def __init__(self, reserved: Reserved, lent: Lent, device: torch.device, stream: Stream, activity: Activity, name: str) -> None:
        self._reserved, self._device, self._stream = reserved, device, stream
        self._name = name
        self._borrowed = Borrowed(lent, device, stream, activity, self._forget)
        begins = [0, *_ends(reserved.sizes)]
        self._buffers = [self._borrowed.memory[begin : begin + size] for begin, size in zip(begins, reserved.sizes)]
        self._holds: dict[int, PartKey] = {}  # the latest remote activation of each buffer, by index
        self._on_host: dict[int, torch.Tensor] = {}  # likewise the host's memory in place of a buffer that was too small
        self._kept: dict[PartKey, list[torch.Tensor]] = {}

    def put(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copied:
        """Copy messages, uint8 [size] each, to the other rank's device.

        Raises:
            CommError: they do not fit there, and neither on this host.
        """
        index, sizes = self._reserved.buffer_of[remote], [message.numel() for message in messages]
        room = self._room(index, sum(sizes), remote)
        self._holds[index] = remote
        self._kept[remote] = list(room[: sum(sizes)].split(sizes)) if sizes else []
        return copy_beside(messages, self._kept[remote], self._stream, self._device)

    @property
    def host_bytes(self) -> int:
        """The bytes of the host's memory that is used in place of buffers."""
        return sum(memory.numel() for memory in self._on_host.values())

    def _room(self, index: int, num_bytes: int, remote: PartKey) -> torch.Tensor:
        """Return a buffer, or if it is too small, memory of the host that takes its place until this object is cleared."""
        if num_bytes <= len(self._buffers[index]):
            return self._buffers[index]
        if index not in self._on_host or num_bytes > len(self._on_host[index]):
            self._check_host(num_bytes, remote)
            if index in self._on_host:
                return_([self._on_host.pop(index)], self._stream)
            self._on_host[index] = pinned(num_bytes, self._device)
        return self._on_host[index]

    def _check_host(self, num_bytes: int, remote: PartKey) -> None:
        if num_bytes > (free := available_bytes()):  # the kernel would end processes before it says so
            stage, microbatch, _ = remote
            raise CommError(
                f"microbatch {microbatch} of stage {stage}: {num_bytes} bytes are more than {self._name} has lent, and stay on "
                f"this host, which has {free} left: free memory on it, or set BPIPE_SHARED_MEMORY=0, so that evictions go over "
                "the process group's backend"
            )

    def get(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copied:
        """Copy what was stored back into messages, uint8 [size] each.

        Raises:
            TransferError: another remote activation was stored in its place.
        """
        if self._holds[self._reserved.buffer_of[remote]] != remote:
            stage, microbatch, _ = remote
            raise TransferError(f"the memory of {self._name} no longer has microbatch {microbatch} of stage {stage}")
        return copy_beside(self._kept.pop(remote), messages, self._stream, self._device)

    def clear(self) -> None:
        """Give the memory back, once the copies under way have ended. Does not block: a thread waits."""
        self._borrowed.give_back()
        self._kept.clear()
        return_(list(self._on_host.values()), self._stream)
        self._on_host.clear()

    def _forget(self) -> None:
        self._buffers, self._kept = [], {}
