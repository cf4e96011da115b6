"""Steps of optimizers for those stages of a rank that are done, while other ranks are still busy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.fill.job import Job
from bpipe.fill.piece_seconds import KnownSeconds

__all__ = ["OptimizerSteps"]


class OptimizerSteps(Job):
    """Step the optimizers of each stage once its gradients are complete: where the rank waits, and else before `step` returns.

    So `schedule.step` trains and steps, and the loop calls `zero_grad` alone. The parameters are those of a loop that steps after
    it, to the bit. What needs the gradients of all stages first cannot be used with it: clipping by the total norm, a `GradScaler`,
    `TiedWeights`. With FSDP and DDP gradients are complete at the end of a step, and so are these steps made there.

    Each optimizer's step is a piece: several optimizers for a stage, each of some parameters, make smaller pieces.

    Args:
        optimizers: of each stage of this rank, by index: an optimizer, or several.
        name: `Job.name`.
        budget: `Job.budget`.
        grace_s: `Job.grace_s`.

    Raises:
        ConfigurationError: a parameter is in optimizers of two stages.

    Example:
        >>> from torch import nn
        >>> stage = nn.Linear(4, 4)
        >>> steps = OptimizerSteps({0: torch.optim.SGD(stage.parameters(), lr=0.1)})  # stage 0 is on this rank
        >>> steps.name  # then: schedule.fill = steps
        'optimizer steps'
    """

    held_bytes = None  # states of optimizers count as the rank's own

    def __init__(
        self,
        optimizers: Mapping[int, torch.optim.Optimizer | Iterable[torch.optim.Optimizer]],
        *,
        name: str = "optimizer steps",
        budget: int | None = None,
        grace_s: float = Job.grace_s,
    ) -> None:
        self._of = {
            stage: [given] if isinstance(given, torch.optim.Optimizer) else list(given) for stage, given in optimizers.items()
        }
        self.name, self.budget, self.grace_s = name, budget, grace_s
        self._due: list[torch.optim.Optimizer] = []
        self._known = KnownSeconds()
        _check_apart({stage: _parameters(of) for stage, of in self._of.items()})

    def begin(self, stages: Mapping[int, nn.Module]) -> None:
        """Check that each stage of the rank has optimizers of its own for all that it trains.

        Raises:
            ConfigurationError: it has not.
        """
        if stages.keys() != self._of.keys():
            raise ConfigurationError(f"optimizers of stages {sorted(self._of)} were given, and the rank has {sorted(stages)}")
        trained = {stage: {id(p): p for p in module.parameters() if p.requires_grad} for stage, module in stages.items()}
        _check_apart(trained)
        for stage, parameters in trained.items():
            if missing := len(parameters.keys() - _parameters(self._of[stage]).keys()):
                raise ConfigurationError(f"{missing} parameters of stage {stage} are in none of its optimizers")

    def stage_done(self, stage: int) -> None:
        """Let the stage's optimizers step."""
        self._due += self._of[stage]

    def step(self, seconds: float, num_bytes: int) -> float | None:
        """Make one optimizer's step that is known to fit; the first one of each runs in `finish`."""
        for index, optimizer in enumerate(self._due):
            if self._known.fits(id(optimizer), seconds, float("inf")):
                return self._step(self._due.pop(index))
        return None

    def finish(self) -> None:
        """Make those steps for which there was no time."""
        while self._due:
            self._step(self._due.pop(0))

    def _step(self, optimizer: torch.optim.Optimizer) -> float:
        began = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - began
        self._known.learn(id(optimizer), took)
        return took


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Any]:
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _check_apart(parameters: Mapping[int, Mapping[int, Any]]) -> None:
    """Raise if two stages have a parameter in common: it would change while one of them is not done."""
    seen: dict[int, int] = {}
    for stage, of_stage in parameters.items():
        for key in of_stage:
            if seen.setdefault(key, stage) != stage:
                raise ConfigurationError(
                    f"stages {seen[key]} and {stage} have a parameter in common, so neither is done before the other: step behind "
                    "schedule.step instead"
                )
