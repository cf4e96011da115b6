"""One microbatch after the other through all stages, to measure a step without needing more memory than one microbatch.

p = 3 stages, m = 2 microbatches, a column a forward's time; a backward takes two:

rank 0 | F0 .. .. .. .. .. .. B0 b0 F1 .. .. .. .. .. .. B1 b1
rank 1 | .. F0 .. .. .. B0 b0 .. .. .. F1 .. .. .. B1 b1 .. ..
rank 2 | .. .. F0 B0 b0 .. .. .. .. .. .. F1 B1 b1 .. .. .. ..

A stage whose plan splits its backwards splits them here too, with W right after I.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.plan.action import SHARDING, Action, Op
from bpipe.plan.plan import Plan

__all__: list[str] = []

HALVES = (Op.I, Op.W)


def profiling_order(plan: Plan) -> Plan:
    """Return a plan that runs the stages of another plan, on the same ranks, one microbatch after the other.

    Each stage takes its microbatches in the same order, so gradients add up to the same bits, as long as the stage depends
    neither on the other stages of its rank nor on whether a backward comes before the next forward (`auto` watches that).
    If the plan gathers weights, they are gathered for each computation, and gradients are reduced once.
    """
    is_sharded = any(action.op in SHARDING and action.peer is None for lane in plan.actions for action in lane)
    halved = {action.stage for lane in plan.actions for action in lane if action.op is Op.I}
    lanes = []
    for rank in range(plan.num_ranks):
        stages = plan.stages_of(rank)
        backwards = [(op, s) for s in reversed(stages) for op in (HALVES if s in halved else (Op.B,))]
        lane: list[Action] = []
        for microbatch in range(plan.num_microbatches):
            units = plan.units.of(microbatch)
            actions = [Action(Op.F, stage, unit) for unit in units for stage in stages if plan.passes(stage, unit)]
            actions += [Action(op, stage, unit) for unit in reversed(units) for op, stage in backwards if plan.passes(stage, unit)]
            lane += [a for action in actions for a in (_gathered(action) if is_sharded else (action,))]
        lanes.append((*lane, *(Action(Op.REDUCE_GRAD, s, 0) for s in stages if is_sharded)))
    return replace(
        plan,
        name=f"{plan.name}/one_at_a_time",
        actions=tuple(lanes),
        served=((),) * plan.num_ranks,
        slots=(None,) * plan.num_ranks,
        sizes=None,
        budgets=None,
        overlapped=frozenset(),
    )


def _gathered(action: Action) -> tuple[Action, ...]:
    return Action(Op.UNSHARD, action.stage, 0), action, Action(Op.RESHARD, action.stage, 0)
