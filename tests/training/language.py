"""A small language model whose stages have the names of the whole, and the loop of a single process that trains it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from tests.models import TOKENS, WIDTH, Block, held_by

WORDS, BLOCKS, M = 13, 4, 8
BOUND = 0.1  # below the norms that occur


class LanguageModel(nn.Module):
    """The whole, or a stage: embedding, blocks, norm and head. Initialised by name, so alike however it is cut."""

    def __init__(self, stage: int = 0, num_stages: int = 1, *, with_statistics: bool = False) -> None:
        super().__init__()
        is_last = stage == num_stages - 1
        mine = range(stage * BLOCKS // num_stages, (stage + 1) * BLOCKS // num_stages)
        self.embedding = nn.Embedding(WORDS, WIDTH) if stage == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(index): Block(dropout=0.0) for index in mine})
        self.statistics = nn.BatchNorm1d(TOKENS) if with_statistics and is_last else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH) if is_last else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if is_last else nn.Identity()
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(self.statistics(x)))


def words_of(step: int, size: int = 2 * M) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (size, TOKENS + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def groups_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Matrices decay, vectors don't; chosen by name, on each stage as in the whole."""
    named = [item for module in modules for item in module.named_parameters()]
    decays = [parameter for name, parameter in named if name.endswith("weight") and "norm" not in name]
    others = [parameter for name, parameter in named if not (name.endswith("weight") and "norm" not in name)]
    return [{"params": decays, "weight_decay": 0.1, "lr": 1e-2}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]


def backward_of(whole: nn.Module, step: int, loss_fn: Callable[..., torch.Tensor] = cross_entropy) -> float:
    """Add a step's gradients in a single process; the mean of the microbatches' losses."""
    x, target = words_of(step)
    losses = []
    for xi, yi in zip(x.chunk(M), target.chunk(M)):
        loss = loss_fn(whole(xi), yi)
        (loss / M).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def train_alone(whole: nn.Module, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> Iterator[Any]:
    """Train in a single process: each step's loss and total norm."""
    optimizer = optimizer or torch.optim.AdamW(groups_of([whole]))
    for step in steps:
        optimizer.zero_grad()
        loss = backward_of(whole, step)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), BOUND)
        optimizer.step()
        yield loss, norm


class Pipeline:
    """A rank's stages, their schedule and optimizer.

    Args:
        rank: of this pipeline.
        num_ranks: of this pipeline.
        num_stages: of the model.
        schedule: the class to run.
        group: of the pipeline.
        shard: what to do with each stage's module, such as to shard it.
        model: the class of the stages.
        loss_fn: of the last stage.
        options: of the model.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_stages: int | None = None,
        schedule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB,
        *,
        group: Any = None,
        shard: Callable[[nn.Module], Any] | None = None,
        model: Callable[..., nn.Module] = LanguageModel,
        loss_fn: Callable[..., torch.Tensor] = cross_entropy,
        **options: Any,
    ) -> None:
        num_stages = num_stages or num_ranks
        self.group = group
        self.modules = {index: model(index, num_stages, **options) for index in held_by(schedule, num_ranks, num_stages)[rank]}
        for module in self.modules.values() if shard else ():
            shard(module)
        stages = [bpipe.PipelineStage(module, index, num_stages, "cpu", group) for index, module in self.modules.items()]
        self.schedule = schedule(stages, M, loss_fn=loss_fn)
        self.optimizer = torch.optim.AdamW(groups_of(self.modules.values()))

    def backward(self, step: int) -> float:
        """Run a step of the schedule; the loss, on every rank."""
        x, target = words_of(step)
        losses: list[torch.Tensor] = []
        self.schedule.step(x, target=target, losses=losses, return_outputs=False)
        return bpipe.share_loss(losses, group=self.group)

    def train(self, steps: Iterable[int], tied: bpipe.TiedWeights | None = None, *, clips: bool = True) -> list[Any]:
        """Each step's loss and total norm."""
        seen = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.backward(step)
            if tied is not None:
                tied.sum_grads()
            seen.append((loss, self.clip(copies=tied.copies if tied else ()) if clips else None))
            self.optimizer.step()
        return seen

    def clip(self, **options: Any) -> torch.Tensor:
        by_stage = {index: module.parameters() for index, module in self.modules.items()}
        return bpipe.clip_grad_norm_(by_stage, BOUND, group=self.group, **options)

    def values(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers by name."""
        return {name: whole_of(value) for module in self.modules.values() for name, value in module.state_dict().items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: whole_of(p.grad)
            for module in self.modules.values()
            for name, p in module.named_parameters()
            if p.grad is not None
        }


def whole_of(value: Any) -> torch.Tensor:
    """A copy; of a DTensor, all of it."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To the bit, name by name."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
