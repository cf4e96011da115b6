"""Compiled blocks and stages: as many graphs as in a loop without bpipe, no breaks, and the same gradients to the bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.models import WIDTH, Block, batch_of, mse
from tests.over import Over, pipeline
from tests.ranks import run_ranks

P, M = 4, 8
PHASES = ("train", "train", "eval", "train")
HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))

Gradients = list[list[torch.Tensor]]
Seen = tuple[list[tuple[int, int]], Gradients]  # graphs and breaks after each phase; gradients after the last

SCHEDULES: dict[str, Any] = {
    "1f1b": bpipe.OneFOneB,
    "balanced": bpipe.BalancedOneFOneB,
    "parts": Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=3)}),
    "halves": bpipe.ZBH1,
}


class Small(nn.Module):
    """A block that compiles quickly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.nn.functional.gelu(self.linear(self.norm(x))))


def blocks(backend: str, num_stages: int = P) -> list[nn.Module]:
    """Two transformer blocks a stage, each compiled by itself."""
    torch.manual_seed(0)
    stages = [nn.Sequential(Block(dropout=0.0), Block(dropout=0.0)) for _ in range(num_stages)]
    for block in (block for stage in stages for block in stage):
        block.compile(backend=backend, fullgraph=True)
    return list(stages)


def wholes(backend: str, num_stages: int = P) -> list[nn.Module]:
    """Compiled stages."""
    torch.manual_seed(0)
    stages = [nn.Sequential(Small(), Small()) for _ in range(num_stages)]
    return [torch.compile(stage, backend=backend, fullgraph=True) for stage in stages]


def parts(backend: str, num_stages: int = P) -> list[nn.Module]:
    """One compiled block a stage, whose input always needs a gradient: one graph."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Small()) for _ in range(num_stages)]
    for stage in stages:
        stage[1].compile(backend=backend, fullgraph=True)
    return list(stages)


class Recurrent(nn.Module):
    """A layer whose LSTM the compiler leaves to run eagerly, and what it saves with it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.block = nn.LSTM(WIDTH, WIDTH, batch_first=True), Small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.lstm(x)[0])


def mixed(backend: str, num_stages: int = P) -> list[nn.Module]:
    """Stages that are compiled but for their LSTM."""
    torch.manual_seed(0)
    return [torch.compile(Recurrent(), backend=backend) for _ in range(num_stages)]


MAKES = {"blocks": blocks, "wholes": wholes, "parts": parts, "mixed": mixed}


def run(modules: list[nn.Module], train: Callable[..., Any], evaluate: Callable[..., Any], phases: Sequence[str]) -> Seen:
    """Go through the phases; the last one, whose forms are all known, may compile nothing."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counts = []
    for number, phase in enumerate(phases):
        x, y = batch_of("quiet", 2 * M, number)
        for module in modules:
            module.train(phase == "train").zero_grad()
        with torch.compiler.set_stance("fail_on_recompile" if number == len(phases) - 1 else "default"):
            train(x, y) if phase == "train" else evaluate(x)
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return counts, [[parameter.grad for parameter in module.parameters()] for module in modules]


def without_bpipe(modules: list[nn.Module], phases: Sequence[str] = PHASES) -> Seen:
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        for xi, yi in zip(x.chunk(M), y.chunk(M)):
            (mse(passed(modules, xi), yi) / M).backward()

    def evaluate(x: torch.Tensor) -> None:
        with torch.no_grad():
            for xi in x.chunk(M):
                passed(modules, xi)

    return run(modules, train, evaluate, phases)


def passed(modules: Iterable[nn.Module], value: torch.Tensor) -> torch.Tensor:
    for module in modules:
        value = module(value)
    return value


def with_bpipe(modules: list[nn.Module], schedule: Any, phases: Sequence[str]) -> tuple[Seen, list[dict[str, float]]]:
    loopback, schedules = pipeline(schedule, modules, M, mse)
    seen = run(modules, lambda x, y: loopback.step(schedules, x, target=y), lambda x: loopback.eval(schedules, x), phases)
    return seen, [one.stats for one in schedules]


def compared(
    rank: int, backend: str, cases: Sequence[tuple[str, str]], phases: Sequence[str] = PHASES
) -> dict[tuple[str, str], Any]:
    """In a process of its own, so that nothing compiled is left behind: each schedule beside the plain loop."""
    expected = {name: without_bpipe(MAKES[name](backend), phases) for name in {name for name, _ in cases}}
    found = {}
    for make, name in cases:
        (counts, gradients), stats = with_bpipe(MAKES[make](backend), SCHEDULES[name], phases)
        is_same = all(torch.equal(a, b) for pair in zip(gradients, expected[make][1]) for a, b in zip(*pair, strict=True))
        found[make, name] = counts, expected[make][0], is_same, stats
    return found


CASES = [("blocks", "balanced"), ("mixed", "balanced"), *(("wholes", name) for name in SCHEDULES)]


@pytest.fixture(scope="module")
def eager() -> dict[tuple[str, str], Any]:
    return run_ranks(compared, 1, "aot_eager", CASES, timeout_s=180)[0]


def check(counts: list[tuple[int, int]], expected: list[tuple[int, int]], is_same: bool, stats: list[dict[str, float]]) -> None:
    assert counts == expected and counts[0][0] > 0
    assert all(breaks == 0 for _, breaks in counts)
    assert is_same
    assert all(of_rank["peak_bytes"] == of_rank["predicted_peak_bytes"] for of_rank in stats)


@pytest.mark.parametrize("make, name", CASES)
def test_as_many_graphs_as_without_a_pipeline(eager: dict[tuple[str, str], Any], make: str, name: str) -> None:
    counts, expected, is_same, stats = eager[make, name]
    check(counts, expected, is_same, stats)
    assert bool(sum(of_rank["evicted_bytes"] for of_rank in stats)) == (name in ("balanced", "parts"))


@pytest.mark.skipif(not HAS_COMPILER, reason="inductor needs a C++ compiler, and there is none here")
def test_inductor(tmp_path: Path) -> None:
    (result,) = run_ranks(with_inductor, 1, str(tmp_path), timeout_s=240)[0].values()
    check(*result)
    assert sum(of_rank["evicted_bytes"] for of_rank in result[-1]) > 0


def with_inductor(rank: int, folder: str) -> dict[tuple[str, str], Any]:
    import torch._inductor.config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch._inductor.config.compile_threads = 1  # no workers that stay
    return compared(rank, "inductor", [("parts", "balanced")], ("train", "train"))


def over_gloo(rank: int) -> tuple[Seen, float]:
    """This rank's stage within three slots on the first rank; its graphs, and its gradients."""
    module = wholes("aot_eager", 2)[rank]
    schedule = bpipe.GPipe(bpipe.PipelineStage(module, rank, 2, "cpu"), M, loss_fn=mse, options=bpipe.Options(slots=(3, 2 * M)))
    seen = run([module], lambda x, y: schedule.step(x, target=y), lambda x: schedule.eval(x), PHASES)
    return seen, schedule.stats["evicted_bytes"]


def beside_gloo(rank: int) -> Seen:
    return without_bpipe(wholes("aot_eager", 2))


def test_over_gloo() -> None:
    (_, expected), *_ = run_ranks(beside_gloo, 1)
    (first, evicted), (last, _) = run_ranks(over_gloo, 2)
    assert evicted > 0
    for (counts, gradients), stage in ((first, 0), (last, 1)):
        assert all(breaks == 0 for _, breaks in counts)
        assert counts[-1][0] == 2  # in training and in evaluation
        assert all(map(torch.equal, gradients[0], expected[stage]))
