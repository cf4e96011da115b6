"""Links from measured steps: what transfers take apart from waiting, as a latency and a bandwidth for each kind of link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, takewhile
from math import inf
from statistics import median
from typing import NamedTuple

from bpipe.plan.action import HOST, SENDS, WAIT_OF, Identity, Op
from bpipe.plan.sizes import Sizes
from bpipe.simulator.costs import Link
from bpipe.simulator.measured import Measured
from bpipe.simulator.timeline import Span, Timeline

__all__: list[str] = []

LEAST_WAIT_S, LEAST_WAIT_SHARE = 1e-3, 0.1  # of a transfer's time: a lane that waits less may have found it complete

Way = tuple[int, int]  # from one rank to another, or to or from its host


class Flight(NamedTuple):
    """A transfer in one direction of a link.

    Args:
        num_bytes: what it carries.
        begin_s: when the later one of its ends was posted.
        end_s: when it was known to be complete.
        is_seen: whether it was complete then and no earlier, because a lane had waited for it.
        error_s: how wrong the time between both can be, because two clocks measured it.
    """

    num_bytes: int
    begin_s: float
    end_s: float
    is_seen: bool
    error_s: float

    @property
    def seconds(self) -> float:
        """How long it was on its way."""
        return self.end_s - self.begin_s


def flights(timeline: Timeline, sizes: Sizes) -> dict[Way, list[Flight]]:
    """Return the transfers of each direction of each link, in the order in which both of their ends were posted.

    On an asynchronous device, hosts do not wait for transfers, so that their ends are not known there: they are left out. So are
    those of a loopback, whose ranks take turns: its clocks are one, without an error. Exchanges of twins, which go both ways at
    once, are not counted.

    Args:
        timeline: a step of all ranks.
        sizes: the bytes of what is transferred.
    """
    if isinstance(timeline, Measured) and not any(timeline.clock_error_s):
        return {}
    ends = {
        (rank, span.action.identity): span
        for rank in timeline.ranks
        for span in (*timeline.spans(rank), *timeline.served_spans(rank))
    }
    hosts = {rank for rank in timeline.ranks if not (isinstance(timeline, Measured) and timeline.device[rank].begin_s)}
    found: dict[Way, list[Flight]] = defaultdict(list)
    for way, span, other in _transfers(timeline, ends):
        if hosts.issuperset({*way} - {HOST}):
            found[way].append(_flight(timeline, ends, way, span, other, sizes.carried(span.action, timeline.plan.flow)))
    return {way: sorted(flights, key=lambda flight: flight.begin_s) for way, flights in found.items()}


def _transfers(timeline: Timeline, ends: dict[tuple[int, Identity], Span]) -> Iterator[tuple[Way, Span, Span]]:
    """Yield the way of each transfer, with the span of its post on this rank, and of that on the receiving one."""
    for (rank, _), span in ends.items():
        action = span.action
        if action.peer == HOST and action.is_post:
            yield (rank, HOST) if action.op is Op.EVICT else (HOST, rank), span, span
        elif action.op in SENDS and action.peer is not None:
            received = ends.get((action.peer, timeline.plan.other_end(action)))
            if received is not None:
                yield (rank, action.peer), span, received


def _flight(
    timeline: Timeline, ends: dict[tuple[int, Identity], Span], way: Way, sent: Span, received: Span, num_bytes: int
) -> Flight:
    """Return a transfer: the receiving end knows when it is complete, a sender only when it may use its memory again."""
    begin, end = max(sent.begin_s, received.begin_s), received.end_s
    if timeline.source == "simulated":
        return Flight(num_bytes, begin, end, True, 0.0)
    src, dst = way
    rank = src if dst == HOST else dst
    wait = ends[rank, (WAIT_OF[received.action.op], *received.action.identity[1:])]
    is_seen = wait.begin_s <= begin < end or wait.seconds >= max(LEAST_WAIT_S, LEAST_WAIT_SHARE * (end - begin))
    crosses = isinstance(timeline, Measured) and HOST not in way and sent.begin_s > received.begin_s
    error_s = timeline.clock_error_s[src] + timeline.clock_error_s[dst] if crosses and isinstance(timeline, Measured) else 0.0
    return Flight(num_bytes, begin, end, is_seen, error_s)


def fitted(ways: Iterable[Sequence[Flight]]) -> Link | None:
    """Return the link whose latency and bandwidth explain most transfers; None if none was seen that took long enough.

    Transfers that were on their way together count as one, of all their bytes: so it does not matter whether they shared the link
    or took turns. For each number of bytes the median counts, unless the clocks of the two ranks can be wrong by more than that.

    Args:
        ways: the transfers of each direction of such links.
    """
    points: dict[int, list[float]] = defaultdict(list)
    most: dict[int, list[float]] = defaultdict(list)
    for flights in ways:
        by_size: dict[int, list[Flight]] = defaultdict(list)
        for together in _together(flights):
            # Up to the first of which it is not known when it was complete: behind it there may be a pause.
            if seen := list(takewhile(lambda flight: flight.is_seen, together)):
                busy = _as_one(seen)
                by_size[busy.num_bytes].append(busy)
            if len(seen) < len(together):
                busy = _as_one(together)
                most[busy.num_bytes].append(busy.seconds + busy.error_s)
        for num_bytes, some in by_size.items():
            if median(busy.seconds for busy in some) > max(busy.error_s for busy in some):
                points[num_bytes] += [busy.seconds for busy in some]
    link = _line(points)
    if link is None:
        return None
    missed = {size: some for size, some in most.items() if size not in points and seconds_of(link, size) > median(some)}
    return _line(points | missed) if missed else link


def seconds_of(link: Link, num_bytes: int) -> float:
    """Return the seconds of a transfer alone on a link."""
    return link.latency_s + num_bytes / link.bytes_per_s


def _together(flights: Iterable[Flight]) -> Iterator[list[Flight]]:
    """Yield the transfers that kept a direction of a link busy without a pause, from those in the order of their posts."""
    together: list[Flight] = []
    for flight in flights:
        if together and flight.begin_s >= max(one.end_s for one in together):
            yield together
            together = []
        together.append(flight)
    if together:
        yield together


def _as_one(together: Sequence[Flight]) -> Flight:
    """Return transfers as one, of all their bytes."""
    num_bytes, end_s = sum(flight.num_bytes for flight in together), max(flight.end_s for flight in together)
    return Flight(num_bytes, together[0].begin_s, end_s, True, max(flight.error_s for flight in together))


def _line(seconds: Mapping[int, Sequence[float]]) -> Link | None:
    """Return the link through most transfers, by their bytes: the median of slopes between medians, then of what is left.

    With one number of bytes, and where more bytes cost more than in proportion, it is a bandwidth alone; where more bytes do not
    cost more, a latency alone.
    """
    if not seconds:
        return None
    points = [(num_bytes, median(some), len(some)) for num_bytes, some in sorted(seconds.items())]
    slopes = [((t - s) / (b - a), (b - a) * min(n, m)) for (a, s, n), (b, t, m) in combinations(points, 2)]
    per_byte = max(0.0, weighted_median(slopes)) if slopes else 0.0
    latency = weighted_median([(taken_s - per_byte * num_bytes, count) for num_bytes, taken_s, count in points])
    if latency < 0 or not slopes:
        latency = 0.0
        per_byte = weighted_median([(taken_s / num_bytes, num_bytes * count) for num_bytes, taken_s, count in points if num_bytes])
    return Link(latency_s=latency, bytes_per_s=1 / per_byte if per_byte else inf)


def weighted_median(values: Iterable[tuple[float, float]], share: float = 0.5) -> float:
    """Return the value below which this share of all weight lies; 0 if there is none.

    Args:
        values: each with its weight.
        share: of the weight; 0.25 gives the lower quartile.
    """
    ordered = sorted(values)
    rest = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        rest -= weight
        if rest <= 0:
            return value
    return 0.0
