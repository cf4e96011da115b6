"""Steps whose waits are filled: the bits of plain ones, in their time, within their bytes; and the job's results are its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.comm.transport.socket_channel import _Receipt
from bpipe.fill import Inference, Job, Pieces
from bpipe.schedules import Costs, build, simulate
from tests.models import WIDTH, Block
from tests.ranks import run_ranks
from tests.sleepers import Sleeper
from tests.storages import StorageCount
from tests.tries import holds_in_one_try

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, BATCH = 4, 8, 2
FORWARD_S, NAP_S = 0.02, 0.005


def naps() -> Iterator[None]:
    while True:
        time.sleep(NAP_S)
        yield


def taking_turns(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of plain and of filled steps in turns, and those that the pieces of each filled one took."""
    module = Sleeper(FORWARD_S, 1000)
    stage = bpipe.PipelineStage(module, rank, P, "cpu")
    plain, filled = [bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss) for _ in range(2)]
    filled.fill = Pieces(naps)
    x, seconds, used = torch.ones(M, 8), ([], []), []
    for turn in range(8):
        for schedule, taken in zip((plain, filled), seconds):
            schedule.step(x, target=x)
            if turn > 2:
                taken.append(schedule.stats["step_s"])
        used.append(filled.stats["fill_used_s"])
    return *seconds, used[3:]


def test_idle_time_is_used_and_steps_take_as_long() -> None:
    costs = Costs(forward_s=FORWARD_S, backward_s=2 * FORWARD_S)
    timeline = simulate(build("1f1b", P, M), costs)

    def measure() -> list[tuple[float, float]]:
        """Of each rank, a filled step in plain ones, and the share of the idle time that is used."""
        medians = [map(statistics.median, seconds) for seconds in run_ranks(taking_turns, P)]
        return [(filled / plain, used / timeline.bubble_s(rank)) for rank, (plain, filled, used) in enumerate(medians)]

    holds_in_one_try(measure, lambda ranks: all(step <= 1.02 and share >= 0.85 for step, share in ranks))


def unseen(rank: int) -> list[float]:
    """The seconds that pieces took in steps of a slow peer, and in later ones of a fast one; nobody sees messages come."""
    _Receipt.has_come = lambda self: None  # type: ignore[method-assign, assignment, return-value]
    module = Sleeper(FORWARD_S, 1000)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    schedule.fill = Pieces(naps) if rank == 0 else None
    x, used = torch.ones(2, 8), []
    for step in range(30):
        module.sleeps = step < 6 or rank == 0
        schedule.step(x, target=x)
        used.append(schedule.stats.get("fill_used_s", 0.0))
    schedule.close()
    return [max(used[:6]), min(used[-4:])]


def test_a_wait_that_nobody_sees_end_is_not_learned_from_its_own_fill() -> None:
    (slow, fast), _ = run_ranks(unseen, 2)
    assert slow > 0 and fast < 0.5 * slow


def blocks(num: int, seed: int, dropout: float) -> list[Block]:
    torch.manual_seed(seed)
    return [Block(dropout=dropout) for _ in range(num)]


def stage_of(rank: int, num_stages: int = P) -> bpipe.PipelineStage:
    return bpipe.PipelineStage(blocks(num_stages, 0, 0.1)[rank], rank, num_stages, "cpu")


def batches(num: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(2, 16, WIDTH, generator=numbers) for _ in range(num)]


class Drawing(nn.Module):
    """A layer that draws random numbers, as no evaluation should, and returns none of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x


def training(rank: int, is_filled: bool, is_balanced: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Gradients of some steps, what an evaluation beside them has found, and how many pieces it took."""
    stage, found = stage_of(rank), []
    schedule: Any = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss)
    if is_balanced:
        schedule = bpipe.Balanced(schedule, budget="lowest")
    if is_filled:
        layers = [*(one.eval() for one in blocks(3, 5, 0.1)), Drawing()]
        schedule.fill = Inference(layers, batches(300), found.append, kept_bytes=2**30, budget=2**40)
    torch.manual_seed(rank)
    x = torch.randn(M * BATCH, 16, WIDTH, generator=torch.Generator().manual_seed(2))
    pieces = 0.0
    for _ in range(8):
        schedule.step(x, target=x)
        pieces += schedule.stats.get("fill_pieces", 0.0)
    gradients = [p.grad for p in stage.submod.parameters()]
    schedule.close()
    return gradients, found[:40], pieces


@pytest.mark.parametrize("is_balanced", [False, True])
def test_gradients_and_evaluations_are_the_same_to_the_bit(is_balanced: bool) -> None:
    layers, alone = [one.eval() for one in blocks(3, 5, 0.1)], []
    with torch.no_grad():
        for x in batches(40):
            for layer in layers:
                x = layer(x)
            alone.append(x)
    plain = run_ranks(training, P, False, is_balanced)
    num_pieces = 0.0
    for (expected, _, _), (gradients, found, pieces) in zip(plain, run_ranks(training, P, True, is_balanced)):
        assert all(map(torch.equal, gradients, expected))
        assert all(map(torch.equal, found, alone))
        num_pieces += pieces
    assert num_pieces > 0


class Watching(Job):
    """Takes what it is given to the byte, and compares that with all storages of the rank that live."""

    def __init__(self, count: StorageCount, module: nn.Module, batch: torch.Tensor, budget: int) -> None:
        self._count, self._parameters, self._batch, self.budget = count, list(module.parameters()), batch, budget
        self.offers: list[int] = []
        self.most = 0

    def step(self, seconds: float, num_bytes: int) -> float | None:
        live = self._count.live_bytes([*self._parameters, self._batch]) + sum(p.nbytes for p in self._parameters)
        with self._count.mode():
            taken = torch.empty(num_bytes, dtype=torch.uint8)
        self.offers.append(num_bytes)
        self.most = max(self.most, live + taken.nbytes)
        time.sleep(0.001)
        return 0.001


def within(rank: int, budgets: list[int]) -> list[tuple[int, int, int, float]]:
    """For each budget: it, the most bytes at a time with the job, how many pieces ran, and the rank's own peak."""
    found = []
    for budget in budgets:
        stage, count = stage_of(rank), StorageCount()
        schedule = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss)
        x = torch.randn(M * BATCH, 16, WIDTH)
        schedule.fill = job = Watching(count, stage.submod, x, budget)
        optimizer, kept = torch.optim.Adam(stage.submod.parameters()), []
        with count.mode():
            for step in range(8):
                kept.append(schedule.step(x, target=x, return_outputs=step > 5))
                if step > 3:  # what the optimizer makes then, and what is returned, are not known from the step before
                    optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        found.append((budget, job.most, len(job.offers), schedule.stats["predicted_device_peak_bytes"]))
        schedule.close()
    return found


def test_no_byte_more_than_the_budget_is_used() -> None:
    numbers = torch.Generator().manual_seed(3)
    budgets = [int(one) for one in torch.randint(200_000, 1_500_000, (4,), generator=numbers)]
    filled, closest = set(), 0.0
    for of_rank in run_ranks(within, P, budgets):
        for budget, most, pieces, peak in of_rank:
            assert most <= budget
            tight = "roomy" if budget > peak + 100_000 else "tight"
            filled.add((pieces > 0, tight))
            closest = max(closest, most / budget)
    assert filled >= {(True, "roomy"), (True, "tight")} and closest > 0.999
