"""Sequences in slices beside whole ones: how much of the bubble that slices save in the plan they save in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import bpipe
from benchmarks.alternate import Taken, Turns, in_turns, steps_of
from benchmarks.intervals import as_they_are, columns
from benchmarks.pictures import beside_one
from benchmarks.study import Claim, Row, Study, sizes
from bpipe.schedules import Costs, build, simulate
from tests.ranks import run_ranks
from tests.sleepers import Sleeper, SlicedSleeper

SECONDS = 25.0  # of alternating steps, in each case
SAVED_BYTES = 4 * 1024**2  # of a whole microbatch
WIDTH = 64
MOST_OVER_IDEAL = 1.05  # where p = m = k = 4
WHY = "each slice pays for its own messages and Python calls"


class Work(NamedTuple):
    """One case.

    Args:
        p, m, k: ranks, microbatches, and slices of each.
        forward_s: of a whole microbatch.
    """

    p: int
    m: int
    k: int
    forward_s: float = 0.1

    @property
    def ideal(self) -> float:
        """The sliced step over the plain one, as their plans are simulated."""
        plan = build("seq_1f1b", self.p, self.m, slices=self.k)
        sliced = simulate(plan, Costs().of_slices(plan))
        return sliced.makespan_s / simulate(build("1f1b", self.p, self.m), Costs()).makespan_s


def on_rank(rank: int, work: Work, stepping_s: float) -> dict[str, Taken]:
    """Steps of both schedules in turns, in the same processes."""
    torch.manual_seed(rank)
    whole = Sleeper(work.forward_s, SAVED_BYTES)
    slice_ = SlicedSleeper(Sleeper(work.forward_s / work.k, SAVED_BYTES // work.k))
    stages = [bpipe.PipelineStage(module, rank, work.p, "cpu") for module in (whole, slice_)]
    loss_fn = nn.functional.mse_loss
    schedules = {
        "plain": bpipe.OneFOneB(stages[0], work.m, loss_fn=loss_fn),
        "sliced": bpipe.Seq1F1B(stages[1], work.m, loss_fn=loss_fn, slices=work.k),
    }
    return in_turns(steps_of(schedules, torch.ones(work.m, 8 * work.k, WIDTH)), seconds=stepping_s)


def measure(work: Work, stepping_s: float = SECONDS) -> list[Row]:
    """One case."""
    turns = Turns(run_ranks(on_rank, work.p, work, stepping_s, timeout_s=200.0))
    time, ideal = turns.time("sliced", "plain"), work.ideal
    row = {**work._asdict(), "num_rounds": len(turns.seconds("plain")), **time.named("time")}
    return [{**row, "ideal": ideal, "over_ideal": time.median / ideal}]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Where there are as many ranks, microbatches and slices."""
    what = "step time of Seq1F1B over 1F1B, {}: {} of the plan's {:.3f}"
    return [
        Claim.of(row, "time", what.format(sizes(row), MOST_OVER_IDEAL, row["ideal"]), MOST_OVER_IDEAL * row["ideal"], why=WHY)
        for row in rows
        if row["p"] == row["m"] == row["k"]
    ]


STUDY = Study(
    name="sliced_plain",
    title="Slices against whole sequences",
    text=(
        "Seq1F1B and 1F1B in turns, over gloo, in the same processes. Stages sleep 0.1 s for the forward of a microbatch and\n"
        "twice that for its backward, and save 4 MiB of it; a slice takes and saves one k-th of that, and reads what all\n"
        "earlier slices of its sequence have left, which get gradients from it. `by the plans` is the ratio of the two plans\n"
        "as simulated, without transfers: (3m + 3(p-1)/k) / (3m + 3(p-1))."
    ),
    works=(Work(4, 4, 2), Work(4, 4, 4), Work(4, 4, 8), Work(4, 8, 4), Work(8, 8, 4)),
    measure=measure,
    columns=[
        *as_they_are("p", "m", "k"),
        ("num_rounds", "rounds", "d"),
        *columns("time", "step time / 1F1B"),
        ("ideal", "by the plans", ".3f"),
        ("over_ideal", "measured / by the plans", ".3f"),
    ],
    claims=claims,
    draw=partial(
        beside_one,
        name_of=sizes,
        titles={"time": "step of Seq1F1B, over 1F1B's", "ideal": "the same by the plans", "over_ideal": "one over the other"},
    ),
)
