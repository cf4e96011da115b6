"""The storages of an evicted microbatch: sent as messages, emptied, and refilled in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.device.huge_pages import prefer_huge_pages
from bpipe.errors import SavedTensorError
from bpipe.memory.saved.storages import Storage, as_bytes, owners

__all__: list[str] = []

SMALL = 64 * 1024  # bytes: below this, copying storages into one message is cheaper than one message per storage


class Bundle:
    """Storages that leave together and come back together.

    A large storage is a message of its own, sent in place. The small ones move into one shared message, and out of
    it again, so that between actions they take their memory once.

    Args:
        storages: each with the number of its owners, all of them saved tensors. A storage with one more owner, because a send
            that ends before `empty` still reads it, is sent in place too.
        name: the microbatch, for messages, such as "microbatch 3 of stage 0".

    Example:
        >>> tensor = torch.arange(3.0)
        >>> bundle = Bundle([(tensor.untyped_storage(), 1)], "microbatch 0 of stage 0")
        >>> [len(message) for message in bundle.messages()], tensor.untyped_storage().nbytes()
        ([12], 0)
    """

    def __init__(self, storages: Sequence[tuple[Storage, int]], name: str) -> None:
        self._name = name
        is_small = [storage.nbytes() < SMALL and owners(storage) == count for storage, count in storages]
        self._large = [entry for entry, small in zip(storages, is_small) if not small]
        self._small = [storage for (storage, _), small in zip(storages, is_small) if small]
        self._large_sizes = [storage.nbytes() for storage, _ in self._large]
        self._small_sizes = [storage.nbytes() for storage in self._small]

    @property
    def num_bytes(self) -> int:
        return sum(self.message_sizes)

    @property
    def message_sizes(self) -> list[int]:
        """Bytes of each message."""
        return [*self._large_sizes, *([sum(self._small_sizes)] if self._small else [])]

    def messages(self) -> list[torch.Tensor]:
        """Return the messages to send, uint8 [size] each, and empty the small storages, which the last message copies."""
        messages = [as_bytes(storage) for storage, _ in self._large]
        messages += [torch.cat([as_bytes(storage) for storage in self._small])] if self._small else []
        for storage in self._small:  # only after the copy: this frees their bytes
            storage.resize_(0)
        return messages

    def empty(self) -> None:
        """Free the large storages too; the bytes must have arrived.

        Raises:
            SavedTensorError: a storage got another owner after its eviction began.
        """
        for storage, expected in self._large:  # all before any is emptied, so that a refusal leaves every storage whole
            if owners(storage) > expected:
                raise SavedTensorError(
                    f"a saved storage of {self._name} got another owner while it was being evicted: {owners(storage)} owners, "
                    f"expected {expected}. Keep no tensor of a stage's forward elsewhere after that forward has ended."
                )
        for storage, _ in self._large:
            storage.resize_(0)

    def refill(self) -> list[torch.Tensor]:
        """Allocate the large storages again and return the tensors that receive the messages, uint8 [size] each."""
        for (storage, _), size in zip(self._large, self._large_sizes):
            storage.resize_(size)
            prefer_huge_pages(as_bytes(storage))
        device = self._small[0].device if self._small else None
        shared = [torch.empty(sum(self._small_sizes), dtype=torch.uint8, device=device)] if self._small else []
        return [as_bytes(storage) for storage, _ in self._large] + shared

    def scatter(self, messages: Sequence[torch.Tensor]) -> None:
        """Allocate the small storages again and copy their bytes from the shared message."""
        if self._small:
            for storage, part in zip(self._small, messages[-1].split(self._small_sizes)):
                storage.resize_(part.numel())
                as_bytes(storage).copy_(part)
