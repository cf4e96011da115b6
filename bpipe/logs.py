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
