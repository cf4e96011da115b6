"""The times of all actions of a plan, simulated or measured, in one form that is drawn, compared and written to files."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isnan
from operator import add
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.plan.action import COMPUTE, POSTS, START_OF, Action, Op
from bpipe.plan.amounts import show_bytes, show_seconds
from bpipe.plan.grid import counts, plan_title
from bpipe.plan.plan import Plan

__all__ = ["Holding", "Lane", "Span", "Timeline"]


class Span(NamedTuple):
    """An action and when it ran, in seconds since the step began.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0, saved_bytes=8))
        >>> span = next(timeline.computations(0))
        >>> str(span.action), span.seconds
        ('0F0', 1.0)
    """

    action: Action
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long the action took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The times of one lane of a rank, with one entry for each of its actions.

    For a computation: when it ran. For a transfer's start: from when to when the transfer was in flight, on the link if
    simulated, as far as this rank knows if measured. For a transfer's completion: when the lane waited for it. Both are nan for
    what a rank did not do for a remote activation because the evictor reaches its memory, until the evictor's times are known.

    The total bytes of a rank's device while an action runs are the sum of the four numbers of bytes; its activations are the sum
    of `activation_bytes` and `remote_buffer_bytes`. Served lanes have none: the buffers already count what they store.

    Args:
        begin_s: seconds since the step began, an `array("d")`.
        end_s: likewise.
        activation_bytes: the saved bytes of the rank's own microbatches while each action runs, an `array("q")`.
        message_bytes: messages between stages on top of those, likewise; zeros for a simulated plan that counts slots.
        static_bytes: the bytes that stay throughout: weights, gradients, buffers, optimizer states.
        remote_buffer_bytes: activations that are counted throughout: the buffers for remote activations, and bytes that
            microbatches share.
        filled_s: the begin and the end of each piece of a fill job, one after the other; some may lie behind the step's end.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0, saved_bytes=8))
        >>> lane = timeline.actions[0]
        >>> lane.begin_s[0], lane.end_s[0], lane.activation_bytes[0]
        (0.0, 1.0, 8)
    """

    begin_s: array[float]
    end_s: array[float]
    activation_bytes: array[int] = field(default_factory=lambda: array("q"))
    message_bytes: array[int] = field(default_factory=lambda: array("q"))
    static_bytes: int = 0
    remote_buffer_bytes: int = 0
    filled_s: array[float] = field(default_factory=lambda: array("d"))

    def __repr__(self) -> str:
        return f"Lane({len(self.begin_s)} actions, {show_bytes(self.static_bytes)} that stay)"

    @property
    def ends_s(self) -> tuple[float, float] | None:
        """When its first known action began and its last one ended; None if none is known."""
        begins, ends = ([s for s in times if not isnan(s)] for times in (self.begin_s, self.end_s))
        return (min(begins), max(ends)) if begins else None


