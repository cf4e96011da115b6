"""The word of a rank that gives up before it has met the others: it stands in the store, in place of the rank's endpoint.

A rank that has no connection, and maybe no descriptor to open one, can still use the store. Its word is for those whose names it
has read there, and these are new in each meeting: so none is told of a meeting that is over, though the store outlives it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from bpipe.comm.rendezvous.addresses import Endpoint, read_endpoint
from bpipe.comm.rendezvous.store import read
from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import CommError

__all__: list[str] = []

TELL_S = 5.0  # in which the other ranks come to their own meeting
LOOK_S = 0.02
MOST_TEXT = 1024


class Farewell(NamedTuple):
    """The word of a rank.

    Args:
        to: the names of those whom it is for.
        why: it gives up.
    """

    to: tuple[bytes, ...]
    why: str


def read_farewell(data: bytes) -> Farewell | None:
    """Return the word that a rank has written in place of its endpoint; None if it is something else."""
    with suppress(CommError):
        return decode(Farewell, data, "farewell")
    return None


def say_farewell(store: Any, key: str, rank: int, missing: Mapping[int, bool], why: str) -> None:
    """Tell ranks why this one gives up, and wait until they have gone, or for TELL_S.

    Args:
        store: a store of torch.distributed.
        key: the meeting's.
        rank: this rank.
        missing: whom to tell, and whether they have been seen in this meeting: of those, who is no longer there has gone.
        why: this rank gives up.
    """
    told: dict[int, bytes] = {}
    waiting, until = set(missing), time.monotonic() + TELL_S
    with suppress(RuntimeError):  # the store does not answer
        while waiting and time.monotonic() < until:
            for other in sorted(waiting):
                data = read(store, f"{key}/{other}")
                endpoint = None if data is None else _endpoint(data)
                if endpoint is not None and told.get(other) != endpoint.name:
                    told[other] = endpoint.name
                    store.set(f"{key}/{rank}", encode(Farewell(tuple(told.values()), why[:MOST_TEXT])))
                elif endpoint is None and (data is not None or other in told or missing[other]):  # it gives up, too
                    waiting.discard(other)
            time.sleep(LOOK_S)


def _endpoint(data: bytes) -> Endpoint | None:
    with suppress(CommError):
        return read_endpoint(data)
    return None
