"""The keys that a rank writes to the store of its process group, removed when nobody needs them: the store outlives a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bpipe.environment import gloo_connects_late, gloo_interfaces

__all__: list[str] = []


class WrittenKeys:
    """The keys of one rank that are still in a store."""

    def __init__(self) -> None:
        self._keys: list[tuple[Any, str]] = []
        self._removing: threading.Thread | None = None

    def add(self, store: Any, key: str) -> None:
        """Take note of a key that this rank writes."""
        self._keys.append((store, key))

    def add_gloo(self, store: Any, rank: int) -> None:
        """Take note of the keys that gloo writes for a rank of one group: one for each network interface that it uses.

        Where gloo connects late, it may read them at any time, so they stay.
        """
        if not gloo_connects_late():
            self._keys += [(store, f"{interface}/{rank}") for interface in range(max(1, len(gloo_interfaces())))]

    def remove(self) -> None:
        """Begin to remove the keys, in a thread, because a store whose host is frozen would hold up the caller for minutes."""
        if self._keys:
            keys, self._keys = self._keys, []
            self._removing = threading.Thread(target=_remove, args=(keys,), name="bpipe-store-keys", daemon=True)
            self._removing.start()

    def wait(self, most_s: float) -> None:
        """Wait until the keys are removed, but no longer than so many seconds."""
        if self._removing is not None:
            self._removing.join(most_s)


def _remove(keys: Sequence[tuple[Any, str]]) -> None:
    """Remove keys. One that the store has lost in the meantime is none to remove."""
    with suppress(RuntimeError):  # the rank that hosts the store has ended
        for store, key in keys:
            store.delete_key(key)
