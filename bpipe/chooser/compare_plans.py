"""Choose the fastest plan for a question: of the named schedules, each kept within the memory, and of orders made to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose

from bpipe.api.options import Options
from bpipe.chooser.plan_choice import Alternative, Choice
from bpipe.chooser.question import Question
from bpipe.chooser.reasons import Spent, too_full
from bpipe.chooser.ways import Way, ways_of
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.evict_or_recompute import PlanInBudget, kept_as_it_is, kept_within
from bpipe.plan.action import COMPUTE
from bpipe.search.bounds import lower_bound_s
from bpipe.search.fastest import MADE, searched
from bpipe.search.job_shop import JobShop
from bpipe.search.named import named
from bpipe.search.work import Family
from bpipe.verifier.proof import verify

__all__: list[str] = []

MOST_FAMILIES = 3  # of named schedules from which orders are made to measure: the fastest
NAMED_SHARE = 0.3  # of the progress that is told
MOST_SHOWN = 3  # ways of a kind that are looked at again, if none of them can be the fastest, to show the best of the kind
# By what share of a step a plan must be faster that trusts in more: transfers beside computations, or an order nobody has seen.
MOVING, STRANGE = 0.01, 0.001

Told = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class Tried:
    """A way that was compared."""

    way: Way
    order_s: float  # of its order if memory were no matter; a bound if nothing was simulated
    kept: PlanInBudget | None
    is_made: bool = False

    @property
    def step_s(self) -> float:
        return inf if self.kept is None else self.kept.step_s

    @property
    def price(self) -> float:
        """What ways are compared by: the step, and a little more if it trusts in more."""
        moves = self.kept is not None and self.kept.evicts
        return self.step_s * (1 + MOVING * moves + STRANGE * self.is_made)

    @property
    def spent(self) -> Spent:
        """What the plan spends its step on; its order, if no plan is known."""
        if self.kept is None or (not self.is_made and isclose(self.kept.step_s, sum(self.way.spent), rel_tol=1e-6)):
            return self.way.spent
        return Spent.of_plan(self.kept.plan, self.way.setting.costs)

    @property
    def how(self) -> str:
        """What keeps it within the budget."""
        if self.kept is None:
            return ""
        hosts = self.kept.evicts and any(self.kept.plan.host_chain(rank) for rank in range(self.kept.plan.num_ranks))
        does = [("offload to the host" if hosts else "offload to other ranks", self.kept.evicts)]
        does.append(("recomputation", self.kept.recomputes))
        return " and ".join(what for what, is_done in does if is_done)

    @property
    def schedule(self) -> str:
        return f"an order made to measure from {self.way.rule.name}" if self.is_made else self.way.rule.name

    @property
    def kind(self) -> str:
        return f"{self.schedule} {self.how}".strip()

    @property
    def name(self) -> str:
        layout, slices = self.way.layout, self.way.rule.slices
        load = layout.load
        parts = [
            f"{len(layout.stage_ranks)} stages" if len(layout.stage_ranks) > layout.num_ranks else "",
            f"{slices} slices" if slices > 1 else "",
            f"microbatch {load.microbatch_size}" if load.microbatch_size else "",
            f"recomputation {load.recomputation}" if load.recomputation else "",
            f"with {self.how}" if self.how else "",
        ]
        return ", ".join([self.schedule, *(part for part in parts if part)])


def choose(
    question: Question,
    *,
    effort: int = Options.effort,
    seed: int = Options.seed,
    progress: Callable[[int, int], None] | None = None,
) -> Choice:
    """Return the fastest plan that is found; `progress(done, total)` is told how far the search is.

    Raises:
        ConfigurationError: no schedule takes these numbers of layers, ranks and microbatches.
        BudgetError: nothing that was found keeps the budgets; the message names what comes closest.
    """
    told: Told = (lambda done: None) if progress is None else (lambda done: progress(round(1000 * done), 1000))
    tried = compared(question, lambda done: told(NAMED_SHARE * done))
    if effort:
        tried += _made(tried, effort, seed, lambda done: told(NAMED_SHARE + (1 - NAMED_SHARE) * done))
    tried += _kept_otherwise(min(tried, key=_rank))
    tried.sort(key=_rank)
    told(1.0)
    if tried[0].kept is None:
        raise BudgetError(_nothing_fits(tried))
    return _choice(tried)


def _rank(one: Tried) -> tuple[float, float, float]:
    """Return what ways are sorted by: of equally fast ones, the one that needs less memory comes first."""
    fullest = max(one.kept.plan.device_peak_bytes) if one.kept is not None else inf
    return float(f"{one.price:.9g}"), fullest, one.order_s


def compared(question: Question, told: Told) -> list[Tried]:
    """Return all ways with named schedules; what cannot be the fastest is not looked at closely.

    First the plans are found that fit as they are: only an order that is faster than these is worth offloading or recomputing.

    Raises:
        ConfigurationError: there is none.
    """
    ways = sorted(ways_of(question), key=lambda way: way.least_s)
    if not ways:
        raise ConfigurationError(
            f"no schedule runs this on {question.num_ranks} ranks: give as many layers as ranks at least, more microbatch sizes, "
            "or more schedules"
        )
    tried: list[Tried] = []
    least, seen = inf, set()
    for done, way in enumerate(ways):
        told(done / len(ways) / 2)
        if way.least_s >= least * (1 + MOVING):
            tried.append(Tried(way, way.least_s, None))
        elif (key := (way.layout, way.order.actions)) not in seen:
            seen.add(key)
            order_s = sum(way.spent)
            tried.append(Tried(way, order_s, kept_as_it_is(way.order, way.setting) if order_s < least * (1 + MOVING) else None))
            least = min(least, tried[-1].price)
    pending = [one for one in tried if one.kept is None and one.order_s < least]
    if pending:
        still = sorted((one for one in tried if one.kept is not None), key=lambda one: one.price)[:1]  # rules others out
        families = [Family(starts=(one.way.order,), setting=one.way.setting) for one in [*pending, *still]]
        kept = {one.family: one.kept for one in named(families, told=lambda done: told((1 + done) / 2))}
        moved = [replace(one, kept=kept[number]) for number, one in enumerate(pending)]
        tried = [one for one in tried if one not in pending] + moved
    return tried


def _made(tried: Sequence[Tried], effort: int, seed: int, told: Told) -> Iterable[Tried]:
    """Yield the best order made to measure from the families of the fastest named schedules, and the best that evicts nothing."""
    families: dict[object, list[Tried]] = {}
    for one in sorted(tried, key=lambda one: (min(one.step_s, 1.5 * one.order_s), one.order_s)):
        plan = one.way.order
        computed = tuple(frozenset(action.op_key for action in lane if action.op in COMPUTE) for lane in plan.actions)
        key = (one.way.layout, computed)
        if key in families or len(families) < MOST_FAMILIES:
            families.setdefault(key, []).append(one)
    groups = list(families.values())
    given = [Family(starts=tuple(one.way.order for one in group), setting=group[0].way.setting) for group in groups]
    made = [one for one in searched(given, effort=effort, seed=seed, told=told) if one.is_made and one.kept is not None]
    still = [one for one in made if one.kept is not None and not one.kept.evicts]
    for found in dict.fromkeys([*made[:1], *still[:1]]):
        yield Tried(groups[found.family][0].way, found.order_s, found.kept, is_made=True)


def _choice(tried: Sequence[Tried]) -> Choice:
    best = tried[0]
    assert best.kept is not None, "the best keeps the budgets"
    way = best.way
    plan = replace(best.kept.plan, name=MADE if best.is_made else best.kept.plan.name)
    verify(plan)
    shop = JobShop(way.order, way.setting.costs)
    return Choice(
        plan=plan,
        stages=way.layout.names,
        microbatch_size=way.layout.load.microbatch_size,
        recomputation=way.layout.load.recomputation,
        name=best.name,
        step_s=best.kept.step_s,
        bound_s=min(best.kept.step_s, lower_bound_s(shop, (None,) * plan.num_ranks)),
        device_peak_bytes=plan.device_peak_bytes,
        budgets=way.setting.budgets,
        others=tuple(_alternatives(tried)),
        assumptions=(),
        to_measure=(),
        num_considered=len(tried),
    )


def _alternatives(tried: Sequence[Tried]) -> Iterable[Alternative]:
    """Yield the best of each other kind than the first: of each schedule, and of each way to keep the budget."""
    best, *others = tried
    assert best.kept is not None, "the best keeps the budgets"
    spent = best.spent
    kinds: dict[str, list[Tried]] = {}
    for one in others:
        kinds.setdefault(one.kind, []).append(one)
    kinds.pop(best.kind, None)
    found = []
    for kind, some in kinds.items():
        first = min(some, key=lambda one: one.price)
        if first.kept is None:  # some were not looked at closely
            likely = sorted(some, key=lambda one: one.order_s)[:MOST_SHOWN]
            first = min((replace(one, order_s=sum(one.way.spent)) for one in likely), key=lambda one: one.order_s)
        step_s = None if first.kept is None else first.kept.step_s
        reason = _reason(first, best, spent)
        found.append(Alternative(name=first.name, kind=kind, step_s=step_s, least_s=step_s or first.order_s, reason=reason))
    return sorted(found, key=lambda one: (one.step_s is None, one.least_s))


def _kept_otherwise(best: Tried) -> Iterable[Tried]:
    """Yield what only evicts, or only recomputes, where the best does the one or the other."""
    if best.kept is None:
        return
    setting, does = best.way.setting, (best.kept.evicts, best.kept.recomputes)
    for evicts, recomputes in ((True, False), (False, True)):
        if any(does) and does != (evicts, recomputes) and not best.is_made:
            allowed = replace(setting, evicts=evicts and setting.evicts, recomputes=recomputes and setting.recomputes)
            if (kept := kept_within(best.way.order, allowed)) is not None:
                yield Tried(best.way, best.order_s, kept)


def _reason(one: Tried, best: Tried, spent: Spent) -> str:
    if one.kept is not None:
        why = one.spent.why_slower(spent)
        assumes_more = one.step_s <= best.step_s and one.price > one.step_s
        return f"{why}: not clearly faster, and its prediction assumes more" if assumes_more else why
    if one.order_s < best.price and not one.way.setting.fits(one.way.plain):
        return f"{too_full(one.way.plain, one.way.setting.budgets)}, and no plan found that keeps it below is faster"
    return f"{one.spent.why_slower(spent)}, even if memory were no matter"


def _nothing_fits(tried: Sequence[Tried]) -> str:
    def excess(one: Tried) -> int:
        peaks = zip(one.way.plain.device_peak_bytes, one.way.setting.budgets)
        return max(peak - (peak if budget is None else budget) for peak, budget in peaks)

    nearest = min(tried, key=excess)
    able = nearest.way.setting
    also = ", or options=Options(host=True)" * (able.evicts and able.to.host == "no")
    inside = ", recomputation inside layers" * (not nearest.way.layout.load.recomputation)
    return (
        f"no plan was found that keeps the budgets, of {len(tried)} ways; the nearest is {nearest.name}, where "
        f"{too_full(nearest.way.plain, able.budgets)} if nothing is offloaded or recomputed. Give more "
        f"memory, more ranks, smaller microbatches{inside}{also}"
    )
