"""Join the pieces of what earlier slices have left, so that autograd saves the pieces and not what they were joined to.

Slices share their pieces, but each slice would save a joined tensor of its own: k slices together would save keys and values
(k + 1) / 2 times. So a joined tensor that is saved is replaced by its pieces, and joined again when the backward asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.errors import SavedTensorError
from bpipe.memory.saved.saved_tensor import FORGOTTEN, Saved, untraced
from bpipe.torch_private.fakes import is_plain
from bpipe.torch_private.owners_and_versions import address_of, version_of

__all__: list[str] = []


class _Join(NamedTuple):
    """How a tensor was joined, and who it is: the reference keeps its address from being reused."""

    storage: StorageWeakRef
    pieces: Sequence[torch.Tensor]
    dim: int


Casts = dict[int, tuple[torch.Tensor, torch.Tensor]]  # tensors and what they were cast to, by the tensor's identity


class _Joins(threading.local):
    """The joined tensors of the slice whose forward runs in this thread, by storage, and what it has cast; None outside of one."""

    current: dict[int, _Join] | None = None
    casts: Casts | None = None


_JOINS = _Joins()


def join(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors of earlier slices and of this one, as `torch.cat` does; where the result is saved, its pieces are.

    Args:
        pieces: tensors whose other dimensions are equal.
        dim: along which they are joined.

    Example:
        >>> join([torch.zeros(1, 3, 8), torch.ones(1, 2, 8)], dim=1).shape
        torch.Size([1, 5, 8])
    """
    joined = torch.cat(list(pieces), dim)
    if torch.compiler.is_compiling():  # what a compiled region saves is its compiler's choice
        return joined
    if _JOINS.current is not None and len(pieces) > 1:
        storage = joined.untyped_storage()
        _JOINS.current[address_of(storage)] = _Join(StorageWeakRef(storage), [piece.detach() for piece in pieces], dim)
    return joined


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a slice's own tensor in another type, in which it is also handed on if it is part of the slice's state.

    Otherwise each later slice would cast it again, and save that.
    """
    found = tensor.to(dtype)
    if found is not tensor and _JOINS.casts is not None and not torch.compiler.is_compiling():
        _JOINS.casts[id(tensor)] = tensor, found
    return found


class Joined:
    """What is saved in place of a view of a joined tensor: its pieces."""

    def __init__(self, join: _Join, view: torch.Tensor) -> None:
        self.pieces, self._dim = join.pieces, join.dim
        self._versions = [version_of(piece) for piece in self.pieces]
        self._layout = view.size(), view.stride(), view.storage_offset()

    def forget(self) -> None:
        """Release the pieces: no backward will ask for them again."""
        self.pieces = ()

    def join(self) -> torch.Tensor:
        """Join the pieces again.

        Raises:
            SavedTensorError: a piece was changed in place, or they are released.
        """
        if not self.pieces:
            raise SavedTensorError(FORGOTTEN)
        if [version_of(piece) for piece in self.pieces] != self._versions:
            raise SavedTensorError(
                "a piece of a joined tensor was modified in place after a slice had saved it for its backward: "
                "replace the in-place operation, or clone the state before it"
            )
        return torch.cat(list(self.pieces), self._dim).as_strided(*self._layout)


def in_pieces(tensor: Any) -> Any:
    """Return what to save for a tensor: its pieces, if it is an unchanged view of a joined one, else itself."""
    joins = _JOINS.current
    if not joins or not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor
    found = joins.get(address_of(tensor.untyped_storage()))
    is_view = found is not None and not found.storage.expired() and not version_of(tensor) and tensor.dtype == found.pieces[0].dtype
    return Joined(found, tensor) if found is not None and is_view else tensor


def joined_again(saved: Any) -> Any:
    """Return what `in_pieces` got."""
    return saved.join() if isinstance(saved, Joined) else saved


def _pack(tensor: torch.Tensor) -> Joined | Saved:
    value = in_pieces(tensor)
    if isinstance(value, Joined):
        return value
    saved = Saved(value, 0)  # an operation that saved its own result, and not an alias, would keep itself alive
    if saved.tensor is not tensor:
        vars(saved.tensor).update(vars(tensor))
    return saved


def _unpack(saved: Joined | Saved) -> torch.Tensor:
    if isinstance(saved, Joined):
        return saved.join()
    if saved.is_forgotten:
        raise SavedTensorError(FORGOTTEN)
    saved.check_unchanged("a slice")  # where hooks are set, torch does not look
    return saved.tensor


@contextmanager
def keeping_pieces(*, sets_hooks: bool) -> Iterator[Casts]:
    """Run a slice's forward: what it joins is saved in pieces. Yields what it casts.

    Args:
        sets_hooks: whether to set hooks that ask `in_pieces` about each tensor that is saved: not where a stash does, nor in the
            first of two forwards, which saves nothing.
    """
    before, casts = (_JOINS.current, _JOINS.casts), Casts()
    _JOINS.current, _JOINS.casts = {}, casts
    try:
        with torch.autograd.graph.saved_tensors_hooks(untraced(_pack), untraced(_unpack)) if sets_hooks else nullcontext():
            yield casts
    finally:
        _JOINS.current, _JOINS.casts = before
