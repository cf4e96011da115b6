"""The acceptor's side: take microbatches in, keep them, and return them, whatever this rank computes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from bpipe.comm.health.activity import place_of
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.wire import header
from bpipe.device import Stream, on_stream
from bpipe.engine.traffic import Traffic
from bpipe.memory.remote_buffers import Rooms
from bpipe.plan.rooms import Guest
from bpipe.schedules import Action

__all__: list[str] = []


class Acceptor:
    """The guests from one evictor during one step.

    Args:
        traffic: the transfers with this evictor, apart from the rank's others because another thread may run them.
        rooms: where its microbatches are kept.
    """

    def __init__(self, traffic: Traffic, rooms: Rooms) -> None:
        self._traffic, self._rooms = traffic, rooms
        self._guests: dict[Guest, list[torch.Tensor]] = {}

    def accept(self, action: Action) -> None:
        channel, guest = self._traffic.channel(action), action[1:4]
        data = self._traffic.transport.receive_header(channel)
        sizes = header.unpack_eviction(data, self._traffic.subject(*guest[:2]), action.part)
        parts = self._guests[guest] = self._rooms.take(guest, sizes)
        self._traffic.posted(action, self._traffic.transport.receive(channel, parts))

    def complete_accept(self, action: Action) -> None:
        self._traffic.wait(action)

    def give_back(self, action: Action) -> None:
        parts = self._guests.pop(action[1:4])
        self._traffic.posted(action, self._traffic.transport.send(self._traffic.channel(action), parts))

    def complete_return(self, action: Action) -> None:
        self._traffic.wait(action)


class Server(threading.Thread):
    """Serves one evictor during a step. Runs none of the user's code.

    Args:
        execute: does one action.
        chain: the actions for this evictor, in order.
        stream: on an asynchronous device, the stream of this evictor's rooms and transfers.
        control: told of where it stands, and of what goes wrong.
    """

    def __init__(
        self, execute: Callable[[Action], None], chain: Sequence[Action], stream: Stream | None, control: ControlPlane
    ) -> None:
        assert chain[0].peer is not None
        super().__init__(name=f"bpipe-serve-{chain[0].peer}", daemon=True)
        self._execute, self._chain, self._stream, self._control, self._peer = execute, chain, stream, control, chain[0].peer
        self.start()

    def run(self) -> None:
        serving, position = self._control.activity.serving, 0
        try:
            with on_stream(self._stream):
                for position, action in enumerate(self._chain):
                    serving[self._peer] = position
                    self._execute(action)
        except BaseException as error:
            self._control.broke(error, place_of(self._chain[position]))
