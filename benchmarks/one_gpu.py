"""What one GPU shows: what evictions free, what they take and how much of it is hidden, with bf16 GPT blocks.

All ranks of a loopback, or several processes, share the GPU: they compute in turns or beside each other, never p times as fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

import bpipe
from benchmarks.alternate import Taken, in_turns, step_seconds
from benchmarks.blocks import GPTBlock, Size
from benchmarks.gpu import event_mark, finish, is_on_gpu
from benchmarks.intervals import interval, ratios
from benchmarks.one_eviction import alone
from benchmarks.overlap import copies_and_kernels, overlapped, trace_of
from benchmarks.study import Case, Claim, Row, Study
from bpipe.engine.run import Observer
from bpipe.schedules import Destinations, Op
from tests.ranks import run_ranks

TIMEOUT_S = 200.0  # of a case
REPEATS = 7  # of steps whose waits are timed
MIB = 1024**2

WAITS = frozenset({Op.WAIT_EVICT, Op.WAIT_LOAD})  # an acceptor's are on a stream of their own wherever it has a process


class Work(NamedTuple):
    """One case.

    Args:
        p, m: ranks and microbatches.
        attention: "flash", or "materialised": the softmax of all pairs is saved.
        to: where evictions go: to a "peer" of a loopback, which is a copy on the device, to the "host", or to a "process".
        size: of the block that is a stage.
        device: where all is.
        seconds: of alternating steps.
    """

    p: int
    m: int
    attention: str
    to: str
    size: Size = Size(2048, 1024, 4)
    device: str = "cuda"
    seconds: float = 15.0


WORKS = (
    *(Work(8, 16, attention, to) for to in ("peer", "host") for attention in ("flash", "materialised")),
    Work(4, 8, "flash", "process", Size(2048, 1024, 1)),
)


class Pipeline:
    """The ranks of a pipeline that are in this process: all of a loopback, or one.

    Args:
        work: the case.
        modules: the stage of each of them.
        batch: of a step.
        is_balanced: or plain 1F1B.
        rank: of this process; None with a loopback.
    """

    def __init__(
        self, work: Work, modules: Sequence[nn.Module], batch: torch.Tensor, *, is_balanced: bool, rank: int | None
    ) -> None:
        loopback = bpipe.Loopback(work.p, own_random_state=False)
        of_rank = [(index, loopback.rank(index)) for index in range(work.p)] if rank is None else [(rank, None)]
        stages = [bpipe.PipelineStage(one, i, work.p, work.device, group) for one, (i, group) in zip(modules, of_rank)]
        self.schedules = [_schedule(stage, work, is_balanced=is_balanced) for stage in stages]
        self._run = partial(loopback.step, self.schedules) if rank is None else self.schedules[0].step
        self._modules, self._batch, self._device = modules, batch, work.device

    def step(self) -> None:
        """A step, all of it done when it returns. Gradients stay where they are, so that no step allocates them."""
        self._run(self._batch, target=self._batch, return_outputs=False)
        for module in self._modules:
            module.zero_grad(set_to_none=False)
        finish(self._device)

    @contextmanager
    def followed(self, observers: Sequence[Observer | None]) -> Iterator[None]:
        """Let an observer follow each schedule."""
        for schedule, observer in zip(self.schedules, observers):
            schedule.session.observer = observer
        try:
            yield
        finally:
            for schedule in self.schedules:
                schedule.session.observer = None


def _schedule(stage: Any, work: Work, *, is_balanced: bool) -> Any:
    loss_fn = nn.functional.mse_loss
    if not is_balanced:
        return bpipe.OneFOneB(stage, work.m, loss_fn=loss_fn)
    if work.to == "host":
        return bpipe.Balanced(bpipe.OneFOneB(stage, work.m, loss_fn=loss_fn), budget=None, to=Destinations(host="only"))
    return bpipe.BalancedOneFOneB(stage, work.m, loss_fn=loss_fn)


def blocks(work: Work, number: int) -> list[nn.Module]:
    return [GPTBlock(work.size, work.attention).to(work.device, torch.bfloat16) for _ in range(number)]


def batch_of(work: Work, m: int) -> torch.Tensor:
    """[m * sequences, tokens, width]"""
    size = work.size
    return torch.randn(m * size.sequences, size.tokens, size.width, device=work.device, dtype=torch.bfloat16)


class Account(Observer):
    """What the actions of one rank take and give back: in a loopback, only one rank acts at a time.

    Args:
        allocated: the bytes that the allocator has given out.
    """

    def __init__(self, allocated: Callable[[], int]) -> None:
        self._allocated = allocated
        self.live_bytes = self.peak_bytes = self.freed_bytes = 0

    def before(self, run: Any, action: Any) -> None:
        self._before = self._allocated()

    def after(self, run: Any, action: Any) -> None:
        taken = self._allocated() - self._before
        self.live_bytes += taken
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if action.op is Op.WAIT_EVICT:
            self.freed_bytes -= taken


def bytes_of(pipeline: Pipeline, allocated: Callable[[], int]) -> dict[str, float]:
    """The bytes of a step: the fullest rank's at the end of an action, as planned and as allocated, and what rank 0 frees.

    Remote activations' buffers are allocated since the first step: they are added as the schedule counts them.
    """
    accounts = [Account(allocated) for _ in pipeline.schedules]
    with pipeline.followed(accounts):
        pipeline.step()
    stats = [schedule.stats for schedule in pipeline.schedules]
    return {
        "planned_mib": max(one["predicted_device_peak_bytes"] - one["static_bytes"] for one in stats) / MIB,
        "peak_mib": max(account.peak_bytes + one["remote_buffer_bytes"] for account, one in zip(accounts, stats)) / MIB,
        "evicted_mib": stats[0]["evicted_bytes"] / MIB,
        "freed_mib": accounts[0].freed_bytes / MIB,
    }


def gpu_peak_mib(pipeline: Pipeline, device: str) -> float:
    """The most that is allocated in a step, by all ranks and with all that stays."""
    torch.cuda.reset_peak_memory_stats(device)
    pipeline.step()
    return torch.cuda.max_memory_allocated(device) / MIB


class Waits(Observer):
    """How long a rank's stream stands still until a transfer of an eviction is done.

    Args:
        mark: puts a mark on the current stream, which knows the milliseconds until a later one.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self._marks: list[Any] = []

    def before(self, run: Any, action: Any) -> None:
        if action.op in WAITS:
            self._marks.append(self._mark())

    after = before

    def seconds(self) -> float:
        return sum(begin.elapsed_time(end) for begin, end in zip(self._marks[::2], self._marks[1::2])) / 1000


