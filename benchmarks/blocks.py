"""The transformer blocks that are measured."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Size(NamedTuple):
    """A block's width, and the tokens and sequences of a microbatch."""

    width: int
    tokens: int
    sequences: int


def block(size: Size) -> nn.Module:
    """A transformer block as PyTorch has it."""
    return nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True)
