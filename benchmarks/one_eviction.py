"""What one eviction takes by itself, beside a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.alternate import Step
from benchmarks.gpu import device_us
from bpipe.comm.transport.in_process import LoopbackTransport, Wires
from bpipe.device import Streams
from bpipe.memory.host_buffers import HostBuffers
from bpipe.memory.remote_buffers import RemoteBuffers
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.stash import Stash
from bpipe.plan.reserved import Reserved
from bpipe.schedules import Channel, Purpose


def alone(module: nn.Module, x: torch.Tensor, *, to_host: bool) -> dict[str, float | None]:
    """A forward of a stage, and an eviction of what it saves, each with the device to itself.

    Args:
        module: the stage.
        x: its input, which needs a gradient.
        to_host: or to the buffers of a peer in a loopback.
    """
    forward_us = device_us(lambda: module(x), x.device)
    stash = Stash("a microbatch", {}, x.device)
    with stash.capture():
        output = module(x)
    bundle = Bundle(stash.send_away(stash.contents(), 0), stash.name)
    evict_us = device_us(eviction(bundle.messages(), x.device, to_host=to_host), x.device)
    del output  # its graph owned what was saved
    gb_s = None if evict_us is None else bundle.num_bytes / evict_us / 1000
    return {"forward_us": forward_us, "evict_us": evict_us, "gb_s": gb_s}


def eviction(messages: Sequence[torch.Tensor], device: torch.device, *, to_host: bool) -> Step:
    """A call that copies messages to the buffers of a peer or of the host, and lets the stream wait for it."""
    remote, sizes = (0, 0, 0), [len(message) for message in messages]
    reserved = Reserved((sum(sizes),), {remote: 0})
    if to_host:
        host = HostBuffers(reserved, device, Streams().of("host", device), in_bytes=True)
        return lambda: host.put(remote, messages).wait()
    parts, wires = RemoteBuffers(reserved, device, in_bytes=True).take(remote, sizes), Wires()
    evictor, acceptor = LoopbackTransport(wires, device), LoopbackTransport(wires, device)

    def over_the_device() -> None:
        channel = Channel(Purpose.EVICT, 0, 1)
        for transfer in [evictor.send(channel, messages), acceptor.receive(channel, parts)]:
            transfer.wait()

    return over_the_device