def exposed(pipeline: Pipeline, mark: Callable[[], Any]) -> dict[str, float]:
    """The share of a step that the rank stands still for evictions that does so longest, step by step."""
    shares = []
    for _ in range(REPEATS):
        waits = [Waits(mark) for _ in pipeline.schedules]
        began = time.perf_counter()
        with pipeline.followed(waits):
            pipeline.step()
        took = time.perf_counter() - began
        shares.append(max(one.seconds() for one in waits) / took)
    return _with_ends("exposed", interval(shares))


class OfProcess(NamedTuple):
    """What a process measured."""

    taken: dict[str, Taken]
    evicted_bytes: float
    figures: dict[str, float | None]


def in_one_process(_: int, work: Work) -> OfProcess:
    """All of a case whose ranks share a process."""
    torch.manual_seed(0)
    figures = alone(*blocks(work, 1), batch_of(work, 1).requires_grad_(), to_host=work.to == "host")
    modules, batch, pipelines = blocks(work, work.p), batch_of(work, work.m), {}
    for name in ("plain", "balanced"):  # bytes of the one are measured before the other has its buffers
        pipeline = pipelines[name] = Pipeline(work, modules, batch, is_balanced=name == "balanced", rank=None)
        for _ in range(2):
            pipeline.step()
        if is_on_gpu(work.device):
            found = {"gpu_mib": gpu_peak_mib(pipeline, work.device)}
            found |= bytes_of(pipeline, partial(torch.cuda.memory_allocated, work.device))
            figures |= found if name == "balanced" else {f"plain_{key}": found[key] for key in ("peak_mib", "gpu_mib")}
    taken = in_turns({name: pipeline.step for name, pipeline in pipelines.items()}, seconds=work.seconds)
    figures["overlapped"] = overlapped(*copies_and_kernels(trace_of(pipelines["balanced"].step)))
    if is_on_gpu(work.device):
        figures |= exposed(pipelines["balanced"], event_mark)
    return OfProcess(taken, sum(schedule.stats["evicted_bytes"] for schedule in pipelines["balanced"].schedules), figures)


