"""How long the bytes of skips count on a rank: from one action to the last of several others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bpipe.plan.action import COMPUTE, MESSAGES, Action, Op
from bpipe.plan.sizes import SkipSizes, StageSizes
from bpipe.skips.routes import Skip, users_by_rank

__all__: list[str] = []

Event = tuple[Op, int, int]  # an operation, its stage, and the part of a message of skips; B stands for I as well
Changes = dict[int, int]  # the bytes that begin to count at an action, or stop, by its place in a lane


class Hold(NamedTuple):
    """Bytes that count on a rank for each unit.

    Args:
        num_bytes: how many.
        begin: the action at which they begin to count; while that is in no lane, they never do.
        begins_before: whether they count while that action runs.
        ends: they stop to count at the last of these.
        ends_before: whether they count no more while that action runs.
    """

    num_bytes: int
    begin: Event
    begins_before: bool
    ends: Sequence[Event]
    ends_before: bool = False


def holds_of(stages: Sequence[StageSizes], skips: Sequence[Skip], stage_ranks: Sequence[int], depth: int) -> tuple[Hold, ...]:
    """Return what the skips of a unit take besides what stages have saved and the messages between neighbours.

    Args:
        stages: the sizes on each stage; those that say nothing of a skip do not count it.
        skips: of the plan.
        stage_ranks: of the plan.
        depth: how many stages a unit passes.
    """
    found: list[Hold] = []
    for first in range(0, len(stage_ranks), depth):
        for place, skip in enumerate(skips):
            source, *users = (first + stage for stage in skip)
            at = {stage: one for stage in (source, *users) for one in stages[stage].skips if one.place == place}
            by_rank = users_by_rank(users, stage_ranks)
            local = by_rank.pop(stage_ranks[source], [])
            if source in at:
                own = at[source]
                behind = stages[source + 1]
                found += _made(source, own, local, [of_rank[0] for of_rank in by_rank.values()], at, stage_ranks, behind)
                found += _returned(source, own.gradient, [of_rank[0] for of_rank in by_rank.values()])
            for of_rank in by_rank.values():
                found += _received(source, of_rank, at)
            for of_rank in (local, *by_rank.values()):
                found += _gradients(source, of_rank, at, is_local=of_rank is local)
    return tuple(hold for hold in found if hold.num_bytes)


def _made(
    source: int,
    own: SkipSizes,
    local: Sequence[int],
    firsts: Sequence[int],
    at: Mapping[int, SkipSizes],
    stage_ranks: Sequence[int],
    behind: StageSizes,
) -> Iterator[Hold]:
    """Yield what the source holds until its messages are sent, and until stages of its rank have used it."""
    ends: list[Event] = [(Op.WAIT_SEND_F, source, first + 1) for first in firsts if first != source + 1]
    ends += [(Op.F, user, 0) for user in local[-1:]]
    is_next_door = stage_ranks[source] == stage_ranks[source + 1]
    passed: Event = (Op.F, source + 1, 0) if is_next_door else (Op.WAIT_SEND_F, source, 0)  # until then, the output counts
    sends, made = [end for end in ends if end[0] is not Op.F], own.num_bytes - own.kept
    yield from _until_kept(made - own.joint, (Op.F, source, 0), local, at, ends or [passed], is_before=True)
    for user in (user for user in local if user in at and sends):  # it may have run backward before all is sent
        kept = min(made, at[user].kept)
        yield Hold(kept, (Op.B, user, 0), False, sends)
        made -= kept
    kept_behind = at[source + 1].kept if source + 1 in local and source + 1 in at else 0
    if is_next_door and source + 1 not in local and behind.kept_received == behind.received:
        kept_behind = own.joint  # the next stage saves its whole input, and so counts the value, which is in it
    others = [user for user in local if user != source + 1]
    if ends:
        yield from _until_kept(max(0, own.joint - kept_behind), passed, others, at, ends, is_before=False)


def _received(source: int, users: Sequence[int], at: Mapping[int, SkipSizes]) -> Iterator[Hold]:
    """Yield what a rank holds of another rank's value, from its receipt until its last user."""
    first, *later = users
    if first not in at:
        return
    own, last = at[first], (Op.F, users[-1], 0)
    if first == source + 1:  # until then it counts as the stage's input
        if later:
            yield from _until_kept(own.num_bytes - own.kept, (Op.F, first, 0), later, at, [last], is_before=False)
        return
    yield from _until_kept(own.num_bytes, (Op.RECV_F, first, source + 1), users, at, [last], is_before=True)


