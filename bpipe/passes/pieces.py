"""Cut forwards and backwards into pieces, so that memory is allocated and freed inside them."""

from __future__ import annotations

from dataclasses import replace

from bpipe.errors import PlanError
from bpipe.plan.action import Action, Op
from bpipe.plan.plan import Plan

__all__: list[str] = []


def in_pieces(plan: Plan) -> Plan:
    """Cut forwards and backwards into pieces, one for each part that a plan's sizes give a microbatch.

    Then memory is allocated and freed inside them, and evictions start and end there: `0F3.1`, `0F3.2` ... save one part
    each, `0B3.2`, `0B3.1` need one part each. I and W stay whole.
    """
    if plan.sizes is None:
        raise PlanError(f"plan {plan.name!r} has no sizes: give it sizes, which define the parts of a microbatch")
    if plan.overlapped:
        raise PlanError(f"plan {plan.name!r} runs forwards and backwards side by side, which are whole: leave out one of both")
    plan.sizes.check(plan.num_stages, plan.num_ranks, plan.slices)
    return replace(plan, actions=tuple(tuple(piece for a in lane for piece in _pieces(plan, a)) for lane in plan.actions))


def _pieces(plan: Plan, action: Action) -> list[Action]:
    parts = range(1, plan.num_parts(action.stage) + 1) if action.op in (Op.F, Op.B) else (0,)
    return [action._replace(part=part) for part in (reversed(parts) if action.op is Op.B else parts)]
