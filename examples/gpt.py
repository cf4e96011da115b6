"""A byte-level GPT: the whole, or the part of it that one stage holds.

A part keeps the names of the whole: `blocks.3.attention.query.weight` is called so on any number of stages. Each
parameter is drawn from a generator seeded by its own name, so a model starts from the same bits however it is cut.

A part takes sequences whole or in slices. A slice's state are the keys and values of each block, which later slices of its
sequence attend to.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention import causal_attention
from torch import Tensor, nn

__all__ = ["GPT", "GPTConfig", "blocks_of_stage", "build_stage"]

Pair = tuple[Tensor, Tensor]  # keys and values of a block: (batch, heads of keys, positions, head width) each
State = tuple[Pair, ...]  # of a slice: a pair for each block


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; the defaults give 6.4 million parameters.

    Args:
        num_key_heads: of keys and values, each shared by a group of queries' heads; None: as many as there are of queries.
    """

    vocabulary: int = 256
    sequence_length: int = 256
    num_blocks: int = 8
    num_heads: int = 4
    width: int = 256
    num_key_heads: int | None = None


class GPT(nn.Module):
    """Stage `stage_index` of `num_stages`: the embedding on the first, some blocks, the norm and head on the last.

    The first stage takes bytes (batch, sequence), the last gives logits (batch, sequence, vocabulary); what passes
    between two stages is (batch, sequence, width).
    """

    def __init__(self, config: GPTConfig, stage_index: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        mine = blocks_of_stage(config.num_blocks, stage_index, num_stages)
        is_first, is_last = stage_index == 0, stage_index == num_stages - 1
        self.embedding = nn.Embedding(config.vocabulary, config.width) if is_first else nn.Identity()
        self.blocks = nn.ModuleDict({str(index): Block(config) for index in mine})
        self.norm = nn.LayerNorm(config.width) if is_last else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary, bias=False) if is_last else nn.Identity()

    def forward(self, x: Tensor, past: Sequence[State] | None = None) -> Tensor | tuple[Tensor, State]:
        """Run a sequence, or with `past`, the states of its earlier slices, a slice: then return its state too."""
        x, state = self.embedding(x), []
        for place, block in enumerate(self.blocks.values()):
            x, pair = block(x, [pairs[place] for pairs in past or ()])
            state.append(pair)
        logits: Tensor = self.head(self.norm(x))
        return logits if past is None else (logits, tuple(state))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a GELU MLP four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, earlier: Sequence[Pair]) -> tuple[Tensor, Pair]:
        mixed, pair = self.attention(self.norm_1(x), earlier)
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.norm_2(x)))), pair


class Attention(nn.Module):
    """Causal self-attention with rotary positions, to a slice and to those before it: (batch, sequence, width) to the same."""

    turns: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        key_width = self.head_width * (config.num_key_heads or config.num_heads)
        self.key = nn.Linear(config.width, key_width, bias=False)
        self.value = nn.Linear(config.width, key_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        turns = rotary_turns(config.sequence_length, self.head_width)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: Tensor, earlier: Sequence[Pair]) -> tuple[Tensor, Pair]:
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        start = sum(keys.shape[2] for keys, _ in earlier)
        query, key = self._rotate(query, start), self._rotate(key, start)
        mixed = causal_attention(query, key, value, earlier)
        return self.out(mixed.transpose(1, 2).flatten(2)), (key, value)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to (batch, heads, sequence, head width); a tensor-parallel rank has some of the heads."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Turn each pair of numbers, taken as a complex one, by its place in the sequence."""
        pairs = torch.view_as_complex(x.unflatten(3, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[start : start + x.shape[2]]).flatten(3)


def rotary_turns(sequence_length: int, head_width: int) -> Tensor:
    """Return (sequence, head width / 2) complex numbers of length one (Su et al., arXiv 2104.09864, section 3.2.2)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(sequence_length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def blocks_of_stage(num_blocks: int, stage_index: int, num_stages: int) -> range:
    """Return one stage's blocks: as even as it can be, the earlier stages taking one more.

    Raises:
        ValueError: there are more stages than blocks.
    """
    if num_stages > num_blocks:
        raise ValueError(f"{num_stages} stages for {num_blocks} blocks: start at most {num_blocks} processes")
    fewest, num_larger = divmod(num_blocks, num_stages)
    first = stage_index * fewest + min(stage_index, num_larger)
    return range(first, first + fewest + (stage_index < num_larger))


def build_stage(config: GPTConfig, stage_index: int, num_stages: int, *, device: torch.device, seed: int) -> GPT:
    """Return one stage, initialised: the same bits for any number of stages."""
    model = GPT(config, stage_index, num_stages)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            nn.init.normal_(parameter, std=initial_std(config, name), generator=generator)
    return model.to(device)


def initial_std(config: GPTConfig, name: str) -> float:
    """Return how widely a matrix is drawn: narrowly at the model's ends, and where a block adds to what it was given."""
    if not name.startswith("blocks."):
        return 0.02
    keeps_size = 1 / math.sqrt(config.width)
    adds = name.endswith(("out.weight", "down.weight"))
    return keeps_size / math.sqrt(2 * config.num_blocks) if adds else keeps_size
