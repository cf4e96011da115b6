"""Strangers by hundreds at the ports of ranks that open channels: nobody is held up by more than 0.1 s, and all channels open."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from statistics import median

import pytest

from bpipe.comm.health.collective import Collective
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.transport.connect import open_connections
from bpipe.comm.wire.codec import decode
from tests.attacks.strangers import WORDS, Place, Words, strangers_at
from tests.comm.meetings import quietly, together
from tests.comm.test_connect import HERE, TOKEN, Line, Together
from tests.patience import PATIENCE_S
from tests.tries import holds_in_one_try

SIZE = 3
TIMES = 5
ENDS = [(one, other) for one in range(SIZE) for other in range(SIZE) if one != other] * 2
MOST_SLOWER_S = 0.1
MANY = 300  # who come before any rank does
SECRETS = (b"", b"open sesame")


class Besieged(Line):
    """A line to the other ranks. Rank 0 is late, so that strangers who know the others' ports come before the ranks."""

    def __init__(self, group: Together, rank: int, places: list[Place], first: Sequence[bytes], stack: ExitStack) -> None:
        super().__init__(group, rank, [])
        self._places, self._first, self._stack = places, first, stack

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        endpoint = decode(Endpoint, data, "endpoint")
        if self._rank == 0 and self._first:
            while len(self._places) < SIZE - 1:
                time.sleep(0.001)
            for place, words in zip(self._places * len(self._first), self._first):
                stranger = self._stack.enter_context(socket.create_connection(place))
                with suppress(OSError):
                    stranger.sendall(words)
        self._places += endpoint.places
        told = super().exchange(call, data)
        self.all_came_s = time.monotonic()
        return told


def open_all(secret: bytes, places: list[Place], first: Sequence[bytes] = ()) -> float:
    """Open channels, try each of them, and return how long opening took once all ranks had come."""
    group, times = Together(SIZE), list[float]()

    def on_rank(stack: ExitStack, rank: int) -> dict[int, socket.socket]:
        line = Besieged(group, rank, places, first, stack)
        found = open_connections(ENDS, rank, HERE, TOKEN, line, quietly, secret=secret)
        times.append(time.monotonic() - line.all_came_s)
        return found

    with ExitStack() as stack:
        found = together([partial(on_rank, stack, rank) for rank in range(SIZE)])
    assert all(isinstance(one, dict) for one in found), found
    for index, (one, other) in enumerate(ENDS):
        with found[one][index] as ours, found[other][index] as theirs:
            theirs.settimeout(PATIENCE_S)
            ours.sendall(b"%d" % index)
            assert theirs.recv(10) == b"%d" % index
    return max(times)


@contextmanager
def without_limit(places: list[Place], words: Words) -> Iterator[list[int]]:
    """Strangers who come all the time, from more than one thread."""
    with ExitStack() as stack:
        accepted = [stack.enter_context(strangers_at(lambda: list(places), lambda _: words())) for _ in range(2)]
        total = list[int]()
        stack.callback(lambda: total.extend(one for each in accepted for one in each))
        yield total


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("kind", WORDS)
def test_strangers_slow_no_opening(kind: str, secret: bytes) -> None:
    holds_in_one_try(partial(slower_s, kind, secret), lambda slower: slower < MOST_SLOWER_S)


def slower_s(kind: str, secret: bytes) -> float:
    quiet, disturbed, num_strangers = [], [], 0
    for _ in range(TIMES):
        quiet.append(open_all(secret, []))
        places: list[Place] = []
        with without_limit(places, WORDS[kind]) as accepted:
            disturbed.append(open_all(secret, places))
        num_strangers += len(accepted)
    print(f"{num_strangers} strangers; quiet {median(quiet):.3f} s, disturbed {median(disturbed):.3f} s")
    assert num_strangers >= TIMES
    return median(disturbed) - median(quiet)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("kind", ["silent", "partial", "garbage", "another meeting's hello"])
def test_hundreds_who_come_first_slow_no_opening(kind: str, secret: bytes) -> None:
    """More than may wait to be accepted, and than are kept; the ranks come behind them."""
    first = [b"".join(WORDS[kind]()) for _ in range(MANY)]
    holds_in_one_try(
        lambda: sorted(open_all(secret, [], first) for _ in range(3)), lambda took_s: took_s[1] < MOST_SLOWER_S
    )
