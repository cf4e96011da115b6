"""The recompute pass: run microbatches over the budget forward again before their backward, instead of keeping or moving them.

    occupied      at the first action over the limit:
    F0 F1 F2 F3   the microbatch whose backward comes last keeps only its input,
    1  2  3  4    and runs forward again, R, before its backward: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 R3 B3

It costs one forward for each microbatch over the budget, and no transfer, so it is the baseline to compare eviction with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from bpipe.checks import budgets_of
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.balance.balance import default_slots
from bpipe.passes.communicate import communicate, computations_only
from bpipe.passes.fit import Budgets, raised, refusal, smallest
from bpipe.plan.action import BACKWARD, Action, Op
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes

__all__ = ["recompute"]

TRIES = 4  # attempts to free memory for messages that R lets arrive earlier

Which = tuple[int, int]  # stage, microbatch


def recompute(
    plan: Plan,
    *,
    slots: int | Sequence[int | None] | None = None,
    sizes: Sizes | None = None,
    budgets: int | Sequence[int | None] | None = None,
) -> Plan:
    """Run just enough microbatches forward twice to keep every rank within its budget.

    A stage next to another one of its rank is not recomputed, because they share the memory of the tensors between them.

    Args:
        plan: any; its computations are kept as whole ones, and its transfers are dropped: `finish` adds new ones.
        slots: the budget in microbatches, one number or one per rank (None: unlimited).
        sizes: the bytes of a microbatch, to count bytes instead of slots. The input of a recomputed microbatch stays.
        budgets: with `sizes`, the budget in bytes, static bytes included; None: as low as possible.

    Raises:
        BudgetError: the budget cannot be met; the message names the smallest that can, to within 1/1024 of the highest peak.
        ConfigurationError: neither or both of slots and sizes are given, or budgets or sizes do not fit the ranks or stages.

    Example:
        >>> from bpipe.schedules import build, finish
        >>> finish(recompute(build("1f1b", 4, 8), slots=3)).peak_slots
        (3, 3, 2, 1)
    """
    if (slots is None) == (sizes is None) or (budgets is not None and sizes is None):
        raise ConfigurationError("give slots=, or sizes= and budgets=")
    if sizes is not None:
        sizes.check(plan.num_stages, plan.num_ranks, plan.slices)
    search = RecomputeSearch(replace(computations_only(plan), sizes=sizes))
    given = slots if sizes is None else budgets
    if given is None:
        lowest = search.lowest((0,) * plan.num_ranks)
        return replace(lowest, budgets=(max(_peaks(lowest)),) * plan.num_ranks)
    each = budgets_of("slots" if sizes is None else "budgets", given, plan.num_ranks)
    found = search.within(each)
    if found is None:
        raise search.refusal(each)
    return found


def recompute_by_count(plan: Plan) -> Plan:
    """Recompute to at most ceil((p+2)/2) microbatches per rank, as `by_count` does with evictions, or else to as few as possible.

    The former is for plans with one stage per rank that can meet it.
    """
    if plan.num_stages == plan.num_ranks:
        with suppress(BudgetError):
            return recompute(plan, slots=default_slots(plan.num_stages))
    lowest = RecomputeSearch(replace(computations_only(plan), sizes=None)).lowest((0,) * plan.num_ranks)
    return replace(lowest, slots=(max(lowest.peak_slots),) * plan.num_ranks)


class RecomputeSearch:
    """A plan of computations, to be kept within budgets.

    Args:
        plan: without messages.
        finished: the plan with messages, if it is known.
    """

    def __init__(self, plan: Plan, finished: Plan | None = None) -> None:
        self.plan = plan
        self._known: dict[tuple[int | None, ...], list[set[Which]] | None] = {}
        self._ranks = [_Rank(plan, rank, lane) for rank, lane in enumerate((finished or communicate(plan)).actions)]

    def within(self, budgets: Budgets) -> Plan | None:
        """Return a plan that keeps to the budgets, or None if none is found."""
        found = self.both_within(budgets)
        return None if found is None else found[0]

    def both_within(self, budgets: Budgets) -> tuple[Plan, Plan] | None:
        """Return a plan that keeps to the budgets, without messages and, if it counts bytes, with them; None if none is found."""
        is_sized = self.plan.sizes is not None
        limits = list(budgets)
        for _ in range(TRIES):
            chosen = self.chosen(limits)
            if chosen is None:
                return None
            found = recompute_first(self.plan, chosen)
            found = replace(found, budgets=budgets) if is_sized else replace(found, slots=budgets)
            finished = communicate(found) if is_sized else found
            peaks = finished.device_peak_bytes if is_sized else finished.peak_slots
            over = [0 if budget is None else peak - budget for peak, budget in zip(peaks, budgets)]
            if max(over) <= 0:
                return found, finished
            limits = [None if limit is None else limit - max(more, 0) for limit, more in zip(limits, over)]
        return None

    def chosen(self, limits: Sequence[int | None]) -> list[set[Which]] | None:
        """Choose the microbatches to recompute on each rank so that its own list keeps a limit; None if that is not enough."""
        if (key := tuple(limits)) not in self._known:
            self._known[key] = self._chosen(key)
        return self._known[key]

    def _chosen(self, limits: Sequence[int | None]) -> list[set[Which]] | None:
        found: list[set[Which]] = []
        for rank, limit in zip(self._ranks, limits):
            chosen = rank.chosen(limit)
            if chosen is None:
                return None
            found.append(chosen)
        return found

    def able(self, rank: int) -> set[int]:
        """Return the stages of a rank that can be recomputed."""
        return self._ranks[rank].able

    def lowest(self, budgets: Budgets) -> Plan:
        """Return the plan within the lowest budgets that can be met: these, all raised by the same amount."""
        highest = max(_peaks(self.plan))
        enough = self.within(raised(budgets, highest))
        assert enough is not None, "with its own peak as the budget, a plan needs no recomputation"

        def attempt(more: int) -> tuple[int, Plan] | None:
            found = self.within(raised(budgets, more))
            return None if found is None else (more, found)

        return smallest(attempt, 1, (highest, enough), highest)[1]

    def refusal(self, given: Budgets) -> BudgetError:
        """Return the error for budgets that cannot be met."""
        lowest = self.lowest(given)
        smallest = (lowest.slots if self.plan.sizes is None else lowest.budgets) or ()
        return refusal(self.plan, given, "recomputing as much as possible is not enough", smallest)


def _peaks(plan: Plan) -> tuple[int, ...]:
    return plan.peak_slots if plan.sizes is None else communicate(plan).device_peak_bytes


def recompute_first(plan: Plan, chosen: Sequence[Collection[Which]]) -> Plan:
    """Return a plan in which each rank runs the chosen microbatches forward again, ahead of their backward.

    Such a forward, and one in front of such a backward, run side by side with nothing.
    """
    actions = tuple(_running_again(lane, of_rank) for lane, of_rank in zip(plan.actions, chosen))
    pairs = [two for lane in plan.actions for two in pairwise(lane) if plan.begins_pair(two[0])] if plan.overlapped else []
    whole = {forward.key for forward, backward in pairs if any({forward.key, backward.key} & set(keys) for keys in chosen)}
    return replace(plan, actions=actions, overlapped=plan.overlapped - whole)


def _running_again(lane: Sequence[Action], chosen: Collection[Which]) -> tuple[Action, ...]:
    """Return a lane in which the chosen microbatches run forward again, ahead of their backward."""
    pairs = ((Action(Op.R, *a.key), a) if a.op in BACKWARD and a.key in chosen else (a,) for a in lane)
    return tuple(action for pair in pairs for action in pair)


class _Event(NamedTuple):
    """What an action of a lane changes, if its microbatch is kept and if it is recomputed."""

    which: Which
    op: Op
    backward: int | None  # of a forward that may be recomputed: the place of its backward
    takes: tuple[int, int]  # before it runs, if its microbatch is kept, and if it is recomputed
    gives: tuple[int, int]  # behind it


class _Rank:
    """One rank's list, in which as few microbatches as possible are to be recomputed."""

    def __init__(self, plan: Plan, rank: int, lane: Sequence[Action]) -> None:
        self._meter = plan.meter()
        self._static = 0 if plan.sizes is None else plan.sizes.static[rank]
        self.able = {stage for stage in plan.stages_of(rank) if not plan.flow.shares_memory(stage)}
        backward = {action.key: index for index, action in enumerate(lane) if action.op in BACKWARD}
        self._slices = plan.slices
        self._changes: dict[tuple[Op, int, int, int], tuple[tuple[int, int], tuple[int, int]]] = {}
        self._events = [
            self._event(action, backward.get(action.key) if action.op is Op.F and action.stage in self.able else None)
            for action in lane
        ]

    def _event(self, action: Action, backward: int | None = None) -> _Event:
        op, stage, unit, part, _ = action
        kind = op, stage, unit % self._slices, part  # units are alike, but for the sizes of their slices
        if kind not in self._changes:
            takes, gives = zip(*(self._meter.change(action, again=again) for again in (False, True)))
            self._changes[kind] = takes, gives
        return _Event((stage, unit), op, backward, *self._changes[kind])

    @cached_property
    def _peak(self) -> int:
        """The most that the rank occupies without recomputation."""
        live = peak = self._static
        for event in self._events:
            live += event.takes[0]
            peak = max(peak, live)
            live -= event.gives[0]
        return peak

    def chosen(self, limit: int | None) -> set[Which] | None:
        """Choose the microbatch needed last whenever the limit is exceeded, and return all; None if that is not enough."""
        if limit is None or self._peak <= limit:
            return set()
        greedy = _GreedyRecompute(self._static, limit)
        run, chosen = greedy.run, greedy.chosen
        for event in self._events:
            if event.which in chosen and event.op in BACKWARD and not run(self._event(Action(Op.R, *event.which))):
                return None
            if not run(event):
                return None
        return chosen