def _until_kept(
    num_bytes: int, begin: Event, users: Iterable[int], at: Mapping[int, SkipSizes], ends: Sequence[Event], *, is_before: bool
) -> Iterator[Hold]:
    """Yield holds of a value's bytes, those that a stage saves until that stage's forward, where its saved bytes begin to count."""
    rest = num_bytes
    for user in users:
        kept = min(rest, at[user].kept) if user in at else 0
        yield Hold(kept, begin, is_before, [(Op.F, user, 0)], ends_before=True)
        rest -= kept
    yield Hold(rest, begin, is_before, ends)


def _returned(source: int, gradient: int, firsts: Sequence[int]) -> Iterator[Hold]:
    """Yield the gradients that come back to the source from other ranks."""
    for first in firsts:
        if first != source + 1:
            yield Hold(gradient, (Op.RECV_B, source, first + 1), True, [(Op.B, source, 0)])


def _gradients(source: int, users: Sequence[int], at: Mapping[int, SkipSizes], *, is_local: bool) -> Iterator[Hold]:
    """Yield the gradients that the users on a rank make: added up until the first one's backward, then on their way back."""
    for user in (user for user in users if user in at):
        begin = Op.B, user, 0
        if user != users[0]:  # the last one runs backward first; to its gradient the others add theirs
            yield Hold(at[user].gradient, begin, True, [(Op.B, users[0], 0) if user == users[-1] else begin])
        elif user != source + 1:
            yield Hold(at[user].gradient, begin, True, [(Op.B, source, 0) if is_local else (Op.WAIT_SEND_B, user, source + 1)])


def changes(lane: Sequence[Action], holds: Sequence[Sequence[Hold]]) -> tuple[Changes, Changes]:
    """Return the bytes that begin to count before actions of a lane, and those that stop behind them, by place in the lane.

    Args:
        lane: a rank's actions.
        holds: of consecutive units, which begin with the first again after the last.
    """
    first: dict[tuple[Op, int, int, int], int] = {}
    last: dict[tuple[Op, int, int, int], int] = {}
    again: dict[tuple[Op, int, int, int], int] = {}  # the second of two forwards
    units: dict[int, None] = {}
    for index, (op, stage, unit, part, _) in enumerate(lane):
        if op in COMPUTE or op in MESSAGES:
            key = (Op.B if op is Op.I else op, stage, unit, part if op in MESSAGES else 0)
            first.setdefault(key, index)
            last[key] = index
            units[unit] = None
        if op is Op.R:
            again[Op.F, stage, unit, 0] = index
    ending = last | again
    takes, gives = defaultdict[int, int](int), defaultdict[int, int](int)
    for unit in units:
        for num_bytes, (op, stage, part), begins_before, ends, ends_before in holds[unit % len(holds)]:
            begin = (first if begins_before else last).get((op, stage, unit, part))
            end = max((ending.get((o, s, unit, p), -1) for o, s, p in ends), default=-1)
            if begin is None or end < begin or (end == begin and not begins_before):
                continue
            for index, change, is_before in ((begin, num_bytes, begins_before), (end, -num_bytes, ends_before)):
                if is_before:
                    takes[index] += change
                else:
                    gives[index] -= change
    return takes, gives
