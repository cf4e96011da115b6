"""Modules that a dry run has to follow, and those that only a real forward shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

T = torch.Tensor
WIDTH = 16


class Layer(nn.Module):
    """A layer of a residual network, which subclasses change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inner(self, x: T) -> T:
        found: T = self.down(F.gelu(self.up(x)))
        return found

    def forward(self, x: T) -> T:
        return x + self.inner(x)


class Checkpointed(Layer):
    def forward(self, x: T) -> T:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class CheckpointedReentrant(Layer):
    def forward(self, x: T) -> T:
        found: T = checkpoint(self.inner, self.up(x)[:, :WIDTH], use_reentrant=True)
        return x + found


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.save_for_backward(x)
        ctx.twice = 2 * x  # kept in an attribute, which no hook sees
        return ctx.twice.clone()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:
        return gradient * ctx.twice / ctx.saved_tensors[0]


class WithFunction(Layer):
    def forward(self, x: T) -> T:
        return x + Doubling.apply(self.inner(x))


class Masked(Layer):
    """Leaves out a mask that masks nothing, and makes positions."""

    def forward(self, x: T) -> T:
        mask = torch.ones(x.shape[0], dtype=torch.bool, device=x.device).cumsum(0) <= x.shape[0]
        if not mask.all():
            x = x * mask[:, None]
        return x + self.inner(x[torch.arange(len(x))[mask]])


class Routed(Layer):
    """Gives each row to the expert that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: T) -> T:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        return x + weights * torch.stack([self.inner(x), self.up(x)[:, :WIDTH]])[chosen[:, 0], torch.arange(len(x))]


class Noting(Layer):
    """Keeps things in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.history, self.seen = 0, [], {"latest": 0.0}
        self.counted = torch.zeros(3)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: T) -> T:
        self.num_calls += 1
        self.history.append(x.shape[0])
        self.seen["latest"] = self.seen["latest"] + 1.0
        self.counted += 1
        self.average.lerp_(x.detach().mean(0), 0.1)
        return x + self.inner(x)


class Drawing(Layer):
    """Draws in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.numbers = random.Random(3), torch.Generator().manual_seed(3)

    def forward(self, x: T) -> T:
        import numpy as np

        factor = random.random() + np.random.rand() + self.own.random()
        return x + factor * self.inner(F.dropout(x, 0.2)) + torch.rand(len(x), 1, generator=self.numbers)


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


class Asking(Layer):
    """Decides by its activations."""

    def forward(self, x: T) -> T:
        return x + self.inner(x) if x.sum() < 1e9 else x


class Selecting(Layer):
    def forward(self, x: T) -> T:
        return x + self.inner(x).masked_fill(x > 9, 0) + x[x[:, 0] < 9].sum()


class ThroughNumPy(Layer):
    def forward(self, x: T) -> T:
        return x * float(x.detach().numpy().max() < 1e9) + self.inner(x)


HIDDEN = {"weight": nn.Parameter(torch.eye(WIDTH))}


class Closing(Layer):
    """Uses a weight that is in none of its modules."""

    def forward(self, x: T) -> T:
        return x @ HIDDEN["weight"] + self.inner(x)


PREDICTED: dict[str, Callable[[], nn.Module]] = {
    "plain": Layer,
    "checkpointed": Checkpointed,
    "checkpointed, reentrant": CheckpointedReentrant,
    "with a Function of its own": WithFunction,
    "masked": Masked,
    "routed": Routed,
    "noting": Noting,
    "drawing": Drawing,
    "normed": Normed,
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
}
MEASURED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "asking": (Asking, "of activations or random numbers, at kinds.py"),
    "selecting": (Selecting, "indexing by a mask that activations decide, at kinds.py"),
    "through NumPy": (ThroughNumPy, "numpy"),
    "closing": (Closing, "is in no module of the stage"),
    "of torch.jit": (lambda: torch.jit.trace(Layer(), torch.randn(2, WIDTH)), "of torch.jit"),
    "compiled": (lambda: torch.compile(Layer(), backend="eager"), "compiled"),
}
