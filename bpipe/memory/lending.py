"""Agree which acceptors lend memory to which evictors, before the step that uses it.

An acceptor says whether it has the memory, and the evictor whether it reaches it. If one of them cannot, both know, and what the
evictor keeps there travels like any message.
"""

from __future__ import annotations

from functools import partial

from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.transport.base import Transport
from bpipe.logs import warn_not_shared
from bpipe.memory.shared_buffers import PeerMemory, SharedBuffers
from bpipe.memory.shared_file import Lent, NoSharedMemoryError, SharedFile
from bpipe.plan.reserved import Reserved
from bpipe.schedules import Channel

__all__: list[str] = []


def offer(reserved: Reserved, link: LocalLink, channel: Channel, *, in_bytes: bool) -> SharedBuffers | None:
    """Reserve memory for the evictor of a channel, and offer it; return None if there is none. Does not wait for the evictor."""
    try:
        buffers = SharedBuffers(reserved, in_bytes=in_bytes)
        buffers.reserve()
    except NoSharedMemoryError as error:
        link.send_text(error.why)
        warn_not_shared(channel.dst, error.why)
        return None
    link.send_text("")
    link.export_memory([Lent(buffers.file.descriptor)])
    return buffers


def accept_offer(
    reserved: Reserved, link: LocalLink, channel: Channel, transport: Transport, *, in_bytes: bool
) -> PeerMemory | None:
    """Take what the acceptor of a channel offers, and say whether this rank reaches it; return None if it does not."""
    if why := _answer(link, channel, transport):
        warn_not_shared(channel.src, f"rank {channel.dst} says that {why}")
        return None
    try:
        lent = imported(link, channel, transport)
        buffers = SharedBuffers(reserved, SharedFile(lent.descriptor), in_bytes=in_bytes)
        buffers.map()
    except NoSharedMemoryError as error:
        link.send_text(error.why)
        warn_not_shared(channel.src, error.why)
        return None
    link.send_text("")
    return PeerMemory(buffers, f"rank {channel.dst}")


def is_taken(buffers: SharedBuffers, channel: Channel, transport: Transport) -> bool:
    """Wait until the evictor of a channel has said whether it reaches these buffers; free them if it does not."""
    link = transport.link_of(channel)
    assert link is not None, "memory was offered over it"
    if why := _answer(link, channel, transport):
        buffers.clear()
        warn_not_shared(channel.dst, f"rank {channel.src} says that {why}")
    return not why


def imported(link: LocalLink, channel: Channel, transport: Transport) -> Lent:
    """Wait for the memory that the acceptor of a channel lends."""
    (lent,) = transport.wait_for(f"memory for {transport.named(channel)} has not come", partial(link.import_memory, 1))
    return lent


def _answer(link: LocalLink, channel: Channel, transport: Transport) -> str:
    what = f"the other rank has not said whether {transport.named(channel)} go through memory that both share"
    return transport.wait_for(what, link.receive_text)
