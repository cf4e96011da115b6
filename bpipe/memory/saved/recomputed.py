"""Find what regions under `torch.utils.checkpoint` (use_reentrant=False) keep besides their inputs: no saved-tensor hook sees it.

Selective checkpointing keeps the outputs of chosen operations in a Python dict, from which only the recomputation takes
them, and each region keeps its keyword arguments and random number states. The frame of the region owns all of this, and the
hooks of tensors that autograd saved inside the region lead to the frame.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from bpipe.memory.saved.attributes import Kept, tensors_kept_in
from bpipe.memory.saved.nodes import saved_by
from bpipe.memory.saved.saved_tensor import Saved
from bpipe.memory.saved.stash import Cached
from bpipe.model.pytree import flattened
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

OF_A_REGION = "kept by a region under torch.utils.checkpoint: a keyword, integers, or the state of random numbers"


def kept_by_checkpoints(nodes: Iterable[Node]) -> tuple[list[Cached], list[Kept]]:
    """Find the values that the checkpointed regions of a graph keep: outputs of chosen operations, and immovable tensors.

    A recomputation first asks for the positional inputs of its region, through our hooks, which thus guard its outputs. The
    outputs of a region without such inputs stay.
    """
    cached: list[Cached] = []
    kept: list[Kept] = []
    for frame in _frames(nodes):
        cells, guard = _cells(frame.recompute_fn), _guard_of(frame)
        outputs = list(_outputs(cells.pop("recompute_context", None)))
        if guard is not None:
            cached += [Cached(weakref.ref(one), version_of(one), weakref.ref(guard)) for one in outputs if _is_alias(one)]
            outputs = [one for one in outputs if not _is_alias(one)]
        found = [*outputs, *tensors_kept_in([list(cells.values()), *_arguments(frame)])]
        kept += [Kept(weakref.ref(one), OF_A_REGION) for one in found]
    return cached, kept


def _frames(nodes: Iterable[Node]) -> Iterable[Any]:
    """Return the frames of the regions, each once; a region inside another one leads to that one."""
    found: dict[int, Any] = {}
    todo = [frame for node in nodes if (frame := _frame_of(saved for saved, _ in saved_by(node))) is not None]
    for frame in todo:  # the list grows during the loop
        if id(frame) not in found:
            found[id(frame)] = frame
            outer = _frame_of(_inputs(frame))
            todo += [] if outer is None else [outer]
    return found.values()


def _frame_of(saved: Iterable[Any]) -> Any:
    """Return the region in which some tensors were saved, if it is recomputed: every tensor saved there leads to it."""
    hook = next((hook for one in saved if (hook := getattr(one, "unpack_hook", None)) is not None), None)
    return _cells(hook).get("frame") if getattr(hook, "__module__", "") == "torch.utils.checkpoint" else None


def _inputs(frame: Any) -> list[Any]:
    """Return the positional tensors of a region, as it has saved them."""
    return [*getattr(frame, "saved_args", ()), *(saved for saved, _ in saved_by(_input_node(frame)))]


def _cells(function: Any) -> dict[str, Any]:
    """Return the values in a function's closure, by name."""
    names, cells = getattr(getattr(function, "__code__", None), "co_freevars", ()), getattr(function, "__closure__", None)
    return {name: value for name, cell in zip(names, cells or ()) for value in _content(cell)}


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # still empty
        return []


def _outputs(context: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that selective checkpointing keeps, in the order of their computation, operation by operation."""
    storage: object = getattr(context, "storage", None)
    for entries in storage.values() if isinstance(storage, dict) else ():
        for leaf in flattened(entries):
            value = getattr(leaf, "val", None)
            if isinstance(value, torch.Tensor):
                yield value


def _is_alias(output: torch.Tensor) -> bool:
    """Return whether a kept output is surely a separate tensor object: before torch 2.12, indices are the stage's own tensors."""
    return output.is_floating_point() or output.is_complex()


def _guard_of(frame: Any) -> Saved | None:
    """Return a positional input of a region that our hooks follow, if there is one."""
    followed = [one.data for one in _inputs(frame) if isinstance(getattr(one, "data", None), Saved)]
    return next((one for one in followed if one.tensor.numel()), None)  # before 2.13, the first is empty, and none of ours


def _arguments(frame: Any) -> list[Any]:
    """Return a region's arguments besides its positional tensors; since torch 2.13, named ones are in its function's cells."""
    return [*getattr(frame, "saved_args", ()), _cells(getattr(_input_node(frame), "get_args", None)).get("args")]


def _input_node(frame: Any) -> Any:
    """Return the node that saves a region's inputs, before torch 2.13."""
    return getattr(getattr(frame, "input_saver", None), "grad_fn", None)
