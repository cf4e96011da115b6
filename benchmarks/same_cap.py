"""What a user would do instead of evicting, at the same memory cap: the time of a step over the peak of the fullest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import bpipe
from benchmarks.alternate import Step, Taken, in_turns, peak_bytes, step_seconds
from benchmarks.blocks import Size, block
from benchmarks.intervals import ratios
from benchmarks.study import Case, Claim, Row, Study
from bpipe.passes.balance.balance import default_slots
from bpipe.schedules import Destinations
from tests.ranks import run_ranks
from tests.sleepers import Sleeper

FORWARD_S, SAVED_BYTES = 0.04, 8 * 1024**2  # of a sleeping stage and microbatch
SECONDS = {"sleeping": 60.0, "real": 45.0}  # of alternating steps
REAL = Size(256, 64, 2)
RIVAL = {4: 1.08, 8: 1.13}  # what recomputing over the cap was expected to take, over balanced
WHY = "bpipe recomputes ahead, while a rank waits for the gradient, and as few as the plan needs (NOTES.md)"


class Part(NamedTuple):
    """How much of a stage's work on one microbatch one module does.

    Args:
        share: of the stage; two stages a rank have half each.
        rows: of the microbatch; half of them in a microbatch of half the size.
    """

    share: float = 1.0
    rows: float = 1.0


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

    def module(self, part: Part) -> nn.Module:
        if self.stages == "real":
            return nn.Sequential(*(block(REAL) for _ in range(round(2 * part.share))))
        return Sleeper(FORWARD_S * part.share * part.rows, int(SAVED_BYTES * part.share * part.rows))

    def batch(self) -> torch.Tensor:
        return torch.randn(self.m * REAL.sequences, REAL.tokens, REAL.width) if self.stages == "real" else torch.ones(2 * self.m, 8)


class Way(NamedTuple):
    """One way to train.

    Args:
        schedule: makes it from a rank's stages, m and a loss.
        part: what each module does.
        run: how ranks that hold more microbatches than the cap run their stage.
        on_all: whether all ranks do.
        is_split: whether it runs backwards in halves, which a stage that sleeps in a Function of its own has not.
        is_partial: whether they run only the microbatches so that are over the cap, as Megatron-LM does: of those under way at
            once, as many are kept as leave room for one that is recomputed.
    """

    schedule: Callable[..., Any] = bpipe.OneFOneB
    part: Part = Part()
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    on_all: bool = False
    is_partial: bool = False
    is_split: bool = False


def balanced(**options: Any) -> Callable[..., Any]:
    """1F1B within ceil((p+2)/2) microbatches a rank."""
    return lambda *args, **kwargs: bpipe.Balanced(bpipe.OneFOneB(*args, **kwargs), None, **options)


WAYS: dict[str, Way] = {
    "1F1B, no cap": Way(),
    "bpipe: evict to peers": Way(bpipe.BalancedOneFOneB),
    "bpipe: evict to the host": Way(balanced(to=Destinations(host="only"))),
    "bpipe: recompute over the cap": Way(balanced(by="recompute")),
    "recompute over the cap (checkpoint)": Way(run=recomputed, is_partial=True),
    "recompute on early stages": Way(run=recomputed),
    "recompute everything": Way(run=recomputed, on_all=True),
    "offload everything (as save_on_cpu)": Way(run=offloaded, on_all=True),
    "half the microbatch": Way(part=Part(rows=0.5)),
    "V-Half": Way(bpipe.VHalf, Part(share=0.5), is_split=True),
}


def ways(work: Work) -> dict[str, Way]:
    """Those that can be measured on its stages."""
    return {name: way for name, way in WAYS.items() if not (way.is_split and work.stages == "sleeping")}


class Pipeline:
    """One rank's end of a pipeline that trains in some way."""

    def __init__(self, rank: int, work: Work, way: Way) -> None:
        torch.manual_seed(rank)
        m = round(work.m / way.part.rows)
        indices = [rank] if way.part.share == 1 else [rank, 2 * work.p - 1 - rank]
        modules = [work.module(way.part) for _ in indices]
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
    peaks, steps = {}, {}
    for name, way in ways(work).items():
        made: list[Pipeline] = []

        def make(way: Way = way, made: list[Pipeline] = made) -> Step:
            made.append(Pipeline(rank, work, way))
            return made[0].step

        peaks[name] = peak_bytes(make, lambda: None) + made[0].remote_buffer_bytes
        steps[name] = made[0].step
    taken = in_turns(steps, seconds=SECONDS[work.stages])
    dist.barrier()
    return OfRank(taken, peaks)


