"""Shapes together: every pair and many triples are planned, proven, simulated and replayed, or refused, and it is said why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from random import Random

import pytest

from bpipe.errors import BudgetError
from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped
from bpipe.passes.balance.balance import balance
from bpipe.passes.recompute import recompute
from bpipe.schedules import Costs, Plan, build, finish, overlap, simulate, verify
from bpipe.schedules.any_flow import computations_for
from tests.schedules.mutations import ORDERING, STRUCTURAL, damaged, refused
from tests.schedules.replay import occupied, replay

TRIPLES, MUTANTS = 300, 100  # of each pair


def directions(flow: Flow, random: Random) -> Flow:
    depth, ranks = len(flow.routes), flow.stage_ranks
    both = tuple(range(depth)), tuple(range(depth, 2 * depth))
    return shaped(flow, "alternatives", (*ranks, *(max(ranks) - rank for rank in ranks)), both, True)


def paths(flow: Flow, random: Random) -> Flow:
    depth = len(flow.routes)
    dealt = tuple(tuple(part + depth * random.randrange(2) for part in range(depth)) for _ in range(flow.num_microbatches))
    return shaped(flow, "alternatives", tuple(range(2 * depth)), dealt, False)


def slices(flow: Flow, random: Random) -> Flow:
    return shaped(flow, "slices", random.randint(2, 3))


def skips(flow: Flow, random: Random) -> Flow:
    every = [parts for size in (2, 3) for parts in combinations(range(len(flow.routes)), size)]
    return shaped(flow, "skips", tuple(sorted(random.sample(every, min(len(every), random.randint(1, 2))))))


def local(flow: Flow, random: Random) -> Flow:
    return shaped(flow, "local")


def pairs(plan: Plan) -> Plan:
    return overlap(plan)


def recomputation(plan: Plan) -> Plan:
    """Of one microbatch less than there would be, on each rank where that is possible."""
    whole = finish(plan)
    with suppress(BudgetError):
        return recompute(whole, slots=[max(1, peak - 1) for peak in whole.peak_slots])
    return plan


def eviction(plan: Plan) -> Plan:
    """Of one microbatch more than the rank needs itself, if some rank has room for it."""
    for less in (2, 1):
        with suppress(BudgetError):
            return balance(plan, slots=[max(1, peak - less) for peak in finish(plan).peak_slots])
    return plan


SHAPES: dict[str, Callable[[Flow, Random], Flow]] = {
    one.__name__: one for one in (directions, paths, slices, skips, local)
}
PASSES: dict[str, Callable[[Plan], Plan]] = {one.__name__: one for one in (pairs, recomputation, eviction)}
ALL = [*SHAPES, *PASSES]
# What is refused, and what is said of it. A pass that follows another one begins with the computations again.
REFUSED = {("directions", "paths"): "alternatives already"}


def planned(names: tuple[str, ...], random: Random) -> Plan:
    """A plan of these shapes, in the order of names."""
    flow = shaped(None, "chain", tuple(range(random.randint(2, 4))), random.randint(2, 6))
    for name in names:
        flow = SHAPES[name](flow, random) if name in SHAPES else flow
    plan = computations_for(flow)
    for name in names:
        plan = PASSES[name](plan) if name in PASSES else plan
    return finish(plan)


def check(plan: Plan) -> None:
    assert replay(plan) is None
    assert occupied(plan) == plan.peak_slots
    assert Plan.from_text(plan.to_text()) == plan
    assert simulate(plan, Costs()).makespan_s > 0 and str(plan)


def reason_of(names: tuple[str, ...]) -> str | None:
    return next((reason for pair, reason in REFUSED.items() if {*pair} <= {*names}), None)


@pytest.mark.parametrize("names", list(combinations(ALL, 2)), ids="-".join)
def test_all_pairs(names: tuple[str, ...]) -> None:
    random = Random("-".join(names))
    for _ in range(3):
        if reason := reason_of(names):
            with pytest.raises(ValueError, match=reason):
                planned(names, random)
        else:
            check(planned(names, random))


@pytest.mark.parametrize("part", range(20))
def test_many_triples(part: int) -> None:
    triples = [names for names in combinations(ALL, 3) if reason_of(names) is None]
    random = Random(part)
    for _ in range(TRIPLES // 20):
        check(planned(random.choice(triples), random))


@pytest.mark.parametrize("names", [names for names in combinations(ALL, 2) if reason_of(names) is None], ids="-".join)
def test_harmful_mutations_of_pairs_are_refused(names: tuple[str, ...]) -> None:
    random = Random(f"mutations of {names}")
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(MUTANTS // 10):
        plan = planned(names, random)
        for _ in range(10):
            mutant = damaged(plan, random.choices((*ORDERING * 3, *STRUCTURAL), k=random.randint(1, 2)), random)
            verdicts[replay(mutant) is not None, refused(mutant)] += 1
    assert not verdicts[True, False] and verdicts[True, True] > MUTANTS // 3


def test_the_order_for_any_flow_is_1f1b_on_a_chain() -> None:
    for p, m in ((1, 3), (2, 1), (3, 8), (5, 4), (8, 16)):
        plan = computations_for(shaped(None, "chain", tuple(range(p)), m))
        assert [plan.compute(rank) for rank in range(p)] == [build("1f1b", p, m).compute(rank) for rank in range(p)]
        verify(finish(plan))


@pytest.mark.parametrize(("name", "num_stages"), [("seq_1f1b", 4), ("chimera", 8), ("interleaved_1f1b", 8), ("zbv", 8)])
def test_the_order_for_any_flow_beside_the_rules(name: str, num_stages: int) -> None:
    """At most half as long again, with twice the memory: a beginning, where no rule knows better."""
    rule = build(name, num_stages, 8, slices=3 if name == "seq_1f1b" else 1)
    plan = finish(computations_for(rule.flow))
    spans = [simulate(one, Costs()).makespan_s for one in (plan, rule)]
    assert spans[0] <= 1.5 * spans[1] and max(plan.peak_slots) <= 2 * max(rule.peak_slots)
    assert replay(plan) is None


def test_an_order_for_any_flow_ends_where_the_limits_are_too_low() -> None:
    """Slices of stages on one rank: all forwards of a microbatch are open before its first backward can run."""
    plan = finish(computations_for(shaped(shaped(None, "chain", (0,) * 6, 3), "slices", 6)))
    assert replay(plan) is None and plan.peak_slots == (6 * 6,)
    assert simulate(plan, Costs()).makespan_s == 3 * 6 * 6 * 3
