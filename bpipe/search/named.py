"""The fastest of named schedules within budgets: what cannot be the fastest any more is neither planned nor simulated.

No plan of an order is faster than the order if memory were no matter. Where there are many microbatches, few of them show how much
slower each order is within the budgets, and in which way it keeps them; then the fastest ones are planned in that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from bpipe.passes.evict_or_recompute import PlanInBudget, kept_as_it_is
from bpipe.plan.collector import collector_paused
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING
from bpipe.search.work import Family, Found
from bpipe.verifier.proof import verify

__all__: list[str] = []

GROUPS = 2  # of p microbatches, by which schedules are judged
NEAR = 0.02  # how much slower than the fastest a plan may be judged on few microbatches, and be planned all the same


def named(families: Sequence[Family], *, all_kept: bool = False, told: Callable[[float], None] = lambda _: None) -> list[Found]:
    """Return every named schedule, and the fastest plan within the budgets among them; the fastest first, which is proven.

    A schedule that cannot be faster than that is left without a plan. The result depends on the arguments alone.

    Args:
        families: the named schedules, at least one in each family.
        all_kept: whether every schedule is kept within the budgets, even if it cannot be the fastest.
        told: called now and then with the share that is done.

    Example:
        >>> from bpipe.schedules import Costs, Sizes, build
        >>> from bpipe.passes.setting import Setting
        >>> setting = Setting(costs=Costs(saved_bytes=8), sizes=Sizes.of([8] * 4), budgets=(24,) * 4)
        >>> first, other = named([Family(starts=(build("1f1b", 4, 8), build("gpipe", 4, 8)), setting=setting)])
        >>> first.name, first.step_s, other.name, other.kept
        ('1f1b', 33.0, 'gpipe', None)
    """
    with collector_paused():
        found = chosen(families, all_kept=all_kept, told=told)
        if found[0].kept is not None:
            verify(found[0].kept.plan)
        return found


@dataclass(slots=True)
class _Candidate:
    """A named schedule, and what is known of it so far."""

    number: int  # of its family
    family: Family
    order: Plan
    order_s: float
    judge: Family  # the same one with few microbatches, or `family` itself
    judged: Plan  # the order there
    judged_order_s: float
    kept: PlanInBudget | None = None  # there

    @property
    def estimate_s(self) -> float:
        """The step of all microbatches, by what is kept where the schedule is judged."""
        if self.kept is None:
            return inf
        return self.order_s * (self.kept.step_s / self.judged_order_s if self.judged_order_s else 1.0)

    @property
    def likely_s(self) -> float:
        """The estimate, and more where it must move or recompute, which takes more of all microbatches than of few."""
        return self.estimate_s * (1 if self.kept is None or self.kept.policy is None else 1 + NEAR)

    @property
    def is_judged_by_few(self) -> bool:
        return self.judge is not self.family


def chosen(families: Sequence[Family], *, all_kept: bool = False, told: Callable[[float], None] = lambda _: None) -> list[Found]:
    """Do what `named` does, without proof."""
    candidates = [one for number, family in enumerate(families) for one in _candidates(number, family)]
    candidates.sort(key=lambda one: one.order_s)
    if all_kept:
        for one in candidates:
            one.kept = one.judge.kept_within(one.judged)
    else:
        _judge(candidates)
    told(0.5)
    candidates.sort(key=lambda one: (one.likely_s, one.order_s))
    found: list[Found] = []
    least_s = inf
    for done, one in enumerate(candidates, start=1):
        kept = None if one.is_judged_by_few else one.kept
        wanted_s = inf if all_kept else least_s
        if one.is_judged_by_few and one.order_s < wanted_s * (1 - ROUNDING) and one.estimate_s <= wanted_s * (1 + NEAR):
            kept = one.family.kept_within(one.order, wanted_s, one.kept and one.kept.policy)
        found.append(Found(one.order.name, False, one.number, one.order_s, kept))
        least_s = min(least_s, found[-1].step_s)
        told(0.5 + 0.5 * done / len(candidates))
    return sorted(found, key=lambda one: (one.step_s, one.order_s))


def _candidates(number: int, family: Family) -> Iterator[_Candidate]:
    judge = family.with_fewer(GROUPS) or family
    for order, lanes, judged, judged_lanes in zip(family.orders, family.lanes, judge.orders, judge.lanes):
        yield _Candidate(number, family, order, family.shop.step_s(lanes), judge, judged, judge.shop.step_s(judged_lanes))


def _judge(candidates: Sequence[_Candidate]) -> None:
    """Keep candidates within the budgets where they are judged, as far as they can be the fastest.

    First come those that keep the budgets as they are, because that takes little time, and what they reach rules others out.
    """
    least_s = inf
    for one in candidates:
        if one.order_s < least_s:
            one.kept = kept_as_it_is(one.judged, one.judge.setting)
            least_s = min(least_s, one.estimate_s)
    for one in candidates:
        limit_s = least_s * (1 + NEAR * one.is_judged_by_few)
        if one.kept is None and one.order_s < limit_s * (1 - ROUNDING):
            below_s = limit_s * (one.judged_order_s / one.order_s if one.order_s else 1.0)
            one.kept = one.judge.kept_within(one.judged, below_s)
            least_s = min(least_s, one.estimate_s)
