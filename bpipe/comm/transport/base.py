"""The interface of a transport: post a transfer and wait for it. The runtime does not depend on a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane, Meanwhile
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.device import Streams
from bpipe.schedules import Channel

__all__: list[str] = []

T = TypeVar("T")


class Transfer(Protocol):
    """A transfer under way. Until `wait` returns, its tensors belong to it."""

    def wait(self) -> bytes | None:
        """Return once the caller may read what arrived, or free or overwrite what was sent.

        Blocks the host on CPU; on CUDA it makes the current stream wait instead, where the backend allows it. For what may come
        with a note, as gradients may, the host waits until the sender's host has sent it.

        Returns:
            The note that was sent with what arrived, if there is one.

        Raises:
            TransferError: it will not complete.
        """

    def has_come(self) -> bool | None:
        """Return whether `wait` would return soon, without waiting; None if that cannot be known.

        On CUDA, whether the device is through with it.
        """


class Transport(ABC):
    """One rank's end of the channels of a pipeline.

    Attributes:
        device: the device of the rank's stages.
        control: its control plane, beside the channels.
        streams: the streams that it uses, besides the caller's.
        identity: the number of the pipeline among those of its group.
        waits_on_device: whether a wait for a transfer blocks only the device, and the host goes on at once; then one thread issues
            all of a step, in the order of `schedules.issue_order`.
    """

    device: torch.device
    control: ControlPlane
    streams: Streams
    identity: int = 0
    waits_on_device: bool = False

    @abstractmethod
    def enlist(self) -> None:
        """Take an identity among the pipelines of the group, as this rank counts them."""

    @abstractmethod
    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        """Give every rank's bytes to all ranks, and return them by rank of the group. Collective over the pipeline; blocks.

        Args:
            call: which call it is.
            data: this rank's bytes.
            meanwhile: called while the other ranks' bytes are on their way.
        """

    @abstractmethod
    def refuse(self, why: str) -> None:
        """Tell the other ranks that this one cannot make the call that they make."""

    @abstractmethod
    def connect(self, channels: Sequence[Channel], group_ranks: Sequence[int], *, are_sized: bool = False) -> None:
        """Open the channels of a plan that are not open yet, in the same order on all ranks. Collective.

        Args:
            channels: all of the plan's.
            group_ranks: the group's rank of each of the plan's.
            are_sized: whether it is known how many bytes acceptors reserve: only then can they lend a device's memory.
        """

    def can_lend(self) -> bool:
        """Return whether memory of a device can be lent between this rank and another, once it is known how much."""
        return False

    def link_of(self, channel: Channel) -> LocalLink | None:
        """Return a connection between the ends of a channel, if its evictor uses the acceptor's memory by itself, as connected now.

        What one end sends over it, the other one must receive.
        """
        return None

    def named(self, channel: Channel) -> str:
        """Return a channel's name in messages."""
        return f"{channel.purpose.value} messages from rank {channel.src} to {channel.dst}"

    def wait_for(self, what: str, call: Callable[[], T]) -> T:
        """Return what a call returns that waits for another process: for no longer than for a transfer, and until a rank fails.

        Args:
            what: what has not come yet, for messages.
            call: ends soon once its connections are shut down.

        Raises:
            CommError: another rank has failed meanwhile, or it takes too long.
        """
        return call()

    def connection_bytes(self) -> int:
        """Return the bytes that a channel takes on the device, as far as the open channels show."""
        return 0

    def shared_message_bytes(self) -> int:
        """Return the bytes of this rank through which messages go to, on GPUs come from, other processes of its host."""
        return 0

    @abstractmethod
    def send(
        self,
        channel: Channel,
        tensors: Sequence[torch.Tensor],
        header: bytes | None = None,
        note: bytes | None = None,
        *,
        may_have_note: bool = False,
    ) -> Transfer:
        """Post a send of contiguous tensors, after a header if there is one. Returns at once.

        Args:
            channel: a channel of any purpose.
            tensors: the tensors, as the receiver expects them.
            header: bytes that `receive_header` reads, before the receive of the tensors is posted.
            note: bytes that arrive with the tensors.
            may_have_note: whether such messages may come with a note; the receiver must say the same.
        """

    @abstractmethod
    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        """Post a receive into contiguous tensors of exactly the sizes and dtypes that are sent. Returns at once."""

    @abstractmethod
    def receive_header(self, channel: Channel) -> bytes:
        """Wait for the next header of a channel. Blocks the host."""

    @abstractmethod
    def settle(self, most_s: float) -> None:
        """Make the current stream wait for what was posted, and wait for threads that queue more. Called after a failure.

        Args:
            most_s: the longest time to wait for the threads, in seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Release groups and threads. Not collective."""
