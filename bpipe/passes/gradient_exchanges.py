"""The pass that lets stages with weights in common add up their gradients, in a plan that was made before that was known."""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Flow
from bpipe.flow.shape_arguments import Holders
from bpipe.flow.shaping import shaped, without
from bpipe.passes.communicate import with_exchanges
from bpipe.plan.action import Action, Op
from bpipe.plan.plan import Plan

__all__: list[str] = []


def with_sums(plan: Plan, holders: tuple[Holders, ...]) -> Plan:
    """Return a plan whose stages add up the gradients of the weights that they have in common, and of no others.

    Args:
        plan: with the transfers between stages.
        holders: the stages of each weight, as `bpipe.flow.shapes.sums` takes them.

    Raises:
        ValueError: its stages cannot add up gradients.
    """
    lanes = tuple(tuple(action for action in lane if not _is_of_sums(action)) for lane in plan.actions)
    made = replace(plan, flow=summing(plan.flow, holders), actions=lanes)
    return with_exchanges(made) if made.flow.exchanges and holders else made


def summing(flow: Flow, holders: tuple[Holders, ...]) -> Flow:
    """Return a flow whose stages add up the gradients of the weights that they have in common, and of no others."""
    known = without(flow, "sums") if flow.arguments("sums") else flow
    return shaped(known, "sums", holders) if holders else known


def _is_of_sums(action: Action) -> bool:
    return action.op in (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD) and bool(action.part)