class _GreedyRecompute:
    """One run over a rank's actions. Each microbatch is counted both ways, so that it can be chosen later."""

    def __init__(self, static: int, limit: int) -> None:
        self.chosen: set[Which] = set()
        self._limit, self._live = limit, static
        self._spared: defaultdict[Which, int] = defaultdict(int)  # the memory that recomputing each microbatch would free
        self._offered: list[tuple[int, Which]] = []  # the microbatch needed last stands first
        self._ended: set[Which] = set()  # microbatches whose backward has begun

    def run(self, event: _Event) -> bool:
        """Count an action, and choose until it is within the limit; return whether that is possible."""
        which, op, backward, takes, gives = event
        if backward is not None:
            heappush(self._offered, (-backward, which))
        self._live += takes[which in self.chosen]
        self._spared[which] += takes[0] - takes[1]
        if op in BACKWARD:
            self._ended.add(which)
        while self._live > self._limit:
            if not self._choose():
                return False
        self._live -= gives[which in self.chosen]
        self._spared[which] -= gives[0] - gives[1]
        return True

    def _choose(self) -> bool:
        """Choose the microbatch needed last among those that would free memory; return whether there is one."""
        while self._offered:
            _, which = heappop(self._offered)
            if which not in self._ended and self._spared[which] > 0:
                self._live -= self._spared[which]
                self.chosen.add(which)
                return True
        return False
