"""The actions of a rank: operations on a microbatch of a stage, written in the field's notation (`2F0`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.flow.units import Units

__all__ = ["Action", "Channel", "Op", "Purpose"]


class Op(StrEnum):
    """An operation. Each transfer is started by one operation and completed by the one with the prefix `WAIT_`.

    Example:
        >>> str(Action(Op.EVICT, stage=0, microbatch=2)), Op("F") is Op.F
        ('0EVICT2', True)
    """

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # noqa: E741  input half of the backward, the field's name for it
    W = "W"  # backward for the weights
    FILL = "FILL"  # a piece of a fill job, in timelines; no plan has one
    R = "R"  # recomputation: the forward again, because the first one saved no activations
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    EVICT = "EVICT"  # send saved bytes to the acceptor
    LOAD = "LOAD"  # receive them back
    ACCEPT = "ACCEPT"  # the acceptor's end of an EVICT
    RETURN = "RETURN"  # the acceptor's end of a LOAD
    UNSHARD = "UNSHARD"  # gather a stage's weights (fully sharded data parallelism); for a stage, not for a microbatch
    RESHARD = "RESHARD"  # free the gathered weights
    # reduce a stage's gradients over the data-parallel replicas, or with a peer: exchange those of what a stage there has, too
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_RECV_B = "WAIT_RECV_B"
    WAIT_EVICT = "WAIT_EVICT"
    WAIT_LOAD = "WAIT_LOAD"
    WAIT_ACCEPT = "WAIT_ACCEPT"
    WAIT_RETURN = "WAIT_RETURN"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"  # with a peer: add up what both have

    __hash__ = str.__hash__  # Enum's own is a Python call, and plans hash millions of operations


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W, Op.R})
SHARDING = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD})  # for a stage, not for a microbatch
BACKWARD = frozenset({Op.B, Op.I})  # operations that need the gradient of a stage's outputs
SERVED = frozenset({Op.ACCEPT, Op.WAIT_ACCEPT, Op.RETURN, Op.WAIT_RETURN})

MOST_SHOWN = 40  # characters of what is not an action, in an error
HOST = -1  # as the peer of an eviction: this rank's own host memory

WAIT_OF = {op: Op["WAIT_" + op.value] for op in Op if "WAIT_" + op.value in Op.__members__}
START_OF = {wait: start for start, wait in WAIT_OF.items()}


class Purpose(StrEnum):
    """The kind of data that a channel carries.

    Example:
        >>> [purpose.name for purpose in Purpose][:2]
        ['FORWARD', 'BACKWARD']
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    EVICT = "evict"
    RETURN = "return"
    TWIN = "twin"

    __hash__ = str.__hash__


class Channel(NamedTuple):
    """A first-in-first-out queue from one rank to another, for one purpose.

    Example:
        >>> Action(Op.SEND_F, stage=0, microbatch=3, peer=1).channel(rank=0).purpose.name
        'FORWARD'
    """

    purpose: Purpose
    src: int
    dst: int


SENDS = {Op.SEND_F: Purpose.FORWARD, Op.SEND_B: Purpose.BACKWARD, Op.EVICT: Purpose.EVICT, Op.RETURN: Purpose.RETURN}
RECEIVES = {Op.RECV_F: Purpose.FORWARD, Op.RECV_B: Purpose.BACKWARD, Op.ACCEPT: Purpose.EVICT, Op.LOAD: Purpose.RETURN}

POSTS = frozenset({*SENDS, *RECEIVES})  # operations that start a transfer, without waiting for its end

# Each end names a message after its own stage: stage 1 sends `1SEND_F0`, stage 2 receives it as `2RECV_F0`.
RECEIVER_OF = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B, Op.EVICT: Op.ACCEPT, Op.RETURN: Op.LOAD}
OTHER_END = RECEIVER_OF | {receive: send for send, receive in RECEIVER_OF.items()}  # of each transfer, from either one
BETWEEN_STAGES = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
MESSAGES = BETWEEN_STAGES | {WAIT_OF[op] for op in BETWEEN_STAGES}

# The acceptor's operation for each operation of the evictor.
MIRROR = {Op.EVICT: Op.ACCEPT, Op.WAIT_EVICT: Op.WAIT_ACCEPT, Op.LOAD: Op.RETURN, Op.WAIT_LOAD: Op.WAIT_RETURN}


MicrobatchKey = tuple[int, int]  # stage, microbatch
PartKey = tuple[int, int, int]  # stage, microbatch, part; part 0 is the whole microbatch
OpKey = tuple[Op, int, int]  # operation, stage, microbatch
Identity = tuple[Op, int, int, int]  # operation, stage, microbatch, part


