"""Everything that a schedule remembers between steps: footprints of microbatches, remote buffers and host buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.transport.base import Transport
from bpipe.device import Streams, is_asynchronous, on_stream, serving
from bpipe.device.waits import DeviceWaits
from bpipe.memory.device_buffers import DevicePeerMemory, LentBuffers
from bpipe.memory.host_buffers import HostBuffers
from bpipe.memory.ledger import Kind
from bpipe.memory.lending import accept_offer, imported, is_taken, offer
from bpipe.memory.remote_buffers import RemoteBuffers
from bpipe.memory.saved.known import Known
from bpipe.memory.shared_buffers import SharedBuffers
from bpipe.memory.stores import Store
from bpipe.plan.action import HOST
from bpipe.plan.meter import slot
from bpipe.plan.reserved import Reserved, reserve
from bpipe.schedules import Action, Channel, Plan, Purpose

__all__: list[str] = []

REMEMBERED_KINDS = 1024  # of microbatches, by stage and shapes


@dataclass
class Memory:
    """What a schedule remembers from step to step: measured footprints, buffers for remote activations, and those on the host."""

    most_parts: Mapping[int, int] = field(default_factory=dict)  # the most parts of a microbatch, by stage; default 1
    grows: bool = False  # whether a microbatch may take more than planned: then it is measured, and a new plan is made
    planned: Callable[[Action], int] | None = None  # the most bytes that an eviction moves
    kinds: dict[Kind, Known] = field(default_factory=dict)  # the most recently used one stands last
    remote_buffers: dict[int, RemoteBuffers | SharedBuffers | LentBuffers] = field(default_factory=dict)  # by evictor
    host_buffers: HostBuffers | None = None
    stores: dict[int | None, Store] = field(default_factory=dict)  # by peer: where this rank copies to and from by itself
    device_waits: DeviceWaits | None = None  # set if only the device waits for transfers
    learned: dict[int, Any] = field(default_factory=dict)  # about the stages whose forwards run twice
    silent: dict[int, frozenset[int]] = field(default_factory=dict)  # hooks on a stage's parameters that queue no callbacks
    largest_remote_bytes: int = 0  # evicted so far to another rank
    cut_off: set[int] = field(default_factory=set)  # stages that a warning has named

    def reserve(self, plan: Plan, rank: int, transport: Transport, largest: Sequence[int]) -> None:
        """Prepare the buffers of a plan's remote activations on this rank and its host, in place of another plan's.

        Its channels must be open. Collective: acceptors lend memory to those evictors that reach it.

        Args:
            plan: the plan.
            rank: this rank in it.
            transport: its channels.
            largest: where the plan counts slots, the bytes of the largest remote activation of each of its ranks so far.
        """
        self._give_back()
        self.reclaim(transport)
        self.clear()
        device, streams = transport.device, transport.streams
        in_bytes = plan.sizes is not None
        moved = None if plan.sizes is None else plan.sizes.moved
        chains, of_host = plan.chains(rank), plan.host_chain(rank)
        self.remote_buffers = {}
        lent: dict[Channel, Reserved] = {}
        for peer, chain in chains.items():
            channel, reserved = Channel(Purpose.EVICT, peer, rank), reserve(chain, moved or _always(largest[peer]))
            lendable = _lendable(reserved, channel, transport, in_bytes=in_bytes)
            if isinstance(lendable, SharedBuffers):
                lent[channel] = reserved
            self.remote_buffers[peer] = lendable or RemoteBuffers(reserved, device, in_bytes=in_bytes)
        for peer in plan.acceptors(rank):
            channel = Channel(Purpose.EVICT, rank, peer)
            if (link := transport.link_of(channel)) is not None:
                reserved = reserve(plan.chains(peer)[rank], moved or _always(largest[rank]))
                if (borrowed := _borrowed(reserved, link, channel, transport, in_bytes=in_bytes)) is not None:
                    self.stores[peer] = borrowed
        for channel, reserved in lent.items():  # behind the loop above, in which the other ranks answer
            shared = self.remote_buffers[channel.src]
            if isinstance(shared, SharedBuffers) and not is_taken(shared, channel, transport):
                self.remote_buffers[channel.src] = RemoteBuffers(reserved, device, in_bytes=in_bytes)
        self.host_buffers = None
        if of_host:
            stream = streams.of(("host", rank), device)
            self.stores[HOST] = self.host_buffers = HostBuffers(reserve(of_host, moved or slot), device, stream, in_bytes=in_bytes)
        if is_asynchronous(device):
            self._make_buffers(rank, device, streams)
        self.planned = None if plan.sizes is None or self.grows else plan.sizes.moved

    def _make_buffers(self, rank: int, device: torch.device, streams: Streams) -> None:
        """Make those buffers whose sizes are known, each on the stream that uses it."""
        for peer, remote_buffers in self.served().items():
            with on_stream(streams.of(serving(rank, peer), device)):
                remote_buffers.make()
        if self.host_buffers is not None:
            self.host_buffers.make()

    def clear(self) -> None:
        """Free the memory of all buffers; what is lent to an evictor, as soon as that gives it back."""
        self._give_back()
        for remote_buffers in self.remote_buffers.values():
            remote_buffers.clear()

    def _give_back(self) -> None:
        for store in self.stores.values():
            store.clear()
        self.stores = {}

    def reclaim(self, transport: Transport) -> None:
        """Wait until evictors have given back what this rank has lent them on its device, if anything.

        Raises:
            CommError: another rank has failed meanwhile, or an evictor does not give it back in time.
        """
        lent = {peer: buffers for peer, buffers in self.remote_buffers.items() if isinstance(buffers, LentBuffers)}
        for buffers in lent.values():
            buffers.recall()
        for peer, buffers in lent.items():
            transport.wait_for(f"rank {peer} has not given back the memory that it uses on this rank's device", buffers.wait)

    def served(self) -> dict[int, RemoteBuffers]:
        """Return the buffers of the evictors that do not reach them, by evictor: this rank receives and returns for them."""
        return {peer: buffers for peer, buffers in self.remote_buffers.items() if isinstance(buffers, RemoteBuffers)}

    def kind(self, kind: Kind) -> Known | None:
        """Return what is known about a kind, and mark it as the most recently used."""
        if kind in self.kinds:
            self.kinds[kind] = self.kinds.pop(kind)
        return self.kinds.get(kind)

    def tidy(self) -> None:
        """Forget the least recently used kinds, if there are too many; call it between steps, when no microbatch is in flight."""
        for kind in list(self.kinds)[:-REMEMBERED_KINDS]:
            del self.kinds[kind]

    @property
    def remote_buffer_bytes(self) -> int:
        return sum(remote_buffers.num_bytes for remote_buffers in self.remote_buffers.values())

    @property
    def host_bytes(self) -> int:
        """The bytes of the host's buffers, and of those that stand in for buffers on another rank's device."""
        return sum(store.host_bytes for store in self.stores.values())


def _always(num_bytes: int) -> Callable[[Action], int]:
    return lambda action: num_bytes


def _lendable(reserved: Reserved, channel: Channel, transport: Transport, *, in_bytes: bool) -> SharedBuffers | LentBuffers | None:
    """Return buffers for an evictor that reaches this rank's memory, which it gets to know; None if there is no such memory."""
    if (link := transport.link_of(channel)) is None:
        return None
    if not is_asynchronous(transport.device):
        return offer(reserved, link, channel, in_bytes=in_bytes)
    buffers = LentBuffers(reserved, transport.device, transport.control.activity)
    with buffers.offered() as lent:
        link.export_memory(lent)
    return buffers


def _borrowed(reserved: Reserved, link: LocalLink, channel: Channel, transport: Transport, *, in_bytes: bool) -> Store | None:
    """Return what keeps microbatches in an acceptor's memory, which this rank reaches; None if there is no such memory."""
    device = transport.device
    if (stream := transport.streams.of(("borrowed", channel), device)) is None:
        return accept_offer(reserved, link, channel, transport, in_bytes=in_bytes)
    return DevicePeerMemory(
        reserved, imported(link, channel, transport), device, stream, transport.control.activity, f"rank {channel.dst}"
    )
