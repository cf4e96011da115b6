"""Messages that carry skips: values by name, whose tensors lie in the message once each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bpipe.comm.wire.message import MessageSpec, flatten_message, unflatten_message
from bpipe.errors import CommError

__all__: list[str] = []

OUTPUT = ""  # the name of a stage's output in a message that carries skips to the next stage as well

Layout = dict[str, tuple[str, list[int]]]  # by name: a value's pytree, and the places of its tensors


def pack(values: Mapping[str, Any], where: str) -> tuple[str, list[torch.Tensor]]:
    """Describe values for a message, in which each tensor lies once; return the description and the tensors.

    Args:
        values: by name, what `flatten_message` takes.
        where: the stage and microbatch, for messages.

    Raises:
        StageError: a value contains something that cannot be sent.
    """
    layout: Layout = {}
    places: dict[int, int] = {}
    found: list[torch.Tensor] = []
    for name, value in values.items():
        tree, tensors = flatten_message(value, f"{where}, skip {name!r}" if name else where)
        for tensor in tensors:
            if places.setdefault(id(tensor), len(found)) == len(found):
                found.append(tensor)
        layout[name] = tree, [places[id(tensor)] for tensor in tensors]
    return json.dumps(layout), found


def layout_of(spec: MessageSpec, names: Sequence[str], where: str) -> Layout:
    """Read what `pack` described.

    Args:
        names: those of the values that are expected.
        where: the message, for messages.

    Raises:
        CommError: the message carries something else.
    """
    try:
        found = {name: (tree, list(places)) for name, (tree, places) in json.loads(spec.tree).items()}
        is_sound = all(type(at) is int and 0 <= at < len(spec.tensors) for _, places in found.values() for at in places)
    except (ValueError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise CommError(f"{where} does not describe the skips that it carries: {spec.tree!r:.200}")
    if found.keys() != set(names):
        seen = ", ".join(repr(name) for name in found if name != OUTPUT) or "none"
        expected = ", ".join(repr(name) for name in names if name != OUTPUT)
        raise CommError(f"{where} carries the skips {seen:.400}, expected {expected}: give all ranks' stages the same skips")
    return found


def value_of(layout: tuple[str, list[int]], tensors: Sequence[torch.Tensor], find_mesh: Any) -> Any:
    """Put a value together again."""
    tree, places = layout
    return unflatten_message(tree, [tensors[place] for place in places], find_mesh)
