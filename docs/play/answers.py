"""Answer the page: settings go in, and plans come out, drawn and in numbers. The same code runs in the browser and in tests.

A setting is the words of a `bpipe simulate` command, so that bpipe's own command line reads it, refuses it and explains why.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from bpipe.errors import BPipeError
from bpipe.flow.shaping import without
from bpipe.plan.amounts import show_bytes
from bpipe.plan.collector import collector_paused
from bpipe.schedules import Costs, Link, Plan, Timeline, rules
from bpipe.schedules.rule import Placement
from bpipe.tools import arguments
from bpipe.tools.balancing import balance_notes
from bpipe.tools.cli import _joined, _parser
from bpipe.tools.page import as_data, render
from bpipe.tools.quantities import show_seconds
from bpipe.tools.scene import compose
from bpipe.tools.summary import data_of, holds_of, share, slow_notes

Words = tuple[str, ...]
USUAL_SLICES = 4  # of the schedules that are made for slices


def schedules() -> list[dict[str, Any]]:
    """Return the schedules that the page offers, and the choices that each of them has."""
    return [
        {
            "name": rule.name,
            "title": rule.title,
            "memory": rule.peak_text,
            "bubble": rule.bubble_text,
            "takes": rule.allows_text,
            "stages_per_rank": rule.default_stages_per_rank,
            "has_stages": rule.placement is Placement.LOOPED,
            "has_slices": rule.sliced is not None,
            "slices": USUAL_SLICES if rule.sliced is not None and rule.placement is Placement.ONE else 1,
        }
        for rule in rules()
    ]


def answer(settings: list[list[str]], *, is_first: bool = False) -> dict[str, Any]:
    """Return the plans of one or two settings, one scene of all that are possible, and how they compare.

    Args:
        settings: for each, the words behind `bpipe simulate`.
        is_first: whether to return the whole page that draws the scene too, and not only its data.
    """
    with collector_paused():
        plans, possible = [], []
        for words in map(tuple, settings):
            try:
                plans.append(_described(words))
                possible.append(words)
            except BPipeError as error:
                plans.append({"error": str(error).partition("\n")[0]})
        try:
            scene = compose(list(map(timeline_of, possible))) if possible else None
        except BPipeError as error:  # more boxes than a picture may have
            return {"plans": [{"error": str(error)}] * len(plans), "scene": None, "numbers": []}
        found = {"plans": plans, "scene": scene and as_data(scene), "numbers": numbers(possible) if possible else []}
        return {**found, "page": render(scene)} if is_first and scene else found


@lru_cache(maxsize=32)
def arguments_of(words: Words) -> argparse.Namespace:
    """Read the words as `bpipe simulate` reads them."""
    return _parser("simulate", import_module("bpipe.tools.commands.simulate")).parse_args(_joined(list(words)))


@lru_cache(maxsize=32)
def timeline_of(words: Words) -> Timeline:
    """Return the plan that the words ask for, with the time of everything in it."""
    args = arguments_of(words)
    if arguments.is_file(args.schedule):
        arguments.rule_named(args.schedule)  # the page has no files, and says which schedules there are
    return arguments.timeline_of(args.schedule, args)


@lru_cache(maxsize=32)
def _described(words: Words) -> dict[str, Any]:
    """Return how to make a plan, its grid, and what is to be known of it."""
    timeline = timeline_of(words)
    plan = timeline.plan
    return {
        "command": f"bpipe simulate {shlex.join(words)} --out plan.html",
        "python": python(words),
        "grid": str(plan),
        "notes": [*balance_notes(plan), *slow_notes([timeline], arguments_of(words).slices)],
    }


@lru_cache(maxsize=32)
def _data(words: Words) -> dict[str, Any]:
    return data_of(timeline_of(words))


def numbers(plans: list[Words]) -> list[list[str]]:
    """Return rows of a table: what is counted, what each plan has, and by how much the second differs from the first."""
    found = list(map(_data, plans))
    steps = [data["makespan_s"] for data in found]
    bubbles = [share(max(rank["bubble_s"] for rank in data["ranks"]), data["makespan_s"]) for data in found]
    evicted = [sum(rank["num_evicted"] for rank in data["ranks"]) for data in found]
    return [
        ["time of a step", *map(show_seconds, steps), *_times(steps)],
        ["largest bubble", *(f"{bubble:.1%}" for bubble in bubbles), *_points(bubbles)],
        _memory("fullest", max, found),
        _memory("emptiest", min, found),
        ["evictions in a step", *map(str, evicted), *([f"{evicted[1] - evicted[0]:+}"] if len(evicted) == 2 else [])],
    ]


def _memory(name: str, pick: Callable[..., dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return the row of the rank that holds the most, or the least: bytes where they are known, and otherwise slots."""
    held = "device_peak_bytes" if all(data["knows_bytes"] for data in found) else "peak_slots"
    ranks = [pick(data["ranks"], key=lambda rank: rank[held]) for data in found]
    texts = [holds_of(rank, data)[held == "peak_slots"] for rank, data in zip(ranks, found)]
    return [f"{name} rank holds", *texts, *_times([rank[held] for rank in ranks])]


