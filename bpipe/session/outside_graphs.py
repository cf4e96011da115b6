"""Find inputs that belong to an autograd graph outside the pipeline which more than one backward of a step would run through."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from bpipe.comm.wire.message import PLAIN
from bpipe.errors import ConfigurationError
from bpipe.memory.saved.nodes import nodes_behind, saved_by
from bpipe.model import microbatch as mb
from bpipe.model.call import Call
from bpipe.model.pytree import attributes_of, closure_of

__all__: list[str] = []

FEW = 32  # entries: longer containers that a loss function keeps are not searched
DEEP = 4  # levels of containers, functions and objects that a loss function keeps


def check_outside_graphs(call: Call, loss_fn: Callable[..., Any] | None, num_losses: int, num_stages: int) -> None:
    """Check that no graph outside the pipeline is freed by one backward of the step while another one needs it.

    A backward frees what the graph has saved, so a graph that saves nothing, as that of a view, may be run through many times.

    Args:
        num_losses: how often the step calls the loss function, once for each part of a microbatch that has a backward of its own.
        num_stages: which all get the same keyword arguments.

    Raises:
        ConfigurationError: a graph is; the message names the input.
    """
    inputs = {"arg_mbs": call.arg_mbs, "kwarg_mbs": call.kwarg_mbs, "target_mbs": call.target_mbs, "loss_kwargs": call.loss_kwargs}
    if any(map(_has_graph, mb.tensors_in(inputs, set()))):
        _check_uses(inputs, num_losses, num_stages)
    if num_losses > 1 and any(_needed_nodes([tensor]) for tensor in _kept_by(loss_fn, set())):
        raise _refusal("a tensor that loss_fn keeps")


def _check_uses(inputs: Mapping[str, Any], num_losses: int, num_stages: int) -> None:
    uses = [
        (f"{name}[{i}]", one, (name == "kwarg_mbs" and num_stages > 1) or len(inputs[name]) < num_losses)
        for name in ("arg_mbs", "kwarg_mbs", "target_mbs")
        for i, one in enumerate(inputs[name] or ())
    ]
    users: dict[Node, str] = {}  # of each node of these graphs
    for name, value, is_shared in (*uses, ("loss_kwargs", inputs["loss_kwargs"], num_losses > 1)):
        for node in _needed_nodes(mb.tensors_in(value)):
            if is_shared or node in users:
                raise _refusal(name, "" if is_shared else f" as {users[node]} is")
            users[node] = name


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf


def _refusal(name: str, as_another: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"{name} is part of an autograd graph outside the pipeline{as_another}, which the first of several backwards would free: "
        "give the pipeline y = x.detach().requires_grad_(), and run x.backward(y.grad) after the step; or compute x in loss_fn "
        "or in a stage, for each microbatch"
    )


def _needed_nodes(tensors: Sequence[torch.Tensor]) -> list[Node]:
    """Return the nodes behind some tensors that have saved something; none if a backward has already run through some of them."""
    edges = [get_gradient_edge(tensor) for tensor in tensors if _has_graph(tensor)]
    found = []
    for node in nodes_behind(edges):
        try:
            saved = saved_by(node)
        except RuntimeError:  # a Function that a backward has run through
            return []
        if saved and all(data is None for _, data in saved):
            return []
        found += [node] * bool(saved)
    return found


def _kept_by(value: Any, seen: set[int], deep: int = DEEP, *, has_attributes: bool = True) -> Iterator[torch.Tensor]:
    """Yield the tensors that a loss function keeps: in closures, defaults, bound arguments and its own attributes.

    Attributes are those of the first object that functions and partials lead to.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in PLAIN and not isinstance(value, (type, types.ModuleType)) and deep and id(value) not in seen:
        seen.add(id(value))
        parts = _parts_of(value)
        if parts is None:
            parts, has_attributes = list(attributes_of(value).values()) if has_attributes else (), False
        for part in parts:
            yield from _kept_by(part, seen, deep - 1, has_attributes=has_attributes)


def _parts_of(value: Any) -> Sequence[Any] | None:
    """Return what a function or a short container holds; None for another object."""
    if isinstance(value, (tuple, list)):
        return value if len(value) <= FEW else ()
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= FEW else ()
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        return *closure_of(value), value.__defaults__, value.__kwdefaults__
    return None
