"""The gaps of a timeline: when a rank waits, what it holds meanwhile, and what a fill job's pieces would make of it."""

from __future__ import annotations

from typing import NamedTuple

from bpipe.checks import check_seconds
from bpipe.plan.action import START_OF
from bpipe.simulator.timeline import Timeline

__all__ = ["Filling", "Gap", "fill_gaps", "gaps_of"]

ROUNDING = 1e-9  # share of a piece that may be missing


class Gap(NamedTuple):
    """Time in which a rank waits.

    Args:
        begin_s: when it begins, in seconds since the step began.
        end_s: when it ends.
        num_bytes: what the rank's device holds meanwhile: static bytes, activations, buffers, and messages if they are known.

    Example:
        >>> from bpipe.schedules import Costs, build, gaps_of, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0))
        >>> gap = gaps_of(timeline, 0)[0]
        >>> gap.begin_s, gap.end_s
        (2.0, 4.0)
    """

    begin_s: float
    end_s: float
    num_bytes: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s


class Filling(NamedTuple):
    """What pieces of equal length make of a rank's gaps.

    Args:
        idle_s: seconds of all gaps.
        used_s: of these, seconds that pieces use.
        num_pieces: how many fit.
        least_bytes: the least that is free in a gap, of the bytes that the rank may hold.
        most_bytes: the most that is free in a gap.

    Example:
        >>> from bpipe.schedules import Costs, build, fill_gaps, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0))
        >>> filling = fill_gaps(timeline, 0, 0.5)
        >>> filling.idle_s, filling.used_s, filling.num_pieces
        (3.0, 3.0, 6)
    """

    idle_s: float
    used_s: float
    num_pieces: int
    least_bytes: int
    most_bytes: int


def gaps_of(timeline: Timeline, rank: int) -> list[Gap]:
    """Return when a rank waits for others, until all have ended the step.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 2, 2), Costs(forward_s=1.0, backward_s=2.0))
        >>> [(gap.begin_s, gap.end_s) for gap in gaps_of(timeline, 1)]
        [(0.0, 1.0), (7.0, 9.0)]
    """
    lane = timeline.actions[rank]
    always, end, gaps = lane.static_bytes + lane.remote_buffer_bytes, timeline.span_s(rank)[1], list[Gap]()
    for span, own, messages in zip(timeline.spans(rank), lane.activation_bytes, lane.message_bytes):
        if span.action.op in START_OF:
            end = max(end, span.end_s)
            if span.seconds > 0:
                gaps.append(Gap(span.begin_s, span.end_s, always + own + messages))
    first = min(timeline.span_s(one)[0] for one in timeline.computing_ranks())
    if (over := first + timeline.makespan_s) > end:
        gaps.append(Gap(end, over, always))
    return gaps


def fill_gaps(timeline: Timeline, rank: int, piece_s: float, num_bytes: int = 0, budget: int | None = None) -> Filling:
    """Compute what a fill job makes of a rank's gaps whose pieces all take the same.

    Args:
        timeline: simulated or measured.
        rank: whose gaps.
        piece_s: seconds of a piece.
        num_bytes: bytes of a piece, what the job keeps between pieces included.
        budget: bytes that the rank's device may hold; default: the plan's budget for the rank, or else the rank's own peak.

    Raises:
        ConfigurationError: `piece_s` is not positive.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> timeline = simulate(build("1f1b", 8, 16), Costs(forward_s=1.0, backward_s=2.0))
        >>> found = fill_gaps(timeline, 0, piece_s=1.0)
        >>> found.idle_s, found.used_s
        (21.0, 21.0)
    """
    check_seconds("piece_s", piece_s)
    if budget is None:
        planned = timeline.plan.budgets[rank] if timeline.plan.budgets is not None else None
        budget = timeline.device_peak_bytes(rank) if planned is None else planned
    gaps = gaps_of(timeline, rank)
    free = [budget - gap.num_bytes for gap in gaps]
    fitting = [int(gap.seconds / piece_s + ROUNDING) if num_bytes <= room else 0 for gap, room in zip(gaps, free)]
    return Filling(
        idle_s=sum(gap.seconds for gap in gaps),
        used_s=sum(fitting) * piece_s,
        num_pieces=sum(fitting),
        least_bytes=min(free, default=0),
        most_bytes=max(free, default=0),
    )
