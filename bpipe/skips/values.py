"""Messages that carry skips: values by name, whose tensors lie in the message once each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bpipe.comm.wire.message import MessageSpec, flatten_message, unflatten_message
from bpipe.errors import CommError
from bpipe.memory.saved.spans import Span

__all__: list[str] = []

OUTPUT = ""  # the name of a stage's output in a message that carries skips to the next stage as well

Layout = dict[str, tuple[str, list[int]]]  # by name: a value's pytree, and the places of its tensors


def pack(values: Mapping[str, Any], where: str) -> tuple[Layout, list[torch.Tensor]]:
    """Lay out values for a message, in which each tensor lies once; return the layout and the tensors.

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
    return layout, found


def described(layout: Layout, fixed: Mapping[int, int]) -> str:
    """Describe a message.

    Args:
        fixed: the places of the tensors that its receiver must not change in place, with the last stage that has each.
    """
    return json.dumps([layout, list(fixed.items())])


def layout_of(spec: MessageSpec, names: Sequence[str], where: str) -> tuple[Layout, dict[int, int]]:
    """Return the layout and the fixed tensors of a message that was described so.

    Args:
        names: those of the values that are expected.
        where: the message, for messages.

    Raises:
        CommError: the message carries something else.
    """
    try:
        layout, fixed = json.loads(spec.tree)
        found = {name: (tree, list(places)) for name, (tree, places) in layout.items()}
        last_users = dict(fixed)
        places = [*(at for _, of in found.values() for at in of), *last_users]
        if not all(type(at) is int and 0 <= at < len(spec.tensors) for at in places):
            raise ValueError("it has no such tensors")
    except (ValueError, TypeError, AttributeError):
        raise CommError(f"{where} does not describe the skips that it carries: {spec.tree!r:.200}") from None
    if found.keys() != set(names):
        seen = ", ".join(repr(name) for name in found if name != OUTPUT) or "none"
        expected = ", ".join(repr(name) for name in names if name != OUTPUT)
        raise CommError(f"{where} carries the skips {seen:.400}, expected {expected}: give all ranks' stages the same skips")
    return found, last_users


def fixed_among(spans: Mapping[int, Sequence[Span]], received: Sequence[Span]) -> dict[int, dict[int, int]]:
    """Return which tensors the receivers of messages must not change in place, because a later stage has them, too.

    Args:
        spans: by the stage that gets a message, those of its tensors, with the last stage that uses the message.
        received: those of what this stage has got itself, and must not change.

    Returns:
        By the stage that gets a message: by the place of a tensor, the last stage that has it.
    """
    found: dict[int, dict[int, int]] = {}
    for user, own in spans.items():
        others = [span for other, of in spans.items() for span in of if other != user and span.last_user > user]
        later = [*others, *(span for span in received if span.last_user >= user)]
        last = {at: [span.last_user for span in later if one.overlaps(span)] for at, one in enumerate(own)}
        found[user] = {at: max(users) for at, users in last.items() if users}
    return found


def value_of(layout: tuple[str, list[int]], tensors: Sequence[torch.Tensor], find_mesh: Any) -> Any:
    """Put a value together again."""
    tree, places = layout
    return unflatten_message(tree, [tensors[place] for place in places], find_mesh)