def in_a_process(rank: int, work: Work) -> OfProcess:
    """One rank of a case that has a process for each."""
    torch.manual_seed(rank)
    how = work, blocks(work, 1), batch_of(work, work.m)
    pipelines = {name: Pipeline(*how, is_balanced=name == "balanced", rank=rank) for name in ("plain", "balanced")}
    for pipeline in [*pipelines.values()] * 2:
        pipeline.step()
    taken = in_turns({name: pipeline.step for name, pipeline in pipelines.items()}, seconds=work.seconds)
    return OfProcess(taken, pipelines["balanced"].schedules[0].stats["evicted_bytes"], {})


def measure(work: Work) -> list[Row]:
    """One case; its figures that take a GPU are None without one."""
    is_split = work.to == "process"
    found = run_ranks(in_a_process if is_split else in_one_process, work.p if is_split else 1, work, timeout_s=TIMEOUT_S)
    seconds = {name: step_seconds([process.taken[name] for process in found]) for name in ("plain", "balanced")}
    return [
        {
            **dict.fromkeys(key for key, *_ in COLUMNS),
            **{key: value for key, value in work._asdict().items() if key not in ("size", "device", "seconds")},
            **work.size._asdict(),
            **found[0].figures,
            "num_rounds": len(seconds["plain"]),
            "plain_ms": 1000 * median(seconds["plain"]),
            "moved_mib": sum(process.evicted_bytes for process in found) / MIB,
            **_with_ends("time", ratios(seconds["balanced"], seconds["plain"])),
        }
    ]


def _with_ends(key: str, found: Sequence[float]) -> dict[str, float]:
    return {f"{key}{end}": value for end, value in zip(("", "_low", "_high"), found)}


def cases() -> list[Case]:
    """All of them."""
    return [(name_of(work._asdict()), partial(measure, work)) for work in WORKS]


def name_of(row: Row) -> str:
    """A case in words."""
    where = {"peer": "loopback, to a peer", "host": "loopback, to the host", "process": "processes over gloo"}[row["to"]]
    return f"{where}, {row['attention']} attention, p = {row['p']}, m = {row['m']}"