def _times(values: list[float]) -> list[str]:
    """Say how much larger the second number is than the first, if there are two."""
    return [f"{share(values[1] - values[0], values[0]):+.1%}"] if len(values) == 2 else []


def _points(shares: list[float]) -> list[str]:
    """Say by how many hundredths of the whole the second share is larger than the first, if there are two."""
    return [f"{100 * (shares[1] - shares[0]):+.1f} points"] if len(shares) == 2 else []


def python(words: Words) -> str:
    """Return a program that makes the same plan without the command line, and draws it."""
    args, plan, budget = arguments_of(words), timeline_of(words).plan, arguments_of(words).budget
    cut, whole = ".of_slices(plan)" * (plan.slices > 1), replace(plan, flow=without(plan.flow, "slices"))
    lines = [
        "from bpipe import draw",
        f"from bpipe.schedules import Costs, {'Link, ' * (args.bandwidth is not None or args.latency is not None)}build, simulate",
        *(["from bpipe.tools.balancing import balanced"] if budget is not None else []),
        "",
        f"plan = {_build(args, plan)}",
        f"costs = {_costs(arguments.costs_of(args, whole))}{cut}",
        *([f"plan = balanced(plan, costs, budget={_written(budget)})"] if budget is not None else []),
        "timeline = simulate(plan, costs)",
        "",
        "print(plan)",
        'draw(timeline, "plan.html")',
        "# To train with this plan, on every rank: bpipe.FromPlan(stage, plan, loss_fn=loss_fn)",
    ]
    return "\n".join(lines) + "\n"


def _build(args: argparse.Namespace, plan: Plan) -> str:
    num_ranks = None if plan.num_ranks == plan.num_stages else plan.num_ranks
    others = {"num_ranks": num_ranks, "slots": args.slots, "slices": args.slices}
    said = "".join(f", {name}={_written(value)}" for name, value in others.items() if value is not None)
    return f"build({_written(args.schedule)}, num_stages={plan.num_stages}, num_microbatches={plan.num_microbatches}{said})"


def _costs(costs: Costs) -> str:
    """Write the costs that differ from the defaults, a line each; what a long number means stands beside it."""
    lines = [f"    {name}={_written(value)},{_meaning(value)}\n" for name, value in _given(costs)]
    return f"Costs(\n{''.join(lines)})" if lines else "Costs()"


def _written(value: object) -> str:
    if isinstance(value, Link):
        return f"Link({', '.join(f'{name}={_written(one)}' for name, one in _given(value))})"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"  # 5e+10, not 50000000000.0
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _given(some: Costs | Link) -> Iterator[tuple[str, Any]]:
    """Yield the fields that differ from the defaults."""
    usual = type(some)()
    for field in fields(some):
        if (value := getattr(some, field.name)) != getattr(usual, field.name):
            yield field.name, value


def _meaning(value: object) -> str:
    """Return a comment on a number of bytes, the only costs that are whole numbers."""
    return f"  # {show_bytes(value)}" if isinstance(value, int) else ""
