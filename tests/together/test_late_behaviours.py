"""Whatever a module begins to do in a later step, wherever it lies: a single process's weights, or an error before they change."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("one_thread", "no_other_threads")

WIDTH, POSITIONS, ROWS, M, DEPTH, STEPS, RATE = 4, 4, 2, 4, 4, 5, 0.1
OWN, PYTHON = torch.Generator().manual_seed(0), random.Random(0)


class Stage(nn.Module):
    """A layer of positions of their own; stage 0 hands its output on to stages 2 and 3, where there are skips."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.part, self.layer, self.more = part, nn.Linear(WIDTH, WIDTH), nn.Identity()
        self.behaviour: Callable[[Stage, torch.Tensor], torch.Tensor] | None = None
        self.is_sliced = self.has_skips = False

    def forward(self, x: torch.Tensor, past: Any = (), kept: torch.Tensor | None = None) -> Any:
        if kept is not None:
            changed = self.behaviour(self, kept) if self.behaviour in IN_PLACE.values() else kept
            x = x + changed
        y = torch.tanh(self.layer(x))
        if self.behaviour is not None and self.behaviour not in IN_PLACE.values():
            y = self.behaviour(self, y)
        y = self.more(y)
        result: Any = (y, {"kept": y}) if self.has_skips and self.part == 0 else y
        return (result, None) if self.is_sliced else result


DRAWS: dict[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "torch's numbers": lambda stage, y: y * torch.rand(()),
    "python's numbers": lambda stage, y: y * random.random(),
    "numpy's numbers": lambda stage, y: y * np.random.rand(),
    "a generator's numbers": lambda stage, y: y * torch.rand((), generator=OWN, dtype=y.dtype),
    "dropout": lambda stage, y: F.dropout(y, 0.5),
}
MIXES: dict[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "a norm of rows": lambda stage, y: F.batch_norm(y.mT, None, None, training=True).mT.contiguous(),
    "a norm of instances": lambda stage, y: F.instance_norm(y.mT).mT.contiguous(),
}
ALIKE: dict[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "another function": lambda stage, y: y.sin(),
    "a part without a gradient": lambda stage, y: y + y.detach(),
    "a change of its own result": lambda stage, y: y.mul(2.0).add_(1.0),
}
IN_PLACE: dict[str, Callable[[Stage, torch.Tensor], torch.Tensor]] = {
    "a skip in place": lambda stage, kept: kept.mul_(2.0),
    "rows of a skip in place": lambda stage, kept: kept.index_fill_(0, torch.tensor([0]), 0.5),
}


def _swapped(stage: Stage) -> None:
    stage.more = nn.BatchNorm1d(POSITIONS).double()  # type: ignore[assignment]


def _hooked(stage: Stage) -> None:
    stage.layer.register_forward_hook(lambda module, inputs, output: output * 0.5)


def _frozen(stage: Stage) -> None:
    stage.layer.bias.requires_grad_(False)


def _replaced(stage: Stage) -> None:
    torch.manual_seed(7)
    stage.layer = nn.Linear(WIDTH, WIDTH).double()


CHANGES: dict[str, Callable[[Stage], None]] = {"a norm": _swapped, "a hook": _hooked, "a freeze": _frozen, "a layer": _replaced}
BEHAVIOURS = DRAWS | MIXES | ALIKE | IN_PLACE


class Setting(NamedTuple):
    """A schedule, and the ranks of its stages."""

    schedule: Callable[..., Any]
    ranks: Sequence[int]
    is_sliced: bool = False
    directions: int = 1


SETTINGS = {
    "a stage a rank": Setting(bpipe.OneFOneB, (0, 1, 2, 3)),
    "in a loop": Setting(bpipe.Interleaved1F1B, (0, 1, 0, 1)),
    "in a V": Setting(bpipe.ZBV, (0, 1, 1, 0)),
    "slices": Setting(lambda *args, **more: bpipe.Seq1F1B(*args, slices=2, **more), (0, 1, 2, 3), is_sliced=True),
    "two directions": Setting(bpipe.Chimera, (0, 1, 2, 3, 3, 2, 1, 0), directions=2),
}