class Holding(NamedTuple):
    """The bytes that a rank holds from some time on.

    Args:
        begin_s: seconds since the step began.
        activation_bytes: saved activations: of the rank's own microbatches and of remote activations in its buffers.
        device_bytes: the total of its device: these, static bytes, and messages between stages.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0, saved_bytes=8))
        >>> max(holding.activation_bytes for holding in timeline.memory(0))
        16
    """

    begin_s: float
    activation_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of one step of a plan.

    Args:
        plan: the plan that ran or will run.
        actions: a `Lane` for each rank's `plan.actions`.
        served: a `Lane` for each rank's `plan.served`.
        source: "simulated" or "measured".
        step: the step's number, if measured.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 4, 8), Costs(forward_s=1.0, backward_s=2.0))
        >>> timeline.makespan_s, timeline.bubble_s(0), timeline.work_s(0)
        (33.0, 9.0, 24.0)
    """

    plan: Plan
    actions: tuple[Lane, ...]
    served: tuple[Lane, ...]
    source: str = "simulated"
    step: int | None = None

    def __repr__(self) -> str:
        step = "" if self.step is None else f" in step {self.step}"
        is_whole = all(self.actions[rank].begin_s for rank in self.computing_ranks())
        seconds = show_seconds(self.makespan_s) if is_whole else f"with the times of ranks {self.ranks} only"
        return f"Timeline({plan_title(self.plan)}: {counts(self.plan)}, {self.source}{step}, {seconds})"

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the plan."""
        return self.plan.num_ranks

    @property
    def ranks(self) -> list[int]:
        """The ranks whose times are here."""
        return [rank for rank, lane in enumerate(self.actions) if lane.begin_s]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first computation's start to the last one's end, or the last exchange's of gradients, over all ranks.

        Raises:
            ConfigurationError: the times of a rank are missing.
        """
        ranks = self.computing_ranks()
        return max(map(self.step_end_s, ranks)) - min(self.span_s(rank)[0] for rank in ranks) if ranks else 0.0

    def step_end_s(self, rank: int) -> float:
        """Return when a rank has computed everything, and added up its gradients and those of other ranks."""
        return max(self.span_s(rank)[1], self.actions[rank].end_s[self.last_position(rank)])

    def last_position(self, rank: int) -> int:
        """Return the place of a rank's last computation, or of the last exchange of gradients."""
        lane = self.plan.actions[rank]
        ends = (i for i in range(len(lane) - 1, -1, -1) if lane[i].op in COMPUTE or lane[i].op is Op.WAIT_REDUCE_GRAD)
        return next(ends)

    def computing_ranks(self) -> list[int]:
        """Return the ranks that compute: all except those that only store remote activations."""
        return [rank for rank, lane in enumerate(self.plan.actions) if any(action.op in COMPUTE for action in lane)]

    def spans(self, rank: int) -> Iterator[Span]:
        """Iterate over the compute lane's actions: computations, and transfers that it starts and waits for."""
        lane = self.actions[rank]
        return map(Span, self.plan.actions[rank], lane.begin_s, lane.end_s)

    def served_spans(self, rank: int) -> Iterator[Span]:
        """Iterate over the actions that a rank runs for the ranks that evict to it, as far as their times are known."""
        lane = self.served[rank]
        spans = map(Span, self.plan.served[rank], lane.begin_s, lane.end_s)
        return (span for span in spans if not isnan(span.begin_s))

    def computations(self, rank: int) -> Iterator[Span]:
        """Iterate over the forwards and backwards of a rank."""
        return (span for span in self.spans(rank) if span.action.op in COMPUTE)

    def transfers(self, rank: int) -> Iterator[Span]:
        """Iterate over the transfers of a rank while they are in flight, including those for its remote activations."""
        both = (*self.spans(rank), *self.served_spans(rank))
        return (span for span in both if span.action.op in POSTS)

    def waits(self, rank: int) -> Iterator[Span]:
        """Iterate over the waits of a rank's compute lane, for other ranks' results as well as for transfers."""
        return (span for span in self.spans(rank) if span.action.op in START_OF and span.seconds > 0)

    def fills(self, rank: int) -> Iterator[Span]:
        """Iterate over the pieces of a fill job, numbered in order: stage and microbatch mean nothing there."""
        filled = self.actions[rank].filled_s
        return (Span(Action(Op.FILL, 0, i // 2), filled[i], filled[i + 1]) for i in range(0, len(filled), 2))

    def span_s(self, rank: int) -> tuple[float, float]:
        """Return when a rank's first computation began and its last one ended.

        Raises:
            ConfigurationError: the rank computes nothing, or its times are missing.
        """
        lane, actions = self.actions[rank], self.plan.actions[rank]
        if not lane.begin_s or not any(action.op in COMPUTE for action in actions):
            raise ConfigurationError(
                f"no times of rank {rank} here: call `gather()` of a trace, or bpipe.load_trace on its folder, to get all ranks'"
            )
        first = next(i for i, action in enumerate(actions) if action.op in COMPUTE)
        last = next(i for i in range(len(actions) - 1, -1, -1) if actions[i].op in COMPUTE)
        return lane.begin_s[first], lane.end_s[last]

    def work_s(self, rank: int) -> float:
        """Return the seconds that a rank computed; those of a forward and a backward side by side count once."""
        seconds, until = 0.0, -inf
        for _, begin, end in self.computations(rank):
            seconds += end - begin if begin >= until else max(0.0, end - until)
            until = max(until, end)
        return seconds

    def bubble_s(self, rank: int) -> float:
        """Return the seconds of the makespan in which a rank computed nothing: the cost of a synchronous optimizer step."""
        return self.makespan_s - self.work_s(rank)

    def span_bubble_s(self, rank: int) -> float:
        """Return the seconds between a rank's own first start and last end in which it computed nothing."""
        begin, end = self.span_s(rank)
        return end - begin - self.work_s(rank)

    def exposed_s(self, rank: int) -> dict[Op, float]:
        """Return the seconds in which a rank's compute lane waited for a transfer in flight, by the operation it waited for.

        Waiting before the transfer begins belongs to the bubble, not to the transfer. As far as one rank knows, a measured
        transfer is in flight from when it was posted, so these numbers are then upper bounds.
        """
        starts: dict[tuple[Op, int, int, int], float] = {}
        exposed: dict[Op, float] = defaultdict(float)
        for action, begin, end in self.spans(rank):
            op = action.op
            if op in START_OF:
                began = starts.pop(action.start_identity)
                exposed[op] += max(0.0, end - max(begin, began))
            elif action.is_post:
                starts[action.identity] = begin
        return dict(exposed)

    def peak_bytes(self, rank: int) -> int:
        """Return the peak bytes of activations on a rank: `stats["peak_bytes"]` of the step, if it was measured.

        They are the saved bytes of the rank's own microbatches, and the buffers for its remote activations.
        """
        lane = self.actions[rank]
        return lane.remote_buffer_bytes + max(lane.activation_bytes, default=0)

    def device_peak_bytes(self, rank: int) -> int:
        """Return the peak of a rank's total device bytes: `stats["device_peak_bytes"]` of the step, if it was measured.

        They are activations, static bytes (weights, gradients, buffers, optimizer states) and messages between stages.
        """
        lane = self.actions[rank]
        return lane.static_bytes + lane.remote_buffer_bytes + max(map(add, lane.activation_bytes, lane.message_bytes), default=0)

    @property
    def fullest_rank(self) -> int:
        """The rank whose device has the highest peak."""
        return max(range(self.num_ranks), key=self.device_peak_bytes)

    def memory(self, rank: int) -> Iterator[Holding]:
        """Yield the times at which a rank's bytes change, with the new bytes, in order."""
        lane = self.actions[rank]
        now = lane.begin_s[0] if self.source == "measured" and lane.begin_s else 0.0
        idle = (0, 0)
        previous: tuple[int, int] | None = None
        if now > 0:  # static bytes existed before
            previous = idle
            yield _holding(0.0, lane, idle)
        for (action, begin, end), *own in zip(self.spans(rank), lane.activation_bytes, lane.message_bytes):
            occupies_lane = action.op in COMPUTE or action.op in START_OF
            if (*own,) != previous:
                previous = own[0], own[1]
                yield _holding(max(now, begin) if occupies_lane else now, lane, previous)
            if occupies_lane:
                now = end
        if previous not in (None, idle):
            yield _holding(now, lane, idle)


def _holding(begin_s: float, lane: Lane, own: tuple[int, int]) -> Holding:
    activations = lane.remote_buffer_bytes + own[0]
    return Holding(begin_s, activations, lane.static_bytes + activations + own[1])
