"""Turn timelines into the contents of a picture, for any backend: rows of boxes in time, and steps of memory.

A scene has a panel for each timeline, one under the other on one time axis, and a panel has a row for each rank. A box is the
timeline's own `Span`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite, lcm

from bpipe.errors import ConfigurationError
from bpipe.plan.amounts import show_bytes
from bpipe.plan.grid import plan_title
from bpipe.plan.meter import occupancy
from bpipe.schedules import Lane, Op, Plan, Span, Timeline
from bpipe.simulator.timeline import Holding
from bpipe.tools.quantities import show_seconds

__all__: list[str] = []

MAX_BOXES = 200_000
MAX_TRACKS = 4

OUT = frozenset({Op.EVICT, Op.RETURN})  # saved bytes that leave a rank, its own or a remote activation's
IN = frozenset({Op.ACCEPT, Op.LOAD})
SENT = frozenset({Op.SEND_F, Op.SEND_B})

Window = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The computations, waits, transfers and memory of one rank."""

    rank: int  # its number
    stages: tuple[int, ...]  # the stages it holds
    slices: int  # of each microbatch; if there are several, boxes are of slices
    computations: tuple[Span, ...]  # F, B, I and W, one after the other; those in pieces as one, from the first to the last
    waits: tuple[Span, ...]  # when its compute lane waited, between pieces too
    fills: tuple[Span, ...]  # pieces of a fill job meanwhile
    # evictions, loads and their other ends, in tracks without overlaps: those that leave, then those that arrive
    moves: tuple[tuple[Span, ...], ...]
    num_out: int  # how many of the tracks are of those that leave
    sends: tuple[Span, ...]  # what it sends along the pipeline, as far as that takes time
    is_measured: bool  # then sends last from posting to completion, otherwise as long as they occupy the link
    memory: tuple[Holding, ...]  # what it holds, and from when on, in order
    stays: int  # what of that stays throughout: weights, gradients, buffers, optimizer states; nothing where slots are counted
    peak: int  # the most activations it ever holds, outside the window too
    device_peak: int  # the most it ever holds of all, likewise
    budget: int | None  # the most it may hold of all; None where there is no budget in the scene's unit

    @property
    def places(self) -> str:
        """The stages of a rank that has several, in words; nothing for one."""
        few = f"stages {', '.join(map(str, self.stages))}" if len(self.stages) <= 3 else f"{len(self.stages)} stages"
        return few if len(self.stages) > 1 else ""

    @property
    def num_boxes(self) -> int:
        return len(self.computations) + len(self.fills) + len(self.waits) + len(self.sends) + sum(map(len, self.moves))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline: its name, its numbers and its ranks."""

    name: str
    facts: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The contents of a picture."""

    title: str  # a line above everything, or nothing
    panels: tuple[Panel, ...]  # one for each timeline
    begin_s: float  # where the time axis begins
    end_s: float
    unit: str  # of all memory, "bytes" or "slots"
    slots_each: int  # how many of these slots a microbatch takes: several where a panel counts slices
    top: int  # the most memory or budget of any rank, at least 1: the scale of all memory strips
    num_microbatches: int  # the most of any panel

    def layers(self) -> dict[str, str]:
        """Return the layers that memory consists of, from the bottom up, with their names in words."""
        if self.unit == "slots":
            return {"activations": f"activations, in {'slots' if self.slots_each == 1 else 'microbatches'}"}
        rows = [row for panel in self.panels for row in panel.rows]
        has_messages = any(held.device_bytes > row.stays + held.activation_bytes for row in rows for held in row.memory)
        stays = {"stays": "weights and what else stays"} if any(row.stays for row in rows) else {}
        return stays | {"activations": "activations"} | ({"messages": "messages between stages"} if has_messages else {})

    @property
    def budget(self) -> str:
        """The budget in words, as a legend has it, with its amount if all ranks have the same; nothing without one."""
        found = {row.budget for panel in self.panels for row in panel.rows if row.budget is not None}
        return f"budget {amount_text(found.pop(), self.unit, self.slots_each)}" if len(found) == 1 else "budget" * bool(found)


