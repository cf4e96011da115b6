"""No more of NCCL's transfers at a time than a device has room for: each keeps multiprocessors busy until its other end comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__: list[str] = []

TRANSFERS_AT_ONCE = 8


class InFlight:
    """The transfers that a rank has issued and that are not over, in the order of issue.

    One starts once all but the latest few before it are over. As both ends of a transfer are issued at one moment of a global order
    (`schedules.issue_order`), the first one that is not over has room at both its ends.

    Args:
        device: where they run.
        at_once: how many may be in flight.
    """

    def __init__(self, device: torch.device, at_once: int) -> None:
        self._device, self._at_once = device, at_once
        self._works: deque[Any] = deque()  # the last one of each
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def next(self) -> Iterator[list[Any]]:
        """Inside, the works of one transfer are posted and put into the list, on a stream that waits for room."""
        works: list[Any] = []
        if self.number() < self._at_once:
            yield works
        else:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._works[-self._at_once].wait()
                yield works
        self._works.extend(works[-1:])

    def number(self) -> int:
        """How many are not over, or wait for one that is not."""
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        return len(self._works)
