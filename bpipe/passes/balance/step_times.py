"""The begin times of a rank's steps, and the durations of transfers: from a cost model, or step by step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bpipe.passes.balance.rank_steps import RankSteps
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulated_times

__all__: list[str] = []


class StepTimes(NamedTuple):
    """The times of one rank."""

    begins: Sequence[float]  # when each step begins, and the last one ends, in any unit
    duration: Callable[[int, int], float]  # how long a transfer with a peer takes, by the peer and the number of bytes
    is_simulated: bool  # whether these come from a cost model. If not, a transfer may take one step, and all peers share one link.
    hides: bool = True  # whether a transfer that fits is known to be hidden behind computations

    def step_at(self, time: float) -> int:
        """Return the last step that begins by `time`."""
        rounding = 1e-9 * self.begins[-1] if self.is_simulated else 0
        return bisect_right(self.begins, time + rounding) - 1


def uniform(num_steps: int, largest: int, *, hides: bool) -> StepTimes:
    """Return the times of steps that each last as long as it takes to move the largest microbatch."""
    return StepTimes([step * largest for step in range(num_steps + 1)], lambda peer, num_bytes: num_bytes, False, hides)


def simulated(finished: Plan, ranks: Sequence[RankSteps], costs: Costs) -> Iterator[StepTimes]:
    """Yield the times of each rank of a plan without evictions, but with messages, simulated."""
    timeline = simulated_times(finished, costs)
    for rank, steps in enumerate(ranks):
        spans = iter(timeline.computations(rank))
        begins: list[float] = []
        end = 0.0
        for actions in steps.steps:
            own = [next(spans) for _ in actions]
            begins.append(own[0].begin_s if own else end)
            end = own[-1].end_s if own else end
        yield StepTimes([*begins, end], _duration(costs, rank), True)


def _duration(costs: Costs, rank: int) -> Callable[[int, int], float]:
    def duration(peer: int, num_bytes: int) -> float:
        link = costs.link_between(rank, peer)
        return link.latency_s + num_bytes / link.bytes_per_s

    return duration
