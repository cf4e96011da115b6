"""The keys that a rank writes to the store of its process group, removed when nobody needs them: the store outlives a pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bpipe.environment import gloo_connects_late, gloo_interfaces

__all__: list[str] = []


class WrittenKeys:
    """The keys of one rank that are still in a store."""

    def __init__(self) -> None:
        self._keys: list[tuple[Any, str]] = []
        self._late: list[tuple[Any, str]] = []  # that others may read as long as the pipeline is open
        self._removing: list[threading.Thread] = []

    def add(self, store: Any, key: str) -> None:
        """Take note of a key that this rank writes."""
        self._keys.append((store, key))

    def add_gloo(self, store: Any, rank: int) -> None:
        """Take note of the keys that gloo writes for a rank of one group: one for each network interface that it uses.

        Where gloo connects late, it may read them at any time, so they stay until the pipeline is closed.
        """
        written = [(store, f"{interface}/{rank}") for interface in range(max(1, len(gloo_interfaces())))]
        (self._late if gloo_connects_late() else self._keys).extend(written)

    def remove(self, most_s: float = 0.0) -> None:
        """Remove the keys that nobody needs any longer, in a thread, because the host of the store may be frozen.

        Args:
            most_s: how long to wait for it, so that a pipeline that is made next can write the same keys.
        """
        if self._keys:
            keys, self._keys = self._keys, []
            thread = threading.Thread(target=_remove, args=(keys,), name="bpipe-store-keys", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can start: the keys stay until the next time, or in the store, where they harm nobody
                self._keys = keys
                return
            self._removing.append(thread)
            thread.join(most_s)

    def remove_all(self) -> None:
        """Begin to remove all keys, because this rank closes the pipeline."""
        self._keys, self._late = self._keys + self._late, []
        self.remove()

    def wait(self, most_s: float) -> None:
        """Wait until the keys are removed, but no longer than so many seconds."""
        until = time.monotonic() + most_s
        for thread in self._removing:
            thread.join(max(0.0, until - time.monotonic()))
        self._removing = [thread for thread in self._removing if thread.is_alive()]


def _remove(keys: Sequence[tuple[Any, str]]) -> None:
    """Remove keys. One that the store has lost in the meantime is none to remove."""
    with suppress(RuntimeError):  # the rank that hosts the store has ended
        for store, key in keys:
            store.delete_key(key)
