"""Who holds the bytes of a unit: from which action on, and until which one.

A value counts from the forward that makes it until it has been sent, or used on this rank; what comes from another rank from its
receive until it has been used; a gradient likewise. Bytes that are also among what a stage has saved count as those, from its
forward to its backward: what is saved and sent is one storage with two holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from bpipe.flow.flow import End, Flow
from bpipe.flow.flow import Kind as EdgeKind
from bpipe.plan.action import COMPUTE, MESSAGES, Action, Op
from bpipe.plan.sizes import IN, LOSS, OUT, STATE, Amount, StageSizes, gradients

__all__: list[str] = []

Kind = tuple[Op, int, int]  # an operation, its stage and part; B stands for I as well
Changes = dict[int, int]  # the bytes that begin to count at an action, or stop, by its place in a lane
SizesAt = Callable[[int], StageSizes]


class Hold(NamedTuple):
    """Bytes that count on a rank for each unit.

    Args:
        num_bytes: how many.
        begin: the action at which they begin to count; while that is in no lane, they never do.
        begins_before: whether they count while that action runs.
        ends: they stop to count at the last of these.
        ends_before: whether they count no more while that action runs.
        runs_twice: whether they count only where the forwards of the stage where they begin run twice, or only where not.
    """

    num_bytes: int
    begin: Kind
    begins_before: bool
    ends: tuple[Kind, ...]
    ends_before: bool = False
    runs_twice: bool | None = None


def holds_of(flow: Flow, turn: int, at: SizesAt, *, again: bool) -> Iterator[Hold]:
    """Yield what a unit takes on the ranks of its stages, but for what moves, and for values with names.

    Args:
        flow: what is computed.
        turn: of the unit.
        at: what it takes on each stage.
        again: whether its forwards run twice, so that the first ones save nothing.
    """
    for part in range(len(flow.routes)):
        own = _Stage(flow, turn, flow.stage_of(part, turn), at, Op.R if again else Op.F)
        yield from (hold for hold in (*own.saved(), *own.outputs(), *own.inputs()) if hold.num_bytes)
    for stage, part in flow.exchanges:  # for all units, because exchanges name the first one
        num_bytes = at(stage)[gradients(part)].num_bytes
        ends = tuple((Op.WAIT_REDUCE_GRAD, *one) for one in flow.exchanges if one[0] == stage)  # what came is added up once all has
        yield Hold(num_bytes, (Op.REDUCE_GRAD, stage, part), True, ends)


def holds_by_order(flow: Flow, turn: int, at: SizesAt) -> Iterator[Hold]:
    """Yield what depends on the order of a plan: values with names, of which some user is the last, and what is sent late."""
    for part in range(len(flow.routes)):
        own = _Stage(flow, turn, flow.stage_of(part, turn), at, Op.F)
        yield from (hold for hold in (*own.sent_late(), *own.values()) if hold.num_bytes)


class _Stage:
    """What a unit takes on one stage.

    Args:
        uses: the forward that saves what the backward needs: the first one, or the one that runs again.
    """

    def __init__(self, flow: Flow, turn: int, stage: int, at: SizesAt, uses: Op) -> None:
        self.flow, self.turn, self.stage, self.at, self.own = flow, turn, stage, at, at(stage)
        self.forward, self.backward = (Op.F, stage, 0), (Op.B, stage, 0)
        self.uses = uses, stage, 0
        self.users = [end for end in flow.gives(Op.F, stage, turn) if end.op == Op.F]
        self.behind = next((end for end in self.users if not end.name), None)
        self.rank = flow.stage_ranks[stage]

    def is_here(self, stage: int) -> bool:
        """Return whether another stage is on this rank."""
        return self.flow.stage_ranks[stage] == self.rank

    def saved(self) -> Iterator[Hold]:
        """Yield what is kept for the backward; a slice's state also between two forwards."""
        yield Hold(self.own.saved, self.uses, True, (self.backward,))
        if self.uses != self.forward:
            yield Hold(self.own[STATE].num_bytes, self.forward, True, (self.uses,))

    def outputs(self) -> Iterator[Hold]:
        """Yield what goes to the next part, or is the result, and the gradient of that."""
        out, behind = self.own[OUT], self.behind
        yield from self._result(self.own[LOSS] if behind else out)
        if behind is None:
            yield Hold(self.own[LOSS].num_bytes, self.forward, True, (self.forward,))
            return
        gone, is_here, alone = (self._gone(behind),), self.is_here(behind.stage), out.num_bytes - out.kept - out.joint
        if self.uses == self.forward:
            yield Hold(out.joint, self.forward, False, gone)
        else:  # the first forward saves nothing of it
            yield Hold(out.kept - out.joint_kept, self.forward, True, gone)
            yield Hold(alone, self.uses, True, (self.uses,))
        there = min(alone, self.at(behind.stage)[IN].kept) if is_here else 0
        yield Hold(there, self.forward, True, gone, ends_before=True)
        yield Hold(alone - there, self.forward, True, gone)
        if behind.kind is EdgeKind.VALUE and is_here:
            yield Hold(self.at(behind.stage)[IN].gradient_bytes, (Op.B, behind.stage, 0), True, (self.backward,))
        elif behind.kind is EdgeKind.VALUE:
            yield Hold(out.gradient_bytes, (Op.RECV_B, self.stage, self._part(behind)), True, (self.backward,))

    def sent_late(self) -> Iterator[Hold]:
        """Yield what was saved of an output that is still under way when its microbatch has run backward, or forward again."""
        if self.behind is None:
            return
        gone, out = (self._gone(self.behind),), self.own[OUT]
        yield Hold(out.joint, (Op.R, self.stage, 0), False, gone)
        if self.flow.has_backward and self.behind.kind is EdgeKind.DETACHED:
            yield Hold(out.kept, self.backward, False, gone, runs_twice=False)

    def _result(self, result: Amount) -> Iterator[Hold]:
        """Yield what a loss is computed from, which is not sent."""
        yield Hold(result.num_bytes - result.kept, self.uses, True, (self.uses,))
        if self.uses != self.forward:
            yield Hold(result.num_bytes, self.forward, True, (self.forward,))
        yield Hold(result.gradient_bytes, self.backward, True, (self.backward,))

    def inputs(self) -> Iterator[Hold]:
        """Yield what comes from the part before on another rank, and the gradient that goes back."""
        for end in self.flow.needs(Op.F, self.stage, self.turn):
            if end.name or self.is_here(end.stage):
                continue
            came, part = self.own[IN], self._part(end)
            yield Hold(came.kept, (Op.RECV_F, self.stage, part), True, (self.uses,), ends_before=True)
            yield Hold(came.num_bytes - came.kept, (Op.RECV_F, self.stage, part), True, (self.uses,))
            if end.kind is EdgeKind.VALUE:
                yield Hold(came.gradient_bytes, self.backward, True, ((Op.WAIT_SEND_B, self.stage, part),))

    def _gone(self, end: End) -> Kind:
        """Return the action after which a user of a value has it."""
        return (Op.F, end.stage, 0) if self.is_here(end.stage) else (Op.WAIT_SEND_F, self.stage, self._part(end))

    def _part(self, end: End) -> int:
        """Return what the message with a stage on another rank says in its actions besides this stage."""
        return end.stage + 1 if self.flow.message(self.stage, end.stage, self.turn).is_aside else 0

    # Values with a name, that other parts than the next one use.

    def values(self) -> Iterator[Hold]:
        """Yield what goes to other parts besides the output, on this rank and on those that get it, and its gradients."""
        needed = {end.name for end in self.flow.needs(Op.F, self.stage, self.turn)}
        behind = self.behind.stage if self.behind else None
        for name in dict.fromkeys(end.name for end in self.users if end.name and end.name not in needed):
            groups = [self._users(end) for end in self.users if end.name == name]
            here = next((group for group in groups if self.is_here(group[0])), [])
            elsewhere = [group for group in groups if not self.is_here(group[0])]
            firsts = [end for end in self.users if end.name == name and not self.is_here(end.stage)]
            asides = [end.stage for end in firsts if self._part(end)]
            returns = any(end.kind is EdgeKind.VALUE for end in self.users if end.name == name)
            yield from self._value(name, here, asides, returns=returns)
            for group in elsewhere:
                yield from self._received(name, group, is_aside=group[0] in asides)
            if returns:
                for first in asides:
                    yield Hold(self.own[name].gradient_bytes, (Op.RECV_B, self.stage, first + 1), True, (self.backward,))
                yield from self._gradients(name, here, self.backward if here and here[0] != behind else None)
                for group in elsewhere:
                    back = Op.WAIT_SEND_B, group[0], self.stage + 1
                    yield from self._gradients(name, group, back if group[0] in asides else None)

    def _users(self, end: End) -> list[int]:
        """Return the stages of one rank that hand a value on to each other, in order."""
        users, found = [end.stage], [end]
        while found:
            flow, last = self.flow, users[-1]
            found = [one for one in flow.gives(Op.F, last, self.turn) if one.op == Op.F and one.name == end.name]
            users += [one.stage for one in found]
        return users

    def _value(self, name: str, here: Sequence[int], asides: Sequence[int], *, returns: bool) -> Iterator[Hold]:
        """Yield what its maker's rank holds until messages are sent, and until its users on the rank have run."""
        own, behind = self.own[name], self.behind.stage if self.behind else None
        sends = tuple((Op.WAIT_SEND_F, self.stage, first + 1) for first in asides)
        ends = (*sends, *((Op.F, user, 0) for user in here[-1:]))
        passed = self._gone(self.behind) if self.behind else self.forward  # until then, the output counts
        made = own.num_bytes - own.kept
        yield from self._until_kept(name, made - own.joint, self.forward, here, ends or (passed,), is_before=True)
        # Where its forward runs twice, the first one saves nothing, and no other stage here has it.
        yield Hold(own.kept - own.joint_kept, self.forward, True, ends or (passed,), runs_twice=True)
        yield Hold(own.joint_kept, passed, False, sends, runs_twice=True)
        yield Hold(made - own.joint, again := (Op.R, self.stage, 0), True, (again,))
        if not returns and sends and self.flow.has_backward:
            yield Hold(own.kept, self.backward, False, sends, runs_twice=False)
        kept_behind = self.at(behind)[name].kept if behind is not None and behind in here else 0
        if behind is not None and self.is_here(behind) and behind not in here:
            came = self.at(behind)[IN]
            if came.kept == came.num_bytes:
                kept_behind = own.joint  # the next stage saves its whole input, and so counts the value, which is in it
        others = [user for user in here if user != behind]
        joint = max(0, own.joint - kept_behind)
        if ends:
            yield from self._until_kept(name, joint, passed, others, ends, is_before=False)
        for user in here:  # it may have saved this, and have run backward, before all is sent
            kept = min(made, self.at(user)[name].kept)
            both = 0 if user == behind else min(kept, self._kept_of(name, user, joint))
            yield Hold(-both, (Op.F, user, 0), True, (passed,))
            yield Hold(both, (Op.B, user, 0), False, (*sends, passed))
            yield Hold(kept - both, (Op.B, user, 0), False, sends)
            made, joint = made - kept, joint - both

    def _received(self, name: str, users: Sequence[int], *, is_aside: bool) -> Iterator[Hold]:
        """Yield what a rank holds of another rank's value, from its receipt until its last user."""
        first, *later = users
        own, last = self.at(first)[name], ((Op.F, users[-1], 0),)
        if not is_aside:  # until then it counts as the stage's input
            if later:
                yield from self._until_kept(name, own.num_bytes - own.kept, (Op.F, first, 0), later, last, is_before=False)
            return
        yield from self._until_kept(name, own.num_bytes, (Op.RECV_F, first, self.stage + 1), users, last, is_before=True)

    def _until_kept(
        self, name: str, num_bytes: int, begin: Kind, users: Iterable[int], ends: tuple[Kind, ...], *, is_before: bool
    ) -> Iterator[Hold]:
        """Yield a value's bytes; those that a stage saves until that stage's forward, where its saved bytes begin to count."""
        rest = num_bytes
        for user in users:
            kept = self._kept_of(name, user, rest)
            yield Hold(kept, begin, is_before, ((Op.F, user, 0),), ends_before=True)
            rest -= kept
        yield Hold(rest, begin, is_before, ends)

    def _kept_of(self, name: str, user: int, num_bytes: int) -> int:
        """Return how many of some bytes of a value a user has saved at least: of several tensors, it may have saved others."""
        own = self.at(user)[name]
        return max(0, min(num_bytes, own.kept + num_bytes - own.num_bytes))

    def _gradients(self, name: str, users: Sequence[int], back: Kind | None) -> Iterator[Hold]:
        """Yield the gradients that the users on a rank make: added up until the first one's backward, then on their way back.

        If the first one is the next part, they are part of the gradient of the output then.
        """
        for user in users:
            begin, size = (Op.B, user, 0), self.at(user)[name].gradient_bytes
            if user != users[0]:  # the last one runs backward first; to its gradient the others add theirs
                yield Hold(size, begin, True, ((Op.B, users[0], 0) if user == users[-1] else begin,))
            elif back is not None:
                yield Hold(size, begin, True, (back,))


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
        for num_bytes, (op, stage, part), begins_before, ends, ends_before, runs_twice in holds[unit % len(holds)]:
            if runs_twice is not None and runs_twice is not ((Op.F, stage, unit, 0) in again):
                continue
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
