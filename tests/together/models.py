"""Stages of every shape, a batch for them, and the single process that a pipeline of them is compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from bpipe.slices import join

WIDTH, POSITIONS, ROWS = 4, 6, 2

Skips = Mapping[str, Sequence[int]]


class Stage(nn.Module):
    """Causal attention and a layer behind it, after what skips bring.

    It returns what the shapes of its plan ask for: ((output, skips), prediction), state), without what nobody wants.
    """

    def __init__(self, takes: Collection[str], makes: Collection[str], *, is_sliced: bool, predicts: bool) -> None:
        super().__init__()
        self.is_sliced = is_sliced
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.takers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in takes})
        self.makers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in makes})
        self.head = nn.Linear(WIDTH, WIDTH) if predicts else None

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = (), **skips: torch.Tensor) -> Any:
        for name, value in skips.items():
            x = x + self.takers[name](value)
        query, key, value = self.qkv(x).chunk(3, -1)
        keys, values = (join([*(one[i] for one in past), own], 1) for i, own in enumerate((key, value)))
        ahead = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool).triu(1 + keys.shape[1] - query.shape[1])
        scores = (query @ keys.mT).masked_fill(ahead, -torch.inf)
        x = x + self.out(torch.tanh(scores.softmax(-1) @ values))
        result: Any = (x, {name: torch.tanh(maker(x)) for name, maker in self.makers.items()}) if self.makers else x
        result = result if self.head is None else (result, self.head(x))
        return (result, (key, value)) if self.is_sliced else result


class Model(NamedTuple):
    """The stages of a model, its skips, and a batch of m microbatches."""

    stages: list[Stage]
    skips: Skips
    x: torch.Tensor
    target: torch.Tensor
    is_local: bool
    m: int


def model_of(depth: int, m: int, *, skips: Skips | None = None, is_sliced: bool = False, is_local: bool = False) -> Model:
    torch.manual_seed(0)
    skips = {} if skips is None else skips
    stages = []
    for part in range(depth):
        takes = [name for name, (_, *users) in skips.items() if part in users]
        makes = [name for name, (source, *_) in skips.items() if part == source]
        predicts = is_local and part < depth - 1
        stages.append(Stage(takes, makes, is_sliced=is_sliced, predicts=predicts).double())
    x, target = torch.randn(2, ROWS * m, POSITIONS, WIDTH, dtype=torch.float64)
    return Model(stages, skips, x, target, is_local, m)


class Trained(NamedTuple):
    """What training has given: the losses of the last stage, and the gradients of all stages."""

    losses: list[torch.Tensor]
    gradients: list[list[torch.Tensor]]


def gradients_of(stage: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in stage.parameters()]


def alone(model: Model, steps: int = 1) -> Trained:
    """Train whole sequences in one process, microbatch by microbatch; the gradients of all steps add up."""
    stages, losses = [deepcopy(stage).requires_grad_() for stage in model.stages], []
    for stage in stages:
        stage.is_sliced = False
    for _ in range(steps):
        for x, target in zip(model.x.chunk(model.m), model.target.chunk(model.m)):
            kept: dict[str, torch.Tensor] = {}
            for part, stage in enumerate(stages):
                used = {name: kept[name] for name, (_, *users) in model.skips.items() if part in users}
                result = stage(x, **used)
                result, prediction = result if stage.head is not None else (result, result)
                x, made = result if stage.makers else (result, {})
                if model.is_local:
                    x, made = x.detach(), {name: one.detach() for name, one in made.items()}
                kept |= made
                if model.is_local or part == len(stages) - 1:
                    loss = nn.functional.mse_loss(prediction, target)
                    (loss / model.m).backward()
            losses.append(loss.detach())
    return Trained(losses, [gradients_of(stage) for stage in stages])


def assert_equal(found: Trained, expected: Trained) -> None:
    """Within 1e-12, in float64: sums over slices, users of a skip and directions are added up in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
