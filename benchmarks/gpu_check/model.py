"""The model of the checks: a transformer of plain torch modules, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import blocks
from benchmarks.blocks import GPTBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the model and of its batches."""

    num_ranks: int = 4  # of the pipeline, each with one stage
    num_microbatches: int = 8  # of a step
    width: int = 2048  # of a block
    tokens: int = 2048
    sequences: int = 2  # of a microbatch
    blocks: int = 1  # of a stage
    dtype: str = "bfloat16"  # of parameters and activations, by torch's name
    dropout: float = 0.1  # the share that is dropped after the attention
    seconds: float = 20.0  # of steps that are timed


def make_deterministic() -> None:
    """Make kernels add in one order, for the whole process: otherwise two identical runs need not agree bit for bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would write all that is allocated


def stage_of(size: Size, index: int, device: torch.device) -> nn.Module:
    """Make one stage with gradients of zero, which steps add to, so that no step allocates them."""
    torch.manual_seed(index)
    shape = blocks.Size(size.width, size.tokens, size.sequences)
    with torch.device(device):
        stage = nn.Sequential(*[GPTBlock(shape, "any", size.dropout) for _ in range(size.blocks)]).to(getattr(torch, size.dtype))
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def batch_of(size: Size, step: int, device: torch.device) -> torch.Tensor:
    """Make a batch [num_microbatches * sequences, tokens, width], a different one for each step."""
    generator = torch.Generator(device).manual_seed(1000 + step)
    shape = size.num_microbatches * size.sequences, size.tokens, size.width
    return torch.randn(*shape, device=device, dtype=getattr(torch, size.dtype), generator=generator)


def gradients_of(stage: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that steps have accumulated."""
    return [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a microbatch."""
    return F.mse_loss(output, target)
