"""The keys that a rank writes to the store of its process group, removed when nobody needs them: the store outlives a pipeline."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from bpipe.environment import gloo_connects_late, gloo_interfaces

__all__: list[str] = []


class WrittenKeys:
    """The keys of one rank that are still in a store."""

    def __init__(self) -> None:
        self._keys: list[tuple[Any, str]] = []

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
        """Remove the keys. One that the store has lost in the meantime is none to remove."""
        while self._keys:
            store, key = self._keys.pop()
            with suppress(RuntimeError):  # the rank that hosts the store has ended
                store.delete_key(key)
