"""Agree which acceptors lend memory to which evictors, before the step that uses it.

An acceptor says whether it has the memory, and the evictor whether it reaches it. If one of them cannot, both know, and what the
evictor keeps there travels like any message.
"""

from __future__ import annotations

from bpipe.comm.transport.base import Transport
from bpipe.logs import warn_not_shared
from bpipe.memory.shared_buffers import PeerMemory, SharedBuffers
from bpipe.memory.shared_file import Lent, NoSharedMemoryError, SharedFile
from bpipe.plan.reserved import Reserved
from bpipe.schedules import Channel

__all__: list[str] = []


def offer(reserved: Reserved, channel: Channel, transport: Transport, *, in_bytes: bool) -> SharedBuffers | None:
    """Reserve memory for the evictor of a channel, and offer it; return None if there is none. Does not wait for the evictor."""
    try:
        buffers = SharedBuffers(reserved, in_bytes=in_bytes)
        buffers.reserve()
    except NoSharedMemoryError as error:
        transport.say(channel, error.why)
        warn_not_shared(channel.dst, error.why)
        return None
    transport.say(channel, "")
    transport.lend(channel, [Lent(buffers.file.descriptor)])
    return buffers


def accept_offer(reserved: Reserved, channel: Channel, transport: Transport, *, in_bytes: bool) -> PeerMemory | None:
    """Take what the acceptor of a channel offers, and say whether this rank reaches it; return None if it does not."""
    if why := transport.hear(channel):
        warn_not_shared(channel.src, f"rank {channel.dst} says that {why}")
        return None
    try:
        (lent,) = transport.borrow(channel, 1)
        buffers = SharedBuffers(reserved, SharedFile(lent.descriptor), in_bytes=in_bytes)
        buffers.map()
    except NoSharedMemoryError as error:
        transport.say(channel, error.why)
        warn_not_shared(channel.src, error.why)
        return None
    transport.say(channel, "")
    return PeerMemory(buffers, f"rank {channel.dst}")


def is_taken(buffers: SharedBuffers, channel: Channel, transport: Transport) -> bool:
    """Wait until the evictor of a channel has said whether it reaches these buffers; free them if it does not."""
    if why := transport.hear(channel):
        buffers.clear()
        warn_not_shared(channel.dst, f"rank {channel.src} says that {why}")
    return not why
