"""Make flows of shapes: a chain of stages begins a flow, each other shape makes one from another.

Shapes combine in any order that their arguments allow, and a plan's text names them, one line each. A shape that cannot be says so
by a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from importlib import import_module
from typing import Any

from bpipe.flow.flow import Flow, Shape

__all__: list[str] = []

SHAPES = "bpipe.flow.shapes"  # the package of all shapes


def shaped(flow: Flow | None, name: str, *arguments: Any) -> Flow:
    """Return a flow of a shape, made from another one; a chain begins with None. Only the shapes that are used are imported.

    Raises:
        ValueError: the shape cannot be made with these arguments, or has another name.
    """
    if name.startswith("_"):
        raise ValueError(f"there is no shape {name!r}")
    path = f"{SHAPES}.{name}"
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise ValueError(f"there is no shape {name!r}") from error
    if (flow is None) is not getattr(module, "BEGINS", False):
        raise ValueError(f"{name} {'begins no flow' if flow is None else 'follows no other shape'}: a flow begins with a chain")
    made: Flow = module.shape(flow, *arguments)
    return made


def sliced(flow: Flow, count: int) -> Flow:
    """Return a flow with its microbatches cut into so many slices; the same flow, if one is all of them."""
    return flow if count == 1 else shaped(flow, "slices", count)


def made_by(shapes: Iterable[Shape]) -> Flow:
    """Return the flow that shapes make, one after the other.

    Raises:
        ValueError: there is none.
    """
    flow: Flow | None = reduce(lambda made, shape: shaped(made, shape.name, *shape.arguments), shapes, None)
    if flow is None:
        raise ValueError("no shape")
    return flow


def with_other(flow: Flow, **arguments: Any) -> Flow:
    """Return the same shapes after another beginning.

    Args:
        flow: whose shapes to make again.
        arguments: those of `bpipe.flow.shapes.chain` that are other ones: `stage_ranks`, `num_microbatches` or `has_backward`.
    """
    (name, (stage_ranks, num_microbatches, has_backward)), *others = flow.shapes
    known = {"stage_ranks": stage_ranks, "num_microbatches": num_microbatches, "has_backward": has_backward}
    return made_by((Shape(name, tuple((known | arguments).values())), *others))


def without(flow: Flow, name: str) -> Flow:
    """Return a flow made by all of its shapes but those of a name."""
    return made_by(shape for shape in flow.shapes if shape.name != name)


def are_numbers(value: object, below: int = 10**9) -> bool:
    """Return whether a value is a tuple of whole numbers from 0 on; no rank, for one, is as large as the usual bound."""
    return isinstance(value, tuple) and all(type(number) is int and 0 <= number < below for number in value)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return type(value) is int and value >= 1
