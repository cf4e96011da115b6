"""Stages of many kinds for the tests, and the single process that every pipeline is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.schedules import rules

WIDTH, TOKENS = 32, 16


class Block(nn.Module):
    """A pre-norm transformer block with SDPA and dropout."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(a))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ConvNorm(nn.Module):
    """Convolution, BatchNorm and an in-place activation; keeps [b, 4, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Views(nn.Module):
    """Saves views of one storage, an in-place change before saving, and returns a view of its input's storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)
        gated = a * torch.sigmoid(b)
        gated.mul_(0.5)
        return (gated + x.flip(-1) * a.transpose(0, 0)).transpose(0, 1).transpose(0, 1)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class Tied(nn.Module):
    """One matrix in three places, and another one beside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.second(torch.tanh(self.first(x))) @ self.first.weight)


class Nested(nn.Module):
    """Passes a pytree on: a tensor, a mask of bools, indices, a constant, and an output that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, scale: Any = None) -> Any:
        nest = x if isinstance(x, dict) else {"x": x, "mask": x.sum(-1) > 0, "more": (torch.arange(3), 2, None)}
        y = self.linear(nest["x"]) * nest["mask"].unsqueeze(-1) * nest["more"][1]
        y = y if scale is None else y * scale
        return {"x": y, "mask": nest["mask"], "more": nest["more"], "unused": [y * 2, y.detach()]}


class Pair(nn.Module):
    """Takes and returns two tensors, of which the second is an input that the next stage may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x)), x


class Frozen(nn.Module):
    """A stage without anything to train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def mse(output: Any, target: torch.Tensor) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = output["x"] if isinstance(output, dict) else output[0]
    return F.mse_loss(output.float(), target.float())


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "transformer": lambda i: nn.Sequential(Block(), Block()),
    "quiet": lambda i: Block(dropout=0.0),
    "conv": lambda i: nn.Sequential(ConvNorm(), ConvNorm()),
    "lstm": lambda i: Recurrent(),
    "views": lambda i: Views(),
    "autocast": lambda i: Autocast(),
    "tied": lambda i: Tied(),
    "nested": lambda i: Nested(),
    "pair": lambda i: Pair(),
    "frozen": lambda i: Frozen() if i in (0, 2) else Block(),
}


