"""The balance pass: evict what is not needed soon to a rank with room, and load it back in time.

A rank with more microbatches than its budget (BPipe, Kim et al., ICML 2023) is decided from its own list of computations
alone, without timing: `tests/schedules/test_balance.py` shows by exhaustion that the budget holds. Between two consecutive
backwards the list gets an idle moment, because that is where a real pipeline waits and a transfer fits.

    occupied      before the first step t that has more than k:
    F0 F1 F2 F3   evict the microbatch whose backward is furthest away: start before t-1, wait before t,
    1  2  3  4    load it from before the step ahead of its backward, wait before its backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from bpipe.errors import BudgetError, ConfigurationError
from bpipe.schedules.action import BACKWARD, MIRROR, Action, Op
from bpipe.schedules.plan import Plan
from bpipe.schedules.sizes import occupancy

__all__: list[str] = []

def default_slots(num_stages: int) -> int:
    """ceil((p+2)/2): what every rank holds at most when p stages are balanced in pairs (Kim et al., ICML 2023).

    Stages x and p-1-x hold (p-x) + (x+1) = p+1 microbatches at their peaks, and one in flight counts at both ends.
    """
    return (num_stages + 3) // 2


def mirror_pairs(num_ranks: int) -> tuple[int, ...]:
    """The paper's pairs: rank x evicts to rank p-1-x."""
    return tuple(reversed(range(num_ranks)))


def balance(plan: Plan, *, slots: int | Sequence[int | None], pairs: Sequence[int] | None = None, rule: str = "fewest") -> Plan:
    """Insert evictions and loads so that no rank occupies more than its budget; the order of computations stays.

    Args:
        plan: a plan of computations alone.
        slots: the budget in microbatches, one number or one a rank (None: unlimited).
        pairs: the rank to which each rank evicts; default: p-1-x.
        rule: "fewest" moves as few microbatches as the budget allows, those whose backward is furthest away;
            "eager" evicts one microbatch with each forward and loads one with each backward (the paper's steady state).

    Raises:
        BudgetError: no placement meets the budget; the message names the smallest one that works.
        ConfigurationError: budgets, pairs or rule make no sense.
    """
    pairs = mirror_pairs(plan.num_ranks) if pairs is None else tuple(pairs)
    budgets = (slots,) * plan.num_ranks if isinstance(slots, int) else tuple(slots)
    _check_arguments(plan, budgets, pairs, rule)
    lacking = _attempt(plan, budgets, pairs, rule)
    if isinstance(lacking, Plan):
        return lacking
    tries = range(1, 1 + 2 * max(plan.peak_slots))
    more = tries[bisect_left(tries, True, key=lambda n: isinstance(_attempt(plan, _raised(budgets, n), pairs, rule), Plan))]
    the = "The" if len(set(budgets)) == 1 else "With all raised alike, the"
    raise BudgetError(
        f"{_show(budgets)} slots are too few for {plan.name} with {plan.num_stages} stages and {plan.num_microbatches} "
        f"microbatches: {lacking}. {the} smallest budget that works here is slots={_show(_raised(budgets, more))}."
    )


def _check_arguments(plan: Plan, budgets: tuple[int | None, ...], pairs: tuple[int, ...], rule: str) -> None:
    ranks = range(plan.num_ranks)
    if rule not in _RULES:
        raise ConfigurationError(f"rule={rule!r}: choose one of {', '.join(map(repr, _RULES))}")
    if len(budgets) != plan.num_ranks or any(k is not None and (not isinstance(k, int) or k < 1) for k in budgets):
        raise ConfigurationError(
            f"slots={_show(budgets)}: give one number of at least 1, or one for each of {plan.num_ranks} ranks"
        )
    if len(pairs) != plan.num_ranks or any(acceptor not in ranks for acceptor in pairs):
        raise ConfigurationError(f"pairs={pairs}: name one acceptor, a rank from 0 to {plan.num_ranks - 1}, for each rank")


def _raised(budgets: tuple[int | None, ...], more: int) -> tuple[int | None, ...]:
    return tuple(None if k is None else k + more for k in budgets)


def _show(budgets: tuple[int | None, ...]) -> str:
    return str(budgets[0]) if len(set(budgets)) == 1 else str(budgets)


def _attempt(plan: Plan, budgets: tuple[int | None, ...], pairs: tuple[int, ...], rule: str) -> Plan | str:
    """The balanced plan, or in words what the budgets lack."""
    actions = list(plan.actions)
    served: list[tuple[Action, ...]] = list(plan.served)
    for rank, budget in enumerate(budgets):
        if budget is None or max(occupancy(plan.actions[rank]), default=0) <= budget:
            continue
        moves = _RULES[rule](plan.actions[rank], budget)
        if isinstance(moves, str) or pairs[rank] == rank:
            return f"rank {rank} {moves if isinstance(moves, str) else 'has no other rank to evict to'}"
        actions[rank] = moves.emit(plan.actions[rank], pairs[rank])
        served[pairs[rank]] += _mirrored(actions[rank], evictor=rank)
    balanced = replace(plan, actions=tuple(actions), served=tuple(served), slots=budgets)
    for rank, (peak, budget) in enumerate(zip(balanced.peak_slots, budgets)):
        if budget is not None and peak > budget:
            return f"rank {rank} would occupy {peak}, of which {sum(map(len, balanced.rooms(rank).values()))} are rooms for guests"
    return balanced