class Action(NamedTuple):
    """An operation on one microbatch of one stage, or on one slice of a microbatch where a plan cuts each into k slices.

    A message of skips, between stages that are no neighbours, names the stage at its other end: `0SEND_F3>5`, `5RECV_F3<0`. So does
    an exchange of gradients, except between twins: `0REDUCE_GRAD>5`, `5REDUCE_GRAD>0`.

    Its first four fields identify it within a plan, except for UNSHARD, RESHARD and REDUCE_GRAD without a peer, which concern a
    whole stage and may occur again.

    Args:
        op: the operation.
        stage: the stage's index.
        microbatch: its number; 0 if the operation concerns the whole stage. In a plan with k slices per microbatch it counts units:
            slice s of microbatch i is unit k*i + s (`PlanData.slices` has all that follows).
        part: for an eviction, the part of the microbatch's saved bytes that moves, from 1 on; 0 for all of them. For a message
            between stages that are no neighbours, and an exchange, one more than the stage at its other end; 0 between twins.
        peer: the rank at the other end of a transfer, or HOST for this rank's own host memory.

    Example:
        >>> str(Action(Op.EVICT, 0, 3, part=2, peer=7))
        '0EVICT3.2'
        >>> Action.parse("0EVICT3@7").peer
        7
    """

    op: Op
    stage: int
    microbatch: int
    part: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, units: int = 1) -> str:
        """Write the action without its peer; in a plan with several slices per microbatch, with the slice: `2F0/1`."""
        if self.op in SHARDING:
            return f"{self.stage}{self.op.value}{f'>{self.part - 1}' if self.part else ''}"
        return f"{self.stage}{self.op.value}{Units(units).text(self.microbatch)}{self._part_text if self.part else ''}"

    @property
    def _part_text(self) -> str:
        if self.op in MESSAGES:
            return f"{'>' if START_OF.get(self.op, self.op) in SENDS else '<'}{self.part - 1}"
        return f".{self.part}"

    @classmethod
    def parse(cls, text: str, units: int = 1) -> Action:
        """Read `2F0`, `2UNSHARD`, or `2EVICT0.1@5` with a part after the dot and the peer's rank, or `host`, after the @.

        Args:
            text: the action, which names a slice (`2F0/1`) if and only if a microbatch has several.
            units: how many a microbatch has, its slices.

        Raises:
            PlanError: the text is not an action of such a plan.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            expected = "expected a stage, an operation and a microbatch, such as 2F0 or 2EVICT0@5"
            raise PlanError(f"{text[:MOST_SHOWN]!r} is not an action: {expected}")
        stage, sharding, tied, rank, op, microbatch, place, part, arrow, other, peer = match.groups()
        if sharding is not None:
            return cls(Op(sharding), int(stage), 0, 0 if tied is None else int(tied) + 1, None if rank is None else int(rank))
        try:
            unit = Units(units).read(microbatch, place)
        except ValueError as error:
            raise PlanError(f"{text[:MOST_SHOWN]!r} is not an action {error}") from None
        number = int(part or 0) if other is None else int(other) + 1
        action = cls(Op(op), int(stage), unit, number, None if peer is None else HOST if peer == "host" else int(peer))
        if (arrow or (part and ".")) not in (None, action._part_text[0]):
            raise PlanError(f"{text[:MOST_SHOWN]!r} is not an action: expected such as 2EVICT0.1@5, 0SEND_F3>5 or 5RECV_F3<0")
        return action

    @property
    def key(self) -> MicrobatchKey:
        """The stage and the microbatch."""
        return self[1:3]

    @property
    def part_key(self) -> PartKey:
        """The stage, the microbatch and the part."""
        return self[1:4]

    @property
    def op_key(self) -> OpKey:
        """The operation, the stage and the microbatch: the same for all pieces of a computation."""
        return self[:3]

    @property
    def identity(self) -> Identity:
        """The fields that identify the action within a plan: all but the peer."""
        return self[:4]

    @property
    def start_identity(self) -> Identity:
        """The identity of the action that starts the transfer which this one completes.

        Raises:
            KeyError: the action does not complete a transfer.
        """
        return (START_OF[self[0]], *self[1:4])

    @property
    def is_post(self) -> bool:
        """Whether it starts a transfer with another rank or the host, without waiting for its end."""
        return self[0] in POSTS or self.is_exchange

    @property
    def is_exchange(self) -> bool:
        """Whether it starts to exchange gradients of its stage with another rank: a send and a receive."""
        return self[0] is Op.REDUCE_GRAD and self[4] is not None

    @property
    def at_peer(self) -> str:
        """The peer as it is written after the action; empty without one."""
        return "" if self.peer is None else f"@{'host' if self.peer == HOST else self.peer}"

    def channel(self, rank: int) -> Channel:
        """Return the channel that this transfer, seen from `rank`, uses.

        Raises:
            KeyError: the action does not start a transfer.
        """
        return channel_of(self.op, rank, self.peer)


@lru_cache(maxsize=4096)
def channel_of(op: Op, rank: int, peer: int | None) -> Channel:
    """Return the channel that a transfer with a peer, seen from `rank`, uses."""
    peer = -1 if peer is None else peer
    return Channel(SENDS[op], rank, peer) if op in SENDS else Channel(RECEIVES[op], peer, rank)


def _names(ops: Iterable[Op]) -> str:
    return "|".join(sorted((op.value for op in ops), key=len, reverse=True))


_NUMBER = r"\d{1,9}"
_PATTERN = re.compile(
    rf"({_NUMBER})(?:({_names(SHARDING)})(?:(?<=REDUCE_GRAD)>({_NUMBER}))?(?:@({_NUMBER}))?"
    rf"|({_names(set(Op) - SHARDING)})({_NUMBER})(?:/({_NUMBER}))?"
    rf"(?:\.({_NUMBER})|([<>])({_NUMBER}))?(?:@({_NUMBER}|host))?)",
    re.ASCII,
)
