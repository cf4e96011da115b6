"""The fastest of named schedules within budgets: what cannot be the fastest any more is neither planned nor simulated.

No plan of an order is faster than the order if memory were no matter. Where there are many microbatches, few of them show how much
slower each order is within the budgets, and in which way it keeps them; then the fastest ones are planned in that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from bpipe.plan.collector import collector_paused
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING
from bpipe.search.within import Kept
from bpipe.search.work import Family, Found, Work
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
        >>> from bpipe.search.setting import Setting
        >>> setting = Setting(costs=Costs(saved_bytes=8), sizes=Sizes.of([8] * 4), budgets=(24,) * 4)
        >>> first, other = named([Family(starts=(build("1f1b", 4, 8), build("gpipe", 4, 8)), setting=setting)])
        >>> first.name, first.step_s, other.name, other.kept
        ('1f1b', 33.0, 'gpipe', None)
    """
    with collector_paused():
        works = [Work(family) for family in families]
        found = chosen(works, all_kept=all_kept, told=told)
        if found[0].kept is not None:
            verify(found[0].kept.plan)
        return found


@dataclass(slots=True)
class _Candidate:
    """A named schedule, and what is known of it so far."""

    family: int
    work: Work
    order: Plan
    order_s: float
    judge: Work  # the same family with few microbatches, or `work` itself
    judged: Plan  # the order there
    judged_order_s: float
    kept: Kept | None = None  # there
    estimate_s: float = inf  # of all microbatches, by what is kept there

    @property
    def likely_s(self) -> float:
        """The estimate, and more where it must move or recompute, which takes more of all microbatches than of few."""
        return self.estimate_s * (1 if self.kept is None or self.kept.way is None else 1 + NEAR)

    def keep(self, kept: Kept | None) -> None:
        self.kept, self.estimate_s = kept, inf
        if kept is not None:
            self.estimate_s = self.order_s * (kept.step_s / self.judged_order_s if self.judged_order_s else 1.0)


def chosen(works: Sequence[Work], *, all_kept: bool = False, told: Callable[[float], None] = lambda _: None) -> list[Found]:
    """Do what `named` does for families whose work is known, without proof."""
    candidates = [one for index, work in enumerate(works) for one in _candidates(index, work)]
    candidates.sort(key=lambda one: one.order_s)
    if all_kept:
        for one in candidates:
            one.keep(one.judge.kept(one.judged))
    else:
        _judge(candidates)
    told(0.5)
    candidates.sort(key=lambda one: (one.likely_s, one.order_s))
    found: list[Found] = []
    least_s = inf
    for number, one in enumerate(candidates):
        kept = one.kept if one.judge is one.work else None
        wanted_s = inf if all_kept else least_s
        if one.judge is not one.work and one.order_s < wanted_s * (1 - ROUNDING) and one.estimate_s <= wanted_s * (1 + NEAR):
            kept = one.work.kept(one.order, wanted_s, one.kept and one.kept.way)
        found.append(Found(one.order.name, False, one.family, one.order_s, kept))
        least_s = min(least_s, found[-1].step_s)
        told(0.5 + 0.5 * (number + 1) / len(candidates))
    return sorted(found, key=lambda one: (one.step_s, one.order_s))


def _candidates(index: int, work: Work) -> Iterator[_Candidate]:
    few = work.family.with_fewer(GROUPS)
    judge = work if few is None else Work(few)
    for order, lanes, judged, judged_lanes in zip(work.orders, work.starts, judge.orders, judge.starts):
        yield _Candidate(index, work, order, work.order_s(lanes), judge, judged, judge.order_s(judged_lanes))


def _judge(candidates: Sequence[_Candidate]) -> None:
    """Keep candidates within the budgets where they are judged, as far as they can be the fastest.

    First come those that keep the budgets as they are, because that takes little time, and what they reach rules others out.
    """
    least_s = inf
    for one in candidates:
        if one.order_s < least_s:
            one.keep(one.judge.kept_as_it_is(one.judged))
            least_s = min(least_s, one.estimate_s)
    for one in candidates:
        limit_s = least_s * (1 + NEAR * (one.judge is not one.work))
        if one.kept is None and one.order_s < limit_s * (1 - ROUNDING):
            one.keep(one.judge.kept_by_moving(one.judged, limit_s * (one.judged_order_s / one.order_s if one.order_s else 1.0)))
            least_s = min(least_s, one.estimate_s)
