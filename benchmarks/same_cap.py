"""What a user would do instead of evicting, at the same memory cap: the time of a step over the peak of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import bpipe
from benchmarks.alternate import Step, Taken, Turns, in_turns, peak_bytes
from benchmarks.blocks import Size, block
from benchmarks.intervals import as_they_are, columns
from benchmarks.pictures import points
from benchmarks.study import Claim, Row, Study
from bpipe.passes.balance.balance import default_slots
from bpipe.schedules import Destinations
from tests.ranks import run_ranks
from tests.sleepers import Sleeper

FORWARD_S, SAVED_BYTES = 0.04, 8 * 1024**2  # of a sleeping stage and microbatch
SECONDS = {"sleeping": 60.0, "real": 45.0}  # of alternating steps
REAL = Size(256, 64, 2)
RIVAL = {4: 1.08, 8: 1.13}  # what recomputing over the cap was expected to take, over balanced
WHY = "bpipe recomputes ahead, while a rank waits for the gradient, and as few as the plan needs (NOTES.md)"


class Wrapped(nn.Module):
    """A stage of which some microbatches are run in some way of torch's.

    Args:
        module: the stage.
        run: runs it in that way.
        window: of so many microbatches in a row ...
        usual: ... so many are run as usual.
    """

    def __init__(self, module: nn.Module, run: Callable[[nn.Module, torch.Tensor], torch.Tensor], window: int, usual: int) -> None:
        super().__init__()
        self.module, self._run, self._window, self._usual, self._num_run = module, run, window, usual, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self._num_run % self._window
        self._num_run += 1
        result: torch.Tensor = self.module(x) if place < self._usual else self._run(self.module, x)
        return result


def recomputed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=False)


def offloaded(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As torch.autograd.graph.save_on_cpu does for a GPU: copied in the forward, and back in the backward."""
    with saved_tensors_hooks(torch.clone, torch.clone):
        return module(x)


class Work(NamedTuple):
    """A pipeline, and what its stages do."""

    p: int
    m: int
    stages: str

    def module(self, way: Way) -> nn.Module:
        if self.stages == "real":
            return nn.Sequential(*(block(REAL) for _ in range(round(2 * way.share))))
        return Sleeper(FORWARD_S * way.share * way.rows, int(SAVED_BYTES * way.share * way.rows))

    def batch(self) -> torch.Tensor:
        return torch.randn(self.m * REAL.sequences, REAL.tokens, REAL.width) if self.stages == "real" else torch.ones(2 * self.m, 8)


class Way(NamedTuple):
    """One way to train.

    Args:
        schedule: makes it from a rank's stages, m and a loss.
        share: of a stage's work that each module does; two stages a rank have half each.
        rows: of the microbatch that it does at once; half of them in a microbatch of half the size.
        run: how ranks that hold more microbatches than the cap run their stage.
        on_all: whether all ranks do.
        is_split: whether it runs backwards in halves, which a stage that sleeps in a Function of its own has not.
        is_partial: whether they run only the microbatches so that are over the cap, as Megatron-LM does: of those under way at
            once, as many are kept as leave room for one that is recomputed.
    """

    schedule: Callable[..., Any] = bpipe.OneFOneB
    share: float = 1.0
    rows: float = 1.0
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    on_all: bool = False
    is_partial: bool = False
    is_split: bool = False


def balanced(**options: Any) -> Callable[..., Any]:
    """1F1B within ceil((p+2)/2) microbatches a rank."""
    return lambda *args, **kwargs: bpipe.Balanced(bpipe.OneFOneB(*args, **kwargs), None, **options)


PLAIN, OURS = "1F1B, no cap", "bpipe: evict to peers"
WAYS: dict[str, Way] = {
    PLAIN: Way(),
    OURS: Way(bpipe.BalancedOneFOneB),
    "bpipe: evict to the host": Way(balanced(to=Destinations(host="only"))),
    "bpipe: recompute over the cap": Way(balanced(by="recompute")),
    "recompute over the cap (checkpoint)": Way(run=recomputed, is_partial=True),
    "recompute on early stages": Way(run=recomputed),
    "recompute everything": Way(run=recomputed, on_all=True),
    "offload everything (as save_on_cpu)": Way(run=offloaded, on_all=True),
    "half the microbatch": Way(rows=0.5),
    "V-Half": Way(bpipe.VHalf, share=0.5, is_split=True),
}


def ways(work: Work) -> dict[str, Way]:
    """Those that can be measured on its stages."""
    return {name: way for name, way in WAYS.items() if not (way.is_split and work.stages == "sleeping")}


