"""What the parts of bpipe cost by themselves, in microseconds of CPU, beside a forward of a small transformer block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import bpipe
from benchmarks.alternate import Taken, in_turns, step_cpu_s, step_seconds
from benchmarks.blocks import Size, block
from benchmarks.intervals import ratios
from benchmarks.study import Case, Claim, Row, Study
from bpipe.comm.health.collective import Collective
from bpipe.comm.wire.header import Subject, pack_eviction, pack_spec, unpack_eviction, unpack_spec
from bpipe.comm.wire.message import MessageSpec, meta_of
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.stash import Stash
from bpipe.schedules import build
from tests.ranks import run_ranks

REPEATS = 15
SMALL, LARGER = Size(64, 32, 1), Size(256, 64, 2)
NUM_TENSORS, NUM_MICROBATCHES = 200, 64
SECONDS = 20.0  # of alternating steps
SIZES = ((4, 16), (8, 64), (16, 128))  # ranks and microbatches of plans


class Chain(nn.Module):
    """Operations that save a tensor each, and do next to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_TENSORS):
            x = x.sigmoid()
        return x


def cpu_us(run: Callable[[], object], per: int = 1) -> float:
    """Microseconds of CPU that a call takes, for each of so many things it does: the median of some calls."""
    run()
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return 1e6 * median(taken) / per


def row(what: str, microseconds: float) -> Row:
    return {"what": what, "cpu_us": microseconds}


def saved_tensors() -> list[Row]:
    """What following a saved tensor costs, forward and backward, and moving its storage."""
    chain, x = Chain(), torch.ones(1024, requires_grad=True)

    def run(stash: Stash | None) -> None:
        if stash is None:
            output = chain(x)
        else:
            with stash.capture():
                output = chain(x)
        output.sum().backward()

    plain = cpu_us(lambda: run(None), NUM_TENSORS)
    followed = cpu_us(lambda: run(Stash("a microbatch", {}, torch.device("cpu"))), NUM_TENSORS)

    def moved(num_bytes: int) -> float:
        def move() -> None:
            tensors = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(NUM_TENSORS)]
            bundle = Bundle([(tensor.untyped_storage(), 1) for tensor in tensors], "a microbatch")
            bundle.messages()
            bundle.empty()
            bundle.scatter(bundle.refill())

        return cpu_us(move, NUM_TENSORS)

    return [
        row("hooks, a saved tensor: pack and unpack", followed - plain),
        row("eviction and load without the transfer, a storage of 4 KiB", moved(4 * 1024)),
        row("eviction and load without the transfer, a storage of 1 MiB", moved(1024**2)),
    ]


def headers() -> list[Row]:
    """What the headers of messages cost; only a step with new shapes sends those between stages."""
    subject = Subject(3, 2, 1)
    layout = MessageSpec('"T"', (meta_of(torch.empty(2, 64, 256), requires_grad=True),))
    sizes = [1024] * 16
    return [
        row("header of a message between stages, both ends", cpu_us(lambda: unpack_spec(pack_spec(subject, layout), subject))),
        row("header of an eviction, both ends", cpu_us(lambda: unpack_eviction(pack_eviction(subject, 0, sizes), subject, 0))),
    ]


def actions() -> list[Row]:
    """What the runtime adds to a forward and a backward, on one rank that sends nothing."""
    module, x = block(SMALL), torch.randn(NUM_MICROBATCHES, SMALL.tokens, SMALL.width)
    loss_fn = nn.functional.mse_loss
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
    schedule = bpipe.OneFOneB(stage, NUM_MICROBATCHES, loss_fn=loss_fn)

    def by_hand() -> None:
        for one in x.tensor_split(NUM_MICROBATCHES):
            (loss_fn(module(one), one) / NUM_MICROBATCHES).backward()
        module.zero_grad()

    def by_schedule() -> None:
        schedule.step(x, target=x, return_outputs=False)
        module.zero_grad()

    alone, runtime = cpu_us(by_hand, NUM_MICROBATCHES), cpu_us(by_schedule, NUM_MICROBATCHES)
    return [
        row("forward and backward of a block, width 64, 32 tokens, by hand", alone),
        row("what a schedule adds to them", runtime - alone),
    ]


