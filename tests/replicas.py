"""Pipelines side by side, each with a share of the batch, and the single process whose gradients theirs must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from tests.models import batch_of, mse

Gradients = list[list[torch.Tensor]]  # by stage
Backward = Callable[[Sequence[nn.Module], torch.Tensor, torch.Tensor, int], Gradients]


def of_replica(modules: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, m: int) -> Gradients:
    """The gradients of one pipeline's share, microbatch after microbatch."""
    for xi, yi in zip(x.chunk(m), y.chunk(m)):
        (mse(nn.Sequential(*modules)(xi), yi) / m).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


def averaged(
    make: Callable[[], Sequence[nn.Module]],
    m: int,
    steps: Iterable[int] = (0,),
    *,
    kind: str = "quiet",
    replicas: int = 2,
    backward: Backward = of_replica,
) -> Gradients:
    """Each replica's gradients of some steps, averaged over the replicas and added up over the steps, by stage."""
    total: Gradients = []
    for step in steps:
        x, y = batch_of(kind, replicas * 2 * m, step)
        each = [backward(make(), *pair, m) for pair in zip(x.chunk(replicas), y.chunk(replicas))]
        mean = [[sum(parts) / replicas for parts in zip(*stages)] for stages in zip(*each)]
        total = mean if not total else [[a + b for a, b in zip(*pair)] for pair in zip(total, mean)]
    return total


def assert_gradients(ranks: Sequence[dict[int, list[torch.Tensor]]], expected: Gradients, replicas: int = 2) -> None:
    """To the bit: two replicas' gradients have one sum whatever the order, and their mean is exact."""
    assert sorted(stage for gradients in ranks for stage in gradients) == sorted([*range(len(expected))] * replicas)
    for gradients in ranks:
        for stage, found in gradients.items():
            assert all(map(torch.equal, found, expected[stage]))
