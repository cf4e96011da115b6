"""Count the bytes of the tensors that a piece of a fill job makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bpipe.fill.live_storages import LiveStorages
from bpipe.model.microbatch import tensors_in
from bpipe.torch_private.modes import DispatchMode
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []


class Counted(DispatchMode):
    """A mode that counts the storages on a device that operations make, for as long as they live."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._made = device, LiveStorages()
        self.peak_bytes = 0  # the most at a time since `begin`

    def begin(self) -> None:
        """Begin a piece: what earlier ones have kept counts."""
        self.peak_bytes = self.live_bytes()

    def live_bytes(self) -> int:
        """Return the bytes of those that live now."""
        return self._made.num_bytes()

    def has_counted(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage is one of them."""
        return self._made.has(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {address_of(one.untyped_storage()) for one in strided_in((args, kwargs))}
        storages = [one.untyped_storage() for one in strided_in(made) if one.device == self._device]
        self._made.note(storage for storage in storages if address_of(storage) not in given)
        if self._made.most_bytes > self.peak_bytes:  # else it cannot be a new peak, whatever is gone
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return made


def strided_in(tree: Any) -> list[torch.Tensor]:
    return [one for one in tensors_in(tree) if one.layout is torch.strided]
