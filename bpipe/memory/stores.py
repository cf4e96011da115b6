"""The interface of a store: where evicted activations are kept, and how they come back. Evictions do not know which one it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bpipe.comm.transport.base import Transfer
from bpipe.plan.action import PartKey

__all__: list[str] = []


class Store(Protocol):
    """Keeps what one rank evicts to one place: another rank's memory, or its host's.

    Attributes:
        host_bytes: the bytes that it takes in this rank's host.
    """

    @property
    def host_bytes(self) -> int: ...

    def put(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Transfer:
        """Begin to keep the messages, uint8 [size] each, of a part of a microbatch. They may be freed when the transfer has ended.

        Raises:
            CommError: there is no memory for them.
        """

    def get(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Transfer:
        """Begin to copy what is kept back into messages of the same sizes, and keep it no longer.

        Raises:
            TransferError: something else is there.
        """

    def clear(self) -> None:
        """Give all memory back, once nothing uses it any more. Does not wait for other ranks."""
