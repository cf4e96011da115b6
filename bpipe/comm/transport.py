"""What the runtime asks of a transport: post and wait. It knows no backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from bpipe.comm.control import CallOf, Control
from bpipe.device import Streams
from bpipe.schedules import Channel

__all__: list[str] = []


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


class Transport(ABC):
    """One rank's end of the channels of a pipeline.

    Attributes:
        device: where the rank's stages compute.
        control: its line to the other ranks beside the channels.
        streams: on which it works beside the caller's.
        identity: of the pipeline among those of its group.
        waits_on_device: whether the host goes on at once where a transfer is waited for, and only the device waits: then one thread
            issues all of a step, in the order of `schedules.issue_order`.
    """

    device: torch.device
    control: Control
    streams: Streams
    identity: int = 0
    waits_on_device: bool = False

    @abstractmethod
    def enlist(self) -> None:
        """Take an identity among the pipelines of the group, as this rank counts them."""

    @abstractmethod
    def exchange(self, call: CallOf, data: bytes) -> list[bytes]:
        """Collective over the pipeline: give every rank's bytes to all; return them by rank of the group. Blocks."""

    @abstractmethod
    def refuse(self, why: str) -> None:
        """Tell the others that this rank cannot make the call that they make."""

    @abstractmethod
    def connect(self, channels: Sequence[Channel], group_ranks: Sequence[int]) -> None:
        """Collective: open channels, in one order on all ranks. `group_ranks` gives the group's rank of each of the plan's."""

    def connection_bytes(self) -> int:
        """The bytes that a channel takes on the device, as far as is known from those that are open."""
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
        """Post a send of contiguous tensors, behind a header if there is one. Returns at once.

        Args:
            channel: of any purpose.
            tensors: as its receiver expects them.
            header: read by `receive_header`, before their receive is posted.
            note: comes with the tensors.
            may_have_note: what its receiver says too: whether such messages may come with one.
        """

    @abstractmethod
    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        """Post a receive into contiguous tensors of the very sizes and dtypes that are sent. Returns at once."""

    @abstractmethod
    def receive_header(self, channel: Channel) -> bytes:
        """Wait for the next header of a channel. Blocks the host."""

    @abstractmethod
    def settle(self, most_s: float) -> None:
        """After a failure: let the current stream wait for what was posted, and wait some seconds for threads that queue more."""

    @abstractmethod
    def close(self) -> None:
        """Give groups and threads back. Not collective."""
