"""Write timelines, simulated or measured, as files in Chrome's trace format, which Perfetto (https://ui.perfetto.dev) opens.

    process "rank 0"   compute      | 0F0 | 0F1 |WAIT_RECV_B| 0B0 | ...
                       device       | 0F0 | 0F1 |           | 0B0 |         on CUDA, when it was measured
                       fill job     pieces of it, in the time in which the rank waits
                       transfers       | 0SEND_F0 ----+|  ...
                       evictions    ...               | |0EVICT2 --+|   |+-> 0LOAD2 |
                       host         ...               evictions to this rank's own host, and loads from there
                       remote activations       ...               |            +---+   accepted here for other ranks, and returned
                       weights      gathered, given back, and their gradients added up
                       activations  bytes, a counter  |
                       device       bytes of all that it holds, a counter
    process "rank 1"   transfers       | 1RECV_F0 <---+|  ...

Slices that overlap get lanes of their own ("transfers 2"), because the format wants the slices of a lane to nest or to be
disjoint. A part of a microbatch that moves, and a piece of a computation, is a slice: `0EVICT2.1`, `0F3.2`. Arrows go from a
send to its receive, from an eviction to its acceptor and to its load, and from a return to its load.

A file has everything that the timelines have: behind the events, where viewers stop reading, stands their record, from which
they are read again.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, NamedTuple

from bpipe._version import __version__
from bpipe.plan.action import COMPUTE, HOST, MESSAGES, POSTS, RECEIVER_OF, SENDS, SERVED, SHARDING, START_OF, Action, Op
from bpipe.plan.whereabouts import whereabouts
from bpipe.simulator.measured import Measured, computed
from bpipe.simulator.timeline import Timeline
from bpipe.tools.trace_record import Origin, packed
from bpipe.whole_file import write_whole

__all__ = ["save_trace"]

# An arrow's head must come after its tail, in time because the file's order counts for nothing between lanes, and before the
# lane's next slice, which would take it: so a transfer that takes no time is shown to take some.
LEAST_NS = 2

Event = dict[str, Any]

# The lanes of a rank, from top to bottom.
COMPUTE_LANE, DEVICE, FILL_JOB, TRANSFERS, EVICTIONS, HOST_MOVES, GUESTS, GUEST_WAITS, WEIGHTS, NO_WAITS = LANES = (
    "compute",
    "device",
    "fill job",
    "transfers",
    "evictions",
    "host",
    "remote activations",
    "waits for remote activations",
    "weights",
    "waits that were over at once",  # of simulated steps mostly; among the computations they would be in the way
)


class _Slice(NamedTuple):
    """A box in the picture, in nanoseconds."""

    begin_ns: int
    end_ns: int
    lane: str
    action: Action
    activation_bytes: int | None
    message_bytes: int | None


def save_trace(timelines: Timeline | Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write timelines to a file in Chrome's trace format, one after the other.

    Measured ones keep their distance in time; others begin where the one before them ends. Only one
    timeline's boxes are in memory at a time.

    Args:
        timelines: simulated or measured, in chronological order; of different plans if you like.
        path: a file, by convention `.json`.

    Raises:
        OSError: the path cannot be written.

    Example:
        >>> import bpipe, tempfile
        >>> from bpipe.schedules import Costs, build, simulate
        >>> planned = simulate(build("balanced_1f1b", 4, 8), Costs(saved_bytes=2**20))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_trace(planned, f"{folder}/planned.json")
        ...     bpipe.load_trace(f"{folder}/planned.json") == [planned]
        True
    """
    steps = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    write_whole(path, lines(steps, Origin()))


