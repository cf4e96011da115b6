"""Channels whose transfers a device carries out by itself, each over a communicator of two ranks, of NCCL or another backend.

torch marks each tensor that it sends or receives as in use on the communicator's stream (`record_stream`). Its allocator then
reuses the memory only once the host has seen that stream come to its end, which is much later than the rank has freed it, because a
host runs ahead of its device. bpipe does not need this mark: it frees or uses a tensor only after `wait`, on the stream that it was
allocated on. So torch gets an alias of the memory, in a storage that its allocator does not own and therefore does not mark
(except with `backend:cudaMallocAsync`, which gets the tensors themselves).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import to_dlpack

from bpipe.comm.transport.device_ring import DeviceRing
from bpipe.comm.transport.in_flight import InFlight
from bpipe.device import current, free_bytes, marks_only_its_own
from bpipe.errors import ConfigurationError, TransferError
from bpipe.schedules import Channel
from bpipe.torch_private.distributed import backend_options, backends_of_packages, begin_transfer, end_transfer

__all__: list[str] = []

POST_S = 1.0  # what a post takes at most, unless the device's queue is full of work that waits for the transfers to be aborted
MOST_BLOCKS = 4  # thread blocks of a transfer, each on a multiprocessor: it may wait there for its other end

Make = Callable[[Any, int, timedelta], Any]

# Tensors of transfers that Ctrl-C interrupted while they were posted. They are kept as long as the process, because nobody has a
# work that tells when the device no longer reads or writes them.
INTERRUPTED: list[Sequence[torch.Tensor]] = []


class Communicators:
    """The communicators of one rank, and the rings in place of some.

    Args:
        device: whose memory they send and receive.
        in_flight: the transfers of this rank.
    """

    def __init__(self, device: torch.device, in_flight: InFlight) -> None:
        self._device, self.in_flight = device, in_flight
        self._made: dict[Channel, Any] = {}
        self._latest: dict[Channel, Any] = {}  # works: those of a channel end in order
        self.bytes_of_one = 0  # of the device beside torch's allocator: what the latest one took, as an estimate for the next
        self._is_over = False
        self._posting = threading.RLock()  # else a transfer that is posted while all are aborted could wait on the device for ever

    def connect(self, channel: Channel, end: int, make: Callable[[], Any]) -> None:
        """Make a channel's communicator. Blocks until the channel's other rank does the same, and nothing can interrupt it.

        Args:
            channel: any channel of this rank.
            end: 0 on the rank that sends, 1 on the rank that receives.
            make: makes it.
        """
        with current(self._device):
            before = free_bytes(self._device)
            made = make()
            if not made.supports_coalescing:
                raise ConfigurationError(
                    f"bpipe sends tensors of {self._device} in groups of transfers, and the process group's backend "
                    f"{type(made).__name__} has none: take gloo for this device, through the host's memory, or NCCL's rules"
                )
            try:
                _posted(made, self._lent([torch.zeros(1, device=self._device)]), sends=end == 0).wait()
            except BaseException:
                made.abort()
                raise
            if not isinstance(made, DeviceRing):
                self.bytes_of_one = max(0, before - free_bytes(self._device))
            self._made[channel] = made
            if self._is_over:  # the caller has given up in the meantime
                made.abort()

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._made

    def shared_bytes(self) -> int:
        """Return the bytes of this rank's device through which other devices copy messages to it."""
        return sum(made.num_bytes for made in self._made.values() if isinstance(made, DeviceRing))

    def post(self, channel: Channel, tensors: Sequence[torch.Tensor], *, sends: bool, what: Callable[[], str]) -> Any:
        """Send contiguous tensors, each of at least one element, or receive into them, as one transfer.

        Args:
            channel: one that is connected.
            tensors: allocated on the current stream.
            sends: whether to send.
            what: describes the transfer.

        Returns:
            Its work; the caller must keep the tensors until it ends.

        Raises:
            TransferError: all transfers have been aborted.
        """
        try:
            with current(self._device), self.in_flight.next(what) as is_posted, self._posting:
                if self._is_over:
                    raise TransferError(f"{what()}: aborted before it began")
                work = _posted(self._made[channel], self._lent(tensors), sends=sends)
                is_posted(work)
                if self._is_over:  # meanwhile: an abort waits for a post no longer than POST_S
                    self._made[channel].abort()
            self._latest[channel] = work
        except Exception:
            raise
        except BaseException:  # Ctrl-C may strike between the posting and the line that keeps its work
            INTERRUPTED.append(tensors)
            raise
        return work

    def _lent(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [lend(tensor) for tensor in tensors] if marks_only_its_own(self._device) else tensors

    def join(self) -> None:
        """Make the current stream wait for everything that was posted, which ends because it was aborted."""
        for work in self._latest.values():
            with current(self._device), suppress(RuntimeError):  # a work may say that it was aborted
                work.wait()

    def abort(self) -> None:
        """End all transfers, no matter who waits for them, and let none begin."""
        self._is_over = True
        is_between = self._posting.acquire(timeout=POST_S)
        try:
            for made in list(self._made.values()):
                made.abort()
        finally:
            if is_between:
                self._posting.release()

    def close(self, is_whole: bool) -> None:
        """Release the communicators; after a failure they have already been aborted."""
        self._is_over = True
        if is_whole:
            self.abort()
        self._made.clear()
        self._latest.clear()


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, uint8 [size], in a storage that torch's allocator does not own."""
    return torch.from_dlpack(to_dlpack(tensor.detach().reshape(-1).view(torch.uint8)))


def _posted(made: Any, tensors: Sequence[torch.Tensor], *, sends: bool) -> Any:
    """Post one transfer, as a group even if it is one tensor, because torch would otherwise make another communicator for it.

    A group that is begun must be ended, also after an error, because everything that the thread gives to NCCL waits for that end.
    """
    try:
        begin_transfer(made)
        for tensor in tensors:
            made.send([tensor], 1, 0) if sends else made.recv([tensor], 0, 0)
        return end_transfer(made)
    except BaseException:
        with suppress(RuntimeError):  # it was not begun, or has been ended
            end_transfer(made)
        raise


def maker_of(backend: str) -> Make | None:
    """Return what makes a communicator of two ranks, for a backend whose transfers a device waits for; None if the host waits.

    Args:
        backend: of the process group, for a device: "nccl", "xccl", or one that a package has registered.
    """
    if backend in MAKERS or backend in HOST_WAITS:  # torch 2.14 and newer register their own backends as packages do
        return MAKERS.get(backend)
    plugin = backends_of_packages().get(backend.upper())
    return None if plugin is None else _plugged(plugin)


def backends() -> list[str]:
    """Return the backends that torch has here, of those that a pipeline can use."""
    return [name for name in ("gloo", *MAKERS) if dist.is_available() and dist.is_backend_available(name)]


def _nccl(store: Any, end: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    options.config.max_ctas = MOST_BLOCKS
    return dist.ProcessGroupNCCL(store, end, 2, options)


def _xccl(store: Any, end: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupXCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupXCCL(store, end, 2, options)


MAKERS: dict[str, Make] = {"nccl": _nccl, "xccl": _xccl}  # those of torch
HOST_WAITS = ("gloo", "mpi", "ucc")  # torch's other backends


def _plugged(plugin: Any) -> Make:
    def make(store: Any, end: int, timeout: timedelta) -> Any:
        if not plugin.extended_api:
            return plugin.creator_fn(store, end, 2, timeout)
        options = backend_options()
        options.store, options.group_rank, options.group_size, options.timeout = store, end, 2, timeout
        return plugin.creator_fn(options, None)

    return make
