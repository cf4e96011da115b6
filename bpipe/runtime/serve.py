"""The acceptor's side: take microbatches in, keep them, and return them, whatever this rank computes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from bpipe.comm import header
from bpipe.errors import CommError
from bpipe.memory.guests import Rooms
from bpipe.runtime.traffic import Traffic
from bpipe.schedules import Action
from bpipe.schedules.rooms import Guest

__all__: list[str] = []


class Acceptor:
    """The guests from one evictor during one step.

    Args:
        traffic: the transfers with this evictor, apart from the rank's others because another thread runs them.
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
        stream: on CUDA, the stream of this evictor's rooms and transfers.
    """

    def __init__(self, execute: Callable[[Action], None], chain: Sequence[Action], stream: torch.cuda.Stream | None) -> None:
        super().__init__(name=f"bpipe-serve-{chain[0].peer}", daemon=True)
        self._execute, self._chain, self._stream = execute, chain, stream
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for action in self._chain:
                    self._execute(action)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait until the evictor has everything back.

        Raises:
            CommError: serving failed; the original error is its cause.
        """
        self.join()
        if self._error is not None:
            raise CommError(f"serving rank {self._chain[0].peer} failed: {self._error}") from self._error