def needs() -> str:
    """Why none of it can be measured here."""
    return "" if torch.cuda.is_available() else "it takes a GPU, and torch.cuda finds none here"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What evictions must free; and what they may cost where a copy takes less time than a forward."""
    found = []
    for row in rows:
        if row["freed_mib"] is None:
            continue
        freed, peak = row["freed_mib"] / row["evicted_mib"], row["peak_mib"] / row["planned_mib"]
        name = name_of(row)
        found += [
            Claim(what=f"freed over evicted bytes, {name}", target=1.0, value=freed, low=freed, high=freed, is_least=True),
            Claim(what=f"allocated over planned peak, {name}", target=1.02, value=peak, low=peak, high=peak),
        ]
        if row["evict_us"] < row["forward_us"]:
            found += [
                _bounded(row, "exposed", f"share of the step that a rank stands still for evictions, {name}", 0.02),
                _bounded(row, "time", f"step time of balanced over plain, {name}", 1.02),
            ]
    return found


def _bounded(row: Row, key: str, what: str, target: float) -> Claim:
    return Claim(what=what, target=target, value=row[key], low=row[f"{key}_low"], high=row[f"{key}_high"])


def draw(rows: Sequence[Row]) -> Figure:
    """Step times, and a forward beside an eviction."""
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    time_axes, copy_axes = figure.subplots(1, 2, sharey=True)
    places = [-index for index in range(len(rows))]
    times = [row["time"] for row in rows]
    errors = [[row["time"] - row["time_low"] for row in rows], [row["time_high"] - row["time"] for row in rows]]
    time_axes.errorbar(times, places, xerr=errors, fmt="o")
    time_axes.axvline(1.0, color="black", linewidth=0.8)
    time_axes.set_yticks(places, [name_of(row) for row in rows], fontsize=8)
    time_axes.set_xlabel("balanced step, over plain")
    alone_rows = [(place, row) for place, row in zip(places, rows) if row["evict_us"] is not None]
    for key, name, shift in (("forward_us", "a forward", 0.2), ("evict_us", "an eviction", -0.2)):
        copy_axes.barh([place + shift for place, _ in alone_rows], [row[key] for _, row in alone_rows], height=0.35, label=name)
    copy_axes.set_xlabel("µs on the GPU, by itself")
    copy_axes.legend(fontsize=8)
    return figure


COLUMNS = [
    ("to", "evicts to", ""),
    ("attention", "attention", ""),
    ("p", "p", "d"),
    ("m", "m", "d"),
    ("width", "width", "d"),
    ("tokens", "tokens", "d"),
    ("sequences", "sequences", "d"),
    ("plain_peak_mib", "MiB of the fullest rank, plain", ",.0f"),
    ("peak_mib", "balanced", ",.0f"),
    ("planned_mib", "planned", ",.0f"),
    ("evicted_mib", "MiB that rank 0 evicts", ",.0f"),
    ("freed_mib", "and frees", ",.0f"),
    ("plain_gpu_mib", "MiB of the GPU, plain", ",.0f"),
    ("gpu_mib", "balanced", ",.0f"),
    ("moved_mib", "MiB evicted a step, all ranks", ",.0f"),
    ("forward_us", "µs of a forward", ",.0f"),
    ("evict_us", "of an eviction", ",.0f"),
    ("gb_s", "GB/s", ",.0f"),
    ("overlapped", "copies beside kernels", ".2f"),
    ("exposed", "exposed", ".4f"),
    ("exposed_low", "from", ".4f"),
    ("exposed_high", "to", ".4f"),
    ("num_rounds", "rounds", "d"),
    ("plain_ms", "ms of a plain step", ",.0f"),
    ("time", "step time / plain", ".3f"),
    ("time_low", "from", ".3f"),
    ("time_high", "to", ".3f"),
]

STUDY = Study(
    name="one_gpu",
    title="One GPU",
    text=(
        "A bf16 GPT block a stage; all ranks share one GPU, as a loopback in one process or as processes over gloo through\n"
        "pinned memory, so that a step takes the compute of all ranks, and other ranks' kernels hide a copy too. Bytes are by\n"
        "the allocator's statistics: the fullest rank's at the end of an action without what stays, as its own actions take and\n"
        "give back; and what the whole GPU holds, remote activations of a loopback too, so that only the host takes from it. A\n"
        "forward and an eviction are timed by themselves, with events. `copies beside kernels` is the share of the copies' time\n"
        "in which a kernel ran, by the profiler; `exposed` that of the step for which the stream of a rank, the one that waits\n"
        "longest, stood still for its evictions and loads, by events: what other ranks computed meanwhile is not taken off.\n"
        "Between processes, the kernels of one do not run beside those of another, and gloo takes longer than a forward."
    ),
    cases=cases,
    columns=COLUMNS,
    claims=claims,
    draw=draw,
    needs=needs,
)
