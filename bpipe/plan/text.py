"""Write and read plans: bpipe's own text, which is complete, and the CSV that torch.distributed.pipelining reads."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from bpipe.errors import ConfigurationError, PlanError, is_printable
from bpipe.plan.action import START_OF, Action, MicrobatchKey, Op
from bpipe.plan.plan_data import PlanData
from bpipe.plan.sizes import Sizes, SkipSizes, StageSizes
from bpipe.skips.routes import wrong_with

__all__: list[str] = []

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

HEADER = re.compile(
    r"bpipe-plan 1 name=(?P<name>\S+) microbatches=(?P<microbatches>\d{1,9}) "
    r"stage_ranks=(?P<stage_ranks>\d{1,9}(?:,\d{1,9})*) slots=(?P<slots>[\d,-]+) backward=(?P<backward>[01])"
    r"(?: slices=(?P<slices>\d{1,9}))?(?: directions=(?P<directions>\d{1,9}))?"
    r"(?: skips=(?P<skips>\d{1,9}(?:>\d{1,9})+(?:,\d{1,9}(?:>\d{1,9})+)*))?"
    r"(?: paths=(?P<paths>\d{1,9}(?:-\d{1,9})*(?:,\d{1,9}(?:-\d{1,9})*)*))?(?P<local> local)?",
    re.ASCII,
)

PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", re.ASCII)  # as torch writes it
MOST_NAME = 256  # characters
MOST_DIGITS = 18
MOST_SHOWN = 60  # of what could not be read, in an error
NUMBERS = ("fixed", "received", "sent", "kept_received", "kept_sent", "between")  # of a stage, the last one if there is one
NAMED = ("state", "given", "collected", "gradients", "results", "kept_results")  # likewise, by name, where they are not 0


def wrong_with_name(name: str) -> str:
    """Return why a plan cannot have that name, which is read back as a word and shown on terminals; empty if it can."""
    if name.split() != [name]:
        return f"the name {name[:MOST_SHOWN]!r} is not a single word: a plan's text is read word by word"
    if len(name) > MOST_NAME or not is_printable(name):
        return f"the name {name[:MOST_SHOWN]!r} has more than {MOST_NAME} characters, or such as control a terminal"
    return ""


def to_text(plan: PlanData) -> str:
    """Write a header, then one line per rank and lane; a peer is written unless it is the neighbour that the placement implies.

    Where microbatches have paths, every message says where it goes.
    """
    slots = ",".join("-" if k is None else str(k) for k in plan.slots)
    lines = [
        f"bpipe-plan 1 name={plan.name} microbatches={plan.num_microbatches} "
        f"stage_ranks={','.join(map(str, plan.stage_ranks))} slots={slots} backward={int(plan.has_backward)}"
        + f" slices={plan.slices}" * (plan.slices > 1)
        + f" directions={plan.directions}" * (plan.directions > 1)
        + (f" skips={','.join('>'.join(map(str, skip)) for skip in plan.skips)}" if plan.skips else "")
        + (f" paths={','.join('-'.join(map(str, path)) for path in plan.paths)}" if plan.paths else "")
        + " local" * plan.local
    ]
    if plan.sizes is not None:
        for number, stages in enumerate(plan.sizes.by_slice):
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
        raise PlanError(f"not a plan: the first line is {head[:80]!r}, expected 'bpipe-plan 1 name=... microbatches=...'")
    num_sizes = sum(line.startswith(("size ", "static:", "budgets:")) for line in lines)
    plan = plan_class(**_described(match), actions=(), served=())
    sizes, budgets = _read_sizes(lines[:num_sizes], plan.num_stages)
    return replace(plan, sizes=sizes, budgets=budgets, **_read_lanes(list(enumerate(lines, start=2))[num_sizes:], plan))


def _described(match: re.Match[str]) -> dict[str, Any]:
    """Return the fields of a plan that its first line tells."""
    if wrong := wrong_with_name(match["name"]):
        raise PlanError(f"not a plan: {wrong}")
    stage_ranks = tuple(map(int, match["stage_ranks"].split(",")))
    try:
        slots = tuple(map(_limit, match["slots"].split(",")))
    except ValueError as error:
        raise PlanError(f"not a plan: slots={match['slots'][:MOST_SHOWN]!r} is not a list of numbers and '-'") from error
    slices, directions = int(match["slices"] or 1), int(match["directions"] or 1)
    if slices < 1:
        raise PlanError("not a plan: slices=0, expected at least 1")
    if directions not in (1, 2) or len(stage_ranks) % directions:
        raise PlanError(f"not a plan: {len(stage_ranks)} stages in directions={directions}, expected 1, or 2 with half each")
    paths = tuple(tuple(map(int, path.split("-"))) for path in (match["paths"] or "").split(",") if path)
    skips = tuple(tuple(map(int, skip.split(">"))) for skip in (match["skips"] or "").split(",") if skip)
    if wrong := wrong_with(skips, len(paths[0]) if paths else len(stage_ranks) // directions):
        raise PlanError(f"not a plan: {wrong}")
    return {
        "name": match["name"],
        "num_microbatches": int(match["microbatches"]),
        "stage_ranks": stage_ranks,
        "slots": slots,
        "has_backward": match["backward"] == "1",
        "slices": slices,
        "directions": directions,
        "skips": skips,
        "local": match["local"] is not None,
        "paths": paths,
    }


def _read_lanes(lines: Iterable[tuple[int, str]], plan: PlanData) -> dict[str, Any]:
    """Return the fields of a plan that its lines of actions tell."""
    overlapped: set[MicrobatchKey] = set()
    lanes = {"rank": list[tuple[Action, ...]](), "serve": list[tuple[Action, ...]]()}
    implied = partial(_with_peer, stage_ranks=plan.stage_ranks, depth=plan.depth)
    for number, line in lines:
        start, _, words = line.partition(":")
        kind, _, rank = start.partition(" ")
        if kind not in lanes or rank != str(len(lanes[kind])):
            raise PlanError(f"not a plan: line {number} starts {line[:40]!r}, expected 'rank N:' or 'serve N:' in ascending order")
        actions = (action for word in words.split() for action in read_word(word, plan.slices, overlapped))
        lanes[kind].append(tuple(actions) if plan.paths else tuple(map(implied, actions)))
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
    numbers = [getattr(stage, name) for name in NUMBERS]
    named = [f"{name}={number}" for name in NAMED if (number := getattr(stage, name))]
    skips = f"skips={','.join(':'.join(map(str, skip)) for skip in stage.skips)}"
    in_order = (str(number) for number in numbers if number is not None)
    return " ".join([",".join(map(str, stage.parts)), *in_order, *named, *([skips] if stage.skips else [])])


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
    """Read the parts of a stage, its numbers in order, and then those of slices by their names.

    Raises:
        ValueError: a word is missing, or is not what stands at its place.
        ConfigurationError: no stage has such sizes.
    """
    parts, *numbers = words
    named: dict[str, int] = {}
    words = numbers.pop().removeprefix("skips=").split(",") if numbers and numbers[-1].startswith("skips=") else []
    while numbers and "=" in numbers[-1]:
        name, _, number = numbers.pop().partition("=")
        if name not in NAMED or name in named:
            raise ValueError(f"{name[:MOST_SHOWN]}= is unknown, or there twice")
        named[name] = _whole(number)
    if len(numbers) not in (len(NUMBERS) - 1, len(NUMBERS)):
        raise ValueError(f"{len(numbers)} numbers")
    in_order, skips = dict(zip(NUMBERS, map(_whole, numbers))), tuple(map(_read_skip, words))
    return StageSizes(parts=tuple(map(_whole, parts.split(","))), **in_order, **named, skips=skips)


def _read_skip(word: str) -> SkipSizes:
    numbers = list(map(_whole, word.split(":")))
    if len(numbers) != len(SkipSizes._fields):
        raise ValueError(f"a skip with {len(numbers)} numbers")
    return SkipSizes(*numbers)


def _write(plan: PlanData, action: Action) -> str:
    if action.peer == (None if plan.paths else _implied_peer(action, plan.stage_ranks, plan.depth)):
        return plan.show(action)
    return f"{plan.show(action)}{action.at_peer or '@none'}"  # a valid plan never has it, and `parse` refuses it


def _words(plan: PlanData, lane: Sequence[Action], write: Callable[[Action], str]) -> Iterator[str]:
    """Yield the words of a lane: the actions, and a forward and a backward that run side by side as one word."""
    actions = iter(lane)
    for action in actions:
        beside = next(actions, None) if plan.begins_pair(action) else None
        yield write(action) if beside is None else f"({write(action)};{write(beside)})OVERLAP_F_B"


def read_word(word: str, slices: int, overlapped: set[MicrobatchKey]) -> list[Action]:
    """Read one action, or a forward and a backward that run side by side, and note the forward of such a pair.

    Raises:
        PlanError: the word is neither.
    """
    if not word.startswith("("):
        return [Action.parse(word, slices)]
    match = PAIR.fullmatch(word)
    pair = [Action.parse(one, slices) for one in match.groups()] if match else []
    if [action.op for action in pair] != [Op.F, Op.B]:
        raise PlanError(
            f"{word[:MOST_SHOWN]!r} is not a pair: expected a forward and a whole backward, such as (0F7;7B3)OVERLAP_F_B"
        )
    if pair[0].key in overlapped:
        raise PlanError(f"{word[:MOST_SHOWN]!r}: its forward is in another pair already")
    overlapped.add(pair[0].key)
    return pair


def _with_peer(action: Action, stage_ranks: tuple[int, ...], depth: int) -> Action:
    return action if action.peer is not None else action._replace(peer=_implied_peer(action, stage_ranks, depth))


SEND_WAITS = {Op.WAIT_SEND_F, Op.WAIT_SEND_B}
_NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_B: 1, Op.RECV_F: -1, Op.SEND_B: -1}


def _implied_peer(action: Action, stage_ranks: tuple[int, ...], depth: int) -> int | None:
    offset = _NEIGHBOUR.get(START_OF.get(action.op, action.op))
    if offset is not None and action.part:
        return stage_ranks[action.part - 1] if action.part <= len(stage_ranks) else None
    if offset is None or action.stage >= len(stage_ranks) or not 0 <= action.stage % depth + offset < depth:
        return None
    return stage_ranks[action.stage + offset]


def to_csv(plan: PlanData, *, send_waits: bool) -> str:
    """Write one row per rank, with the starts of transfers, and with the waits of sends if torch does not add them itself.

    A plan of slices begins with a cell that says how many a microbatch has, at which torch stops: it would read `0F3/1` as `0F3`.
    """
    actions = [action for lane in plan.actions for action in lane]
    for what, is_so in (
        ("evicts", any(action.op is Op.EVICT for action in actions)),
        ("recomputes", any(action.op is Op.R for action in actions)),
        ("has two directions", plan.directions > 1),
        ("has skips", bool(plan.skips)),
        ("keeps gradients in their stages", plan.local),
        ("has paths", bool(plan.paths)),
    ):
        if is_so:
            raise PlanError(f"{plan.name} {what}, which torch.distributed.pipelining's CSV cannot express: use to_text()")
    ours = START_OF.keys() - (SEND_WAITS if send_waits else set())
    rows = [list(_words(plan, [a for a in lane if a.op not in ours], plan.show)) for lane in plan.actions]
    if plan.slices > 1:
        rows[0].insert(0, f"slices={plan.slices}")
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
