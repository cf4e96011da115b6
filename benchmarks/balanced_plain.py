"""Balanced beside plain: what evictions cost, by how much they move for each second of compute, and how much of it is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import bpipe
from benchmarks.alternate import Taken, Turns, in_turns, steps_of
from benchmarks.blocks import Size, block
from benchmarks.intervals import as_they_are, columns
from benchmarks.pictures import beside_one
from benchmarks.study import Claim, Row, Study
from tests.ranks import run_ranks
from tests.sleepers import Sleeper

SECONDS = 25.0  # of alternating steps, in each case
FORWARD_S = 0.05  # of a sleeping stage
BLOCKS = Size(256, 64, 2)
MIB = 1024**2
WHY = "copies take CPU time, and no core is free for them where there are as many as ranks (NOTES.md)"
MOST_BLOCKS = 1.02
MOST_SLEEPING = {32: 1.005, 64: 1.01, 128: 1.03}  # by MiB a microbatch


class Work(NamedTuple):
    """One case.

    Args:
        p, m: ranks and microbatches.
        stages: "sleeping" or "blocks".
        saved_mib: of a sleeping stage's microbatch.
        schedule: "1F1B", balanced to ceil((p+2)/2) slots; "GPipe", to m-2 on the first of two ranks and m+3 on the other.
    """

    p: int
    m: int
    stages: str
    saved_mib: int = 0
    schedule: str = "1F1B"


WORKS = (
    *(Work(4, 12, "sleeping", saved_mib) for saved_mib in (2, 8, 32, 64, 128)),
    Work(8, 24, "sleeping", 16),
    Work(4, 12, "blocks"),
    Work(2, 8, "blocks", schedule="GPipe"),
)


class OfRank(NamedTuple):
    """What a rank measured."""

    taken: dict[str, Taken]
    moved_bytes: float
    moving_s: list[float]  # of steps in which nothing is computed


def on_rank(rank: int, work: Work, stepping_s: float) -> OfRank:
    """All measurements of a case."""
    torch.manual_seed(rank)
    sleeper = Sleeper(FORWARD_S, work.saved_mib * MIB, is_written=True) if work.stages == "sleeping" else None
    module: nn.Module = nn.Sequential(block(BLOCKS), block(BLOCKS)) if sleeper is None else sleeper
    batch = torch.randn(work.m * BLOCKS.sequences, BLOCKS.tokens, BLOCKS.width) if sleeper is None else torch.ones(work.m, 8)
    stage = bpipe.PipelineStage(module, rank, work.p, "cpu")
    schedules = {name: _schedule(stage, work, is_balanced=name == "balanced") for name in ("plain", "balanced")}
    steps = steps_of(schedules, batch, module)
    taken = in_turns(steps, seconds=stepping_s)
    moving_s = []
    if sleeper is not None:
        sleeper.sleeps = False
        for _ in range(5):
            steps["balanced"]()
            moving_s.append(schedules["balanced"].stats["step_s"])
    dist.barrier()
    return OfRank(taken, schedules["balanced"].stats["evicted_bytes"], moving_s)


def _schedule(stage: Any, work: Work, *, is_balanced: bool) -> Any:
    rule = {"1F1B": bpipe.OneFOneB, "GPipe": bpipe.GPipe}[work.schedule]
    if not is_balanced:
        return rule(stage, work.m, loss_fn=nn.functional.mse_loss)
    slots = -(-(work.p + 2) // 2) if work.schedule == "1F1B" else (work.m - 2, work.m + 3)
    return rule(stage, work.m, loss_fn=nn.functional.mse_loss, options=bpipe.Options(slots=slots))


def measure(work: Work, stepping_s: float = SECONDS) -> list[Row]:
    """One case."""
    ranks = run_ranks(on_rank, work.p, work, stepping_s, timeout_s=400.0)
    turns = Turns(rank.taken for rank in ranks)
    time, plain_s = turns.time("balanced", "plain"), turns.seconds("plain")
    row: dict[str, Any] = {
        **work._asdict(),
        "num_rounds": len(plain_s),
        "moved_mib": sum(rank.moved_bytes for rank in ranks) / MIB,
        **time.named("time"),
        **turns.cpu("balanced", "plain").named("cpu"),
    }
    if work.stages == "sleeping":
        row["alone"] = median(max(of_step) for of_step in zip(*(rank.moving_s for rank in ranks))) / median(plain_s)
        row["hidden"] = 1 - max(time.median - 1, 0.0) / row["alone"]
    return [row]


def name_of(row: Row) -> str:
    """A case in words."""
    what = f"sleeping stages, {row['saved_mib']} MiB" if row["stages"] == "sleeping" else "transformer blocks"
    return f"{row['schedule']}, p = {row['p']}, m = {row['m']}, {what}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What blocks cost, and sleeping stages, on which the copies have cores to themselves."""
    keys = {"1F1B": ("cpu", "CPU seconds"), "GPipe": ("time", "step time")}  # where four ranks share two cores, two have one each
    found = []
    for row in rows:
        if row["stages"] == "blocks":
            key, what = keys[row["schedule"]]
            found.append(Claim.of(row, key, f"{what} of balanced over plain, {name_of(row)}", MOST_BLOCKS, why=WHY))
        elif row["p"] == 4 and row["saved_mib"] in MOST_SLEEPING:
            what, target = f"step time of balanced over plain, {name_of(row)}", MOST_SLEEPING[row["saved_mib"]]
            found.append(Claim.of(row, "time", what, target, why=WHY))
    return found


STUDY = Study(
    name="balanced_plain",
    title="Balanced against plain",
    text=(
        "The same schedule with and without evictions, in turns. Stages that sleep take 0.05 s a forward and twice that a\n"
        "backward, in which they write what the table says of each microbatch;\n"
        "blocks are two transformer blocks a stage (width 256, 2 x 64 tokens). `alone` is a step that evicts the same and\n"
        "does not sleep, over a plain step; `hidden` is the share of it that the balanced step does not take longer. Four\n"
        "ranks of blocks share cores where there are 2, so that what counts there are CPU seconds."
    ),
    works=WORKS,
    measure=measure,
    columns=[
        *as_they_are("schedule", "p", "m", "stages"),
        ("saved_mib", "MiB a microbatch", "d"),
        ("num_rounds", "rounds", "d"),
        ("moved_mib", "MiB evicted a step", ".0f"),
        ("alone", "alone", ".2f"),
        ("hidden", "hidden", ".2f"),
        *columns("time", "step time / plain"),
        *columns("cpu", "CPU seconds / plain"),
    ],
    claims=claims,
    draw=partial(beside_one, name_of=name_of, titles={"time": "balanced step, over plain", "cpu": "CPU seconds, over plain"}),
    name_of=name_of,
)
