"""Requests to the store of torch.distributed, through which ranks find each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bpipe.errors import BPipeError, CommError, format_error, printable

__all__: list[str] = []

MOST_SHOWN = 300  # characters of torch's error, which has a C++ stack trace


@contextmanager
def using_store() -> Iterator[None]:
    """Make requests to the store inside this context.

    Raises:
        CommError: the store does not answer.
    """
    try:
        yield
    except BPipeError:
        raise
    except RuntimeError as error:
        raise CommError(
            "the store of torch.distributed does not answer, so the ranks cannot find each other: the process that hosts it, "
            f"usually rank 0 or torchrun, has probably ended ({printable(format_error(error))[:MOST_SHOWN]})"
        ) from error
