"""Give every rank's bytes to all in log2 p rounds; what all ranks gave the last time is not sent again.

In each round a rank sends what it knows of the ranks up to itself, and gets the same from ranks before it; `links.py` tells which
ranks these are. Only ranks that give something else than they did in an earlier call have entries in a message. So, where nothing
has changed since then, the messages are a few bytes long whatever the number of ranks, and are as good as a barrier.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from bpipe._version import __version__
from bpipe.comm.health.collective import DOING, Collective
from bpipe.comm.health.effects import Send
from bpipe.comm.health.links import strides
from bpipe.comm.wire.codec import MAX_BYTES
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import CommError

__all__: list[str] = []

HEAD = struct.Struct("<B?QI")  # call, whether this part is the last, number of the earlier call, number of entries
ENTRY = struct.Struct("<II")  # rank, number of bytes, which follow
PART_BYTES = 2**22  # a part with this many bytes gets no further entry

# The most bytes that a rank gives to a call: records, sizes of stages or a reason; and a trace, of which all ranks together bound
# how much each may give, because every rank holds what all give. So a message also has few parts, however many ranks it tells of.
MOST_TOGETHER = 2**30
MAX_GIVEN: dict[int, int] = {
    Collective.STEP: MAX_BYTES,
    Collective.PLAN: 2**24,
    Collective.TRACE: MAX_BYTES,
    Collective.GATHER: MOST_TOGETHER,
    Collective.CONNECT: MAX_BYTES,
    Collective.RESULT: 2**24,
}


def most_given(call: int, size: int) -> int:
    """Return the most bytes that one of `size` ranks gives to a call; 0 if there is no such call."""
    return min(MAX_GIVEN.get(call, 0), MOST_TOGETHER // size)


def most_in_part(call: int, size: int) -> int:
    """Return the most bytes of one part of a message."""
    return HEAD.size + PART_BYTES + ENTRY.size + most_given(call, size)


def most_in_parts(call: int, num_told: int, size: int) -> int:
    """Return the most bytes of all parts of a message together that tells of so many ranks."""
    return HEAD.size + num_told * (HEAD.size + ENTRY.size + most_given(call, size))


@cache
def longest(num_told: int, size: int, *, traces: bool) -> int:
    """Return the most bytes of all parts of a message together, whatever the call, but for a trace unless there may be one."""
    return max(most_in_parts(call, num_told, size) for call in Collective if traces or call is not Collective.GATHER)


class Given(NamedTuple):
    """What all ranks gave to a call, by rank, and the number of that call; there is none before the first one."""

    number: int = 0
    data: tuple[bytes, ...] = ()


class Part(NamedTuple):
    """A rank's message of one round, or a part of it.

    Args:
        call: what the rank makes.
        earlier: the number of the call in which the ranks without an entry gave the same; 0 if all have one.
        entries: what the other ranks give.
        is_last: whether no other part follows.
    """

    call: int
    earlier: int
    entries: Mapping[int, bytes] = {}
    is_last: bool = True

    def pack(self) -> bytes:
        entries = b"".join([ENTRY.pack(rank, len(data)) + data for rank, data in self.entries.items()])
        return HEAD.pack(self.call, self.is_last, self.earlier, len(self.entries)) + entries

    @classmethod
    def unpack(cls, body: bytes, size: int) -> Part:
        """Read what `pack` wrote, in a pipeline of `size` ranks.

        Raises:
            CommError: the bytes are not a part, or of a call that there is not.
        """
        entries: dict[int, bytes] = {}
        try:
            call, is_last, earlier, number = HEAD.unpack_from(body)
            end = HEAD.size
            for _ in range(number):
                rank, length = ENTRY.unpack_from(body, end)
                end += ENTRY.size + length
                entries[rank] = body[end - length : end]
        except struct.error:
            end = -1
        if end != len(body) or (entries and max(entries) >= size):
            raise CommError(f"{len(body)} bytes are not what ranks of a pipeline of {size} give to a call")
        if call not in MAX_GIVEN:
            raise CommError(f"a call of kind {call}, which bpipe {__version__} lacks: install the same version on all ranks")
        return cls(call, earlier, entries, is_last)

    def followed_by(self, part: Part) -> Part:
        """Return this part and the next one in one.

        Raises:
            CommError: they do not belong together.
        """
        if self.is_last or part[:2] != self[:2]:
            raise CommError("a rank gives something to a call twice")
        return part._replace(entries={**self.entries, **part.entries})


class AllGather:
    """One rank's part in a collective call.

    Args:
        rank: this rank of `size`.
        number: the call's.
        data: what this rank gives.
        earlier: what all ranks gave to an earlier call.

    Raises:
        CommError: this rank gives too much.

    Attributes:
        num_known: of how many ranks, up to this one, it is known what they give.
    """

    def __init__(self, rank: int, size: int, call: Collective, number: int, data: bytes, earlier: Given) -> None:
        if len(data) > (most := most_given(call, size)):
            shorter = ": trace fewer steps" if call is Collective.GATHER else ""
            raise CommError(
                f"{len(data)} bytes are more than rank {rank} of {size} can say when it {DOING[call]}, which is {most}{shorter}"
            )
        self.call, self.number = call, number
        self._rank, self._size, self._earlier = rank, size, earlier
        self._entries = {} if earlier.number and earlier.data[rank] == data else {rank: data}
        self._rounds = iter(strides(size))
        self._strides: tuple[int, ...] | None = ()  # of the round under way; None if all are over
        self.num_known = 1

    def begin(self) -> list[Send]:
        """Return what to send in the first round."""
        self._strides = next(self._rounds)
        return self._message(self._strides)

    def go_on(self, parts: Mapping[int, Part]) -> list[Send]:
        """Go on as far as is possible with the messages that have come, by rank, and return what to send.

        Raises:
            CommError: one of them leaves out a rank.
        """
        sends: list[Send] = []
        while self._strides is not None:
            for stride in self._strides:
                part = parts.get((self._rank - stride) % self._size)
                if part is None or not part.is_last:
                    return sends
            num_sent = self._num_sent(self._strides)
            for stride in self._strides:
                source = (self._rank - stride) % self._size
                self._take_in(source, num_sent, parts[source])
            self.num_known += num_sent * len(self._strides)
            self._strides = next(self._rounds, None)
            if self._strides is not None:
                sends += self._message(self._strides)
        return sends

    @property
    def is_in_last_round(self) -> bool:
        """Whether this rank has sent all that it has to send."""
        return self._strides is None or self._strides is strides(self._size)[-1]

    def _num_sent(self, strides: tuple[int, ...]) -> int:
        """Return of how many ranks a message tells: in the last round only of those that are not known yet."""
        return min(self.num_known, self._size - strides[-1])

    def _take_in(self, source: int, num_ranks: int, part: Part) -> None:
        if part.earlier != self._earlier.number or not part.earlier:
            missing = {rank % self._size for rank in range(source - num_ranks + 1, source + 1)} - part.entries.keys()
            if missing:
                raise CommError(f"it says that rank {min(missing)} gives the same as in call {part.earlier}, which is unknown here")
        self._entries.update(part.entries)

    def _message(self, strides: tuple[int, ...]) -> list[Send]:
        to, num_ranks = [(self._rank + stride) % self._size for stride in strides], self._num_sent(strides)
        entries = {rank: data for rank, data in self._entries.items() if (self._rank - rank) % self._size < num_ranks}
        parts = _in_parts(self.call, self._earlier.number, entries) if entries else [Part(self.call, self._earlier.number)]
        return [Send(Frame(Kind.CALL, self.number, part.pack()), to) for part in parts]

    def result(self) -> Given | None:
        """Return what all ranks give; None if that is not known yet."""
        if self.num_known < self._size:
            return None
        if not self._entries:
            return self._earlier._replace(number=self.number)
        return Given(self.number, tuple([self._of(rank) for rank in range(self._size)]))

    def _of(self, rank: int) -> bytes:
        given = self._entries.get(rank)
        return self._earlier.data[rank] if given is None else given


def _in_parts(call: int, earlier: int, entries: Mapping[int, bytes]) -> Iterator[Part]:
    """Yield a message in parts, none of which is much longer than one entry."""
    part: dict[int, bytes] = {}
    num_bytes = 0
    for rank, data in entries.items():
        if num_bytes >= PART_BYTES:
            yield Part(call, earlier, part, is_last=False)
            part, num_bytes = {}, 0
        part[rank] = data
        num_bytes += ENTRY.size + len(data)
    yield Part(call, earlier, part)