def lines(timelines: Sequence[Timeline], origin: Origin) -> Iterator[str]:
    """Yield a trace file's text: a header, a line per event, and the record."""
    # The header comes first and fits in a first read: Perfetto learns the unit of time from it. It ignores what follows the events.
    yield f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps({"bpipe": __version__})},\n"traceEvents": ['
    separator = "\n"
    for event in _all_events(timelines, _starts_ns(timelines)):
        yield f"{separator}{json.dumps(event, separators=(',', ':'))}"
        separator = ",\n"
    yield '\n],\n"record": '
    yield from packed(timelines, origin)
    yield "}\n"


def _starts_ns(timelines: Sequence[Timeline]) -> list[int]:
    """Return where each timeline's zero is: on the trace's clock if it was measured there, else after all before it."""
    starts: list[int] = []
    free_ns = 0
    for timeline in timelines:
        device = timeline.device if isinstance(timeline, Measured) else ()
        ends = [ends_s for lane in (*timeline.actions, *timeline.served, *device) if (ends_s := lane.ends_s) is not None]
        earliest_ns = min((_ns(begin_s) for begin_s, _ in ends), default=0)
        starts.append(_ns(timeline.began_s) if isinstance(timeline, Measured) else free_ns - min(0, earliest_ns))
        free_ns = max([free_ns, *(starts[-1] + _ns(end_s) + LEAST_NS for _, end_s in ends)])
    return starts


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(ns: int) -> float:
    return ns / 1000


def _slices(timeline: Timeline, rank: int) -> Iterator[_Slice]:
    """Yield the boxes of one rank, in no particular order."""
    plan = timeline.plan
    for actions, lane in ((plan.actions[rank], timeline.actions[rank]), (plan.served[rank], timeline.served[rank])):
        held = lane.activation_bytes, lane.message_bytes
        for action, begin_s, end_s, activations, messages in zip_longest(actions, lane.begin_s, lane.end_s, *held):
            if isnan(begin_s):
                continue
            begin_ns, end_ns = _ns(begin_s), _ns(end_s)
            shown_ns = max(end_ns, begin_ns + LEAST_NS) if action.is_post else end_ns
            place = _lane_of(action, end_ns > begin_ns)
            yield _Slice(begin_ns, shown_ns, place, action, activations, messages)
    if isinstance(timeline, Measured) and timeline.device[rank].begin_s:
        device = timeline.device[rank]
        for action, begin_s, end_s in zip(computed(plan, rank), device.begin_s, device.end_s):
            yield _Slice(_ns(begin_s), _ns(end_s), DEVICE, action, None, None)
    for action, begin_s, end_s in timeline.fills(rank):
        yield _Slice(_ns(begin_s), _ns(end_s), FILL_JOB, action, None, None)


def _lane_of(action: Action, takes_time: bool) -> str:
    op = action.op
    if op in COMPUTE:
        return COMPUTE_LANE
    if op in START_OF:
        return GUEST_WAITS if op in SERVED else COMPUTE_LANE if takes_time else NO_WAITS
    if op in (Op.EVICT, Op.LOAD):
        return HOST_MOVES if action.peer == HOST else EVICTIONS
    return GUESTS if op in SERVED else WEIGHTS if op in SHARDING else TRANSFERS


def _all_events(timelines: Sequence[Timeline], starts_ns: Sequence[int]) -> Iterator[Event]:
    """Yield each timeline's events rank by rank, in chronological order within a rank: readers sort the rest."""
    tracks, num_arrows = _Tracks(), 0
    for number, (timeline, start_ns) in enumerate(zip(timelines, starts_ns)):
        arrows = list(_arrows(timeline))
        ends: dict[tuple[int, Action], list[_End]] = defaultdict(list)
        for identity, arrow in enumerate(arrows, start=num_arrows + 1):
            ends[arrow.tail].append(_End("s", identity, arrow.name))
            ends[arrow.head].append(_End("f", identity, arrow.name))
        num_arrows += len(arrows)
        step = number if timeline.step is None else timeline.step
        for rank in timeline.ranks:
            known = {"step": step, "timeline": number}
            yield from sorted(_events(timeline, rank, start_ns, known, tracks, ends), key=lambda event: event.get("ts", 0))


class _Arrow(NamedTuple):
    """An arrow from one rank's transfer to another's, or to a later one of its own."""

    name: str
    tail: tuple[int, Action]
    head: tuple[int, Action]


class _End(NamedTuple):
    """An arrow's tail or head."""

    phase: str
    identity: int
    name: str


def _arrows(timeline: Timeline) -> Iterator[_Arrow]:
    """Yield the arrows whose two ends are known, but for those that the clocks' error would turn backwards."""
    slices = {
        (rank, *one.action.identity): one for rank in timeline.ranks for one in _slices(timeline, rank) if one.action.op in POSTS
    }
    for (rank, op, stage, microbatch, part), sent in slices.items():
        heads: list[tuple[str, tuple[int, Op, int, int, int]]] = []
        if op in RECEIVER_OF and sent.action.peer is not None:
            heads.append((SENDS[op].value, (sent.action.peer, *timeline.plan.other_end(sent.action))))
        if op is Op.EVICT:
            heads.append(("away", (rank, Op.LOAD, stage, microbatch, part)))
        for name, head in heads:
            received = slices.get(head)
            if received is not None and received.end_ns - 1 > sent.begin_ns:
                yield _Arrow(name, (rank, sent.action), (head[0], received.action))


def _events(
    timeline: Timeline,
    rank: int,
    start_ns: int,
    known: dict[str, int],
    tracks: _Tracks,
    ends: Mapping[tuple[int, Action], Sequence[_End]],
) -> Iterator[Event]:
    """Yield one rank's events. An arrow's tail is at the start of its slice, its head at the last nanosecond before the end."""
    pid = rank + 1  # Perfetto takes process 0 for the kernel's
    for one in sorted(_slices(timeline, rank), key=lambda one: one.begin_ns):
        begin_ns, end_ns = start_ns + one.begin_ns, start_ns + one.end_ns
        place = _free_place(tracks.busy_ns[rank, one.lane], begin_ns, end_ns)
        yield from tracks.names(rank, one.lane, place)
        on = {"pid": pid, "tid": tracks.tids[rank, one.lane, place]}
        times = {"ts": _us(begin_ns), "dur": _us(end_ns - begin_ns)}
        if one.action.op is Op.FILL:
            name = f"piece {one.action.microbatch}"
            yield {"ph": "X", "name": name, "cat": one.lane, **on, **times, "args": {"action": name, **known}}
            continue
        name = timeline.plan.show(one.action)
        microbatch, slice_ = timeline.plan.slice_of(one.action.microbatch)
        args = {"action": name, "stage": one.action.stage, "microbatch": microbatch, **known}
        if timeline.plan.slices > 1:
            args["slice"] = slice_
        if one.action.part and one.action.op not in MESSAGES:
            args["part"] = one.action.part
        if then := whereabouts(one.action):
            args["then"] = then
        if one.activation_bytes is not None:
            args |= {"activation_bytes": one.activation_bytes, "message_bytes": one.message_bytes}
        yield {"ph": "X", "name": name, "cat": one.lane, **on, **times, "args": args}
        for phase, identity, name in ends.get((rank, one.action), ()) if one.action.op in POSTS else ():
            binding = {"ts": times["ts"]} if phase == "s" else {"ts": _us(end_ns - 1), "bp": "e"}
            yield {"ph": phase, "name": name, "cat": "transfer", "id": identity, **on, **binding}
    yield from _counters(timeline, rank, start_ns, tracks.tids[rank, COMPUTE_LANE, 0])


def _counters(timeline: Timeline, rank: int, start_ns: int, tid: int) -> Iterator[Event]:
    """Yield what a rank holds: a counter for activations, and one for all that its device holds."""
    for held in timeline.memory(rank):
        when = {"pid": rank + 1, "tid": tid, "ts": _us(start_ns + _ns(held.begin_s))}
        yield {"ph": "C", "name": "activations", **when, "args": {"bytes": held.activation_bytes}}
        yield {"ph": "C", "name": "device", **when, "args": {"bytes": held.device_bytes}}


def _free_place(busy_ns: list[int], begin_ns: int, end_ns: int) -> int:
    """Take the first lane that is free from `begin_ns` on, occupy it until `end_ns`, and return its index."""
    place = next((i for i, until in enumerate(busy_ns) if until <= begin_ns), len(busy_ns))
    busy_ns[place : place + 1] = [end_ns]
    return place


class _Tracks:
    """The lanes' numbers in the file: each lane has its own, because older readers name threads by number alone."""

    def __init__(self) -> None:
        self.tids: dict[tuple[int, str, int], int] = {}
        self.busy_ns: dict[tuple[int, str], list[int]] = defaultdict(list)  # until when, for each of the lanes of a name
        self._named: set[int] = set()

    def names(self, rank: int, lane: str, place: int) -> Iterator[Event]:
        """Yield the events that name a lane and its process, if they are new."""
        pid = rank + 1
        if rank not in self._named:
            self._named.add(rank)
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {rank}"}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": rank}}
        if (rank, lane, place) not in self.tids:
            tid = self.tids[rank, lane, place] = len(self.tids) + 1
            name = f"{lane} {place + 1}" if place else lane
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            order = {"sort_index": 1000 * LANES.index(lane) + place}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order}
