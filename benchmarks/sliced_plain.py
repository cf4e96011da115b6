"""Sequences in slices beside whole ones: how much of the bubble that slices save in the plan they save in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import bpipe
from benchmarks.alternate import Taken, in_turns, step_seconds
from benchmarks.intervals import ratios
from benchmarks.study import Case, Claim, Row, Study
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


WORKS = (Work(4, 4, 2), Work(4, 4, 4), Work(4, 4, 8), Work(4, 8, 4), Work(8, 8, 4))


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
    batch = torch.ones(work.m, 8 * work.k, WIDTH)

    def step(name: str) -> None:
        schedules[name].step(batch, target=batch, return_outputs=False)

    steps = {name: partial(step, name) for name in schedules}
    for one in steps.values():
        one()
    taken = in_turns(steps, seconds=stepping_s)
    dist.barrier()
    return taken


def measure(work: Work, stepping_s: float = SECONDS) -> list[Row]:
    """One case."""
    ranks = run_ranks(on_rank, work.p, work, stepping_s, timeout_s=200.0)
    seconds = {name: step_seconds([taken[name] for taken in ranks]) for name in ("plain", "sliced")}
    time, ideal = ratios(seconds["sliced"], seconds["plain"]), work.ideal
    return [
        {
            **work._asdict(),
            "num_rounds": len(seconds["plain"]),
            "time": time.median,
            "time_low": time.low,
            "time_high": time.high,
            "ideal": ideal,
            "over_ideal": time.median / ideal,
        }
    ]


def cases() -> list[Case]:
    """All of them."""
    return [(name_of(work._asdict()), partial(measure, work)) for work in WORKS]


def name_of(row: Row) -> str:
    """A case in words."""
    return f"p = {row['p']}, m = {row['m']}, k = {row['k']}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Where there are as many ranks, microbatches and slices."""
    return [
        Claim(
            what=f"step time of Seq1F1B over 1F1B, {name_of(row)}: {MOST_OVER_IDEAL} of the plan's {row['ideal']:.3f}",
            target=MOST_OVER_IDEAL * row["ideal"],
            value=row["time"],
            low=row["time_low"],
            high=row["time_high"],
            why=WHY,
        )
        for row in rows
        if row["p"] == row["m"] == row["k"]
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Each case's sliced step over the plain one, beside what the plans say."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    errors = [[row["time"] - row["time_low"] for row in rows], [row["time_high"] - row["time"] for row in rows]]
    measured = axes.bar(places, [row["time"] for row in rows], 0.5, yerr=errors, color="#0072B2", label="measured")
    axes.bar_label(measured, [f"{row['time']:.3f}" for row in rows], label_type="center", color="white")
    axes.plot(places, [row["ideal"] for row in rows], "D", color="white", markeredgecolor="black", label="by the plans")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [name_of(row).replace(", ", "\n") for row in rows])
    axes.set_ylabel("step of Seq1F1B, over 1F1B's")
    axes.set_title(f"What slices save where stages sleep for {rows[0]['forward_s']} s a microbatch's forward")
    axes.set_ylim(0, 1.25)
    axes.legend(loc="upper right", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


STUDY = Study(
    name="sliced_plain",
    title="Slices against whole sequences",
    text=(
        "Seq1F1B and 1F1B in turns, over gloo, in the same processes. Stages sleep 0.1 s for the forward of a microbatch and\n"
        "twice that for its backward, and save 4 MiB of it; a slice takes and saves one k-th of that, and reads what all\n"
        "earlier slices of its sequence have left, which get gradients from it. `by the plans` is the ratio of the two plans\n"
        "as simulated, without transfers: (3m + 3(p-1)/k) / (3m + 3(p-1))."
    ),
    cases=cases,
    columns=[
        ("p", "p", "d"),
        ("m", "m", "d"),
        ("k", "k", "d"),
        ("num_rounds", "rounds", "d"),
        ("time", "step time / 1F1B", ".3f"),
        ("time_low", "from", ".3f"),
        ("time_high", "to", ".3f"),
        ("ideal", "by the plans", ".3f"),
        ("over_ideal", "measured / by the plans", ".3f"),
    ],
    claims=claims,
    draw=draw,
)