class Pipeline:
    """Stages in a loopback, and the same ones in one process."""

    def __init__(self, setting: Setting, *, has_skips: bool) -> None:
        torch.manual_seed(0)
        self.single = [Stage(part).double() for part in range(DEPTH)]
        for stage in self.single:
            stage.has_skips = has_skips
        self.stages = [deepcopy(self.single[number % DEPTH]) for number in range(len(setting.ranks))]
        for stage in self.stages:
            stage.is_sliced = setting.is_sliced
        self.loopback = bpipe.Loopback(max(setting.ranks) + 1, own_random_state=False)
        skips = {"kept": (0, 2, 3)} if has_skips else None
        how: dict[str, Any] = {"directions": setting.directions, "skips": skips}
        held = [
            [
                bpipe.PipelineStage(self.stages[number], number, len(setting.ranks), "cpu", self.loopback.rank(rank), **how)
                for number, own in enumerate(setting.ranks)
                if own == rank
            ]
            for rank in range(max(setting.ranks) + 1)
        ]
        make = setting.schedule
        self.schedules = [make(some if len(some) > 1 else some[0], M, loss_fn=F.mse_loss) for some in held]

    def all_of(self, part: int) -> list[Stage]:
        """The stage in the pipeline, its twin, and the one in the single process."""
        return [self.single[part], *self.stages[part::DEPTH]]

    def step(self, number: int) -> None:
        x = _batch(number)
        self.loopback.step(self.schedules, x, target=x, return_outputs=False)

    def alone(self, number: int) -> None:
        for x in _batch(number).chunk(M):
            y, kept = x, {}
            for part, stage in enumerate(self.single):
                y = stage(y, **(kept if part > 1 else {}))
                y, kept = y if stage.has_skips and part == 0 else (y, kept)
            (F.mse_loss(y, x) / M).backward()

    def gradients(self) -> list[list[torch.Tensor | None]]:
        return [[one.grad for one in stage.parameters()] for stage in self.stages]

    def optimize(self) -> None:
        with torch.no_grad():
            for one in (one for stage in (*self.single, *self.stages) for one in stage.parameters()):
                if one.grad is not None:
                    one -= RATE * one.grad
                    one.grad = None


def _batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS * M, POSITIONS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def outcome(setting: str, name: str, part: int, begin: int) -> str:
    """Train until a step is refused, or all have run: 'refused in step 2', or 'as one process'; what is wrong, otherwise."""
    pipeline = Pipeline(SETTINGS[setting], has_skips=name in IN_PLACE)
    for step in range(STEPS):
        for stage in pipeline.all_of(part) if step == begin else ():
            if name in CHANGES:
                CHANGES[name](stage)
            else:
                stage.behaviour = BEHAVIOURS[name]
        try:
            pipeline.step(step)
        except BPipeError:
            return f"refused in step {step - begin}"  # which no optimizer's step has followed
        pipeline.alone(step)
        expected = [[one.grad for one in stage.parameters()] for stage in pipeline.single] * SETTINGS[setting].directions
        for found, right in zip(pipeline.gradients(), expected):
            for one, other in zip(found, right, strict=True):
                if (one is None) != (other is None) or (one is not None and not torch.allclose(one, other, rtol=1e-12, atol=1e-12)):
                    return f"another model in step {step - begin}"
        pipeline.optimize()
    return "as one process"


COMMON = [*CHANGES, *ALIKE, *MIXES]
NAMES = {setting: [*COMMON, *(DRAWS if setting == "slices" else IN_PLACE)] for setting in SETTINGS}


@given(st.sampled_from(sorted(SETTINGS)), st.data())
@settings(max_examples=examples(60))
def test_a_behaviour_that_begins_late(setting: str, data: st.DataObject) -> None:
    """Random numbers are drawn over slices alone: without them, each rank of a pipeline draws its own."""
    name = data.draw(st.sampled_from(NAMES[setting]))
    part = 2 if name in IN_PLACE else data.draw(st.integers(0, DEPTH - 1))
    said = outcome(setting, name, part, data.draw(st.integers(0, STEPS - 2)))
    if name in IN_PLACE or (setting == "slices" and name in {"a norm", *MIXES, *DRAWS}):
        assert said == "refused in step 0", (setting, name, part)
    else:
        assert said == "as one process", (setting, name, part)
