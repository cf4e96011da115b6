"""Plans for sizes and times that a step measures, one microbatch after the other, because nothing is known of either before it."""

from __future__ import annotations

from typing import Any

from bpipe.api.loopback import LoopbackGroup
from bpipe.api.measured_plans import MeasuredPlans
from bpipe.chooser.order_watch import OrderWatch
from bpipe.chooser.shared_state import why_in_order
from bpipe.comm.wire.codec import decode_text
from bpipe.engine.run import Observer
from bpipe.parallel.shared_weights import Shared
from bpipe.passes.profiling_order import profiling_order
from bpipe.plan.action import COMPUTE
from bpipe.plan.plan import Plan
from bpipe.schedules import finish
from bpipe.session.filler import both
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import PreparedCall

__all__: list[str] = []


class ProfiledPlans(MeasuredPlans):
    """Plans from a step that runs one microbatch at a time, if that gives the same results as any order, on all ranks."""

    predicts = False  # a step has to show times, too

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._profiling_plan = finish(profiling_order(self._base))

    def share(self, shared: Shared) -> bool:
        is_news = super().share(shared)
        if is_news:
            self._profiling_plan = finish(profiling_order(self._base))
        return is_news

    def _plan_to_measure(self, gather: Gather) -> Plan:
        reasons = ["as requested"] if self._policy.measure == "in_order" else []
        reasons = reasons or [*filter(None, map(decode_text, gather(lambda source: _profiled(source)._needs_order().encode())))]
        if len(self._shapes) > 1 or reasons:
            how = f"in the schedule's own order ({reasons[0]})" if reasons else "one microbatch at a time"
            self._say(f"new shapes or sizes: this step runs {how} and measures them")
        return super()._plan_to_measure(gather) if reasons else self._profiling_plan

    def _needs_order(self) -> str:
        """Return why this rank cannot measure one microbatch at a time; empty if it knows no reason."""
        return why_in_order(self._context.stages, self._context.loss_fn, shares_random=self._shares_random())

    def _shares_random(self) -> bool:
        """Return whether this rank's forwards and those of another stage draw from the same random numbers."""
        group = self._context.group
        with_ranks = isinstance(group, LoopbackGroup) and not group.loopback.own_random_state
        return self.plan.num_stages > 1 if with_ranks else len(self._context.stages) > 1

    def observer_of(self, inputs: PreparedCall, plan: Plan, observer: Observer | None) -> Observer | None:
        rank, shares_random = self._context.plan_rank, self._shares_random()
        if plan is not self._profiling_plan or (not shares_random and _computed(plan, rank) == _computed(self._base, rank)):
            return observer
        device = self._context.transport.device
        return both(OrderWatch(self._context.stages, inputs.given, device, shares_random=shares_random), observer)


def _profiled(source: PlanSource) -> ProfiledPlans:
    assert isinstance(source, ProfiledPlans), "ranks whose records agree have plans from the same kind of source"
    return source


def _computed(plan: Plan, rank: int) -> list[tuple[object, ...]]:
    """Return the computations of a rank, in order."""
    return [action.op_key for action in plan.actions[rank] if action.op in COMPUTE]
