"""The transformer blocks that are measured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_WIDTH = 128  # of a GPT block


class Size(NamedTuple):
    """A block's width, and the tokens and sequences of a microbatch."""

    width: int
    tokens: int
    sequences: int


def block(size: Size) -> nn.Module:
    """A transformer block as PyTorch has it."""
    return nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True)


class GPTBlock(nn.Module):
    """A pre-norm GPT block.

    Args:
        size: its width, and the tokens of a sequence.
        attention: "flash"; "materialised": the softmax of all pairs is saved; or "any": by the kernel that torch chooses.
        dropout: the share that is dropped after the attention.
    """

    def __init__(self, size: Size, attention: str, dropout: float = 0.0) -> None:
        super().__init__()
        width = size.width
        self._num_heads, self._attention, self.dropout = max(1, width // HEAD_WIDTH), attention, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if attention == "materialised":
            self.register_buffer("mask", torch.full((size.tokens, size.tokens), float("-inf")).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [sequences, tokens, width] to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.dropout(self.out(self._attend(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._attention == "materialised":
            return (q * q.shape[-1] ** -0.5 @ k.mT + self.mask).softmax(-1) @ v
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self._attention == "flash" else nullcontext():
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
