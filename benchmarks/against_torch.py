"""bpipe beside torch.distributed.pipelining: the same stages, batches and schedules, in turns, in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed.pipelining as peer
import torch.nn.functional as F

import bpipe
from benchmarks.alternate import Step, Taken, Turns, in_turns, peak_bytes, timed
from benchmarks.blocks import Size, block
from benchmarks.intervals import as_they_are, columns
from benchmarks.pictures import beside_one
from benchmarks.study import Claim, Row, Study
from tests.ranks import run_ranks

SECONDS = 5.0  # of alternating steps, in each case
NUM_FIRST = 3  # first steps of new schedules


class Kind(NamedTuple):
    """A schedule that both have."""

    ours: type[bpipe.Schedule]
    theirs: Any
    stages_per_rank: int = 1


class Work(NamedTuple):
    """One case."""

    kind: str
    p: int
    m: int
    size: str


SIZES = {"small": Size(64, 32, 1), "larger": Size(256, 64, 2)}
KINDS = {
    "1F1B": Kind(bpipe.OneFOneB, peer.Schedule1F1B),
    "GPipe": Kind(bpipe.GPipe, peer.ScheduleGPipe),
    "interleaved": Kind(bpipe.Interleaved1F1B, peer.ScheduleInterleaved1F1B, 2),
}


def makers(rank: int, work: Work) -> dict[str, Callable[[], Step]]:
    """What makes a schedule of each library with the same stages of one rank, and returns its step."""
    size, kind = SIZES[work.size], KINDS[work.kind]
    num_stages = work.p * kind.stages_per_rank
    torch.manual_seed(0)
    modules = {index: block(size) for index in range(rank, num_stages, work.p)}
    batch = torch.randn(work.m * size.sequences, size.tokens, size.width)
    args = (batch,) if rank == 0 else ()
    target = {"target": torch.randn_like(batch)} if rank == work.p - 1 else {}

    def make(library: Any, kind: Any) -> Step:
        stages = [library.PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in modules.items()]
        schedule = kind(stages if len(stages) > 1 else stages[0], work.m, loss_fn=F.mse_loss)

        def step() -> None:
            schedule.step(*args, **target, return_outputs=False)
            for module in modules.values():
                module.zero_grad()

        return step

    return {"ours": partial(make, bpipe, kind.ours), "theirs": partial(make, peer, kind.theirs)}


class OfRank(NamedTuple):
    """What a rank measured: by contender, steps in turns, first steps, and peak bytes."""

    steady: dict[str, Taken]
    first: dict[str, Taken]
    peaks: dict[str, int]


def on_rank(rank: int, work: Work, stepping_s: float) -> OfRank:
    """All measurements of a case."""
    of = makers(rank, work)
    first = {name: Taken([], []) for name in of}
    for turn in range(NUM_FIRST):
        for name in list(of)[:: 1 if turn % 2 == 0 else -1]:
            first[name].add(timed(of[name]()))
    peaks = {name: peak_bytes(make) for name, make in of.items()}
    steps = {name: make() for name, make in of.items()}
    for step in [*steps.values()] * 2:
        step()
    return OfRank(in_turns(steps, seconds=stepping_s), first, peaks)


def measure(work: Work, stepping_s: float = SECONDS) -> list[Row]:
    """One case."""
    ranks = run_ranks(on_rank, work.p, work, stepping_s, timeout_s=240.0)
    steady, first = Turns(rank.steady for rank in ranks), Turns(rank.first for rank in ranks)
    return [
        {
            **work._asdict(),
            "num_rounds": len(ranks[0].steady["ours"].seconds),
            **steady.time("ours", "theirs").named("seconds"),
            **steady.cpu("ours", "theirs").named("cpu"),
            "first_seconds": first.time("ours", "theirs").median,
            "peak_bytes": [rank.peaks["ours"] for rank in ranks],
            "their_peak_bytes": [rank.peaks["theirs"] for rank in ranks],
            "peak": max(rank.peaks["ours"] / rank.peaks["theirs"] for rank in ranks),
        }
    ]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The worst cases."""
    found = []
    for key, what in (("seconds", "step time"), ("cpu", "CPU seconds")):
        worst = max(rows, key=lambda row: row[key])
        found.append(Claim.of(worst, key, f"{what} over torch's, the worst of {len(rows)} cases ({name_of(worst)})", 1.0))
        over = [row for row in rows if row[f"{key}_low"] > 1]
        what = f"cases of {len(rows)} whose {what}, with all its interval, is above torch's"
        found.append(Claim(what, 0.0, float(len(over)), why="; ".join(map(name_of, over))))
    worst = max(rows, key=lambda row: row["peak"])
    return [*found, Claim.of(worst, "peak", f"peak bytes of a rank over torch's, the worst case ({name_of(worst)})", 1.0)]


def name_of(row: Row) -> str:
    """A case in words."""
    return f"{row['kind']}, p = {row['p']}, m = {row['m']}, {row['size']} blocks"


STUDY = Study(
    name="against_torch",
    title="Against torch.distributed.pipelining",
    text=(
        "Transformer blocks (`nn.TransformerEncoderLayer`, one a stage; small: width 64, 1 x 32 tokens a microbatch;\n"
        "larger: width 256, 2 x 64 tokens), gloo, p processes on the machine's cores with one thread each. Both libraries\n"
        "step the same modules on the same batches in turns. A step lasts until its slowest rank is done; CPU seconds are\n"
        "those of all ranks and threads. Peak bytes are those of the tensors that live in the second step beside weights\n"
        "and the batch: receive buffers, activations, gradients. The first step is that of a new schedule, its construction\n"
        "left out, the median of three."
    ),
    works=[Work(*one) for one in product(KINDS, (2, 4), (8, 16, 64), SIZES)],
    measure=measure,
    columns=[
        ("kind", "schedule", ""),
        *as_they_are("p", "m"),
        ("size", "blocks", ""),
        ("num_rounds", "rounds", "d"),
        *columns("seconds", "step time / torch's"),
        *columns("cpu", "CPU seconds / torch's"),
        ("first_seconds", "first step / torch's", ".2f"),
        ("peak", "peak bytes / torch's, worst rank", ".3f"),
    ],
    claims=claims,
    draw=partial(
        beside_one,
        name_of=name_of,
        titles={"seconds": "step time, over torch's", "cpu": "CPU seconds, over torch's", "peak": "peak bytes, over torch's"},
    ),
    name_of=name_of,
)
