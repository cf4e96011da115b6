"""The log lines of bpipe: all go to the logger "bpipe", each with the rank that writes it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

__all__: list[str] = []

LOG = logging.getLogger("bpipe")


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of one rank, by its number in the pipeline's group."""

    def __init__(self, rank: int) -> None:
        super().__init__(LOG)
        self._rank = rank

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of a message."""
        return f"rank {self._rank}: {msg}", kwargs


_SAID: set[str] = set()  # by this process: the subjects of warnings that come once


def warn_once(subject: str, message: str, *values: object) -> None:
    """Warn, for the first time in this process, of a subject."""
    if subject not in _SAID:
        _SAID.add(subject)
        LOG.warning(message, *values)


def warn_not_shared(rank: int, why: str) -> None:
    """Warn, for the first time in this process, that tensors do not travel through memory shared with a process of this host."""
    warn_once(
        "shared memory",
        "rank %d shares no memory with another process of this host, or less than it could: %s. Tensors travel over sockets "
        "instead, with the same results, and some 0.3 ms more of CPU time for each MiB. BPIPE_SHARED_MEMORY=0 asks for that, "
        "and ends this warning",
        rank,
        why,
    )
