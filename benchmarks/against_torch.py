"""bpipe beside torch.distributed.pipelining: the same stages, batches and schedules, in turns, in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

import bpipe
from benchmarks.alternate import Step, Taken, in_turns, peak_bytes, step_cpu_s, step_seconds, timed
from benchmarks.blocks import Size, block
from benchmarks.intervals import Interval, ratios
from benchmarks.study import Case, Claim, Row, Study
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


class Both:
    """The same stages of one rank, under both libraries."""

    def __init__(self, rank: int, work: Work) -> None:
        size, self._kind, self._m = SIZES[work.size], KINDS[work.kind], work.m
        self._indices = range(rank, work.p * self._kind.stages_per_rank, work.p)
        self._num_stages = work.p * self._kind.stages_per_rank
        torch.manual_seed(0)
        self._modules = [block(size) for _ in self._indices]
        batch = torch.randn(work.m * size.sequences, size.tokens, size.width)
        is_first, self._is_last = rank == 0, rank == work.p - 1
        self._args = (batch,) if is_first else ()
        self._kwargs = {"target": torch.randn_like(batch)} if self._is_last else {}

    def ours(self) -> Step:
        stages = [bpipe.PipelineStage(module, i, self._num_stages, "cpu") for module, i in self._parts()]
        return self._step(self._kind.ours(self._whole(stages), self._m, loss_fn=F.mse_loss))

    def theirs(self) -> Step:
        stages = [peer.PipelineStage(module, i, self._num_stages, torch.device("cpu")) for module, i in self._parts()]
        return self._step(self._kind.theirs(self._whole(stages), self._m, loss_fn=F.mse_loss))

    def _parts(self) -> Sequence[tuple[nn.Module, int]]:
        return list(zip(self._modules, self._indices))

    def _whole(self, stages: list[Any]) -> Any:
        return stages if self._kind.stages_per_rank > 1 else stages[0]

    def _step(self, schedule: Any) -> Step:
        def step() -> None:
            schedule.step(*self._args, **self._kwargs, return_outputs=False)
            self.forget()

        return step

    def forget(self) -> None:
        for module in self._modules:
            module.zero_grad()


class OfRank(NamedTuple):
    """What a rank measured: by contender, steps in turns, first steps, and peak bytes."""

    steady: dict[str, Taken]
    first: dict[str, Taken]
    peaks: dict[str, int]


def on_rank(rank: int, work: Work, stepping_s: float) -> OfRank:
    """All measurements of a case."""
    both = Both(rank, work)
    makers: dict[str, Callable[[], Step]] = {"ours": both.ours, "theirs": both.theirs}
    first = {name: Taken([], []) for name in makers}
    for turn, name in product(range(NUM_FIRST), makers):
        name = name if turn % 2 == 0 else {"ours": "theirs", "theirs": "ours"}[name]
        step = makers[name]()
        for of_all, of_step in zip(first[name], timed(step)):
            of_all.append(of_step)
    peaks = {name: peak_bytes(make, both.forget) for name, make in makers.items()}
    steps = {name: make() for name, make in makers.items()}
    for step in steps.values():
        step()
        step()
    steady = in_turns(steps, seconds=stepping_s)
    dist.barrier()
    return OfRank(steady, first, peaks)


def measure(work: Work, stepping_s: float = SECONDS) -> list[Row]:
    """One case."""
    ranks = run_ranks(on_rank, work.p, work, stepping_s, timeout_s=240.0)

    def of(name: str, which: str) -> list[Taken]:
        return [getattr(rank, which)[name] for rank in ranks]

    seconds = ratios(step_seconds(of("ours", "steady")), step_seconds(of("theirs", "steady")))
    cpu = ratios(step_cpu_s(of("ours", "steady")), step_cpu_s(of("theirs", "steady")))
    first = ratios(step_seconds(of("ours", "first")), step_seconds(of("theirs", "first")))
    return [
        {
            **work._asdict(),
            "num_rounds": len(ranks[0].steady["ours"].seconds),
            **_named("seconds", seconds),
            **_named("cpu", cpu),
            "first_seconds": first.median,
            "peak_bytes": [rank.peaks["ours"] for rank in ranks],
            "their_peak_bytes": [rank.peaks["theirs"] for rank in ranks],
            "peak": max(rank.peaks["ours"] / rank.peaks["theirs"] for rank in ranks),
        }
    ]


def _named(what: str, ratio: Interval) -> dict[str, float]:
    return {what: ratio.median, f"{what}_low": ratio.low, f"{what}_high": ratio.high}


def cases() -> list[Case]:
    """All of them."""
    works = [Work(*one) for one in product(KINDS, (2, 4), (8, 16, 64), SIZES)]
    return [(f"{w.kind}, p = {w.p}, m = {w.m}, {w.size} blocks", partial(measure, w)) for w in works]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The worst cases."""
    found = []
    for key, what in (("seconds", "step time"), ("cpu", "CPU seconds")):
        worst = max(rows, key=lambda row: row[key])
        found.append(
            Claim(
                what=f"{what} over torch's, the worst of {len(rows)} cases ({name_of(worst)})",
                target=1.0,
                value=worst[key],
                low=worst[f"{key}_low"],
                high=worst[f"{key}_high"],
            )
        )
        over = [row for row in rows if row[f"{key}_low"] > 1]
        number = float(len(over))
        what = f"cases of {len(rows)} whose {what}, with all its interval, is above torch's"
        why = "; ".join(map(name_of, over))
        found.append(Claim(what=what, target=0.0, value=number, low=number, high=number, why=why))
    worst = max(rows, key=lambda row: row["peak"])
    what = f"peak bytes of a rank over torch's, the worst case ({name_of(worst)})"
    return [*found, Claim(what=what, target=1.0, value=worst["peak"], low=worst["peak"], high=worst["peak"])]


def name_of(row: Row) -> str:
    """A case in words."""
    return f"{row['kind']}, p = {row['p']}, m = {row['m']}, {row['size']} blocks"


def draw(rows: Sequence[Row]) -> Figure:
    """Each case's ratios, beside 1."""
    figure = Figure(figsize=(9, 0.26 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    places = [-index for index in range(len(rows))]
    for axis, (key, title) in zip(axes, (("seconds", "step time"), ("cpu", "CPU seconds"), ("peak", "peak bytes"))):
        values = [row[key] for row in rows]
        ends = [
            [row[key] - row.get(f"{key}_low", row[key]) for row in rows],
            [row.get(f"{key}_high", row[key]) - row[key] for row in rows],
        ]
        axis.errorbar(values, places, xerr=ends, fmt="o", markersize=4, color="tab:blue", ecolor="tab:gray")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{title}, over torch's")
        axis.set_xlim(left=0)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(places, [name_of(row) for row in rows], fontsize=8)
    return figure


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
    cases=cases,
    columns=[
        ("kind", "schedule", ""),
        ("p", "p", "d"),
        ("m", "m", "d"),
        ("size", "blocks", ""),
        ("num_rounds", "rounds", "d"),
        ("seconds", "step time / torch's", ".3f"),
        ("seconds_low", "from", ".3f"),
        ("seconds_high", "to", ".3f"),
        ("cpu", "CPU seconds / torch's", ".3f"),
        ("cpu_low", "from", ".3f"),
        ("cpu_high", "to", ".3f"),
        ("first_seconds", "first step / torch's", ".2f"),
        ("peak", "peak bytes / torch's, worst rank", ".3f"),
    ],
    claims=claims,
    draw=draw,
)
