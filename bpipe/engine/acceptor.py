"""The acceptor's side: receive evicted microbatches, store them, and return them, independently of this rank's computations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from bpipe.comm.health.activity import place_of
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.device import Stream, on_stream
from bpipe.engine.microbatch_state import MicrobatchState, PostedTransfer, StoredPart
from bpipe.engine.traffic import Traffic
from bpipe.memory.remote_buffers import RemoteBuffers
from bpipe.plan.action import Action, Op, channel_of

__all__: list[str] = []


class Acceptor:
    """The remote activations from one evictor during one step.

    Args:
        traffic: the transfers with this evictor, separate from the rank's others because another thread may run them.
        remote_buffers: the memory in which its microbatches are stored.
    """

    def __init__(self, traffic: Traffic, remote_buffers: RemoteBuffers) -> None:
        self._traffic, self._buffers = traffic, remote_buffers
        self.microbatches = traffic.microbatches

    def accept(self, action: Action, state: MicrobatchState) -> None:
        channel, remote = channel_of(action.op, self._traffic.rank, action.peer), action[1:4]
        data = self._traffic.transport.receive_header(channel)
        sizes = header.unpack_eviction(data, Subject(self._traffic.step, action.stage, action.microbatch), action.part)
        messages = self._buffers.take(remote, sizes)
        transfer = PostedTransfer(self._traffic.transport.receive(channel, messages))
        state.stored[action.part] = StoredPart(messages, {(action.op, action.part): transfer})

    def return_(self, action: Action, state: MicrobatchState) -> None:
        channel, stored = channel_of(action.op, self._traffic.rank, action.peer), state.stored[action.part]
        stored.transfers[action.op, action.part] = PostedTransfer(self._traffic.transport.send(channel, stored.messages))

    def complete(self, action: Action, state: MicrobatchState) -> None:
        """Wait for what an action has begun."""
        self._traffic.wait(state.stored[action.part].transfers, action)
        if action.op is Op.WAIT_RETURN:
            del state.stored[action.part]


class AcceptorThread(threading.Thread):
    """A thread that serves one evictor during a step. It runs none of the user's code.

    Args:
        execute: runs one action.
        chain: the actions for this evictor, in order.
        stream: on an asynchronous device, the stream of this evictor's buffers and transfers.
        control: gets this thread's position and its errors.
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
