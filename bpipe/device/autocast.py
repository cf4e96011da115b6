"""Autocast as it is set on a thread, to be set again there or on another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__: list[str] = []


class Autocast(NamedTuple):
    """For each kind of device whether autocast is on, and to what it casts; and whether casts are cached."""

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    has_cache: bool

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Autocast:
        """Return what is set on this thread for the CPU and some devices."""
        kinds = sorted({"cpu", *(device.type for device in devices)})
        each = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(each, torch.is_autocast_cache_enabled())

    def apply(self) -> None:
        """Set it on this thread, and keep the casts that are cached, as `torch.autocast` does not where it ends."""
        for kind, is_on, dtype in self.kinds:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.has_cache)
