"""Count the saved bytes that a graph shows, after a forward that no hook has followed."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from bpipe.memory.saved.attributes import kept_by_functions
from bpipe.memory.saved.nodes import saved_by
from bpipe.memory.saved.saved_tensor import Saved
from bpipe.memory.saved.storages import storages_of
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []


# For a plain number, as in `x * 0.5`, a graph keeps 8 bytes that no hook and no count of storages sees.
_OF_NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


class Shown(NamedTuple):
    """The bytes of all storages that the nodes of a graph have saved, including those with other owners."""

    num_bytes: int  # each storage counts once
    is_all: bool  # whether there is nothing more, such as tensors hidden by other hooks (`torch.utils.checkpoint`'s, or the user's)


def shown_by(nodes: Sequence[Node], non_activations: Container[int], where: str) -> Shown:
    """Add up the bytes that the nodes of a microbatch's graph have saved, and those that custom Functions keep as attributes.

    Args:
        non_activations: storages that are not activations, such as parameters; a deeper graph uses more of them.
    """
    is_all = _SHOWS_TENSORS
    tensors = [tensor for kept in kept_by_functions(nodes, where) if (tensor := kept.tensor()) is not None]
    for node in nodes:
        for saved, data in saved_by(node):
            tensor = data.tensor if isinstance(data, Saved) else data
            if isinstance(tensor, torch.Tensor):
                if not _is_number(tensor):
                    tensors.append(tensor)
            elif data is not None or not hasattr(saved, "data"):  # without `data` an older version of torch hides all
                is_all = False
    found = {address_of(storage): storage.nbytes() for tensor in tensors for storage in storages_of(tensor)}
    return Shown(sum(size for key, size in found.items() if key not in non_activations), is_all)


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain number by itself: a view of one element keeps a storage that holds others."""
    if tensor.ndim or tensor.dtype not in _OF_NUMBERS:
        return False
    return sum(storage.nbytes() for storage in storages_of(tensor)) == tensor.itemsize


def _shows_tensors() -> bool:
    """Return whether this version of torch shows a saved tensor that no hook has packed."""
    node = torch.ones((), requires_grad=True).sin().grad_fn
    assert node is not None
    return any(isinstance(data, torch.Tensor) for _, data in saved_by(node))


_SHOWS_TENSORS = _shows_tensors()
