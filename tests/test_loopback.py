"""All ranks in one process: random numbers of their own, no trace outside, and clear words on misuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError, PipelineBrokenError

CPU = torch.device("cpu")
M = 6


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Noise(nn.Module):
    """Adds noise, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(1)
        self.drawn.append(noise.item())
        return self.linear(x) + noise


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(5)
        raise KeyError("the user's own")


def pipeline(
    loopback: bpipe.Loopback, *modules: nn.Module, rule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB
) -> list[bpipe.Schedule]:
    p = len(modules)
    stages = [bpipe.PipelineStage(module, i, p, CPU, group=loopback.rank(i)) for i, module in enumerate(modules)]
    return [rule(stage, M, loss_fn=F.mse_loss) for stage in stages]


def step(loopback: bpipe.Loopback, schedules: list[bpipe.Schedule]) -> torch.Tensor:
    return loopback.step(schedules, torch.ones(M, 3), target=torch.ones(M, 3))


def drawn_alone(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(1, generator=generator).item() for _ in range(count)]


# Random numbers


@pytest.mark.parametrize("rule", [bpipe.GPipe, bpipe.OneFOneB, bpipe.BalancedOneFOneB])
def test_each_rank_draws_as_if_it_were_alone(rule: type[bpipe.Schedule]) -> None:
    torch.manual_seed(5)
    loopback = bpipe.Loopback(4)
    torch.rand(3)  # changes nothing any more
    modules = [Noise() for _ in range(4)]
    schedules = pipeline(loopback, *modules, rule=rule)
    for _ in range(2):
        step(loopback, schedules)
    assert [module.drawn for module in modules] == [drawn_alone(5, 2 * M)] * 4


def test_seeds() -> None:
    loopback = bpipe.Loopback(2)
    modules = [Noise(), Noise()]
    schedules = pipeline(loopback, *modules)
    loopback.manual_seed(8)
    loopback.manual_seed(9, rank=1)
    step(loopback, schedules)
    assert [module.drawn for module in modules] == [drawn_alone(8, M), drawn_alone(9, M)]


def test_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    loopback = bpipe.Loopback(2)
    schedules = pipeline(loopback, Noise(), Noise())
    torch.set_rng_state(before)
    step(loopback, schedules)
    loopback.eval(schedules, torch.ones(M, 3))
    loopback.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_global_random_state_is_untouched_by_an_error() -> None:
    loopback = bpipe.Loopback(2)
    schedules = pipeline(loopback, Noise(), Fails())
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="the user's own"):
        step(loopback, schedules)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_of_a_failed_step_reaches_the_next_pipeline() -> None:
    loopback = bpipe.Loopback(2)
    first = Noise()
    broken = pipeline(loopback, first, Fails())
    with pytest.raises(KeyError):
        step(loopback, broken)
    with pytest.raises(PipelineBrokenError):
        step(loopback, broken)
    sound = pipeline(loopback, nn.Identity(), nn.Linear(3, 3))
    inputs = torch.randn(M, 3)
    outputs = loopback.eval(sound, inputs)
    assert torch.equal(outputs, torch.cat([sound[1].session.context.stages[1].submod(row) for row in inputs.split(1)]))


# Misuse


def test_a_loopback_of_no_ranks() -> None:
    with pytest.raises(ConfigurationError, match="num_ranks=0"):
        bpipe.Loopback(0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank {rank} is not in a loopback of 2 ranks"):
        bpipe.Loopback(2).rank(rank)
    with pytest.raises(ConfigurationError, match=f"rank {rank} is not in a loopback of 2 ranks"):
        bpipe.Loopback(2).manual_seed(0, rank)


def test_wrong_schedules() -> None:
    loopback, other = bpipe.Loopback(2), bpipe.Loopback(2)
    schedules, others = pipeline(loopback, Noise(), Noise()), pipeline(other, Noise(), Noise())
    with pytest.raises(ConfigurationError, match="1 schedules for 2 ranks"):
        step(loopback, schedules[:1])
    for wrong in (schedules[::-1], [schedules[0], others[1]], [schedules[0], schedules[0]]):
        with pytest.raises(ConfigurationError, match=r"schedule \d is not on rank \d of this loopback"):
            step(loopback, wrong)
    step(loopback, schedules)  # none of this broke anything


def test_a_stage_on_the_wrong_number_of_ranks() -> None:
    stage = bpipe.PipelineStage(Noise(), 0, 3, CPU, group=bpipe.Loopback(2).rank(0))
    with pytest.raises(ConfigurationError, match="needs 3 ranks, but the group has 2: make a Loopback of 3 ranks, or cut"):
        bpipe.OneFOneB(stage, M)


def test_one_rank_cannot_step_alone() -> None:
    loopback = bpipe.Loopback(2)
    schedules = pipeline(loopback, Noise(), Noise())
    with pytest.raises(ConfigurationError, match=r"call loopback\.step"):
        schedules[0].step(torch.ones(M, 3), target=torch.ones(M, 3))
    with pytest.raises(ConfigurationError, match=r"loopback\.eval"):
        schedules[0].eval(torch.ones(M, 3))
    step(loopback, schedules)


def test_a_single_rank_can() -> None:
    (schedule,) = pipeline(bpipe.Loopback(1), Noise())
    assert schedule.step(torch.ones(M, 3), target=torch.ones(M, 3)).shape == (M, 3)
