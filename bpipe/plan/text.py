"""Write and read plans: bpipe's own text, which is complete, and the CSV that torch.distributed.pipelining reads."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from bpipe.errors import ConfigurationError, PlanError, is_printable
from bpipe.flow.flow import Flow, Shape
from bpipe.flow.shaping import made_by
from bpipe.plan.action import START_OF, Action, MicrobatchKey, Op
from bpipe.plan.plan_data import PlanData
from bpipe.plan.sizes import Amount, Sizes, StageSizes

__all__: list[str] = []

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

HEADER = re.compile(r"bpipe-plan 2 name=(?P<name>\S+) slots=(?P<slots>[\d,-]+)", re.ASCII)
SHAPE = re.compile(r"flow (?P<name>[a-z_]{1,32}) (?P<arguments>\[.*\])", re.ASCII)
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", re.ASCII)  # as torch writes it
OF_CSV = ("slices", "sums")  # shapes beside a chain that a CSV can tell, or that are known anew where it is read
MOST_NAME = 256  # characters
MOST_DIGITS = 18
MOST_SHOWN = 60  # of what could not be read, in an error
BETWEEN = "between"  # beside the names of amounts
GRADIENT = Amount._fields.index("gradient")  # may be as large as the value


def wrong_with_name(name: str) -> str:
    """Return why a plan cannot have that name, which is read back as a word and shown on terminals; empty if it can."""
    if name.split() != [name]:
        return f"the name {name[:MOST_SHOWN]!r} is not a single word: a plan's text is read word by word"
    if len(name) > MOST_NAME or not is_printable(name):
        return f"the name {name[:MOST_SHOWN]!r} has more than {MOST_NAME} characters, or such as control a terminal"
    return ""


def to_text(plan: PlanData) -> str:
    """Write a header, what the plan computes, then one line per rank and lane; a peer is written unless the flow implies it."""
    lines = [f"bpipe-plan 2 name={plan.name} slots={','.join('-' if k is None else str(k) for k in plan.slots)}"]
    lines += [f"flow {name} {json.dumps(arguments, separators=(',', ':'))}" for name, arguments in plan.flow.shapes]
    if plan.sizes is not None:
        for number, stages in enumerate(plan.sizes.by_unit):
            names = [f"{stage}/{number}" if plan.sizes.later_slices else f"{stage}" for stage in range(len(stages))]
            lines += [f"size {name}: {stage_text(s)}" for name, s in zip(names, stages)]
        lines.append(f"static: {' '.join(map(str, plan.sizes.static))}")
    if plan.budgets is not None:
        lines.append(f"budgets: {' '.join('-' if budget is None else str(budget) for budget in plan.budgets)}")
    for kind, lanes in (("rank", plan.actions), ("serve", plan.served)):
        for rank, lane in enumerate(lanes):
            lines.append(" ".join([f"{kind} {rank}:", *_words(plan, lane, partial(_write, plan))]))
    return "\n".join(lines) + "\n"


def from_text(text: str, plan_class: type[AnyPlan]) -> AnyPlan:
    """Read the lines that `to_text` wrote into a plan of some class."""
    head, *lines = text.splitlines() or [""]
    match = HEADER.fullmatch(head)
    if match is None:
        raise PlanError(f"not a plan: the first line is {head[:80]!r}, expected 'bpipe-plan 2 name=... slots=...'")
    if wrong := wrong_with_name(match["name"]):
        raise PlanError(f"not a plan: {wrong}")
    try:
        slots = tuple(map(_limit, match["slots"].split(",")))
    except ValueError as error:
        raise PlanError(f"not a plan: slots={match['slots'][:MOST_SHOWN]!r} is not a list of numbers and '-'") from error
    num_shapes = sum(line.startswith("flow ") for line in lines)
    flow = _read_flow(lines[:num_shapes])
    num_read = num_shapes + sum(line.startswith(("size ", "static:", "budgets:")) for line in lines)
    plan = plan_class(name=match["name"], flow=flow, slots=slots, actions=(), served=())
    sizes, budgets = _read_sizes(lines[num_shapes:num_read], plan.num_stages)
    return replace(plan, sizes=sizes, budgets=budgets, **_read_lanes(list(enumerate(lines, start=2))[num_read:], plan))


def _read_flow(lines: Sequence[str]) -> Flow:
    """Make the flow whose shapes are written one a line, each with its arguments."""
    shapes: list[Shape] = []
    try:
        for line in lines:
            match = SHAPE.fullmatch(line)
            if match is None:
                raise ValueError(f"{line[:MOST_SHOWN]!r} is no shape of a flow: expected such as 'flow chain [[0,1],4,true]'")
            shapes.append(Shape(match["name"], _tuples(json.loads(match["arguments"], parse_int=_whole))))
        return made_by(shapes)
    except (RecursionError, TypeError, ValueError) as error:
        raise PlanError(f"not a plan: what it computes cannot be read: {error!s:.300}") from error


def _tuples(value: Any) -> Any:
    """Return what was read with tuples in the place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _read_lanes(lines: Iterable[tuple[int, str]], plan: PlanData) -> dict[str, Any]:
    """Return the fields of a plan that its lines of actions tell."""
    overlapped: set[MicrobatchKey] = set()
    lanes = {"rank": list[tuple[Action, ...]](), "serve": list[tuple[Action, ...]]()}
    implied = partial(_with_peer, plan)
    for number, line in lines:
        start, _, words = line.partition(":")
        kind, _, rank = start.partition(" ")
        if kind not in lanes or rank != str(len(lanes[kind])):
            raise PlanError(f"not a plan: line {number} starts {line[:40]!r}, expected 'rank N:' or 'serve N:' in ascending order")
        actions = (action for word in words.split() for action in read_word(word, plan.units, overlapped))
        lanes[kind].append(tuple(map(implied, actions)))
    if not lanes["rank"]:
        raise PlanError("not a plan: it has no line that starts 'rank 0:'")
    return {"actions": tuple(lanes["rank"]), "served": tuple(lanes["serve"]), "overlapped": frozenset(overlapped)}


