"""Channels at whose other ends nobody is: what is sent is gone, and zeros arrive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bpipe.comm.health.collective import CANNOT, Collective
from bpipe.comm.health.control_plane import Meanwhile, NullControlPlane
from bpipe.comm.transport.base import Transfer, Transport
from bpipe.device import Streams
from bpipe.dry_run.absent_peers import AbsentPeers
from bpipe.errors import ConfigurationError
from bpipe.schedules import Channel, Purpose

__all__: list[str] = []


class _Over:
    """A transfer that was over when it was posted."""

    def wait(self) -> bytes | None:
        return None

    def has_come(self) -> bool:
        return True


class FakeTransport(Transport):
    """One rank's end of a pipeline over a fake process group.

    Args:
        group: the group; None for the default one.
        device: the device of the stages.

    Attributes:
        peers: what the other ranks would announce in the step that runs.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device, self.control, self.streams = device, NullControlPlane(), Streams()
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.peers: AbsentPeers | None = None

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
        if header is not None and channel.purpose is Purpose.FORWARD and self.peers is not None:
            self.peers.hear(channel, header)
        return _Over()

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        for tensor in tensors:
            tensor.zero_()  # whatever the memory held may be no valid index, and no number
        return _Over()

    def receive_header(self, channel: Channel) -> bytes:
        assert self.peers is not None, "a step begins with the agreement on it"
        return self.peers.announce(channel)

    def settle(self, most_s: float) -> None:
        """Do nothing, because nothing is under way."""

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
