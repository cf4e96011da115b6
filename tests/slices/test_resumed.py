"""A training in slices that is saved and loaded goes on to the bit, also with other stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import bpipe
from bpipe import Interleaved1F1B, PipelineStage, Seq1F1B
from tests.ranks import run_ranks
from tests.slices.models import Attention, batch_of

mse = nn.functional.mse_loss
LAYERS, SLICES = 4, 3
BEFORE, AFTER = range(2), range(2, 4)


class Part(nn.Module):
    """Some layers of a model, under their names in it."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(all_layers()) if i in layers})

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        states = {}
        for name, layer in self.layers.items():
            x, states[name] = layer(x, tuple(one[name] for one in past))
        return x, states


def all_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Attention().double() for _ in range(LAYERS)]


class Training:
    """Two ranks train with AdamW, rank r with each second one of some stages."""

    def __init__(self, rank: int, num_stages: int, schedule: Any, **options: Any) -> None:
        each, own = LAYERS // num_stages, range(rank, num_stages, 2)
        self.parts = nn.ModuleList(Part(range(s * each, (s + 1) * each)) for s in own)
        stages = [PipelineStage(part, s, num_stages, "cpu") for s, part in zip(own, self.parts)]
        self.schedule = schedule(stages if len(stages) > 1 else stages[0], 2, loss_fn=mse, slices=SLICES, **options)
        self.optimizer = torch.optim.AdamW(self.parts.parameters(), lr=1e-2)

    def state(self) -> dict[str, Any]:
        return bpipe.training_state(list(self.parts), self.optimizer)

    def train(self, steps: range) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        for step in steps:
            x, target = (one.roll(step, 1) for one in batch_of(2))
            self.optimizer.zero_grad()
            self.schedule.step(x, target=target, losses=(found := []))
            losses += found
            self.optimizer.step()
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for part in self.parts for name, value in part.named_parameters()}


def resumed(rank: int, folder: Path, num_stages: int, schedule: Any, **options: Any) -> Any:
    training = Training(rank, num_stages, schedule, **options)
    with torch.no_grad():
        for parameter in training.parts.parameters():
            parameter.zero_()
    state = {**training.state(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == len(BEFORE)
    return training.train(AFTER), training.values()


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    training = Training(rank, 2, Seq1F1B)
    training.train(BEFORE)
    dcp.save({**training.state(), "step": len(BEFORE)}, checkpoint_id=folder)
    went_on = training.train(AFTER), training.values()
    dist.barrier()
    return {
        "went on": went_on,
        "plain": resumed(rank, folder, 2, Seq1F1B),
        "balanced": resumed(rank, folder, 2, Seq1F1B, options=bpipe.Options(slots=4)),
        "interleaved": resumed(rank, folder, 4, Interleaved1F1B),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("way", ["plain", "balanced", "interleaved"])
def test_a_training_in_slices_goes_on_to_the_bit(ranks: Any, way: str) -> None:
    losses, expected = ranks[1]["went on"][0], {**ranks[0]["went on"][1], **ranks[1]["went on"][1]}
    assert len(losses) == 2 * len(AFTER)
    assert all(map(torch.equal, ranks[1][way][0], losses))
    found = {**ranks[0][way][1], **ranks[1][way][1]}
    assert found.keys() == {name for name, _ in Part(range(LAYERS)).named_parameters()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
