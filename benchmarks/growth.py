"""How plans, messages and bytes grow with the pipeline, up to 1024 ranks: planned, proven and simulated, each size by itself.

A process measures one size, so that its memory is its own.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from benchmarks.intervals import as_they_are
from benchmarks.pictures import curves
from benchmarks.study import Claim, Row, Study
from bpipe.plan.action import POSTS
from bpipe.schedules import Costs, Link, Plan, build, simulate


class Work(NamedTuple):
    """Ranks and microbatches."""

    p: int
    m: int


WORKS = [Work(*one) for one in ((8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 1024), (512, 2048), (1024, 2048))]
COSTS = Costs(saved_bytes=1, output_bytes=1, link=Link(bytes_per_s=2.0))


def measured_here(p: int, m: int) -> dict[str, float]:
    """Plan, prove and simulate balanced 1F1B once; seconds are of this process's CPU time."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    plan = build("balanced_1f1b", p, m)
    planned = time.process_time()
    simulate(plan, COSTS)
    simulated = time.process_time()
    num_actions = sum(map(len, (*plan.actions, *plan.served)))
    return {
        "p": p,
        "m": m,
        "actions": num_actions,
        "plan_us": 1e6 * (planned - began) / num_actions,
        "simulate_us": 1e6 * (simulated - planned) / num_actions,
        "bytes_an_action": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / num_actions,
        **traffic(plan),
    }


def traffic(plan: Plan) -> dict[str, float]:
    """What the busiest rank sends and receives: messages a microbatch, and how many microbatches move to another rank and back."""
    messages = [sum(a.op in POSTS for lane in (plan.actions[r], plan.served[r]) for a in lane) for r in range(plan.num_ranks)]
    moved = [len(plan.evicted(rank)) for rank in range(plan.num_ranks)]
    peers = [
        len({a.peer for lane in (plan.actions[r], plan.served[r]) for a in lane if a.op in POSTS}) for r in range(plan.num_ranks)
    ]
    return {
        "messages": max(messages) / plan.num_microbatches,
        "moved": max(moved) / plan.num_microbatches,
        "peers": max(peers),
        "peak_slots": max(plan.peak_slots),
    }


def measure(work: Work) -> list[Row]:
    """One size, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return [pool.submit(measured_here, *work).result()]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What bounds the growth."""
    largest = rows[-1]
    at = f"at p = {largest['p']}"
    of_planning = largest["plan_us"] / rows[3]["plan_us"]
    return [
        Claim.of(largest, "messages", f"messages a microbatch on the busiest rank, {at}", 6.0),
        Claim.of(largest, "moved", f"share of the microbatches that the busiest rank evicts, {at}", 0.5),
        Claim.of(largest, "peers", f"ranks that a rank exchanges messages with by its plan, {at}", 3.0),
        Claim(f"CPU time to plan an action, {at}, over that at p = 64", 2.0, of_planning),
    ]


STUDY = Study(
    name="growth",
    title="Growth",
    text=(
        "Balanced 1F1B, planned, proven by `verify` and simulated, in one process a size. A message is a transfer that a\n"
        "rank starts or receives, for itself or for others. Memory is what the process grew by: of small plans nothing, which\n"
        "find room in what loading torch had taken."
    ),
    works=WORKS,
    measure=measure,
    columns=[
        *as_they_are("p", "m"),
        ("actions", "actions", ",d"),
        ("plan_us", "CPU µs to plan an action", ".1f"),
        ("simulate_us", "to simulate it", ".1f"),
        ("bytes_an_action", "bytes of memory an action", ".0f"),
        ("messages", "messages a microbatch, busiest rank", ".2f"),
        ("moved", "evicted a microbatch, busiest rank", ".3f"),
        ("peers", "most peers of a rank", "d"),
        ("peak_slots", "peak slots", "d"),
    ],
    claims=claims,
    draw=partial(
        curves,
        over="actions",
        groups={
            "CPU µs an action": {"plan_us": "plan and prove", "simulate_us": "simulate"},
            "bytes of the process an action": {"bytes_an_action": "memory"},
        },
    ),
)