def _whole(word: str) -> int:
    """Read a number whose digits are few enough for any sum of such numbers to be shown and stored."""
    if not (word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS):
        raise ValueError(f"{word[:MOST_SHOWN]!r} is not a whole number of at most {MOST_DIGITS} digits")
    return int(word)


def _limit(word: str) -> int | None:
    return None if word == "-" else _whole(word)


def stage_text(stage: StageSizes) -> str:
    """Write a stage's sizes as words that `read_stage` reads."""
    words = [",".join(map(str, stage.parts)), str(stage.fixed)]
    words += [f"{BETWEEN}={stage.between}"] * (stage.between is not None)
    for name, *numbers in stage.amounts:
        while numbers and not numbers[-1] and (len(numbers) != GRADIENT or numbers[-1] is None):
            numbers.pop()
        words.append(f"{name}={':'.join('-' if number is None else str(number) for number in numbers)}")
    return " ".join(words)


def _read_sizes(lines: list[str], num_stages: int) -> tuple[Sizes | None, tuple[int | None, ...] | None]:
    """Read the lines of sizes and of budgets, if there are any."""
    stages: list[StageSizes] = []  # of the first slice on all stages, then of the second one, ...
    is_sliced = bool(lines) and lines[0].startswith("size 0/0:")
    sizes: Sizes | None = None
    budgets: tuple[int | None, ...] | None = None
    for line in lines:
        kind, _, words = line.partition(":")
        number, stage = divmod(len(stages), num_stages)  # of the next slice and stage
        try:
            if kind == (f"size {stage}/{number}" if is_sliced else f"size {len(stages)}"):
                stages.append(read_stage(words.split()))
            elif kind == "static" and sizes is None:
                sizes = Sizes(stages=(), static=tuple(map(_whole, words.split())))
            elif kind == "budgets" and budgets is None:
                budgets = tuple(map(_limit, words.split()))
            else:
                raise ValueError("stages are not in ascending order, or a line is there twice")
        except ValueError as error:
            raise PlanError(f"not a plan: the sizes in {line[:MOST_SHOWN]!r} cannot be read: {error}") from error
    if bool(stages) != (sizes is not None):
        raise PlanError(f"not a plan: sizes of {len(stages)} stages, and {'no' if sizes is None else 'a'} line of static bytes")
    if sizes is not None:
        first, *later = (
            [tuple(stages[i : i + num_stages]) for i in range(0, len(stages), num_stages)] if is_sliced else [tuple(stages)]
        )
        try:
            sizes = replace(sizes, stages=first, later_slices=tuple(later))
        except ConfigurationError as error:
            raise PlanError(f"not a plan: {error}") from error
    return sizes, budgets


