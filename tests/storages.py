"""Count live storages without bpipe's help: a dispatch mode that remembers, weakly, every storage that an operation made."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCount:
    """Every storage made while one of its modes was active, on any thread."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    def mode(self) -> TorchDispatchMode:
        """A mode to enter; one for each thread."""
        return _Mode(self)

    def note(self, value: object) -> None:
        with self._lock:
            for leaf in value if type(value) is list else tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    storage = leaf.untyped_storage()
                    known = self._seen.get(storage._cdata)
                    if known is None or known.expired():
                        self._seen[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self, without: Iterable[torch.Tensor] = ()) -> int:
        """The bytes of those still alive, leaving some tensors' storages out."""
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        with self._lock:
            self._seen = {key: ref for key, ref in self._seen.items() if not ref.expired()}
            alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._seen.items() if key not in left_out]
        return sum(storage.nbytes() for storage in alive if storage is not None)


class _Mode(TorchDispatchMode):
    def __init__(self, count: StorageCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self._count.note(result)
        return result
