"""Count what is done, operation by operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Count(TorchDispatchMode):
    """While it is active: how often each operation runs, by name; collectives of process groups too."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
