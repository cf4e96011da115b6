"""Stages that take a sequence in slices: attention with grouped queries, an LSTM, a state-space layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bpipe.slices import causal_attention, join

WIDTH, HEADS, KEY_HEADS = 16, 4, 2
Past = tuple[Any, ...]


class Attention(nn.Module):
    """A transformer block whose queries share heads of keys and values in groups."""

    def __init__(self, *, joins: bool = False) -> None:
        super().__init__()
        self.norm, self.q, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._key_heads = HEADS if joins else KEY_HEADS
        self.kv = nn.Linear(WIDTH, 2 * self._key_heads * WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self._joins = joins

    def forward(self, x: torch.Tensor, past: Past = ()) -> tuple[torch.Tensor, Any]:
        batch, n, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, n, HEADS, -1).transpose(1, 2)
        k, v = self.kv(y).view(batch, n, 2, self._key_heads, -1).permute(2, 0, 3, 1, 4)
        attend = _with_joined if self._joins else causal_attention
        x = x + self.out(attend(q, k, v, past).transpose(1, 2).reshape(batch, n, WIDTH))
        return x + self.mlp(x), (k, v)


def _with_joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: Past) -> torch.Tensor:
    """Attend as a model's own code may do it: keys and values are joined, and products of matrices save them."""
    keys, values = join([*(one for one, _ in past), k], 2), join([*(one for _, one in past), v], 2)
    scores = q @ keys.mT / q.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + keys.shape[2] - q.shape[2])
    return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values


class Recurrent(nn.Module):
    """An LSTM; its state are its two vectors after the slice."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, past: Past = ()) -> tuple[torch.Tensor, Any]:
        y, state = self.lstm(x, past[-1] if past else None)
        return x + y, state


class StateSpace(nn.Module):
    """A state-space layer with a diagonal of decays, as in Mamba without its gates; its state is the hidden one and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of, self.decay = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Parameter(torch.randn(2 * WIDTH)),
        )

    def forward(self, x: torch.Tensor, past: Past = ()) -> tuple[torch.Tensor, Any]:
        hidden, found = past[-1]["hidden"] if past else x.new_zeros(x.shape[0], 2 * WIDTH), []
        for given in self.into(x).unbind(1):
            hidden = torch.sigmoid(self.decay) * hidden + given
            found.append(hidden)
        return x + self.out_of(torch.stack(found, 1)), {"hidden": hidden, "seen": x.shape[1]}


KINDS = {"attention": Attention, "joined": lambda: Attention(joins=True), "lstm": Recurrent, "state space": StateSpace}


class Stage(nn.Module):
    """Some layers, each with its own state."""

    def __init__(self, kind: str, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(num_layers))

    def forward(self, x: torch.Tensor, past: Past = ()) -> tuple[torch.Tensor, Any]:
        states = []
        for place, layer in enumerate(self.layers):
            x, state = layer(x, tuple(one[place] for one in past))
            states.append(state)
        return x, states


class Whole(nn.Module):
    """A stage that takes sequences whole."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x)[0]


def stages_of(kind: str, num_stages: int, dtype: torch.dtype = torch.float64, num_layers: int = 2) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(kind, num_layers).to(dtype) for _ in range(num_stages)]


def batch_of(num_microbatches: int, positions: int = 12, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences a microbatch, and their targets."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * num_microbatches, positions, WIDTH, dtype=dtype, generator=generator) for _ in range(2))  # type: ignore[return-value]
