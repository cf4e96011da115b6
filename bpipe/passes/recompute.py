"""The recompute pass: run microbatches over the budget forward again before their backward, instead of keeping or moving them.

    occupied      at the first action over the limit:
    F0 F1 F2 F3   the microbatch whose backward comes last keeps only its input,
    1  2  3  4    and runs forward again, R, before its backward: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 R3 B3

It costs one forward for each microbatch over the budget, and no transfer, so it is the baseline to compare eviction with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

from bpipe.errors import BudgetError
from bpipe.passes.balance.balance import default_slots
from bpipe.passes.communicate import communicate, computations_only
from bpipe.passes.fit import Budgets, Given, budgets_to_keep, least_raised, refusal
from bpipe.plan.action import BACKWARD, Action, Op
from bpipe.plan.meter import NOTHING, Change
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes

__all__ = ["recompute"]

TRIES = 4  # attempts to free memory for messages that R lets arrive earlier

Which = tuple[int, int]  # stage, microbatch
Counted = tuple[tuple[Change, Change], ...]  # what an action takes and gives if its microbatch is kept, and if it is recomputed
Recomputed = tuple[frozenset[Which], ...]  # the microbatches that a plan recomputes, by rank


def recompute(plan: Plan, *, slots: Given = None, sizes: Sizes | None = None, budgets: Given = None) -> Plan:
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
    given = budgets_to_keep(plan, slots, sizes, budgets)
    search = RecomputeSearch(replace(computations_only(plan), sizes=sizes))
    found = None if given is None else search.within(given)
    if found is not None:
        return found[0]
    enough, (lowest, finished) = search.lowest(given or (0,) * plan.num_ranks)
    if given is not None:
        raise refusal(search.plan, given, "recomputing as much as possible is not enough", enough)
    return replace(lowest, budgets=(max(finished.device_peak_bytes),) * plan.num_ranks)


def recompute_by_count(plan: Plan) -> Plan:
    """Recompute to at most ceil((p+2)/2) microbatches per rank, as `by_count` does with evictions, or else to as few as possible.

    The former is for plans with one stage per rank that can meet it.
    """
    if plan.num_stages == plan.num_ranks:
        with suppress(BudgetError):
            return recompute(plan, slots=default_slots(plan.num_stages))
    _, (lowest, _) = RecomputeSearch(computations_only(plan)).lowest((0,) * plan.num_ranks)
    return replace(lowest, slots=(max(lowest.peak_slots),) * plan.num_ranks)


class RecomputeSearch:
    """A plan of computations, to be kept within budgets.

    Args:
        plan: without messages.
        finished: the plan with messages, if it is known.
    """

    def __init__(self, plan: Plan, finished: Plan | None = None) -> None:
        self.plan, self._finished = plan, finished or communicate(plan)
        self._known: dict[Budgets, Recomputed | None] = {}

    @cached_property
    def _ranks(self) -> list[_Rank]:
        return [_Rank(self.plan, rank, lane) for rank, lane in enumerate(self._finished.actions)]

    def within(self, budgets: Budgets) -> tuple[Plan, Plan] | None:
        """Return a plan that keeps to the budgets, without messages and with them; None if none is found."""
        limits = budgets
        for _ in range(TRIES):
            chosen = self.chosen(limits)
            if chosen is None:
                return None
            found = recompute_first(self.plan, chosen)
            found = replace(found, slots=budgets) if self.plan.sizes is None else replace(found, budgets=budgets)
            finished = found if self.plan.sizes is None else communicate(found)
            peaks = _peaks(finished)
            over = [0 if budget is None else max(0, peak - budget) for peak, budget in zip(peaks, budgets)]
            if not any(over):
                return found, finished
            limits = tuple(None if limit is None else limit - more for limit, more in zip(limits, over))
        return None

    def chosen(self, limits: Budgets) -> Recomputed | None:
        """Choose the microbatches to recompute on each rank so that its own list keeps a limit; None if that is not enough."""
        if limits not in self._known:
            chosen: list[frozenset[Which]] = []
            for rank, limit in zip(self._ranks, limits):
                if (of_rank := rank.chosen(limit)) is None:
                    break
                chosen.append(of_rank)
            self._known[limits] = tuple(chosen) if len(chosen) == len(limits) else None
        return self._known[limits]

    def able(self, rank: int) -> set[int]:
        """Return the stages of a rank that can be recomputed."""
        return self._ranks[rank].able

    def lowest(self, budgets: Budgets) -> tuple[Budgets, tuple[Plan, Plan]]:
        """Return the lowest budgets that can be met, which are these, all raised by the same amount, and the plan within them."""
        return least_raised(self.within, budgets, max(_peaks(self._finished)))


def _peaks(plan: Plan) -> tuple[int, ...]:
    return plan.peak_slots if plan.sizes is None else plan.device_peak_bytes


def recompute_first(plan: Plan, chosen: Sequence[Collection[Which]]) -> Plan:
    """Return a plan in which each rank runs the chosen microbatches forward again, ahead of their backward.

    Such a forward, and one in front of such a backward, run side by side with nothing.
    """
    actions = tuple(_running_again(lane, of_rank) for lane, of_rank in zip(plan.actions, chosen))
    return replace(plan, actions=actions, overlapped=plan.overlapped and plan.overlapped - _alone(plan.actions, chosen))


def _alone(lanes: Sequence[Sequence[Action]], chosen: Sequence[Collection[Which]]) -> set[Which]:
    """Return the forwards that run again, and those in front of a backward that follows such a one."""
    steps = ((two, of_rank) for lane, of_rank in zip(lanes, chosen) for two in pairwise(lane) if two[0].op is Op.F)
    return {first.key for (first, second), of_rank in steps if first.key in of_rank or second.key in of_rank}


def _running_again(lane: Sequence[Action], chosen: Collection[Which]) -> tuple[Action, ...]:
    """Return a lane in which the chosen microbatches run forward again, ahead of their backward."""
    pairs = ((Action(Op.R, *a.key), a) if a.op in BACKWARD and a.key in chosen else (a,) for a in lane)
    return tuple(action for pair in pairs for action in pair)


def _more(change: Change, held: tuple[Mapping[int, int], Mapping[int, int]], place: int) -> Change:
    """Return what an action at a place of a lane takes and gives with what begins and ends to be held there."""
    (takes, gives), (begun, ended) = change, held
    return takes + begun.get(place, 0), gives + ended.get(place, 0)


class _Rank:
    """One rank's list, in which as few microbatches as possible are to be recomputed.

    Each action is counted twice, as if its microbatch were kept and as if it were recomputed, so that each can be chosen later.
    """

    def __init__(self, plan: Plan, rank: int, lane: Sequence[Action]) -> None:
        self.able = {stage for stage in plan.stages_of(rank) if not plan.flow.shares_memory(stage)}
        self._static = 0 if plan.sizes is None else plan.sizes.static[rank]
        self._meter, self._k, self._enough = plan.meter(), plan.units, inf
        self._counted: dict[tuple[Op, int, int, int], Counted] = {}
        ends = {action.key: index for index, action in enumerate(lane) if action.op in BACKWARD and action.stage in self.able}
        # Of each action: its microbatch, the place of its backward if it is a forward that may be recomputed, and what it counts.
        counted = self._with_holds(lane, ends) if self._meter.has_holds else map(self._count, lane)
        self._events = [(a.key, ends.get(a.key) if a.op is Op.F else None, of_one) for a, of_one in zip(lane, counted)]

    def _count(self, action: Action) -> Counted:
        """Return what an action takes and gives if its microbatch is kept, and if it is recomputed; ahead of a backward also R."""
        op, stage, unit, part, _ = action
        kind = op, stage, unit % self._k, part  # microbatches are alike, but for the sizes of their units
        if kind not in self._counted:
            both = (Action(Op.R, stage, unit), action) if op in BACKWARD else (action,)
            self._counted[kind] = tuple((self._meter.change(one), self._meter.change(one, again=True)) for one in both)
        return self._counted[kind]

    def _with_holds(self, lane: Sequence[Action], able: Collection[Which]) -> Iterator[Counted]:
        """Yield what each action counts with what its microbatch holds until the last of several actions, in either case.

        Such holds begin and end at actions of one microbatch of one stage, because no other stage of the rank has what they are of.
        """
        usual, again, places = self._meter.held(lane), self._meter.held(_running_again(lane, able)), count()
        for index, action in enumerate(lane):
            *first, own = self._count(action)
            found = [(NOTHING, _more(change, again, next(places))) for _, change in first if action.key in able]
            kept, change = own
            yield (*found, (_more(kept, usual, index), _more(change, again, next(places))))

    def chosen(self, limit: int | None) -> frozenset[Which] | None:
        """Choose the microbatch needed last whenever the limit is exceeded, and return all; None if that is not enough."""
        if limit is None or limit >= self._enough:
            return frozenset()
        chosen = set[Which]()
        live, spared = self._static, defaultdict[Which, int](int)  # the memory that recomputing each microbatch would free
        offered: list[tuple[int, Which]] = []  # the microbatch needed last stands first
        for index, (which, backward, counted) in enumerate(self._events):
            if backward is not None:
                heappush(offered, (-backward, which))
            for (takes, gives), (takes_again, gives_again) in counted if which in chosen else counted[-1:]:
                live += takes_again if which in chosen else takes
                spared[which] += takes - takes_again
                while live > limit:
                    if not offered:
                        return None
                    end, last = heappop(offered)
                    if index < -end and spared[last] > 0:
                        live -= spared[last]
                        chosen.add(last)
                live -= gives_again if which in chosen else gives
                spared[which] -= gives - gives_again
        if not chosen:
            self._enough = limit
        return frozenset(chosen)
