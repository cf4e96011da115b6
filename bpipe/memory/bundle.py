"""The storages of an evicted microbatch: handed out as messages, emptied, and refilled in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.errors import SavedTensorError
from bpipe.memory.storages import Storage, as_bytes, owners

__all__: list[str] = []

SMALL = 64 * 1024  # bytes: below this, one message of copies is cheaper than a message each


class Bundle:
    """Storages that leave together and come back together.

    A large storage is a message of its own, sent from where it lies; the small ones share the last message.

    Args:
        storages: each with the number of its owners, all of them saved tensors.
        name: the microbatch, for messages, such as "microbatch 3 of stage 0".

    Example:
        >>> tensor = torch.arange(3.0)
        >>> bundle = Bundle([(tensor.untyped_storage(), 1)], "microbatch 0 of stage 0")
        >>> [len(message) for message in bundle.messages()]
        [12]
    """

    def __init__(self, storages: Sequence[tuple[Storage, int]], name: str) -> None:
        self._name = name
        ordered = sorted(storages, key=lambda entry: entry[0].nbytes() < SMALL)  # stable: large ones first
        self._storages = [storage for storage, _ in ordered]
        self._owners = [count for _, count in ordered]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._num_large = sum(size >= SMALL for size in self._sizes)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def message_sizes(self) -> list[int]:
        """Bytes of each message."""
        large, small = self._sizes[: self._num_large], self._sizes[self._num_large :]
        return [*large, *([sum(small)] if small else [])]

    def messages(self) -> list[torch.Tensor]:
        """The bytes to send, uint8 [size] each."""
        large, small = self._views()
        return [*large, *([torch.cat(small)] if small else [])]

    def empty(self) -> None:
        """Free the storages; the bytes must have arrived.

        Raises:
            SavedTensorError: somebody took hold of a storage since its eviction began.
        """
        for storage, expected in zip(self._storages, self._owners):
            if owners(storage) > expected:
                raise SavedTensorError(
                    f"{owners(storage) - expected} tensors took hold of saved memory of {self._name} while it was being evicted"
                )
        for storage in self._storages:
            storage.resize_(0)

    def refill(self) -> list[torch.Tensor]:
        """Give the storages memory again and return where to receive the messages, uint8 [size] each."""
        for storage, size in zip(self._storages, self._sizes):
            storage.resize_(size)
        large, small = self._views()
        return [*large, *([small[0].new_empty(self.message_sizes[-1])] if small else [])]

    def scatter(self, messages: Sequence[torch.Tensor]) -> None:
        """Copy what arrived in the shared message to the small storages it belongs to."""
        _, small = self._views()
        if small:
            for view, part in zip(small, messages[-1].split(self._sizes[self._num_large :])):
                view.copy_(part)

    def _views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        views = [as_bytes(storage) for storage in self._storages]
        return views[: self._num_large], views[self._num_large :]
