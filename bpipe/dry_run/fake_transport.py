"""Channels at whose other ends nobody is: what is sent is gone, and zeros arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bpipe.comm.health.collective import CANNOT, Collective
from bpipe.comm.health.control_plane import Meanwhile, NullControlPlane
from bpipe.comm.transport.base import Transfer, Transport
from bpipe.device import Streams
from bpipe.errors import ConfigurationError
from bpipe.schedules import Channel

__all__: list[str] = []


class Over:
    """A transfer that was over when it was posted."""

    def wait(self) -> bytes | None:
        return None

    def has_come(self) -> bool:
        return True


class Peers(Protocol):
    """The other ranks, as far as headers tell of them."""

    def hear(self, channel: Channel, data: bytes) -> None:
        """Take the header of a message that is sent."""

    def announce(self, channel: Channel) -> bytes:
        """Return the next header of a channel."""


class FakeTransport(Transport):
    """One rank's end of a pipeline whose other ends are not there.

    Args:
        device: the device of the stages.
        rank: this rank's number in the group.
        size: how many ranks it has.

    Attributes:
        peers: what the other ranks would announce in the step that runs.
    """

    def __init__(self, device: torch.device, rank: int, size: int, peers: Peers | None = None) -> None:
        self.device, self.control, self.streams = device, NullControlPlane(), Streams()
        self.size, self.rank, self.peers = size, rank, peers

    def enlist(self) -> None:
        """Do nothing, because no other rank counts pipelines."""

    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        """Return this rank's bytes in place of every rank's."""
        if call not in (Collective.STEP, Collective.PLAN):
            raise ConfigurationError(
                f"rank {self.rank} cannot {CANNOT[call]} over a fake process group: it needs the other {self.size - 1} ranks, "
                "which do not exist. Start them as processes, or run all ranks in one process with bpipe.Loopback"
            )
        if meanwhile is not None:
            meanwhile(lambda: True)
        return [data] * self.size

    def refuse(self, why: str) -> None:
        """Do nothing, because nobody waits."""

    def connect(self, channels: Sequence[Channel], group_ranks: Sequence[int], *, are_sized: bool = False) -> None:
        """Do nothing, because there is nobody to connect with."""

    def send(
        self,
        channel: Channel,
        tensors: Sequence[torch.Tensor],
        header: bytes | None = None,
        note: bytes | None = None,
        *,
        may_have_note: bool = False,
    ) -> Transfer:
        if header is not None and self.peers is not None:
            self.peers.hear(channel, header)
        return Over()

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        for tensor in tensors:
            tensor.zero_()  # whatever the memory held may be no valid index, and no number
        return Over()

    def receive_header(self, channel: Channel) -> bytes:
        assert self.peers is not None, "a step begins with the agreement on it"
        return self.peers.announce(channel)

    def settle(self, most_s: float) -> None:
        """Do nothing, because nothing is under way."""

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
