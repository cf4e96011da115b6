"""Give the backwards of custom autograd Functions the original tensors that they saved.

Under saved-tensor hooks torch makes a new tensor from the result of the unpack hook, unless that needs no gradient. It has the same
values, but attributes that a Function's backward sets on it, such as `weight.grad` or `weight.main_grad`, would be lost, and those
set on the saved tensor would not be found. So the nodes of such Functions return the saved tensor, as they do without hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from bpipe.memory.saved.nodes import saved_by
from bpipe.memory.saved.saved_tensor import Saved

__all__: list[str] = []


def give_originals(nodes: Iterable[Node]) -> None:
    """Let the nodes of custom Functions return the original tensors that they saved."""
    for node in nodes:
        if isinstance(node, BackwardCFunction) and any(_original(data) is not None for _, data in saved_by(node)):
            node.__class__ = _giving(type(node))


def _giving(kind: Any) -> type[Any]:
    """Return a node class whose `saved_tensors` are the originals; `kind` keeps it, and is freed with its Function."""
    giving: type[Any] | None = vars(kind).get("_bpipe_giving")
    if giving is None:
        found = {name: property(partial(_given, getattr(BackwardCFunction, name))) for name in ("saved_tensors", "saved_variables")}
        giving = kind._bpipe_giving = type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **found})
    return giving


def _given(torchs: Any, node: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors that a node returns as saved, given the attribute by which torch returns them."""
    pairs = [(unpacked, _original(data)) for unpacked, (_, data) in zip(torchs.__get__(node), saved_by(node), strict=True)]
    # torch makes new tensors of a Function's own outputs even without hooks.
    return tuple(one if data is None or one.grad_fn is node else _in_place_of(one, data) for one, data in pairs)


def _in_place_of(unpacked: torch.Tensor, data: Saved) -> torch.Tensor:
    """Return the tensor that was saved or, if it is gone, the one that torch unpacked, with the attributes that were set on it."""
    tensor = None if data.original is None else data.original()
    if tensor is None:
        unpacked.__dict__.update(data.attributes)
    return unpacked if tensor is None else tensor


def _original(data: object) -> Saved | None:
    return data if isinstance(data, Saved) and data.original is not None else None
