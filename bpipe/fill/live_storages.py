"""The memory that is still held, of all that was noted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []


class LiveStorages:
    """Storages that were noted, each once, for as long as they live. None is kept alive.

    Attributes:
        most_bytes: at least the bytes of those that live: of all that were noted, as far as nobody has looked since.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most_bytes = 0

    def has(self, storage: Any) -> bool:
        """Return whether a storage, which lives, was noted."""
        known = self._noted.get(address_of(storage))
        return known is not None and not known[0].expired()

    def note(self, storages: Iterable[Any]) -> None:
        for storage in storages:
            if not self.has(storage):
                self._noted[address_of(storage)] = StorageWeakRef(storage), storage.nbytes()
                self.most_bytes += storage.nbytes()

    def num_bytes(self) -> int:
        """Return the bytes of those that live now."""
        self._noted = {key: one for key, one in self._noted.items() if not one[0].expired()}
        self.most_bytes = sum(num_bytes for _, num_bytes in self._noted.values())
        return self.most_bytes
