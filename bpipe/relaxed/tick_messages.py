"""The messages of a stream: in each tick one over each channel, which is received in the next tick.

So no rank waits for an answer. The first message with tensors has a header that says what they are. From then on receives are
posted a tick ahead, and all messages are alike: where a tick has made nothing, zeros are sent. The note of each message says so,
and what call the sender made, so that ranks which make different calls notice it without a collective call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bpipe.comm.transport.base import Transfer, Transport
from bpipe.comm.wire.header import Subject, pack_spec, unpack_spec
from bpipe.comm.wire.message import MessageSpec, on_the_wire
from bpipe.device import check_fits
from bpipe.engine.messages import modified
from bpipe.engine.microbatch_state import Versions, versions_of
from bpipe.errors import AgreementError, CommError
from bpipe.schedules import Channel
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

NOTE = struct.Struct("<Q???")  # tick, whether it drains, whether it learns, whether it holds something; then a mark for each tensor
NOTHING = MessageSpec('{"value": null}', ())


class Call(NamedTuple):
    """What a rank is called for in a tick: all ranks make the same calls."""

    tick: int
    drains: bool
    learns: bool

    def __str__(self) -> str:
        return f"{'drains' if self.drains else 'pushes'} {'with' if self.learns else 'without'} learning in tick {self.tick}"


class Content(NamedTuple):
    """What a message holds."""

    spec: MessageSpec
    tensors: Sequence[torch.Tensor | None]  # dense ones; None for zeros
    marks: Sequence[bool]  # for each tensor whether it needs a gradient, or if it is one, whether there is one


class Outgoing:
    """The end of a channel that sends the results of a stage."""

    def __init__(self, transport: Transport, channel: Channel, stage: int) -> None:
        self.spec: MessageSpec | None = None  # of all messages; None until one has held something
        self._transport, self._channel, self._stage = transport, channel, stage
        self._owners: Sequence[torch.Tensor] = ()  # of the memory that is sent
        self._sent: tuple[Transfer, Versions] | None = None

    def send(self, call: Call, content: Content | None) -> None:
        """Post the message of a tick, which holds something or nothing; the one before must be complete."""
        header = None
        if self.spec is None:
            header = pack_spec(Subject(call.tick, self._stage, 0), NOTHING if content is None else content.spec)
            self.spec = None if content is None else content.spec
        metas = (self.spec or NOTHING).tensors
        given = [None] * len(metas) if content is None else content.tensors
        tensors = [
            meta.new(self._transport.device).zero_() if one is None else one for meta, one in zip(metas, given, strict=True) if meta
        ]
        note = NOTE.pack(*call, content is not None) + bytes([] if content is None else content.marks)
        views, versions = [on_the_wire(tensor) for tensor in tensors], versions_of(tensors)
        self._owners = [*tensors, *views]  # also if an error comes while it is posted
        self._sent = self._transport.send(self._channel, views, header, note, may_have_note=True), versions

    def complete(self) -> None:
        """Wait until the latest message is sent.

        Raises:
            StageError: it was changed meanwhile.
        """
        if self._sent is not None:
            transfer, versions = self._sent
            transfer.wait()
            self._sent, self._owners = None, ()
            for tensor, version in versions:
                if version_of(tensor) != version:
                    raise modified(f"stage {self._stage}", tensor)

    def finish(self) -> None:
        """Wait until the latest message is sent; the next one has a header again, because the stream has ended."""
        self.complete()
        self.spec = None


class Incoming:
    """The end of a channel that receives the results of a stage from a rank of the group."""

    def __init__(self, transport: Transport, channel: Channel, rank: int, stage: int) -> None:
        self._transport, self._channel, self._rank, self._stage = transport, channel, rank, stage
        self._spec: MessageSpec | None = None
        self._posted: tuple[MessageSpec, list[torch.Tensor | None], Transfer] | None = None

    def take(self, call: Call, *, is_last: bool = False) -> Content | None:
        """Wait for the message of a tick, with which the stream may end, and return what it holds, if it holds something.

        Raises:
            AgreementError: the sender was called for something else than this rank.
            CommError: the message is malformed.
        """
        if self._posted is None:
            subject = Subject(call.tick, self._stage, 0)
            spec = unpack_spec(self._transport.receive_header(self._channel), subject)
            check_fits(spec.num_bytes, self._transport.device, subject)
            self._post(spec)
        assert self._posted is not None
        (spec, tensors, transfer), self._posted = self._posted, None
        marks = marks_of(transfer.wait(), call, self._rank, len(tensors))
        if marks is not None:
            self._spec = spec
        if is_last:
            self._spec = None
        elif self._spec is not None:
            self._post(self._spec)
        return None if marks is None else Content(spec, tensors, marks)

    def _post(self, spec: MessageSpec) -> None:
        tensors, views = spec.new(self._transport.device)
        self._posted = spec, tensors, self._transport.receive(self._channel, views, may_have_note=True)


def marks_of(note: bytes | None, call: Call, rank: int, num_tensors: int) -> list[bool] | None:
    """Read the note of a rank's message: the mark of each tensor, or None if the message holds nothing.

    Raises:
        AgreementError: the sender was called for something else than this rank.
        CommError: the note is malformed.
    """
    if note is None or len(note) < NOTE.size:
        raise CommError(f"rank {rank} sent a message for tick {call.tick} without saying what it holds")
    *theirs, holds = NOTE.unpack_from(note)
    if (other := Call(*theirs)) != call:
        raise AgreementError(f"rank {rank} {other} while this one {call}: make the same calls on all ranks")
    marks = [mark != 0 for mark in note[NOTE.size :]]
    if len(marks) != (num_tensors if holds else 0):
        raise CommError(f"rank {rank} sent {len(marks)} marks for {num_tensors} tensors in tick {call.tick}")
    return marks if holds else None