def measure(work: Work) -> list[Row]:
    """One case: a row for each way."""
    ranks = run_ranks(on_rank, work.p, work, timeout_s=600.0)
    seconds = {name: step_seconds([rank.taken[name] for rank in ranks]) for name in ways(work)}
    rows = []
    for name in ways(work):
        ratio = ratios(seconds[name], seconds["1F1B, no cap"])
        speed = ratios(seconds[name], seconds["bpipe: evict to peers"])
        peaks = [rank.peaks[name] for rank in ranks]
        rows.append(
            {
                **work._asdict(),
                "way": name,
                "num_rounds": len(seconds[name]),
                "time": ratio.median,
                "time_low": ratio.low,
                "time_high": ratio.high,
                "over_ours": speed.median,
                "over_ours_low": speed.low,
                "over_ours_high": speed.high,
                "peak_bytes": peaks,
                "peak": max(peaks) / max(ranks[rank].peaks["1F1B, no cap"] for rank in range(work.p)),
            }
        )
    return rows


def cases() -> list[Case]:
    """Four and eight ranks that sleep, four that compute."""
    works = [Work(4, 12, "sleeping"), Work(8, 24, "sleeping"), Work(4, 12, "real")]
    return [(f"p = {work.p}, {work.stages} stages", partial(measure, work)) for work in works]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Of the stages that sleep: balanced beside plain, and what is over the cap beside it."""
    found = []
    for row in rows:
        at = f"p = {row['p']}, m = {row['m']}, stages that sleep"
        if row["stages"] != "sleeping":
            continue
        if row["way"] == "bpipe: evict to peers":
            found.append(_claim(f"balanced over plain 1F1B, {at}", 1.01, row, "time"))
        if "recompute over the cap" in row["way"]:
            who = "bpipe's own plan" if row["way"].startswith("bpipe") else "checkpoint, as Megatron-LM"
            why = WHY if row["way"].startswith("bpipe") else ""
            found.append(_claim(f"recomputing over the cap ({who}), over balanced, {at}", RIVAL[row["p"]], row, "over_ours", why))
        if row["way"] == "recompute everything":
            found.append(_claim(f"recomputing everything, over balanced, {at}", 1.30, row, "over_ours"))
    return found


def _claim(what: str, target: float, row: Row, key: str, why: str = "") -> Claim:
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return Claim(what=what, target=target, value=row[key], low=low, high=high, is_least=key == "over_ours", why=why)


def draw(rows: Sequence[Row]) -> Figure:
    """Time over peak, both over plain 1F1B's: lower left is better."""
    works = list(dict.fromkeys((row["p"], row["m"], row["stages"]) for row in rows))
    figure = Figure(figsize=(5.2 * len(works), 5), layout="constrained")
    axes = figure.subplots(1, len(works), squeeze=False)[0]
    names = list(dict.fromkeys(row["way"] for row in rows))
    for axis, work in zip(axes, works):
        for row in rows:
            if (row["p"], row["m"], row["stages"]) != work:
                continue
            index, is_ours = names.index(row["way"]), row["way"].startswith("bpipe")
            errors = [[row["time"] - row["time_low"]], [row["time_high"] - row["time"]]]
            style = {"color": f"C{index}", "marker": "o" if is_ours else "s", "markersize": 9 if is_ours else 6}
            axis.errorbar(row["peak"], row["time"], yerr=errors, label=row["way"], linestyle="none", **style)
        axis.set_title(f"p = {work[0]}, m = {work[1]}, {work[2]} stages")
        axis.set_xlabel("peak bytes of the fullest rank, over plain 1F1B's")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step time, over plain 1F1B's")
    shown = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=4, fontsize=9)
    return figure


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
    cases=cases,
    columns=[
        ("p", "p", "d"),
        ("m", "m", "d"),
        ("stages", "stages", ""),
        ("way", "way", ""),
        ("num_rounds", "rounds", "d"),
        ("time", "step time / plain 1F1B", ".3f"),
        ("time_low", "from", ".3f"),
        ("time_high", "to", ".3f"),
        ("over_ours", "step time / balanced", ".3f"),
        ("over_ours_low", "from", ".3f"),
        ("over_ours_high", "to", ".3f"),
        ("peak", "peak / plain 1F1B", ".3f"),
    ],
    claims=claims,
    draw=draw,
)
