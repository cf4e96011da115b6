"""Plans as text for people: a grid over time, and an excerpt that points at one action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from bpipe.plan.action import COMPUTE, HOST, Action, Op
from bpipe.plan.amounts import show_each
from bpipe.plan.order import UNITS, clock_of
from bpipe.plan.plan_data import PlanData

__all__: list[str] = []

EITHER_SIDE = 5
MOST_MARKS = 16  # in a cell
MOST_CELLS = 1_000_000  # of a grid that is drawn as a whole
MOST_SCANNED = 100_000  # actions of a plan that is looked through for a line about it, which loggers print
AROUND = 12  # columns before and after the ranks' places
MARKS = {Op.EVICT: ">^", Op.LOAD: "<v"}  # to and from another rank, or the host


Row = tuple[str, list[str]]  # its label and its cells


def rows(plan: PlanData, columns: slice = slice(None)) -> list[str]:
    """Draw one line per rank, one column per forward's time: `F0`, `B0 b0` for the two units of a backward, `..` for idle.

    With several stages on a rank, the stage is written too (`4F0`), with slices the slice (`F0/1`), and parentheses around a
    forward and a backward that run side by side (`(0F7 7B3 7b3)`). Below a rank that
    evicts, `>3` stands where the eviction of microbatch 3, or of parts of it, starts and `<3` where its load does; `^3` and `v3` if
    these go to the host.
    """
    return _lines(_grid(plan, columns))


def _lines(grid: Sequence[Row]) -> list[str]:
    width, label = _widths(grid)
    return [f"{name:<{label}} | " + " ".join(f"{cell:<{width}}" for cell in cells).rstrip() for name, cells in grid]


def num_fitting(plan: PlanData, first: int, width: int) -> int:
    """Return how many columns, from the first one on, fit into lines of a given width; at least one."""
    grid = _grid(plan, slice(first, first + width))
    fitting = 1
    for columns in range(2, 1 + len(grid[0][1])):
        cell, label = _widths([(name, cells[:columns]) for name, cells in grid])
        if label + len(" |") + columns * (1 + cell) > width:
            break
        fitting = columns
    return fitting


def where(plan: PlanData, positions: Mapping[int, int], names: Sequence[str]) -> list[str]:
    """Draw the grid around some ranks' positions, with `>` and `<` around the computation that each runs or waits for.

    Args:
        positions: the position of an action in the lane of each of these ranks, by rank of the plan.
        names: the names of the plan's ranks.
    """
    lanes, starts, length = _clocked(plan)
    stuck = {rank: starts[rank][_num_done(plan, rank, position)] for rank, position in positions.items() if starts[rank]}
    window = range(max(min(stuck.values()) - AROUND, 0), min(max(stuck.values()) + AROUND, length))
    grid: list[Row] = []
    for rank, (lane, times) in enumerate(zip(lanes, starts)):
        cells = _cells(plan, lane, times, window)
        if rank in stuck:
            cells[stuck[rank] - window.start] = f">{cells[stuck[rank] - window.start]}<"
        grid.append((names[rank], cells))
    return _lines(grid)


def _num_done(plan: PlanData, rank: int, position: int) -> int:
    """Return how many of a rank's computations have ended before a position of its lane; one less if all have."""
    lane = plan.actions[rank]
    done = sum(action.op in COMPUTE for action in lane[:position])
    return min(done, sum(action.op in COMPUTE for action in lane) - 1)


class _Clocked(NamedTuple):
    """The computations of each rank, the column where each starts, and the number of columns."""

    lanes: list[list[Action]]
    starts: Sequence[Sequence[int]]
    length: int


def _clocked(plan: PlanData) -> _Clocked:
    lanes = [plan.compute(rank) for rank in range(plan.num_ranks)]
    starts, _ = clock_of(plan, lanes)
    length = max((times[-1] + UNITS[lane[-1].op] for lane, times in zip(lanes, starts) if lane), default=0)
    return _Clocked(lanes, starts, length)


def _grid(plan: PlanData, columns: slice) -> list[Row]:
    return _drawn(plan, _clocked(plan), columns)


def _drawn(plan: PlanData, clocked: _Clocked, columns: slice) -> list[Row]:
    lanes, starts, length = clocked
    window = range(length)[columns]
    grid: list[Row] = []
    for rank, (lane, times) in enumerate(zip(lanes, starts)):
        grid.append((f"rank {rank}", _cells(plan, lane, times, window)))
        moves = {column: text for column, text in _moves(plan, rank, times, length).items() if column in window}
        if moves:
            grid.append(("", [moves.get(column, "") for column in window]))
    return grid


def _widths(grid: Sequence[Row]) -> tuple[int, int]:
    """Return the width of a cell and of a label."""
    return max((len(cell) for _, cells in grid for cell in cells), default=2), max((len(name) for name, _ in grid), default=0)