def _mirrored(actions: Sequence[Action], evictor: int) -> tuple[Action, ...]:
    """The acceptor's end of an evictor's transfers: the same events in the same order, so that neither can wait in a circle."""
    return tuple(Action(MIRROR[a.op], *a[1:4], peer=evictor) for a in actions if a.op in MIRROR)


Boundary = defaultdict[int, list[Action]]


@dataclass
class _Moves:
    """Which transfers start and complete before which step of a rank's list, idle moments counted."""

    steps: list[Action | None]
    wait_evict: Boundary = field(default_factory=lambda: defaultdict(list))
    load: Boundary = field(default_factory=lambda: defaultdict(list))
    wait_load: Boundary = field(default_factory=lambda: defaultdict(list))
    evict: Boundary = field(default_factory=lambda: defaultdict(list))

    def add(self, victim: Action, *, evict: int, wait_evict: int, load: int, wait_load: int) -> None:
        self.evict[evict].append(victim)
        self.wait_evict[wait_evict].append(victim)
        self.load[load].append(victim)
        self.wait_load[wait_load].append(victim)

    def load_during_backwards(self, occupied: list[int], budget: int) -> None:
        """Start loads that would run in an idle moment one backward earlier where the budget has room.

        A rank that never waits has no idle moments in its ending, and would see the whole transfer.
        """
        for step in sorted(self.load):
            if self.steps[step] is None and occupied[step - 1] < budget:
                occupied[step - 1] += 1
                self.load[step - 1] += self.load.pop(step)

    def emit(self, actions: Sequence[Action], acceptor: int) -> tuple[Action, ...]:
        """The rank's list with the transfers in it.

        At one boundary slots are given back before they are taken: on this rank by completed evictions, on the acceptor
        by completed loads.
        """
        lane: list[Action] = []
        order = ((Op.WAIT_EVICT, self.wait_evict), (Op.LOAD, self.load), (Op.WAIT_LOAD, self.wait_load), (Op.EVICT, self.evict))
        for index, action in enumerate(self.steps):
            lane += [Action(op, a.stage, a.microbatch, peer=acceptor) for op, boundary in order for a in boundary.get(index, ())]
            if action is not None:
                lane.append(action)
        return tuple(lane)


def _with_idle_moments(actions: Sequence[Action]) -> list[Action | None]:
    steps: list[Action | None] = []
    for action in actions:
        if steps and steps[-1] is not None and steps[-1].op in BACKWARD and action.op in BACKWARD:
            steps.append(None)
        steps.append(action)
    return steps


def _fewest(actions: Sequence[Action], budget: int) -> _Moves | str:
    steps = _with_idle_moments(actions)
    forward = {a[1:3]: t for t, a in enumerate(steps) if a is not None and a.op is Op.F}
    backward = {a[1:3]: t for t, a in enumerate(steps) if a is not None and a.op in BACKWARD}
    change = [0] * (len(steps) + 1)  # by evictions, at each step
    moves = _Moves(steps)
    live: dict[tuple[int, int], Action] = {}  # here and never evicted
    occupied = freed = 0
    for t, (action, own) in enumerate(zip(steps, _step_occupancy(steps))):
        if action is not None and action.op is Op.F:
            live[action[1:3]] = action
        freed += change[t]
        occupied = own + freed
        while occupied > budget:
            start = next((s for s in range(t - 1, -1, -1) if not moves.evict.get(s)), -1)
            candidates = [key for key in live if forward[key] < start and backward[key] - 1 > t]
            if not candidates:
                return f"occupies {occupied} at {action} and has nothing that it could evict in time"
            victim = max(candidates, key=backward.__getitem__)
            moves.add(live.pop(victim), evict=start, wait_evict=t, load=backward[victim] - 1, wait_load=backward[victim])
            change[t] -= 1
            change[backward[victim] - 1] += 1
            occupied -= 1
            freed -= 1
        if action is not None and action.op in BACKWARD:
            live.pop(action[1:3], None)
    moves.load_during_backwards([own + extra for own, extra in zip(_step_occupancy(steps), accumulate(change))], budget)
    return moves


def _step_occupancy(steps: Sequence[Action | None]) -> list[int]:
    """Slots occupied at each step before any eviction; an idle moment sees what lives between its neighbours."""
    live, result = 0, []
    for action in steps:
        live += action is not None and action.op is Op.F
        result.append(live)
        live -= action is not None and action.op in (Op.B, Op.W)
    return result


def _eager(actions: Sequence[Action], budget: int) -> _Moves | str:
    moves = _Moves(list(actions))
    forwards: list[Action] = []
    remote: list[tuple[Action, int]] = []
    for t, action in enumerate(actions):
        if action.op is Op.F:
            if len(forwards) >= budget - 1 and forwards:
                remote.append((forwards[-1], t))
            forwards.append(action)
        elif action.op in BACKWARD and remote:
            victim, evicted = remote.pop(0)
            moves.add(victim, evict=evicted, wait_evict=evicted + 1, load=t, wait_load=t + 1)
    if remote:
        return f"evicts {remote[0][0].stage}F{remote[0][0].microbatch} and has no backward left during which to load it"
    lane = moves.emit(actions, acceptor=-1)
    peak = max(occupancy(lane))
    late = [
        str(a) for i, a in enumerate(lane) if a.op is Op.WAIT_LOAD and any(b.op in BACKWARD and b[1:3] == a[1:3] for b in lane[:i])
    ]
    if peak > budget or late:
        return f"evicting eagerly occupies {peak}" + (f" and loads too late at {late[0]}" if late else "")
    return moves


_RULES = {"fewest": _fewest, "eager": _eager}