def compose(timelines: Sequence[Timeline], *, title: str | None = None, window: Window | None = None) -> Scene:
    """Make the scene of timelines on one time axis.

    Memory is in bytes if all timelines know them, and otherwise in slots, which count the memory of microbatches alone.
    """
    begin, end = _interval(timelines, window)
    unit = "bytes" if all(map(knows_bytes, timelines)) else "slots"
    slots_each = lcm(*(timeline.plan.slices for timeline in timelines)) if unit == "slots" else 1
    shown = timelines if unit == "bytes" else [in_slots(timeline, slots_each) for timeline in timelines]
    panels: list[Panel] = []
    for timeline in shown:
        spent = sum(row.num_boxes for panel in panels for row in panel.rows)
        slot = slots_each // timeline.plan.slices
        rows = tuple(_rows(timeline, (begin, end), unit, slot, MAX_BOXES - spent))
        is_short = unit == "bytes" and not counts_messages(timeline) and any(map(counts_messages, timelines))
        facts = _facts(timeline, unit, slots_each) + ", messages left out" * is_short
        panels.append(Panel(name=plan_title(timeline.plan), facts=facts, rows=rows))
    amounts = [amount for panel in panels for row in panel.rows for amount in (row.device_peak, row.budget or 0)]
    return Scene(
        title=title or "",
        panels=tuple(panels),
        begin_s=begin,
        end_s=end,
        unit=unit,
        slots_each=slots_each,
        top=max([1, *amounts]),
        num_microbatches=max(timeline.plan.num_microbatches for timeline in timelines),
    )


def knows_bytes(timeline: Timeline) -> bool:
    """Return whether a timeline knows what ranks hold in bytes; a simulated training step does if its costs say what is saved."""
    is_measured_or_saves_nothing = timeline.source == "measured" or not timeline.plan.has_backward
    peak = timeline.device_peak_bytes if is_measured_or_saves_nothing else timeline.peak_bytes
    return any(map(peak, range(timeline.num_ranks)))


def counts_messages(timeline: Timeline) -> bool:
    """Return whether the devices' totals include messages between stages; those of a simulated plan that counts slots do not."""
    return timeline.source == "measured" or timeline.plan.sizes is not None