def _cells(plan: PlanData, lane: Sequence[Action], starts: Sequence[int], window: range) -> list[str]:
    """Return the computation of a rank in each column of a window."""
    cells = [".."] * len(window)
    several = plan.num_stages > plan.num_ranks
    is_beside = False  # whether the computation before this one runs side by side with it
    for action, start in zip(lane, starts):
        name = f"{action.stage if several else ''}{action.op}{plan.units.text(action.microbatch)}"
        units = range(UNITS[action.op])
        for unit in units:
            if start + unit in window:
                cell = name if unit == 0 else name.lower()
                is_end = is_beside and unit == units[-1]
                cells[start + unit - window.start] = f"({cell}" if plan.begins_pair(action) else f"{cell})" if is_end else cell
        is_beside = plan.begins_pair(action)
    return cells


def _moves(plan: PlanData, rank: int, starts: Sequence[int], length: int) -> dict[int, str]:
    """Return the marks of evictions and loads by column: that of the computation that follows."""
    moves: dict[int, dict[str, None]] = {}
    done = 0
    for action in plan.actions[rank]:
        if action.op in COMPUTE:
            done += 1
        elif action.op in MARKS:
            column = starts[min(done, len(starts) - 1)]
            mark = f"{MARKS[action.op][action.peer == HOST]}{plan.units.text(action.microbatch)}"
            moves.setdefault(min(column, length - 1), {})[mark] = None
    return {column: "".join(islice(marks, MOST_MARKS)) + "+" * (len(marks) > MOST_MARKS) for column, marks in moves.items()}


def head(plan: PlanData) -> str:
    """Return a line with the plan's name and peaks: total and activation bytes of each device, or slots."""
    return f"{plan_title(plan)}: {counts(plan)}, {_memory(plan)}"


def short_head(plan: PlanData) -> str:
    """Return the head of a plan, and of a large one what takes no look at each of its actions."""
    is_large = sum(map(len, plan.actions)) > MOST_SCANNED
    return f"{plan.name}: {counts(plan)}" if is_large else head(plan)


def plan_title(plan: PlanData) -> str:
    """Return what a plan is: the name of its schedule, and how it was changed to hold less, such as `1f1b, balanced in bytes`."""
    if sum(map(len, plan.actions)) > MOST_SCANNED:
        return plan.name
    ops = {action.op for lane in plan.actions for action in lane}
    ways = {Op.EVICT: "balanced", Op.R: "recomputed"}
    done = [way for op, way in ways.items() if op in ops and not plan.name.startswith(way)]
    return plan.name + (f", {' and '.join(done)}{' in bytes' * (plan.sizes is not None)}" if done else "")


def counts(plan: PlanData) -> str:
    """Return how many stages or ranks and how many microbatches a plan has."""
    ranks, each = plan.num_ranks, plan.num_stages // max(plan.num_ranks, 1)
    stages = f"{ranks} stage{'s' * (ranks != 1)}" if each == 1 else f"{ranks} rank{'s' * (ranks != 1)} with {each} stages each"
    microbatches = f"{plan.num_microbatches} microbatch{'es' * (plan.num_microbatches != 1)}"
    return f"{stages}, {microbatches}{plan.units.parts}"


def _memory(plan: PlanData) -> str:
    """Describe the peaks and the budgets, in bytes if the plan counts them."""
    if plan.sizes is not None:
        budget = "" if plan.budgets is None else f"; budget {show_each(plan.budgets)}"
        return f"planned: device {show_each(plan.device_peak_bytes)}; activations {show_each(plan.activation_peak_bytes)}{budget}"
    budget = "" if all(k is None for k in plan.slots) else f", budget {' '.join('-' if k is None else str(k) for k in plan.slots)}"
    unit = "slices" if plan.units.are_slices else "slots"
    return f"peak {unit} {' '.join(map(str, plan.peak_slots))}{budget}"


def draw(plan: PlanData) -> str:
    """Draw the grid under its head, or as many of its columns as make a text of bounded size."""
    clocked, most = _clocked(plan), MOST_CELLS // max(plan.num_ranks, 1) + 1
    more = [f"... and {clocked.length - most} more columns"] * (clocked.length > most)
    return "\n".join([head(plan), *_lines(_drawn(plan, clocked, slice(most))), *more])


def excerpt(plan: PlanData, rank: int, served: bool, position: int) -> str:
    """Show a few actions of one lane around a position, one per line, with the one at the position marked."""
    lane = (plan.served if served else plan.actions)[rank]
    first = max(position - EITHER_SIDE, 0)
    lines = [f"rank {rank}{', served' if served else ''}:"]
    for index, action in enumerate(lane[first : position + EITHER_SIDE + 1], start=first):
        peer = "" if action.peer is None else "host" if action.peer == HOST else f"peer {action.peer}"
        lines.append(f"  {index:>5} {plan.show(action):<16}{peer:<10}".rstrip())
        if index == position:
            lines[-1] += "   <-- ERROR HERE"
    return "\n".join(lines)
