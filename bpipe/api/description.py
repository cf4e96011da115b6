"""What schedules print of themselves: their plan, this rank's stages, and where they are in their life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpipe.plan.amounts import show_each
from bpipe.plan.grid import counts, plan_title
from bpipe.plan.plan import Plan

if TYPE_CHECKING:
    from bpipe.session.guard import Guard
    from bpipe.session.session import Session

__all__: list[str] = []


def described(schedule: object, budget: str = "") -> str:
    """Return a line on a schedule, also of one that is closed, broken, or whose constructor has failed.

    Args:
        schedule: a `Schedule` of any class.
        budget: that it was given, in words; default: that of its plan.
    """
    kind, source = type(schedule).__name__, vars(schedule).get("_source")
    if source is None:
        return f"{kind}(not constructed)"
    limits, session = budget or budget_of(source.plan), vars(schedule).get("_session")
    parts = [f"{plan_title(source.plan)}: {counts(source.plan)}", *([limits] if limits else []), *_of_session(session)]
    return f"{kind}({', '.join(parts)})"


def budget_of(plan: Plan) -> str:
    """Return the budget of a plan in words; nothing if it has none."""
    if plan.budgets is not None:
        return f"budget {show_each(plan.budgets)}"
    slots = ["-" if k is None else str(k) for k in plan.slots]
    each = slots[0] if len(set(slots)) == 1 else " ".join(slots)
    return "" if each == "-" else f"budget {each} {'slices' if plan.units.are_slices else 'slots'}"


def _of_session(session: Session | None) -> list[str]:
    if session is None:
        return ["given to another schedule"]
    context = session.context
    stages = sorted(context.stages)
    held = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {context.transport.device}"
    return [held, *(["a dry run"] if session.is_dry else []), state_of(session.guard)]


def state_of(guard: Guard, unit: str = "step") -> str:
    """Return how many steps a pipeline has run, or that it is closed or broken, and by what."""
    if guard.broken is not None:
        error = guard.broken
        return f"broken: {error.partition(':')[0] if isinstance(error, str) else type(error).__name__}"
    if guard.is_closed:
        return "closed"
    steps = guard.num_steps
    return f"{steps} {unit}{'s' * (steps > 1)}" if steps else "not run yet"