def in_slots(timeline: Timeline, slots_each: int = 1) -> Timeline:
    """Return the same timeline with its plan's slots in place of bytes: a rank's own and the buffers of its remote activations.

    Args:
        slots_each: how many slots a microbatch counts as, a multiple of its slices.
    """
    plan = timeline.plan
    slot = max(1, slots_each // plan.slices)
    lanes = (_lane_in_slots(plan, rank, lane, slot) for rank, lane in enumerate(timeline.actions))
    return replace(timeline, actions=tuple(lanes))


def _lane_in_slots(plan: Plan, rank: int, lane: Lane, slot: int) -> Lane:
    """Return a lane that holds slots: its own microbatches' as activations, remote ones' as buffers, and none of anything else."""
    remote_buffers = slot * sum(map(len, plan.remote_buffers(rank).values()))
    # Without backwards nothing is kept: autograd saves nothing.
    own = array("q", (live * slot * plan.has_backward for live in occupancy(plan.actions[rank])))
    return replace(
        lane,
        activation_bytes=own,
        message_bytes=array("q", bytes(8 * len(own))),
        static_bytes=0,
        remote_buffer_bytes=remote_buffers,
    )


def _interval(timelines: Sequence[Timeline], window: Window | None) -> Window:
    """Return the interval that the picture shows: all of the timelines, or the window."""
    lanes = [lane for timeline in timelines for lane in (*timeline.actions, *timeline.served)]
    ends = [ends_s for lane in lanes if (ends_s := lane.ends_s) is not None]
    begin = min(begin_s for begin_s, _ in ends)
    on_devices = (timeline.span_s(rank)[1] for timeline in timelines for rank in timeline.computing_ranks())
    end = max([*(end_s for _, end_s in ends), *on_devices])
    if window is None:
        return begin, end if end > begin else begin + 1.0
    if not (all(map(isfinite, window)) and window[0] < window[1]):
        raise ConfigurationError(f"window={window}: give two numbers of seconds, the earlier one first")
    if window[0] >= end or window[1] <= begin:
        raise ConfigurationError(f"window={window} shows nothing: the step goes from {begin:g} s to {end:g} s")
    return window


def _rows(timeline: Timeline, window: Window, unit: str, slot: int, allowance: int) -> Iterator[Row]:
    """Yield a row for each rank; raise as soon as there are too many boxes."""
    for rank in range(timeline.num_ranks):
        row = _row(timeline, rank, window, unit, slot, allowance)
        allowance -= row.num_boxes
        if allowance < 0:
            raise ConfigurationError(
                f"{timeline.plan.name} with {timeline.plan.num_microbatches} microbatches on {timeline.num_ranks} ranks has more "
                f"than the {MAX_BOXES:,} boxes that one picture may have: draw a part of it, window=(from, to) in seconds, "
                f"or --from and --to on the command line"
            )
        yield row


def _row(timeline: Timeline, rank: int, window: Window, unit: str, slot: int, allowance: int) -> Row:
    plan = timeline.plan
    budget = None if plan.budgets is None else plan.budgets[rank]
    if unit == "slots":
        slots = plan.slots[rank]
        budget = None if slots is None else slots * slot
    transfers = list(_within(filter(_is_drawn, timeline.transfers(rank)), window, allowance))
    leaving = _tracks(span for span in transfers if span.action.op in OUT)
    arriving = _tracks(span for span in transfers if span.action.op in IN)
    return Row(
        rank=rank,
        stages=tuple(plan.stages_of(rank)),
        slices=plan.slices,
        computations=tuple(_within(_whole(plan, timeline.computations(rank)), window, allowance)),
        waits=tuple(_within(timeline.waits(rank), window, allowance)),
        fills=tuple(_within(timeline.fills(rank), window, allowance)),
        moves=(*leaving, *arriving),
        num_out=len(leaving),
        sends=tuple(span for span in transfers if span.action.op in SENT),
        is_measured=timeline.source == "measured",
        memory=_steps(timeline, rank, window),
        stays=timeline.actions[rank].static_bytes,
        peak=timeline.peak_bytes(rank),
        device_peak=timeline.device_peak_bytes(rank),
        budget=budget,
    )


def _whole(plan: Plan, computations: Iterable[Span]) -> Iterator[Span]:
    """Yield computations, with the pieces of one put together: to the eye it is one, with waits in it."""
    begin_s = 0.0
    for action, piece_begin_s, end_s in computations:
        begin_s = begin_s if plan.goes_on(action) else piece_begin_s
        if plan.ends(action):
            yield Span(action._replace(part=0), begin_s, end_s)


def _within(spans: Iterable[Span], window: Window, allowance: int) -> Iterator[Span]:
    """Yield the spans that reach into the window, but at most one more than is allowed."""
    begin, end = window
    return islice((span for span in spans if span.end_s >= begin and span.begin_s <= end), allowance + 1)


def _is_drawn(transfer: Span) -> bool:
    """Return whether a transfer has a box: a receive is its send's other end, and a send that takes no time is mere clutter."""
    return transfer.action.op in OUT or transfer.action.op in IN or (transfer.action.op in SENT and transfer.seconds > 0)


def _tracks(spans: Iterable[Span]) -> list[tuple[Span, ...]]:
    """Lay spans into as few tracks as keep them from overlapping, but no more than MAX_TRACKS."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        free = next((track for track in tracks if track[-1].end_s <= span.begin_s), None)
        if free is None and len(tracks) < MAX_TRACKS:
            tracks.append([span])
        else:
            (tracks[-1] if free is None else free).append(span)
    return [tuple(track) for track in tracks]


def _steps(timeline: Timeline, rank: int, window: Window) -> tuple[Holding, ...]:
    """Return the steps of memory within the window, and the one in force where it begins."""
    steps = without_dips(list(timeline.memory(rank)))
    seconds = [step.begin_s for step in steps]
    first = bisect_left(seconds, window[0])
    if first == len(steps) or seconds[first] > window[0]:
        first = max(first - 1, 0)
    return tuple(steps[first : bisect_right(seconds, window[1])])


def without_dips(steps: Sequence[Holding], least_s: float = 0.0) -> list[Holding]:
    """Leave out what is given back and taken again within `least_s`: memory steps as the eye, or an allocator, sees them."""
    kept: list[Holding] = []
    for step in steps:
        while kept and step.begin_s - kept[-1].begin_s <= least_s and _is_dip(kept[-2:], step):
            kept.pop()
        if not kept or kept[-1][1:] != step[1:]:
            kept.append(step)
    return kept


def _is_dip(last: Sequence[Holding], now: Holding) -> bool:
    """Return whether the last of two steps is below both the one before it and the one now; a single step never is."""
    if len(last) < 2:
        return False
    before, lowest = last
    is_below = lowest.device_bytes < min(before.device_bytes, now.device_bytes)
    return is_below and lowest.activation_bytes <= max(before.activation_bytes, now.activation_bytes)


def _facts(timeline: Timeline, unit: str, slots_each: int) -> str:
    """Return one line of numbers on a timeline."""
    plan, ranks = timeline.plan, range(timeline.num_ranks)
    makespan = timeline.makespan_s
    bubble = 1 - min(map(timeline.work_s, ranks)) / makespan if makespan else 0.0
    several = f", {plan.num_stages // plan.num_ranks} stages each" if plan.num_ranks != plan.num_stages else ""
    stages = f"p = {plan.num_ranks}{several}"
    step = "" if timeline.step is None else f" in step {timeline.step}"
    slices = f" of k = {plan.slices} slices" if plan.slices > 1 else ""
    filled = sum(span.seconds for rank in ranks for span in timeline.fills(rank)) / (makespan * len(ranks) or 1.0)
    fill = f" (fill job {filled:.1%})" if filled else ""
    return (
        f"{stages}, m = {plan.num_microbatches}{slices}   \N{MIDDLE DOT}   makespan {show_seconds(makespan)}   \N{MIDDLE DOT}   "
        f"largest bubble {bubble:.1%}{fill}   \N{MIDDLE DOT}   {_fullest(timeline, unit, slots_each)}   \N{MIDDLE DOT}   "
        f"{timeline.source}{step}"
    )


def _fullest(timeline: Timeline, unit: str, slots_each: int) -> str:
    """Return the rank that holds the most in total, and how much, in words."""
    rank = timeline.fullest_rank
    return f"fullest rank {rank}: {'device ' * (unit == 'bytes')}{amount_text(timeline.device_peak_bytes(rank), unit, slots_each)}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and how many of it make a second."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return unit, per_second
    return "\N{MICRO SIGN}s", 1e6


def amount_text(amount: int, unit: str, slots_each: int = 1) -> str:
    """Write an amount of memory for people: `3.25 GiB`, `3 slots`, or `1.75 microbatches` if these take several slots each."""
    if unit == "slots" and slots_each > 1:
        return f"{amount / slots_each:.4g} microbatch{'' if amount == slots_each else 'es'}"
    if unit == "slots":
        return f"{amount} slot{'' if amount == 1 else 's'}"
    return show_bytes(amount)
