"""Plan on few microbatches: what repeats with each group of them there repeats for many, too.

An order of many microbatches on p ranks has a beginning, a steady state and an end. Three groups of p microbatches have most often
all of them, and a piece between beginning and end that takes one group through each kind of computation can be repeated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from bpipe.flow.shaping import with_other
from bpipe.plan.action import Action
from bpipe.plan.plan import Plan
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.simulator.costs import Costs

__all__: list[str] = []

FEWEST = 32  # microbatches in a plan of few
CUTS = 24  # times of a step at which pieces that repeat may begin
WORTHWHILE = 2  # how many times as many microbatches a plan must have


def few_of(plan: Plan, costs: Costs, groups: int) -> int | None:
    """Return how many microbatches show what a plan does with all of its own; None if it has not many more, or they differ.

    Args:
        groups: of as many microbatches as there are ranks, at least.
    """
    p, m = plan.num_ranks, plan.num_microbatches
    least = max(groups * p, -(-FEWEST // p) * p)
    fewer = least + (m - least) % p
    return fewer if m >= WORTHWHILE * fewer and costs.are_of_stages else None


def with_fewer(plan: Plan, num_microbatches: int) -> Plan:
    """Return the order of a plan's first microbatches.

    Example:
        >>> from bpipe.schedules import build
        >>> with_fewer(build("1f1b", 4, 12), 8).compute(2) == build("1f1b", 4, 8).compute(2)
        True
    """
    units = num_microbatches * plan.slices
    lanes = tuple(tuple(action for action in lane if action.microbatch < units) for lane in plan.actions)
    return replace(plan, actions=lanes, flow=with_other(plan.flow, num_microbatches=num_microbatches))


def with_more(few: JobShop, lanes: Lanes, many: JobShop) -> Lanes | None:
    """Return the fastest order of many microbatches that repeats a piece of an order of few; None if no piece can be repeated.

    A piece takes as many microbatches through each of a rank's kinds of computations: one group of them. Where the pieces of all
    ranks begin at about the same time, what one makes for another comes in time again.

    Args:
        few: the computations of few microbatches.
        lanes: an order of these.
        many: the computations of all.
    """
    times = few.run(lanes)
    assert times is not None, "the order ends"
    peaks = few.peaks(lanes)
    best: Lanes | None = None
    best_s = inf
    for part in range(1, CUTS):
        at_s = times.step_s * part / CUTS
        found = [_repeated(few, lane, bisect_left([times.begin_s[number] for number in lane], at_s), many) for lane in lanes]
        whole = [lane for lane in found if lane is not None]
        if len(whole) < len(found) or not all(map(many.fits, whole, peaks)):
            continue
        if (step_s := many.step_s(whole)) < best_s:
            best, best_s = whole, step_s
    return best


def _repeated(few: JobShop, lane: Sequence[int], place: int, many: JobShop) -> list[int] | None:
    """Repeat a piece of a lane that begins at a place; return None if no piece there takes one group through each kind."""
    slices = few.plan.slices
    group, more = few.plan.num_ranks * slices, (many.plan.num_microbatches - few.plan.num_microbatches) * slices
    actions = [few.actions[number] for number in lane]
    counts = dict.fromkeys((action[:2] for action in actions), 0)
    end = place
    while end < len(actions) and min(counts.values()) < group:
        counts[actions[end][:2]] += 1
        end += 1
    if set(counts.values()) != {group}:
        return None
    piece, behind = actions[place:end], actions[end:]
    order = [*actions[:end], *(_later(one, by) for by in range(group, more + 1, group) for one in piece)]
    order += [_later(one, more) for one in behind]
    return many.numbers(order)


def _later(action: Action, by: int) -> Action:
    return action._replace(microbatch=action.microbatch + by)
