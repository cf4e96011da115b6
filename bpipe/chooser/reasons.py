"""Why one plan takes longer than another: where its slowest rank spends the difference."""

from __future__ import annotations

from typing import NamedTuple

from bpipe.passes.fit import Budgets
from bpipe.plan.action import Op
from bpipe.plan.amounts import show_bytes
from bpipe.plan.plan import Plan
from bpipe.search.job_shop import JobShop
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulate

__all__: list[str] = []

NOTICED = 0.003  # share of a step, below which a difference is not mentioned


class Spent(NamedTuple):
    """What the rank that computes most spends its step on, in seconds."""

    computing: float
    recomputing: float
    moving: float  # that it waits for evictions and loads
    waiting: float  # for other ranks

    @classmethod
    def of_plan(cls, plan: Plan, costs: Costs) -> Spent:
        """Simulate a plan."""
        timeline = simulate(plan, costs)
        rank = max(range(plan.num_ranks), key=timeline.work_s)
        again = sum(span.seconds for span in timeline.computations(rank) if span.action.op is Op.R)
        exposed, work = timeline.exposed_s(rank), timeline.work_s(rank)
        moving = exposed.get(Op.WAIT_EVICT, 0.0) + exposed.get(Op.WAIT_LOAD, 0.0)
        return cls(work - again, again, moving, max(0.0, timeline.makespan_s - work - moving))

    @classmethod
    def of_order(cls, order: Plan, costs: Costs) -> Spent:
        """Run an order of computations, as if memory were no matter."""
        shop = JobShop(order, costs)
        times = shop.run(shop.lanes)
        assert times is not None, "the order of a schedule ends"
        work = max(sum(shop.seconds[number] for number in lane) for lane in shop.lanes)
        return cls(work, 0.0, 0.0, times.step_s - work)

    def why_slower(self, than: Spent) -> str:
        """Say what it spends more time on, and what less, as shares of the other's step."""
        total = sum(than) or 1.0
        shares = sorted(((one - other) / total, what) for one, other, what in zip(self, than, WHAT))
        more = [f"{100 * share:.1f}% more {what}" for share, what in reversed(shares) if share >= NOTICED]
        less = [f"{-100 * share:.1f}% less {what}" for share, what in shares if share <= -NOTICED]
        return ", ".join(more + less) or "as fast"


WHAT = ("computing", "recomputing", "waiting for evictions and loads", "waiting for other ranks")


def too_full(plan: Plan, budgets: Budgets) -> str:
    """Say which rank exceeds its budget most if nothing is done about it."""
    over = [(peak - budget, rank) for rank, (peak, budget) in enumerate(zip(plan.device_peak_bytes, budgets)) if budget is not None]
    _, rank = max(over)
    return f"rank {rank} needs {show_bytes(plan.device_peak_bytes[rank])} of {show_bytes(budgets[rank] or 0)}"