class Pipeline:
    """One rank's end of a pipeline that trains in some way."""

    def __init__(self, rank: int, work: Work, way: Way) -> None:
        torch.manual_seed(rank)
        m = round(work.m / way.rows)
        indices = [rank] if way.share == 1 else [rank, 2 * work.p - 1 - rank]
        modules = [work.module(way) for _ in indices]
        if way.run is not None and (way.on_all or work.p - rank > default_slots(work.p)):
            usual = default_slots(work.p) - 1 if way.is_partial else 0
            modules = [Wrapped(module, way.run, work.p - rank, usual) for module in modules]
        num_stages = work.p * len(indices)
        stages = [bpipe.PipelineStage(module, i, num_stages, "cpu") for module, i in zip(modules, indices)]
        self._modules, self._batch = modules, work.batch()
        self.schedule = way.schedule(stages if len(stages) > 1 else stages[0], m, loss_fn=nn.functional.mse_loss)

    def step(self) -> None:
        self.schedule.step(self._batch, target=self._batch, return_outputs=False)
        for module in self._modules:
            module.zero_grad()

    @property
    def remote_buffer_bytes(self) -> int:
        return int(self.schedule.stats["remote_buffer_bytes"])


class OfRank(NamedTuple):
    """What a rank measured, by way: steps in turns, and peak bytes."""

    taken: dict[str, Taken]
    peaks: dict[str, int]


def on_rank(rank: int, work: Work) -> OfRank:
    """All measurements of a case."""
    pipelines: dict[str, Pipeline] = {}

    def make(name: str) -> Step:
        pipelines[name] = Pipeline(rank, work, WAYS[name])
        return pipelines[name].step

    peaks = {name: peak_bytes(partial(make, name)) + pipelines[name].remote_buffer_bytes for name in ways(work)}
    taken = in_turns({name: one.step for name, one in pipelines.items()}, seconds=SECONDS[work.stages])
    return OfRank(taken, peaks)


def measure(work: Work) -> list[Row]:
    """One case: a row for each way."""
    ranks = run_ranks(on_rank, work.p, work, timeout_s=600.0)
    turns, peaks = Turns(rank.taken for rank in ranks), {name: [rank.peaks[name] for rank in ranks] for name in ways(work)}
    return [
        {
            **work._asdict(),
            "way": name,
            "num_rounds": len(turns.seconds(name)),
            **turns.time(name, PLAIN).named("time"),
            **turns.time(name, OURS).named("over_ours"),
            "peak_bytes": peaks[name],
            "peak": max(peaks[name]) / max(peaks[PLAIN]),
        }
        for name in ways(work)
    ]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Of the stages that sleep: balanced beside plain, and what is over the cap beside it."""
    found = []
    for row in (row for row in rows if row["stages"] == "sleeping"):
        way, at = row["way"], f"p = {row['p']}, m = {row['m']}, stages that sleep"
        rival = partial(Claim.of, row, "over_ours", is_least=True)
        if way == OURS:
            found.append(Claim.of(row, "time", f"balanced over plain 1F1B, {at}", 1.01))
        if "recompute over the cap" in way:
            who, why = ("bpipe's own plan", WHY) if way.startswith("bpipe") else ("checkpoint, as Megatron-LM", "")
            found.append(rival(f"recomputing over the cap ({who}), over balanced, {at}", RIVAL[row["p"]], why=why))
        if way == "recompute everything":
            found.append(rival(f"recomputing everything, over balanced, {at}", 1.30))
    return found


def name_of(row: Row) -> str:
    """A case in words."""
    return f"p = {row['p']}, m = {row['m']}, {row['stages']} stages"


STUDY = Study(
    name="same_cap",
    title="At the same memory cap",
    text=(
        "Ways to train within ceil((p+2)/2) microbatches of activations a rank, beside plain 1F1B without a cap. Stages\n"
        "that sleep take a device's time (forward 0.04 s, backward twice that, 8 MiB saved a microbatch): the ranks then\n"
        "share no compute, while processes and transfers are real. Real stages are two transformer blocks each: where there\n"
        "are fewer cores than ranks these share the compute, and time is CPU time. Peak bytes are those of all live tensors in\n"
        "the second step, remote activations included; on CPU, what is offloaded to the host is live as well. A stage that sleeps\n"
        "is no device in three ways. What it saves is memory that nobody has written: sending it costs less than sending what\n"
        "is in memory. It makes all that it saves at once, so that a forward that is to be recomputed holds it too while it\n"
        "runs: bpipe's own recomputation has one microbatch more at its peak than with real stages. And half a microbatch takes\n"
        "it half the time, which no kernel does."
    ),
    works=[Work(4, 12, "sleeping"), Work(8, 24, "sleeping"), Work(4, 12, "real")],  # which compute
    measure=measure,
    columns=[
        *as_they_are("p", "m", "stages", "way"),
        ("num_rounds", "rounds", "d"),
        *columns("time", "step time / plain 1F1B"),
        *columns("over_ours", "step time / balanced"),
        ("peak", "peak / plain 1F1B", ".3f"),
    ],
    claims=claims,
    draw=partial(
        points,
        panel_of=name_of,
        kind_of=itemgetter("way"),
        x=("peak", "peak bytes of the fullest rank, over plain 1F1B's"),
        y=("time", "step time, over plain 1F1B's"),
    ),
    name_of=name_of,
)
