"""Random plans to test with: any rule, budget and pairing; several stages on a rank; backwards split into halves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress

from hypothesis import assume
from hypothesis import strategies as st

from bpipe.errors import BudgetError
from bpipe.flow.shaping import shaped
from bpipe.passes.balance.balance import balance
from bpipe.plan.destinations import Destinations
from bpipe.plan.order import clock
from bpipe.schedules import Action, Op, Plan, build, finish, gpipe, one_f_one_b

ORDERS = {"gpipe": gpipe.order, "1f1b": one_f_one_b.order}


def computations(lanes: Sequence[Sequence[Action]], stage_ranks: Sequence[int], name: str = "test") -> Plan:
    """A plan of computations alone from a list a stage: stages on one rank take turns in the order of their times."""
    num_microbatches = 1 + max(action.microbatch for lane in lanes for action in lane)
    starts = clock(lanes, shaped(None, "chain", tuple(range(len(lanes))), num_microbatches))[0]
    merged: list[list[tuple[int, int, Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, (lane, times) in enumerate(zip(lanes, starts)):
        merged[stage_ranks[stage]] += [(time, stage, action) for action, time in zip(lane, times)]
    return Plan(
        name=name,
        flow=shaped(None, "chain", tuple(stage_ranks), num_microbatches),
        actions=tuple(tuple(action for *_, action in sorted(lane, key=lambda item: item[:2])) for lane in merged),
        served=((),) * len(merged),
        slots=(None,) * len(merged),
    )


def split(lane: Sequence[Action], whole: frozenset[int], deferred: int) -> list[Action]:
    """Cut a stage's backwards into halves, `whole` ones excepted: each weight half runs `deferred` backwards later."""
    result: list[Action] = []
    weights: deque[Action] = deque()
    for action in lane:
        cut = action.op is Op.B and action.microbatch not in whole
        while weights and action.op is Op.B and not cut:
            result.append(weights.popleft())
        result.append(action._replace(op=Op.I) if cut else action)
        weights += [action._replace(op=Op.W)] * cut
        while len(weights) > deferred:
            result.append(weights.popleft())
    return [*result, *weights]


@st.composite
def placements(draw: st.DrawFn, num_stages: int) -> tuple[int, ...]:
    """One stage a rank, stages in a loop over the ranks, in a V, in blocks, or anywhere."""
    ranks = draw(st.integers(1, num_stages))
    return draw(
        st.sampled_from(
            [
                tuple(range(num_stages)),
                tuple(range(num_stages)),
                tuple(stage % ranks for stage in range(num_stages)),
                tuple(min(stage % (2 * ranks), 2 * ranks - 1 - stage % (2 * ranks)) for stage in range(num_stages)),
                tuple(stage * ranks // num_stages for stage in range(num_stages)),
                (*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(num_stages - ranks))),
            ]
        )
    )


def channels_agree(plan: Plan) -> bool:
    """Whether neighbouring ranks make and use what crosses from one to the other in one order: channels are first in, first out."""
    made, used = defaultdict(list), defaultdict(list)
    for rank in range(plan.num_ranks):
        for op, stage, microbatch, *_ in plan.compute(rank):
            step = 1 if op is Op.F else -1
            if op is not Op.W:
                for queues, crossing, other in ((made, stage, stage + step), (used, stage - step, stage - step)):
                    if 0 <= other < plan.num_stages and plan.stage_ranks[other] != rank:
                        ends = (rank, plan.stage_ranks[other]) if queues is made else (plan.stage_ranks[other], rank)
                        queues[(step, *ends)].append((crossing, microbatch))
    return made == used


@st.composite
def orders(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 10) -> Plan:
    """Computations alone."""
    p, m = draw(st.sampled_from(range(1, max_stages + 1))), draw(st.sampled_from(range(1, max_microbatches + 1)))
    name = draw(st.sampled_from(sorted(ORDERS)))
    lanes = ORDERS[name](p, m)
    if draw(st.booleans()):
        whole = draw(st.frozensets(st.integers(0, m - 1)))
        lanes = [split(lane, whole, draw(st.integers(0, 2))) for lane in lanes]
    plan = computations(lanes, draw(placements(p)), name)
    assume(channels_agree(plan))
    return plan


@st.composite
def plans(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 10) -> Plan:
    """Finished plans, about a fifth of them with evictions."""
    plan = draw(orders(max_stages, max_microbatches))
    peaks = plan.peak_slots
    ranks = range(plan.num_ranks)
    evictors = draw(st.frozensets(st.sampled_from([rank for rank in ranks if peaks[rank] >= 3] or ranks), min_size=1))
    room = draw(st.sampled_from([None, *range(5)]))
    pairs = draw(st.none() | st.tuples(*(st.sampled_from([r for r in ranks if r != rank] or [0]) for rank in ranks)))
    rule = draw(st.sampled_from(["fewest", "fewest", "eager"]))
    for less, more in ((draw(st.integers(1, 3)), room), (1, room), (1, None), (0, room)):
        budgets = [max(k - less, 1) if rank in evictors else None if more is None else k + more for rank, k in enumerate(peaks)]
        with suppress(BudgetError):
            return finish(balance(plan, slots=budgets, to=Destinations(pairs=pairs), rule=rule))
    assume(False)
    raise AssertionError


def gathering_plans() -> st.SearchStrategy[Plan]:
    """Finished plans that say when a stage's weights are gathered and given back."""
    sizes = st.tuples(st.integers(1, 3), st.integers(2, 3), st.integers(1, 4))
    return sizes.map(lambda pvm: build("breadth_first", pvm[0] * pvm[1], pvm[2], num_ranks=pvm[0]))
