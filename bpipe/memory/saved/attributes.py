"""Find tensors that custom autograd Functions keep as attributes of their `ctx`: no hook sees them, but the graph's nodes do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from bpipe.device import graph_maker
from bpipe.errors import StageError
from bpipe.model.pytree import leaves_of
from bpipe.torch_private.engine_and_graph import function_of

__all__: list[str] = []

MOST_LEAVES = 10_000  # to search in one Function's attributes: one with more keeps a whole program


class Kept(NamedTuple):
    """A tensor that has an owner other than autograd, and why it cannot move."""

    tensor: weakref.ref[torch.Tensor]
    reason: str


def kept_by_functions(nodes: Iterable[Node], where: str) -> list[Kept]:
    """Find the tensors that the Functions of a microbatch's graph keep as attributes.

    Raises:
        StageError: a Function replays a graph of its device, whose memory the next microbatch overwrites.
    """
    return [kept for node in nodes if isinstance(node, BackwardCFunction) for kept in _attributes(node, where)]


def _attributes(node: Any, where: str) -> Iterator[Kept]:
    function = function_of(node)
    if (made_by := graph_maker(function)) is not None:
        raise StageError(
            f"{where}: the stage replays a graph of its device ({made_by}), whose activations have the same addresses for all "
            "microbatches: with several in flight, a backward would use another microbatch's activations. Use torch.compile "
            'without mode="reduce-overhead" instead.'
        )
    reason = f"kept by {function.__name__} as an attribute of its ctx; with ctx.save_for_backward it could move"
    for tensor in tensors_kept_in(vars(node)):
        yield Kept(weakref.ref(tensor), reason)


def tensors_kept_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a pytree and in its objects and functions, except in torch's own objects, such as a DeviceMesh."""
    leaves = islice(leaves_of(value, without="torch"), MOST_LEAVES)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())
