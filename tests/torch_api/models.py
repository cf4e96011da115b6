"""Models like those of PyTorch's own tests of pipelining, small, and one process that a pipeline of them is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import bpipe

WIDTH, BATCH = 16, 32


class Block(nn.Module):
    """Two linear layers with ReLU between; takes keyword arguments that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Cut(nn.Module):
    """Cuts itself into parts, of which the first uses a keyword argument."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(num_parts))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x) + y
        for part in list(self.parts)[1:]:
            bpipe.pipe_split()
            x = part(x)
        return x


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target, reduction="sum")


def blocks(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(number)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def gradients_of(modules: Sequence[nn.Module]) -> list[torch.Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def in_one_process(modules: Sequence[nn.Module], loss_fn: Callable[..., torch.Tensor] = sum_of_squares) -> list[Any]:
    """The output, the loss and the gradients of the whole batch at once, as PyTorch's tests compare with."""
    x, target = batch()
    for module in modules:
        module.zero_grad()
    output = nn.Sequential(*modules)(x)
    loss = loss_fn(output, target)
    loss.backward()
    return [output.detach(), loss.detach(), *(None if one is None else one.clone() for one in gradients_of(modules))]
