"""Put all ranks on one clock: bound the difference between two ranks' clocks by what their readings prove.

In every round each rank reads its clock, all exchange their readings, and each reads its clock again. No rank has
everybody's reading before everybody has read, so any rank's first reading happened before any other's second one. With
rank 0's clock as the true one, and r's clock ahead of it by o_r (readings a_r before the exchange, b_r after it):

    a_0 < b_r - o_r    so  o_r < b_r - a_0
    a_r - o_r < b_0    so  o_r > a_r - b_0

The bounds of all rounds hold together, for any delays of the network. They hold for the time when they were taken:
afterwards the clocks of different machines drift apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from bpipe.comm.health.collective import Collective
from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import AgreementError

__all__: list[str] = []

NUM_ROUNDS = 8
TOKEN_BYTES = 16

Readings = Sequence[tuple[int, int]]  # before and after each exchange, in nanoseconds
Exchange = Callable[[Collective, bytes], list[bytes]]


class Offset(NamedTuple):
    """The lead of a rank's clock over rank 0's, and its largest possible error."""

    offset_ns: int
    error_ns: int


class Clocks(NamedTuple):
    """The clocks of a pipeline's ranks, by rank of the group.

    Args:
        token: 16 bytes, the same on all ranks and never used again.
        plan_ranks: each one's rank in the plan.
        offsets: the offset of each rank's clock.
        zero_ns: an early reading of rank 0's clock; all times count from it.
    """

    token: bytes
    plan_ranks: tuple[int, ...]
    offsets: tuple[Offset, ...]
    zero_ns: int


class Reading(NamedTuple):
    """The frame that a rank sends in a round."""

    token: bytes
    fingerprint: str
    plan_rank: int
    before_ns: int
    previous_after_ns: int


def align(exchange: Exchange, fingerprint: str, plan_rank: int) -> Clocks:
    """Bound how far apart the ranks' clocks are. Collective; blocks for some milliseconds.

    Args:
        exchange: gives bytes to all ranks and returns theirs, as `Transport.exchange` does.
        fingerprint: of the plan, the same on all ranks.
        plan_rank: this rank's place in it.

    Raises:
        AgreementError: the ranks have different plans, or one of them cannot trace.
        CommError: an exchange failed.
    """
    token, previous = os.urandom(TOKEN_BYTES), 0
    rounds: list[list[Reading]] = []
    for _ in range(NUM_ROUNDS + 1):  # the last one only reports what the clocks read after the one before
        reading = Reading(token, fingerprint, plan_rank, time.perf_counter_ns(), previous)
        packed = exchange(Collective.TRACE, encode(reading))
        previous = time.perf_counter_ns()
        rounds.append([decode(Reading, data, f"reading of rank {rank}'s clock") for rank, data in enumerate(packed)])
        _check(rounds[-1])
    readings = [
        [(now[rank].before_ns, then[rank].previous_after_ns) for now, then in pairwise(rounds)] for rank in range(len(rounds[0]))
    ]
    first = rounds[0]
    return Clocks(first[0].token, tuple(one.plan_rank for one in first), tuple(offsets(readings)), first[0].before_ns)


def _check(readings: Sequence[Reading]) -> None:
    for rank, reading in enumerate(readings):
        if reading.fingerprint != readings[0].fingerprint:
            raise AgreementError(f"ranks 0 and {rank} trace schedules with different plans: trace the same one on all ranks")


def offsets(readings: Sequence[Readings]) -> list[Offset]:
    """Compute the offset that the readings of all ranks prove for each one's clock, and its error.

    Two clocks that may agree are taken to be one, because clocks of different machines count from different starts and come
    that close only by chance, whereas the processes of one machine share a clock.
    """
    reference = readings[0]
    return [Offset(0, 0), *(_offset(reference, own) for own in readings[1:])]


def _offset(reference: Readings, own: Readings) -> Offset:
    least = max(before - after for (before, _), (_, after) in zip(own, reference))
    most = min(after - before for (_, after), (before, _) in zip(own, reference))
    offset = 0 if least <= 0 <= most else (least + most) // 2
    return Offset(offset, max(abs(most - offset), abs(offset - least)))
