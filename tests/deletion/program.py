"""Print what a step of each feature returned, or why it was refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

import bpipe

NUM_RANKS, WIDTH, POSITIONS, M = 4, 8, 6, 8


class Stage(nn.Module):
    """A stage that takes what the shape of a step gives it: skips by keyword, `past` of earlier slices."""

    def __init__(self, index: int, makes: str = "") -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.makes = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), makes

    def forward(self, x: torch.Tensor, **skips: torch.Tensor) -> Any:
        y = torch.tanh(self.linear(x)) + sum(skips.values())
        return (y, {self.makes: y}) if self.makes else y


class Sliced(Stage):
    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, ...] = ()) -> Any:  # type: ignore[override]
        y = torch.tanh(self.linear(x))
        return y + sum(state.mean(1, keepdim=True) for state in past), y


@dataclass(frozen=True)
class Feature:
    """A schedule for each rank of a loopback, made of a rank's stages."""

    make: Callable[..., Any]
    stages: Callable[[int], nn.Module] = Stage
    held_by: Callable[[int], list[int]] = lambda rank: [rank]
    of_stage: dict[str, Any] = field(default_factory=dict)

    def run(self) -> str:
        """Run a step, and return a digest of its losses and gradients."""
        held = [self.held_by(rank) for rank in range(NUM_RANKS)]
        num_stages = sum(map(len, held))
        depth = num_stages // self.of_stage.get("directions", 1)
        loopback, schedules, modules = bpipe.Loopback(NUM_RANKS), [], list[nn.Module]()
        for rank, indices in enumerate(held):
            own = [self.stages(index % depth) for index in indices]
            options = {"num_stages": num_stages, "device": "cpu", "group": loopback.rank(rank), **self.of_stage}
            stages = [bpipe.PipelineStage(module, index, **options) for module, index in zip(own, indices)]
            schedules.append(self.make(stages if len(stages) > 1 else stages[0]))
            modules += own
        x = torch.linspace(-1, 1, M * POSITIONS * WIDTH, dtype=torch.float64).view(M, POSITIONS, WIDTH)
        losses: list[torch.Tensor] = []
        loopback.step(schedules, x, target=x**2, losses=losses)
        evicted = sum(action.op.name == "EVICT" for lane in schedules[0].plan.actions for action in lane)
        gradients = [parameter.grad.flatten() for module in modules for parameter in module.parameters()]
        digest = hashlib.sha256(torch.cat([torch.stack(losses), *gradients]).numpy().tobytes())
        return f"{digest.hexdigest()} {evicted} evictions"


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def there(room: str) -> Callable[[], str]:
    return lambda: f"{len(import_module(room).__all__)} names"


def with_own_loss(index: int) -> nn.Module:
    return Stage(index) if index == 3 else bpipe.LocalBlock(Stage(index), nn.Identity())


def recomputing(stage: Any) -> Any:
    return bpipe.Balanced(bpipe.OneFOneB(stage, M, loss_fn), None, by="recompute")


STEPS = {
    "plain": Feature(lambda stage: bpipe.BalancedOneFOneB(stage, M, loss_fn)).run,
    "skips": Feature(
        lambda stage: bpipe.BalancedOneFOneB(stage, M, loss_fn),
        stages=lambda index: Stage(index, makes="early" if index == 0 else ""),
        of_stage={"skips": {"early": (0, 2, 3)}},
    ).run,
    "slices": Feature(lambda stage: bpipe.Seq1F1B(stage, M, loss_fn, slices=2), stages=Sliced).run,
    "twins": Feature(
        lambda stages: bpipe.Chimera(stages, M, loss_fn),
        held_by=lambda rank: [rank, 7 - rank],
        of_stage={"directions": 2},
    ).run,
    "recomputation": Feature(recomputing).run,
    "relaxed": Feature(lambda stage: bpipe.LocalLearning(stage, M, loss_fn), stages=with_own_loss).run,
    "fill": there("bpipe.fill"),
    "overlap": there("bpipe.overlap"),
}


def main() -> None:
    for name, run in STEPS.items():
        try:
            print(name, run())
        except (ModuleNotFoundError, bpipe.errors.ConfigurationError) as error:
            print(name, "refused:", str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
