"""Whole models to cut: with a ModuleList, with a ModuleDict whose forward tolerates None, and one that no stage can run alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from tests.models import Block
from tests.over import pipeline

WORDS, WIDTH, TOKENS, NUM_BLOCKS = 13, 16, 6, 6


class Transformer(nn.Module):
    """Embedding, blocks in a ModuleList, norm and head; every module of it may be missing."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 2, dropout) for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Decoder(nn.Module):
    """As torchtitan writes them: blocks in a ModuleDict, and a forward that knows missing modules as None."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        self.layers = nn.ModuleDict({str(index): Block(WIDTH, 2, 0.0) for index in range(num_blocks)})
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.lm_head: Any = nn.Linear(WIDTH, WORDS, bias=False)

    def init_weights(self) -> None:
        """The same bits however it is cut: each parameter from a seed of its own name."""
        self.scale.fill_(1.5)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h) * self.scale
            h = h if shift is None else h + shift
        h = self.norm(h) if self.norm is not None else h
        return self.lm_head(h) if self.lm_head is not None else h


class Nano(nn.Module):
    """As nanoGPT writes it: positions are added outside of any module, so that every stage would add them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tok(x) + self.pos(torch.arange(x.shape[1])))
        for layer in self.h:
            x = torch.tanh(layer(x))
        return self.head(x)


def words(num_rows: int, seed: int = 0) -> torch.Tensor:
    """[rows, tokens] of random words."""
    return torch.randint(0, WORDS, (num_rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def gradients_alone(model: nn.Module, m: int, x: torch.Tensor, y: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a single process, microbatch by microbatch; the model has none afterwards."""
    model.zero_grad()
    parts = {name: value.chunk(m) for name, value in kwargs.items()}
    for i, (xi, yi) in enumerate(zip(x.chunk(m), y.chunk(m))):
        output = model(xi, **{name: chunks[i] for name, chunks in parts.items()})
        (cross_entropy(output, yi) / m).backward()
    return taken_gradients([model])


def taken_gradients(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of some parts by name, which are gone afterwards."""
    found = {name: parameter.grad for part in parts for name, parameter in part.named_parameters()}
    for part in parts:
        part.zero_grad()
    return found


def gradients_piped(
    parts: Sequence[nn.Module],
    m: int,
    x: torch.Tensor,
    y: torch.Tensor,
    schedule: Any = bpipe.BalancedOneFOneB,
    loss_fn: Callable[..., Any] = cross_entropy,
    num_ranks: int | None = None,
    **kwargs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The gradients of the same in a loopback."""
    loopback, schedules = pipeline(schedule, parts, m, loss_fn, num_ranks)
    loopback.step(schedules, x, target=y, return_outputs=False, **kwargs)
    for one in schedules:
        one.close()
    return taken_gradients(parts)


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Equal to the bit."""
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
