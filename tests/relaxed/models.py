"""Stages of local learning for the tests, and each of them trained alone, which a pipeline is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bpipe
from tests.models import TOKENS, WIDTH, Block, ConvNorm

CLASSES = 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class InPlace(nn.Module):
    """Changes its input in place before it uses it, as its own right."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5) + torch.tanh(self.linear(x))


class Checkpointed(nn.Module):
    """Runs its inner layers forward a second time before their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # a block, and the shape of a sample
    "transformer with dropout": (Block, (TOKENS, WIDTH)),
    "batch norm": (ConvNorm, (4, 8, 8)),
    "in place": (InPlace, (WIDTH,)),
    "checkpointed": (Checkpointed, (WIDTH,)),
}


def modules_of(kind: str, num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    block, shape = KINDS[kind]
    heads = bpipe.local_heads([(2, *shape)] * num_stages, CLASSES)
    first = [bpipe.LocalBlock(block(), head, name=index) for index, head in enumerate(heads[:-1])]
    return [*first, nn.Sequential(block(), heads[-1])]


def batch_of(kind: str, size: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, *KINDS[kind][1], generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def loss_of(stage: int) -> Loss:
    """Each stage has a loss of its own."""
    return partial(F.cross_entropy, label_smoothing=0.1 * stage)


def targets_of(stage: int, y: torch.Tensor, shift: int) -> torch.Tensor:
    """Each process may have a target of its own."""
    return (y + shift * stage) % CLASSES


@dataclass
class Trained:
    """What one stage has after some steps: its gradients and buffers, the losses of all steps, and the latest outputs."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: torch.Tensor | None = None

    def of(self, module: nn.Module) -> Trained:
        self.tensors = [p.grad.clone() for p in module.parameters() if p.grad is not None] + [b.clone() for b in module.buffers()]
        return self


def alone(kind: str, num_stages: int, m: int, steps: int = 2, shift: int = 0) -> list[Trained]:
    """Train each stage by itself, one after the other, on what the stage before has made, which was recorded."""
    recorded = [list(batch_of(kind, 2 * m, step)[0].chunk(m)) for step in range(steps)]
    found = []
    for index, module in enumerate(modules_of(kind, num_stages)):
        torch.manual_seed(1)
        result = Trained()
        for step in range(steps):
            for i, y in enumerate(targets_of(index, batch_of(kind, 2 * m, step)[1], shift).chunk(m)):
                made = module(recorded[step][i].clone())
                output, prediction = made if index < num_stages - 1 else (made, made)
                loss = loss_of(index)(prediction, y)
                (loss / m).backward()
                recorded[step][i] = output.detach()
                result.losses.append(loss.detach())
        result.outputs = torch.cat(recorded[-1]) if index == num_stages - 1 else None
        found.append(result.of(module))
    return found


def as_rank(rank: int, kind: str, num_stages: int, m: int, steps: int = 2, shift: int = 0) -> Trained:
    """The same as a rank of a pipeline."""
    module, result = modules_of(kind, num_stages)[rank], Trained()
    torch.manual_seed(1)
    stage = bpipe.PipelineStage(module, rank, num_stages, "cpu")
    schedule = bpipe.LocalLearning(stage, m, loss_fn=loss_of(rank))
    for step in range(steps):
        x, y = batch_of(kind, 2 * m, step)
        losses: list[torch.Tensor] = []
        result.outputs = schedule.step(*(x,) * (rank == 0), target=targets_of(rank, y, shift), losses=losses)
        result.losses += losses
    stats = schedule.stats
    assert stats["peak_slots"] == 1 and stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"]
    schedule.close()
    return result.of(module)


def loopback_of(modules: list[nn.Module], m: int) -> tuple[bpipe.Loopback, list[bpipe.LocalLearning]]:
    loopback = bpipe.Loopback(len(modules))
    return loopback, schedules_of(loopback, modules, m)


def schedules_of(loopback: bpipe.Loopback, modules: list[nn.Module], m: int) -> list[bpipe.LocalLearning]:
    """The last stage is on the first rank, and so on."""
    placed = zip(reversed(range(len(modules))), range(len(modules)))
    stages = [bpipe.PipelineStage(modules[i], i, len(modules), "cpu", loopback.rank(rank)) for i, rank in placed]
    return [bpipe.LocalLearning(stage, m, loss_fn=loss_of(stage.stage_index)) for stage in stages]


def assert_same(found: Trained, expected: Trained, *, all_losses: bool = True) -> None:
    """Equal to the bit."""
    assert expected.tensors and len(found.tensors) == len(expected.tensors)
    assert all(map(torch.equal, found.tensors, expected.tensors))
    assert not all_losses or (len(found.losses) == len(expected.losses) and all(map(torch.equal, found.losses, expected.losses)))
    assert (found.outputs is None) == (expected.outputs is None)
    assert found.outputs is None or expected.outputs is None or torch.equal(found.outputs, expected.outputs)
