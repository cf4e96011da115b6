"""What one GPU shows: what evictions free, what they take and how much of it is hidden, with bf16 GPT blocks.

All ranks of a loopback share the GPU: they compute in turns, never p times as fast.
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
from benchmarks.alternate import Turns, in_turns
from benchmarks.blocks import GPTBlock, Size
from benchmarks.gpu import event_mark, finish, is_on_gpu
from benchmarks.intervals import as_they_are, columns, interval
from benchmarks.one_eviction import alone
from benchmarks.pictures import beside_one
from benchmarks.study import Claim, Row, Study
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
        to: where evictions go: to a "peer" of the loopback, which is a copy on the device, or to the "host".
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


WORKS = tuple(Work(8, 16, attention, to) for to in ("peer", "host") for attention in ("flash", "materialised"))


class Pipeline:
    """All ranks of a pipeline, in a loopback.

    Args:
        work: the case.
        modules: the stage of each of them.
        batch: of a step.
        is_balanced: or plain 1F1B.
    """

    def __init__(self, work: Work, modules: Sequence[nn.Module], batch: torch.Tensor, *, is_balanced: bool) -> None:
        self._loopback = bpipe.Loopback(work.p, own_random_state=False)
        stages = [bpipe.PipelineStage(one, i, work.p, work.device, self._loopback.rank(i)) for i, one in enumerate(modules)]
        self.schedules = [_schedule(stage, work, is_balanced=is_balanced) for stage in stages]
        self._modules, self._batch, self._device = modules, batch, work.device

    def step(self) -> None:
        """A step, all of it done when it returns. Gradients stay where they are, so that no step allocates them."""
        self._loopback.step(self.schedules, self._batch, target=self._batch, return_outputs=False)
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
    return interval(shares).named("exposed")


def measure(work: Work) -> list[Row]:
    """One case, in a process of its own; its figures that take a GPU are None without one."""
    return run_ranks(in_one_process, 1, work, timeout_s=TIMEOUT_S)


def in_one_process(_: int, work: Work) -> Row:
    """All of a case."""
    torch.manual_seed(0)
    figures: dict[str, Any] = dict.fromkeys(key for key, *_ in COLUMNS)
    figures |= {"to": work.to, "attention": work.attention, "p": work.p, "m": work.m, **work.size._asdict()}
    (stage,) = blocks(work, 1)
    figures |= alone(stage, batch_of(work, 1).requires_grad_(), to_host=work.to == "host")
    modules, batch, pipelines = blocks(work, work.p), batch_of(work, work.m), {}
    for name in ("plain", "balanced"):  # bytes of the one are measured before the other has its buffers
        pipeline = pipelines[name] = Pipeline(work, modules, batch, is_balanced=name == "balanced")
        for _ in range(2):
            pipeline.step()
        if is_on_gpu(work.device):
            found = {"gpu_mib": gpu_peak_mib(pipeline, work.device)}
            found |= bytes_of(pipeline, partial(torch.cuda.memory_allocated, work.device))
            figures |= found if name == "balanced" else {f"plain_{key}": found[key] for key in ("peak_mib", "gpu_mib")}
    turns = Turns([in_turns({name: pipeline.step for name, pipeline in pipelines.items()}, seconds=work.seconds)])
    if is_on_gpu(work.device):
        figures |= exposed(pipelines["balanced"], event_mark)
    plain_s = turns.seconds("plain")
    return {
        **figures,
        "num_rounds": len(plain_s),
        "plain_ms": 1000 * median(plain_s),
        "moved_mib": sum(schedule.stats["evicted_bytes"] for schedule in pipelines["balanced"].schedules) / MIB,
        **turns.time("balanced", "plain").named("time"),
    }


def name_of(row: Row) -> str:
    """A case in words."""
    where = {"peer": "to a peer", "host": "to the host"}[row["to"]]
    return f"loopback, {where}, {row['attention']} attention, p = {row['p']}, m = {row['m']}"


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
            Claim(f"freed over evicted bytes, {name}", 1.0, freed, is_least=True),
            Claim(f"allocated over planned peak, {name}", 1.02, peak),
        ]
        if row["evict_us"] < row["forward_us"]:
            found += [
                Claim.of(row, "exposed", f"share of the step that a rank stands still for evictions, {name}", 0.02),
                Claim.of(row, "time", f"step time of balanced over plain, {name}", 1.02),
            ]
    return found


def draw(rows: Sequence[Row]) -> Figure:
    """Step times, and evictions over forwards where both were timed."""
    of_gpu = [{**row, "evict": row["evict_us"] and row["evict_us"] / row["forward_us"]} for row in rows]
    titles = {"time": "balanced step, over plain", "evict": "an eviction by itself, over a forward"}
    return beside_one(of_gpu, name_of, titles)


COLUMNS = [
    ("to", "evicts to", ""),
    *as_they_are("attention", "p", "m", "width", "tokens", "sequences"),
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
    *columns("exposed", "exposed", ".4f"),
    ("num_rounds", "rounds", "d"),
    ("plain_ms", "ms of a plain step", ",.0f"),
    *columns("time", "step time / plain"),
]

STUDY = Study(
    name="one_gpu",
    title="One GPU",
    text=(
        "A bf16 GPT block a stage; all ranks share one GPU, as a loopback in one process, so that a step takes the compute of all\n"
        "ranks, and other ranks' kernels hide a copy too. Bytes are by the allocator's statistics: the fullest rank's at the end\n"
        "of an action without what stays, as its own actions take and give back; and what the whole GPU holds, remote activations\n"
        "too, so that only the host takes from it. A forward and an eviction are timed by themselves, with events. `exposed` is\n"
        "the share of the step for which the stream of a rank, the one that waits longest, stood still for its evictions and\n"
        "loads, by events: what other ranks computed meanwhile is not taken off."
    ),
    works=WORKS,
    measure=measure,
    columns=COLUMNS,
    claims=claims,
    draw=draw,
    name_of=name_of,
    needs=needs,
)
