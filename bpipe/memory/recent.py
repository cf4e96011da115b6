"""Keep what was used most recently."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__: list[str] = []

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """A dict of the entries that were used most recently, up to a number of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, key: K, otherwise: V) -> V:
        """Return the entry of a key, which is `otherwise` if it has none yet, and count it as used now."""
        value = self.setdefault(key, otherwise)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
        return value
