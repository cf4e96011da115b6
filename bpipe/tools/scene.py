"""Turn timelines into the contents of a picture, for any backend: rows of boxes in time, steps of memory, and a legend.

A scene has a panel for each timeline, one under the other on one time axis, and a panel has a row for each rank. A box is the
timeline's own `Span`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from math import isfinite, lcm
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.flow.units import Units
from bpipe.plan.action import COMPUTE, HOST
from bpipe.plan.amounts import show_bytes
from bpipe.plan.grid import plan_title
from bpipe.plan.meter import occupancy
from bpipe.schedules import Op, Span, Timeline
from bpipe.simulator.timeline import Holding
from bpipe.tools.colours import NAMES, Role, shade
from bpipe.tools.quantities import show_seconds

__all__: list[str] = []

MAX_BOXES = 200_000
MAX_TRACKS = 4
FILL_SHARE = 0.6  # of a computation's height
ROUNDING = 1e-6  # share of a computation by which the next one may seem to begin before its end

OUT = frozenset({Op.EVICT, Op.RETURN})  # saved bytes that leave a rank, its own or a remote activation's
IN = frozenset({Op.ACCEPT, Op.LOAD})
SENT = (Op.SEND_F, Op.SEND_B)

Window = tuple[float, float]


class Strip(NamedTuple):
    """Boxes of one kind side by side, and which share of a part of the row's height they take."""

    kind: str  # "compute", "wait", "fill", "move" or "send"
    part: int  # 0: with the computations, 1: moves, 2: sends
    top: float
    bottom: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The computations, waits, transfers and memory of one rank."""

    rank: int  # its number
    stages: tuple[int, ...]  # the stages it holds
    units: Units  # those of the plan, which boxes are of
    strips: tuple[Strip, ...]  # its boxes, the lowest layer first
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
        return sum(len(strip.spans) for strip in self.strips)

    def spans(self, kind: str) -> Iterator[Span]:
        """Iterate over the boxes of one kind."""
        return (span for strip in self.strips if strip.kind == kind for span in strip.spans)

    def role(self, span: Span) -> Role:
        """Return the role that an action is shown in."""
        if self.is_measured and span.action.op in SENT:
            return f"{span.action.op}@posted"
        return f"{span.action.op}@host" if span.action.peer == HOST else span.action.op

    def colour(self, span: Span) -> str:
        """Return the colour of a box: of a computation, lighter on the rank's later stages."""
        place = self.stages.index(span.action.stage) if span.action.op in COMPUTE else 0
        return shade(self.role(span), place, len(self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline: its name, its numbers and its ranks."""

    name: str
    facts: str
    rows: tuple[Row, ...]


class Entry(NamedTuple):
    """An entry of the legend."""

    kind: str  # "box", "send", "wait", "memory" or "budget"
    role: Role  # of these boxes, or the layer of memory
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The contents of a picture."""

    title: str  # a line above everything, or nothing
    panels: tuple[Panel, ...]  # one for each timeline
    begin_s: float  # where the time axis begins
    end_s: float
    slots_each: int | None  # how many slots a microbatch counts as, several where a panel has slices; None where memory is in bytes
    top: int  # the most memory or budget of any rank, at least 1: the scale of all memory strips
    num_microbatches: int  # the most of any panel

    def peaks(self, row: Row) -> list[str]:
        """Return the most that a row holds, in words."""
        if self.slots_each is None:
            return [f"device {show_bytes(row.device_peak)}", f"activations {show_bytes(row.peak)}"]
        return ["holds " * (self.slots_each == 1) + amount_text(row.peak, self.slots_each)]

    def legend(self) -> Iterator[Entry]:
        """Yield an entry for each thing that can be seen: boxes, the layers of memory from the bottom up, and the budget."""
        rows = [row for panel in self.panels for row in panel.rows]
        seen = {row.role(span) for row in rows for strip in row.strips for span in strip.spans}
        roles = {name: role for role, name in NAMES.items() if role in seen}  # one of those that share a name
        for name, role in roles.items():
            yield Entry("send" if role.startswith("SEND") else "wait" if role.startswith("WAIT") else "box", role, name)
        if any(row.stays for row in rows):
            yield Entry("memory", "stays", "weights and what else stays")
        unit = "" if self.slots_each is None else ", in slots" if self.slots_each == 1 else ", in microbatches"
        yield Entry("memory", "activations", f"activations{unit}")
        if any(held.device_bytes > row.stays + held.activation_bytes for row in rows for held in row.memory):
            yield Entry("memory", "messages", "messages between stages")
        budgets = {row.budget for row in rows if row.budget is not None}
        if budgets:
            amount = f" {amount_text(budgets.pop(), self.slots_each)}" if len(budgets) == 1 else ""
            yield Entry("budget", "", f"budget{amount}")


def compose(timelines: Sequence[Timeline], *, title: str | None = None, window: Window | None = None) -> Scene:
    """Make the scene of timelines on one time axis.

    Memory is in bytes if all timelines know them, and otherwise in slots, which count the memory of microbatches alone.
    """
    begin, end = interval = _interval(timelines, window)
    in_bytes = all(map(knows_bytes, timelines))
    slots_each = None if in_bytes else lcm(*(timeline.plan.slices for timeline in timelines))
    panels: list[Panel] = []
    for timeline in timelines:
        slot = None if slots_each is None else slots_each // timeline.plan.slices
        shown = timeline if slot is None else _in_slots(timeline, slot)
        spent = sum(row.num_boxes for panel in panels for row in panel.rows)
        rows = tuple(_rows(shown, interval, slot, MAX_BOXES - spent))
        is_short = in_bytes and not counts_messages(timeline) and any(map(counts_messages, timelines))
        facts = _facts(shown, slots_each) + ", messages left out" * is_short
        panels.append(Panel(name=plan_title(timeline.plan), facts=facts, rows=rows))
    amounts = [amount for panel in panels for row in panel.rows for amount in (row.device_peak, row.budget or 0)]
    return Scene(
        title=title or "",
        panels=tuple(panels),
        begin_s=begin,
        end_s=end,
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


def _in_slots(timeline: Timeline, slot: int) -> Timeline:
    """Return the same timeline with `slot` for each slot in place of bytes: a rank's own, and its buffers for remote ones."""
    plan, lanes = timeline.plan, []
    for rank, lane in enumerate(timeline.actions):
        # Without backwards nothing is kept: autograd saves nothing.
        own = array("q", (live * slot * plan.has_backward for live in occupancy(plan.actions[rank])))
        buffers = slot * sum(map(len, plan.remote_buffers(rank).values()))
        none = array("q", bytes(8 * len(own)))
        lanes.append(replace(lane, activation_bytes=own, message_bytes=none, static_bytes=0, remote_buffer_bytes=buffers))
    return replace(timeline, actions=tuple(lanes))


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


def _rows(timeline: Timeline, window: Window, slot: int | None, allowance: int) -> Iterator[Row]:
    """Yield a row for each rank; raise as soon as there are too many boxes."""
    for rank in range(timeline.num_ranks):
        row = _row(timeline, rank, window, slot, allowance)
        allowance -= row.num_boxes
        if allowance < 0:
            raise ConfigurationError(
                f"{timeline.plan.name} with {timeline.plan.num_microbatches} microbatches on {timeline.num_ranks} ranks has more "
                f"than the {MAX_BOXES:,} boxes that one picture may have: draw a part of it, window=(from, to) in seconds, "
                f"or --from and --to on the command line"
            )
        yield row


def _row(timeline: Timeline, rank: int, window: Window, slot: int | None, allowance: int) -> Row:
    plan = timeline.plan
    limit = plan.slots[rank] if slot is not None else plan.budgets[rank] if plan.budgets is not None else None
    transfers = filter(_is_drawn, timeline.transfers(rank))
    spans = timeline.computations(rank), timeline.waits(rank), timeline.fills(rank), transfers
    return Row(
        rank=rank,
        stages=tuple(plan.stages_of(rank)),
        units=plan.units,
        strips=tuple(strip for strip in _strips(*(list(_within(some, window, allowance)) for some in spans)) if strip.spans),
        is_measured=timeline.source == "measured",
        memory=_steps(timeline, rank, window),
        stays=timeline.actions[rank].static_bytes,
        peak=timeline.peak_bytes(rank),
        device_peak=timeline.device_peak_bytes(rank),
        budget=None if limit is None else limit * (slot or 1),
    )


def _within(spans: Iterable[Span], window: Window, allowance: int) -> Iterator[Span]:
    """Yield the spans that reach into the window, but at most one more than is allowed."""
    begin, end = window
    return islice((span for span in spans if span.end_s >= begin and span.begin_s <= end), allowance + 1)


def _is_drawn(transfer: Span) -> bool:
    """Return whether a transfer has a box: a receive is its send's other end, and a send that takes no time is mere clutter."""
    return transfer.action.op in OUT or transfer.action.op in IN or (transfer.action.op in SENT and transfer.seconds > 0)


def _strips(computations: list[Span], waits: list[Span], fills: list[Span], transfers: list[Span]) -> Iterator[Strip]:
    """Yield a row's boxes, the lowest layer first.

    A wait for a transfer is drawn thicker than one for another rank's result.
    """
    for (top, bottom), side in _side_by_side(computations).items():
        yield Strip("compute", 0, top, bottom, tuple(side))
    for share, is_for_move in ((0.14, False), (0.34, True)):
        some = (span for span in waits if (span.action.op in (Op.WAIT_EVICT, Op.WAIT_LOAD)) == is_for_move)
        yield Strip("wait", 0, (1 - share) / 2, (1 + share) / 2, tuple(some))
    yield Strip("fill", 0, (1 - FILL_SHARE) / 2, (1 + FILL_SHARE) / 2, tuple(fills))
    leaving, arriving = (_tracks(span for span in transfers if span.action.op in ops) for ops in (OUT, IN))
    step = 1 / max(2, len(leaving) + len(arriving))
    for index, track in enumerate((*leaving, *arriving), start=not leaving and len(arriving) == 1):
        yield Strip("move", 1, step * (index + 0.15), step * (index + 1), track)
    for index, op in enumerate(SENT, start=1):
        yield Strip("send", 2, index / 3, (index + 1) / 3, tuple(span for span in transfers if span.action.op is op))


def _side_by_side(computations: Sequence[Span]) -> dict[tuple[float, float], list[Span]]:
    """Return computations by the share of a row's height that they take: all of it, or half of it where two overlap in time."""
    found: dict[tuple[float, float], list[Span]] = {(0.0, 1.0): [], (0.0, 0.5): [], (0.5, 1.0): []}
    share = (0.0, 1.0)
    for span, following in zip_longest(computations, computations[1:]):
        is_second = share == (0.0, 0.5)
        is_first = not is_second and following is not None and following.begin_s < span.end_s - ROUNDING * span.seconds
        share = (0.5, 1.0) if is_second else (0.0, 0.5) if is_first else (0.0, 1.0)
        found[share].append(span)
    return found


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


def _facts(timeline: Timeline, slots_each: int | None) -> str:
    """Return one line of numbers on a timeline."""
    plan, ranks, makespan = timeline.plan, range(timeline.num_ranks), timeline.makespan_s
    bubble = 1 - min(map(timeline.work_s, ranks)) / makespan if makespan else 0.0
    several = f", {plan.num_stages // plan.num_ranks} stages each" if plan.num_ranks != plan.num_stages else ""
    step = "" if timeline.step is None else f" in step {timeline.step}"
    slices = f" of k = {plan.slices} slices" if plan.units.are_slices else ""
    filled = sum(span.seconds for rank in ranks for span in timeline.fills(rank)) / (makespan * len(ranks) or 1.0)
    fill = f" (fill job {filled:.1%})" if filled else ""
    fullest, device = timeline.fullest_rank, "device " * (slots_each is None)
    facts = (
        f"p = {plan.num_ranks}{several}, m = {plan.num_microbatches}{slices}",
        f"makespan {show_seconds(makespan)}",
        f"largest bubble {bubble:.1%}{fill}",
        f"fullest rank {fullest}: {device}{amount_text(timeline.device_peak_bytes(fullest), slots_each)}",
        f"{timeline.source}{step}",
    )
    return "   \N{MIDDLE DOT}   ".join(facts)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and how many of it make a second."""
    for unit, per_second in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_second >= 1:
            return unit, per_second
    return "\N{MICRO SIGN}s", 1e6


def amount_text(amount: int, slots_each: int | None = None) -> str:
    """Write an amount of memory for people: `3.25 GiB`, `3 slots`, or `1.75 microbatches` if these take several slots each."""
    if slots_each is None:
        return show_bytes(amount)
    if slots_each > 1:
        return f"{amount / slots_each:.4g} microbatch{'' if amount == slots_each else 'es'}"
    return f"{amount} slot{'' if amount == 1 else 's'}"