def plans() -> list[Row]:
    """What it takes to plan and prove, once a schedule."""
    return [row(f"plan and prove balanced 1F1B, p = {p}, m = {m}", cpu_us(partial(build, "balanced_1f1b", p, m))) for p, m in SIZES]


class OfRank(NamedTuple):
    """What a rank measured."""

    agreement_s: list[float]
    staying: dict[str, Taken]


def on_rank(rank: int) -> OfRank:
    """What the start of a step costs, and what microbatches pay that are not evicted."""
    module, m = block(LARGER), 8
    stage = bpipe.PipelineStage(module, rank, 2, "cpu")
    batch = torch.randn(m * LARGER.sequences, LARGER.tokens, LARGER.width)
    schedules: dict[str, Any] = {
        "never": bpipe.OneFOneB(stage, m, loss_fn=nn.functional.mse_loss),
        "staying": bpipe.Balanced(bpipe.OneFOneB(stage, m, loss_fn=nn.functional.mse_loss), budget=2**40),
    }

    def step(name: str) -> None:
        schedules[name].step(batch, target=batch, return_outputs=False)
        module.zero_grad()

    steps = {name: partial(step, name) for name in schedules}
    for one in [*steps.values()] * 3:
        one()
    staying = in_turns(steps, seconds=SECONDS)
    transport, agreement_s = schedules["never"].session.context.transport, []
    for _ in range(20 * REPEATS):
        began = time.process_time()
        transport.exchange(Collective.STEP, b"0" * 100)
        agreement_s.append(time.process_time() - began)
    dist.barrier()
    return OfRank(agreement_s, staying)


def processes() -> list[Row]:
    """The rows that take two processes."""
    ranks = run_ranks(on_rank, 2, timeout_s=200.0)
    both = {name: [rank.staying[name] for rank in ranks] for name in ("never", "staying")}
    time_ratio = ratios(step_seconds(both["staying"]), step_seconds(both["never"]))
    cpu_ratio = ratios(step_cpu_s(both["staying"]), step_cpu_s(both["never"]))
    return [
        row("agreement before a step, a rank of two", 1e6 * median(ranks[0].agreement_s)),
        {"what": STAYING, **{f"time{end}": value for end, value in zip(("", "_low", "_high"), time_ratio)}},
        {"what": f"{STAYING}, CPU seconds", **{f"time{end}": value for end, value in zip(("", "_low", "_high"), cpu_ratio)}},
    ]


STAYING = "step of microbatches that stay, in `Balanced`, over one without hooks"


def cases() -> list[Case]:
    """All parts."""
    return [
        ("saved tensors", saved_tensors),
        ("headers", headers),
        ("actions", actions),
        ("plans", plans),
        ("agreement, and microbatches that stay", processes),
    ]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """That microbatches pay nothing that stay."""
    return [
        Claim(what=one["what"], target=1.0, value=one["time"], low=one["time_low"], high=one["time_high"])
        for one in rows
        if "time" in one
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Microseconds, on a logarithmic axis."""
    some = [one for one in rows if "cpu_us" in one]
    figure = Figure(figsize=(9, 0.4 * len(some) + 1), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([-index for index in range(len(some))], [max(one["cpu_us"], 0.1) for one in some], color="tab:blue")
    axes.bar_label(bars, [f"{one['cpu_us']:,.1f}" for one in some], padding=3, fontsize=9)
    axes.set_yticks([-index for index in range(len(some))], [one["what"] for one in some], fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(right=8 * max(one["cpu_us"] for one in some))
    axes.set_xlabel("CPU microseconds")
    return figure


STUDY = Study(
    name="overheads",
    title="Overheads by themselves",
    text=(
        "CPU microseconds of each part, medians; the machine's speed is in all of them alike, so that they say what to\n"
        "compare with what. Microbatches that stay are those of a `Balanced` schedule whose budget has room for all."
    ),
    cases=cases,
    columns=[
        ("what", "part", ""),
        ("cpu_us", "CPU µs", ",.1f"),
        ("time", "ratio", ".3f"),
        ("time_low", "from", ".3f"),
        ("time_high", "to", ".3f"),
    ],
    claims=claims,
    draw=draw,
)
