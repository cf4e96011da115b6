"""What a stream does, said again in one process: a loop over ticks and stages, with plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS = 8, 11


class Embed(nn.Module):
    """Takes integers; hands on values, and the integers, which no gradient comes for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.table(words), {"words": words}


class Middle(nn.Module):
    """Hands on three values: of the last one, the next stage uses nothing where all words are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.other = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, marks: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(self.norm(self.linear(x)), inplace=True)
        return x, marks["words"] % 2, self.other(x.detach())


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        x.mul_(2)  # in place, which a stage may do
        y = self.linear(x)
        return y if mask.all() else y + other * mask[:, None]


class Tick(NamedTuple):
    """A call of all ranks; without words, a tick of a drain."""

    words: Tensor | None
    target: Tensor | None = None
    learn: bool = True


def alone(
    stages: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], loss_fn: Callable[..., Tensor], ticks: Sequence[Tick]
) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield what comes out in each tick, and its loss."""
    p = len(stages)
    arriving: list[Any] = [None] * p
    gradients: list[Any] = [None] * p
    targets: list[Any] = [None] * (p - 1)
    marks: list[Any] = [None] * p
    drained = 0
    for tick in ticks:
        made, back = [None] * p, [None] * p
        targets.append(tick.target)
        target, output, loss = targets.pop(0), None, None
        for s, (stage, optimizer) in enumerate(zip(stages, optimizers)):
            given = tick.words if s == 0 else arriving[s]
            if given is None:
                continue
            leaves: list[Tensor] = []
            with torch.set_grad_enabled(tick.learn):
                args = (given,) if s == 0 else tuple(_entered(given, tick.learn, leaves))
                result = stage(*args)
                outputs = [one for one in _tensors(result) if one.is_floating_point()]
                if s == p - 1:
                    output = result.detach()
                    loss = None if target is None or not tick.learn else loss_fn(result, target)
                    outputs, given_back = ([], []) if loss is None else ([loss], [torch.ones_like(loss)])
                else:
                    if tick.learn:
                        marks[s] = [one.requires_grad for one in _tensors(result)]
                    made[s + 1] = result, iter(marks[s] or [False] * len(_tensors(result)))
                    given_back = gradients[s] or [None] * len(outputs)
            pairs = [(one, back) for one, back in zip(outputs, given_back) if one.requires_grad and back is not None]
            if pairs:
                optimizer.zero_grad()
                torch.autograd.backward(*zip(*pairs))
                found = [leaf.grad for leaf in leaves]
                back[s - 1] = found if any(one is not None for one in found) else None
                optimizer.step()
        yield output, None if loss is None else loss.detach()
        arriving = [None if one is None else _cut(*one) for one in made]
        gradients = back if tick.learn else gradients  # what has arrived waits for the next tick that learns
        drained = drained + 1 if tick.words is None else 0
        if drained == p - 1:
            arriving, gradients, marks = [None] * p, [None] * p, [None] * p


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in (value.values() if isinstance(value, dict) else value) for tensor in _tensors(part)]


def _cut(value: Any, marks: Iterator[bool]) -> Any:
    """Detached copies, each with a word on whether it needs a gradient, as in the latest tick that learned."""
    if isinstance(value, Tensor):
        return value.detach().clone(), next(marks)
    if isinstance(value, dict):
        return {key: _cut(one, marks) for key, one in value.items()}
    return [_cut(one, marks) for one in value]


def _entered(value: Any, learn: bool, leaves: list[Tensor]) -> Any:
    """New leaves in place of tensors, aliased so that a stage may change them; those that can have a gradient are collected."""
    if isinstance(value, dict):
        return {key: _entered(one, learn, leaves) for key, one in value.items()}
    if isinstance(value, list):
        return [_entered(one, learn, leaves) for one in value]
    tensor, needed = value
    leaf = tensor.requires_grad_(needed and learn and tensor.is_floating_point())
    if tensor.is_floating_point():
        leaves.append(leaf)
    return leaf * 1 if leaf.requires_grad else leaf
