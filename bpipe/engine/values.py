"""Values by name: how a message carries them, its tensors once each, and what of it others on the rank have, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bpipe.comm.wire.message import MessageSpec, flatten_message
from bpipe.engine.microbatch_state import MemoryState
from bpipe.engine.stage_links import OUTPUT, Way
from bpipe.errors import CommError
from bpipe.memory.saved.spans import Span
from bpipe.memory.saved.storages import MessageBytes

__all__: list[str] = []

T = TypeVar("T", torch.Tensor, torch.Tensor | None)
Layout = dict[str, tuple[str, Sequence[int]]]  # by name: a value's pytree, and the places of its tensors


def pack(values: Mapping[str, Any], where: object, title: Callable[[str], str]) -> tuple[Layout, list[torch.Tensor]]:
    """Lay out values for a message, in which each tensor lies once; return the layout and the tensors.

    Args:
        values: by name, what `flatten_message` takes.
        where: the stage and microbatch, for messages.
        title: returns what a value is called there.

    Raises:
        StageError: a value contains something that cannot be sent.
    """
    layout: Layout = {}
    places: dict[int, int] = {}
    found: list[torch.Tensor] = []
    for name, value in values.items():
        tree, tensors = flatten_message(value, f"{where}, {title(name)}" if name else where)
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


def count(memory: MemoryState, layout: Layout, tensors: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> None:
    """Note the bytes of values besides the output, and of their gradients."""
    for name, (_, places) in layout.items():
        if name != OUTPUT:
            there = {id(tensor): (tensor, needed[at]) for at in places if (tensor := tensors[at]) is not None}
            gradient = sum(tensor.nbytes for tensor, is_needed in there.values() if is_needed)
            value, known = MessageBytes.of([tensor for tensor, _ in there.values()]), memory.value_bytes.get(name)
            memory.value_bytes[name] = (value, gradient) if known is None else (known[0].with_more(value), known[1])


def layout_of(spec: MessageSpec, names: Sequence[str], where: str, *, is_all: bool) -> tuple[Layout, dict[int, int]]:
    """Return the layout and the fixed tensors of a message that was described so.

    Args:
        names: those of the values that are used.
        where: the message, for messages.
        is_all: whether these are all that it carries.

    Raises:
        CommError: the message carries something else.
    """
    try:
        layout, fixed = json.loads(spec.tree)
        found: Layout = {name: (tree, list(places)) for name, (tree, places) in layout.items()}
        last_users: dict[int, int] = dict(fixed)
        places = [*(at for _, of in found.values() for at in of), *last_users]
        if not all(type(at) is int and 0 <= at < len(spec.tensors) for at in places):
            raise ValueError("it has no such tensors")
    except (ValueError, TypeError, AttributeError):
        raise CommError(f"{where} does not describe the values that it carries: {spec.tree!r:.200}") from None
    if not found.keys() >= set(names) or (is_all and len(found) > len(names)):
        raise CommError(f"{where} carries the values {[*found]!r:.400}, expected {names!r:.400}")
    return {name: found[name] for name in names}, last_users


def fixed_among(spans: Mapping[Way, Sequence[Span]], received: Sequence[Span]) -> dict[Way, dict[int, int]]:
    """Return which tensors the receivers of messages must not change in place, because a later stage has them, too.

    Args:
        spans: by the way of a message, those of its tensors, with the last stage that uses the message.
        received: those of what this stage has got itself, and must not change.

    Returns:
        By the way of a message: by the place of a tensor, the last stage that has it.
    """
    found: dict[Way, dict[int, int]] = {}
    for way, own in spans.items():
        _, user = way
        others = [span for other, of in spans.items() for span in of if other != way and span.last_user > user]
        later = [*others, *(span for span in received if span.last_user >= user)]
        last = {at: [span.last_user for span in later if one.overlaps(span)] for at, one in enumerate(own)}
        found[way] = {at: max(users) for at, users in last.items() if users}
    return found


def places_of(layout: Layout, names: Collection[str]) -> set[int]:
    """Return the places of the tensors of some values."""
    return {place for name, (_, places) in layout.items() if name in names for place in places}


def without_inference(tensor: T) -> T | torch.Tensor:
    """Copy an inference tensor, which does not record that it is changed in place."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of gradients that the pipeline owns, any of which may be absent; the first one's memory is used again."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other) if one.dtype == other.dtype else one + other