def modules_of(kind: str, num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [KINDS[kind](i) for i in range(num_stages)]


def batch_of(kind: str, size: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = (size, 4, 8, 8) if kind == "conv" else (size, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@dataclass
class Result:
    """What a training run leaves behind, by stage where it belongs to one."""

    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    buffers: list[list[torch.Tensor]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)


def state_of(module: nn.Module) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    return [p.grad for p in module.parameters()], [b.clone() for b in module.buffers()]


def flat(value: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(a: Result, b: Result) -> None:
    """Equal to the bit, in everything but the stats."""
    for x, y in zip(a.gradients + a.buffers, b.gradients + b.buffers, strict=True):
        assert [t is None for t in x] == [t is None for t in y]
        assert all(torch.equal(s, t) for s, t in zip(x, y, strict=True) if s is not None and t is not None)
    assert a.losses and all(map(torch.equal, a.losses, b.losses))
    assert a.outputs and all(map(torch.equal, a.outputs, b.outputs))


def single_process(kind: str, num_stages: int, m: int, steps: int = 2) -> Result:
    """The whole model in one process: microbatch by microbatch, each stage with a random number state of its own."""
    modules, result = modules_of(kind, num_stages), Result()
    torch.manual_seed(1)
    random = [torch.get_rng_state()] * num_stages
    for step in range(steps):
        x, y = batch_of(kind, 2 * m, step)
        result.losses, outputs = [], []
        for xi, yi in zip(x.chunk(m), y.chunk(m)):
            value: Any = (xi,)
            for i, module in enumerate(modules):
                torch.set_rng_state(random[i])
                value = module(*value) if isinstance(value, tuple) else module(value)
                random[i] = torch.get_rng_state()
            loss = mse(value, yi)
            (loss / m).backward()
            result.losses.append(loss.detach())
            outputs.append(flat(value))
        result.outputs = [torch.cat(parts) for parts in zip(*outputs)]
    for gradients, buffers in map(state_of, modules):
        result.gradients.append(gradients)
        result.buffers.append(buffers)
    return result


def held_by(schedule: type[bpipe.Schedule], num_ranks: int, num_stages: int) -> list[list[int]]:
    """The stages of each rank."""
    placement = next(rule.placement for rule in rules() if rule.name == schedule.rule)
    stage_ranks = placement.stage_ranks(num_ranks, num_stages // num_ranks)
    return [[stage for stage, owner in enumerate(stage_ranks) if owner == rank] for rank in range(num_ranks)]


def directions_of(schedule: type[bpipe.Schedule]) -> int:
    """Whether its stages are the model once, or twice."""
    return next(rule.placement.directions for rule in rules() if rule.name == schedule.rule)


def in_loopback(
    kind: str,
    num_stages: int,
    m: int,
    schedule: type[bpipe.Schedule],
    steps: int = 2,
    *,
    num_ranks: int | None = None,
    **options: Any,
) -> Result:
    """The same in a loopback."""
    modules, result = modules_of(kind, num_stages), Result()
    torch.manual_seed(1)
    loopback = bpipe.Loopback(num_ranks or num_stages)
    stages = [
        [bpipe.PipelineStage(modules[i], i, num_stages, "cpu", loopback.rank(rank)) for i in held]
        for rank, held in enumerate(held_by(schedule, loopback.num_ranks, num_stages))
    ]
    schedules = [schedule(of_rank, m, loss_fn=mse, **options) for of_rank in stages]
    for step in range(steps):
        x, y = batch_of(kind, 2 * m, step)
        result.outputs = flat(loopback.step(schedules, x, target=y, losses=result.losses))
    result.stats = [one.stats for one in schedules]
    for gradients, buffers in map(state_of, modules):
        result.gradients.append(gradients)
        result.buffers.append(buffers)
    return result


def as_rank(
    rank: int,
    kind: str,
    num_stages: int,
    m: int,
    schedule: type[bpipe.Schedule],
    steps: int,
    options: dict[str, Any],
    device: str = "cpu",
    num_ranks: int | None = None,
) -> Result:
    """One rank's part of the same over a process group."""
    held = held_by(schedule, num_ranks or num_stages, num_stages)[rank]
    whole, result = modules_of(kind, num_stages), Result(stages=held)
    modules = {i: whole[i].to(device) for i in held}
    torch.manual_seed(1)
    stages = [bpipe.PipelineStage(module, i, num_stages, device) for i, module in modules.items()]
    pipeline = schedule(stages, m, loss_fn=mse, **options)
    for step in range(steps):
        x, y = (part.to(device) for part in batch_of(kind, 2 * m, step))
        result.outputs = flat(pipeline.step(x, target=y, losses=result.losses))
    for module in modules.values():
        gradients, buffers = state_of(module.cpu())
        result.gradients.append(gradients)
        result.buffers.append(buffers)
    result.losses, result.outputs = [loss.cpu() for loss in result.losses], [output.cpu() for output in result.outputs]
    result.stats = [pipeline.stats]
    pipeline.close()
    return result


def joined(results: Sequence[Result]) -> Result:
    """The ranks' parts as one."""
    last = next(part for part in results if part.losses)
    whole = Result(losses=last.losses, outputs=last.outputs, stats=[stats for part in results for stats in part.stats])
    parts = [one for part in results for one in zip(part.stages, part.gradients, part.buffers, strict=True)]
    for _, gradients, buffers in sorted(parts, key=lambda one: one[0]):
        whole.gradients.append(gradients)
        whole.buffers.append(buffers)
    return whole