def read_stage(words: list[str]) -> StageSizes:
    """Read the parts of a stage, its fixed bytes, and what has a name.

    Raises:
        ValueError: a word is missing, or is not what stands at its place.
        ConfigurationError: no stage has such sizes.
    """
    parts, fixed, *named = words
    amounts: list[Amount] = []
    between: int | None = None
    for word in named:
        name, _, numbers = word.partition("=")
        each = enumerate(numbers.split(":"), start=1)
        values: list[Any] = [(_limit if at == GRADIENT else _whole)(number) for at, number in each]
        if name == BETWEEN and between is None:
            (between,) = values
        elif name != BETWEEN and len(values) < len(Amount._fields):
            amounts.append(Amount(name, *values))
        else:
            raise ValueError(f"{word[:MOST_SHOWN]!r} has too many numbers, or is no name of bytes, or there twice")
    movable = tuple(map(_whole, parts.split(",")))
    return StageSizes(parts=movable, fixed=_whole(fixed), between=between, amounts=tuple(amounts))


def _write(plan: PlanData, action: Action) -> str:
    if action.peer == _implied_peer(plan, action):
        return plan.show(action)
    return f"{plan.show(action)}{action.at_peer or '@none'}"  # a valid plan never has it, and `parse` refuses it


def _words(plan: PlanData, lane: Sequence[Action], write: Callable[[Action], str]) -> Iterator[str]:
    """Yield the words of a lane: the actions, and a forward and a backward that run side by side as one word."""
    actions = iter(lane)
    for action in actions:
        beside = next(actions, None) if plan.begins_pair(action) else None
        yield write(action) if beside is None else f"({write(action)};{write(beside)})OVERLAP_F_B"


def read_word(word: str, units: int, overlapped: set[MicrobatchKey]) -> list[Action]:
    """Read one action, or a forward and a backward that run side by side, and note the forward of such a pair.

    Raises:
        PlanError: the word is neither.
    """
    if not word.startswith("("):
        return [Action.parse(word, units)]
    match = PAIR.fullmatch(word)
    pair = [Action.parse(one, units) for one in match.groups()] if match else []
    if [action.op for action in pair] != [Op.F, Op.B]:
        raise PlanError(
            f"{word[:MOST_SHOWN]!r} is not a pair: expected a forward and a whole backward, such as (0F7;7B3)OVERLAP_F_B"
        )
    if pair[0].key in overlapped:
        raise PlanError(f"{word[:MOST_SHOWN]!r}: its forward is in another pair already")
    overlapped.add(pair[0].key)
    return pair


def _with_peer(plan: PlanData, action: Action) -> Action:
    return action if action.peer is not None else action._replace(peer=_implied_peer(plan, action))


SEND_WAITS = {Op.WAIT_SEND_F, Op.WAIT_SEND_B}
_NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_B: 1, Op.RECV_F: -1, Op.SEND_B: -1}


def _implied_peer(plan: PlanData, action: Action) -> int | None:
    """Return the rank of the stage with which the flow exchanges a message."""
    offset = _NEIGHBOUR.get(START_OF.get(action.op, action.op))
    if offset is None or action.stage >= plan.num_stages:
        return None
    other = action.part - 1 if action.part else plan.neighbour(action.stage, offset, action.microbatch)
    return plan.stage_ranks[other] if other is not None and other < plan.num_stages else None


def to_csv(plan: PlanData, *, send_waits: bool) -> str:
    """Write one row per rank, with the starts of transfers, and with the waits of sends if torch does not add them itself.

    A plan of slices begins with a cell that says how many a microbatch has, at which torch stops: it would read `0F3/1` as `0F3`.
    """
    actions = [action for lane in plan.actions for action in lane]
    others = [shape.name for shape in plan.flow.shapes[1:] if shape.name not in OF_CSV]
    for what, is_so in (
        ("evicts", any(action.op is Op.EVICT for action in actions)),
        ("recomputes", any(action.op is Op.R for action in actions)),
        (f"is no chain of stages, but has {', '.join(others)}", bool(others)),
    ):
        if is_so:
            raise PlanError(f"{plan.name} {what}, which torch.distributed.pipelining's CSV cannot express: use to_text()")
    ours = START_OF.keys() - (SEND_WAITS if send_waits else set())
    rows = [list(_words(plan, [a for a in lane if a.op not in ours and not a.is_exchange], plan.show)) for lane in plan.actions]
    if plan.units.are_slices:
        rows[0].insert(0, f"slices={plan.units}")
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
