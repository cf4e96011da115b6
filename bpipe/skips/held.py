"""What a rank remembers of the skips of a microbatch between the computations of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bpipe.skips.values import Layout

__all__: list[str] = []


@dataclass
class Held:
    """A message of which later stages on the rank of its first user use something, too.

    Args:
        layout: the values that they use, with the places of their tensors in `tensors`.
        tensors: what they use of the message, until the last of them has run forward.
        versions: of these; no stage may change them.
        numbers: for each of them, its number among the message's tensors that need a gradient; None if it needs none.
        num_users: how many of these stages have not run forward yet.
        gradients: for each tensor of the message that needs one, the sum of what their backwards have given; None if nothing.
    """

    layout: Layout
    tensors: list[torch.Tensor]
    versions: list[tuple[torch.Tensor, int]]
    numbers: list[int | None]
    num_users: int
    gradients: list[torch.Tensor | None]

    def add(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what the backward of a later stage gives to the tensors with these numbers."""
        for number, gradient in zip(numbers, gradients, strict=True):
            self.gradients[number] = added(self.gradients[number], gradient)


class Use(NamedTuple):
    """What a forward has used of a message that is not the one from the stage before.

    Args:
        source: the stage that made it.
        first: the stage on this rank that used it first.
        numbers: the used tensors that need a gradient, by their number among all such tensors of the message.
    """

    source: int
    first: int
    numbers: list[int]


class Made(NamedTuple):
    """A message that a forward has made: the stage that gets it, and its tensors that need a gradient, by number of the graph's."""

    user: int
    numbers: list[int]


def added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of gradients that the pipeline owns, any of which may be absent; the first one's memory is used again."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other) if one.dtype == other.dtype else one + other
