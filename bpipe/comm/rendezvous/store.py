"""Requests to the store of torch.distributed, through which ranks find each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bpipe.comm.rendezvous.shortage import named
from bpipe.errors import BPipeError, CommError, format_error, printable

__all__: list[str] = []

ABSENT = "absent"  # no value of bpipe's is that
MOST_SHOWN = 300  # characters of torch's error, which has a C++ stack trace


def read(store: Any, key: str) -> bytes | None:
    """Return what a key of the store has, or None if there is no such key: `get` would wait for a key that is removed meanwhile."""
    data: bytes = store.compare_set(key, ABSENT, ABSENT)
    return None if data == ABSENT.encode() else data


@contextmanager
def using_store() -> Iterator[None]:
    """Make requests to the store inside this context.

    Raises:
        CommError: the store does not answer, or this rank has run out of descriptors, memory or threads.
    """
    try:
        yield
    except BPipeError:
        raise
    except RuntimeError as error:
        if (shortage := named(error)) is not None:
            raise shortage from error
        raise CommError(
            "the store of torch.distributed does not answer, so the ranks cannot find each other: the process that hosts it, "
            f"usually rank 0 or torchrun, has probably ended ({printable(format_error(error))[:MOST_SHOWN]})"
        ) from error
