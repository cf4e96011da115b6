"""The balance pass: evict what is not needed soon to a rank with room, and load it back in time.

Any plan of computations can be balanced (BPipe, Kim et al., ICML 2023, does it to 1F1B). Each rank with more than its budget
is decided from its own list of computations; whoever has room takes its guests, the rank it is paired with first, then ranks
of the same node, then others, then its host. `tests/schedules/test_balance.py` shows what that reaches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bpipe.errors import BudgetError, ConfigurationError
from bpipe.schedules.action import HOST, Action, Op
from bpipe.schedules.communicate import communicate
from bpipe.schedules.costs import Costs
from bpipe.schedules.eager import evict_eagerly
from bpipe.schedules.evict import Eviction, Guests, Shortage, Sweep, emit, mirrored
from bpipe.schedules.plan import Plan
from bpipe.schedules.rank_steps import steps_of
from bpipe.schedules.simulate import simulate
from bpipe.schedules.sizes import Sizes

__all__ = ["balance", "level"]

Budgets = tuple[int | None, ...]


def default_slots(num_stages: int) -> int:
    """ceil((p+2)/2): what every rank holds at most when p stages are balanced in pairs (Kim et al., ICML 2023).

    Stages x and p-1-x hold (p-x) + (x+1) = p+1 microbatches at their peaks, and one in flight counts at both ends.
    """
    return (num_stages + 3) // 2


def mirror_pairs(num_ranks: int) -> tuple[int, ...]:
    """The paper's pairs: rank x evicts to rank p-1-x."""
    return tuple(reversed(range(num_ranks)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Who may take a rank's guests.

    Args:
        pairs: the rank to which each rank evicts first; default: p-1-x.
        others: whether any other rank with room may take what the pair cannot.
        nodes: the node of each rank; the others of one's own node come first. Default: all on one.
        host: whether a rank may evict to its own host's memory: "no", "last" (where no rank has room) or "only".
    """

    pairs: Sequence[int] | None = None
    others: bool = True
    nodes: Sequence[int] | None = None
    host: str = "no"

    def check(self, num_ranks: int) -> None:
        """Raise unless these fit a number of ranks.

        Raises:
            ConfigurationError: they do not.
        """
        ranks = range(num_ranks)
        if self.pairs is not None and (len(self.pairs) != num_ranks or any(pair not in ranks for pair in self.pairs)):
            raise ConfigurationError(
                f"pairs={tuple(self.pairs)}: name one acceptor, a rank from 0 to {num_ranks - 1}, for each rank"
            )
        if self.nodes is not None and len(self.nodes) != num_ranks:
            raise ConfigurationError(f"nodes={tuple(self.nodes)}: give the node of each of {num_ranks} ranks")
        if self.host not in ("no", "last", "only"):
            raise ConfigurationError(f"host={self.host!r}: choose 'no', 'last' or 'only'")

    def of(self, rank: int, room: Sequence[int | None]) -> list[int]:
        """The acceptors of a rank, best first: its pair, its node, the roomiest."""
        pair = (mirror_pairs(len(room)) if self.pairs is None else self.pairs)[rank]
        others = [other for other in range(len(room)) if self.others or other == pair]
        node = None if self.nodes is None else self.nodes[rank]

        def distance(other: int) -> tuple[bool, bool, float]:
            left = room[other]
            is_across = self.nodes is not None and self.nodes[other] != node
            return other != pair, is_across, float("-inf") if left is None else -left

        peers = [] if self.host == "only" else sorted((other for other in others if other != rank), key=distance)
        return peers + [HOST] * (self.host != "no")


def in_pieces(plan: Plan) -> Plan:
    """Cut forwards and backwards into pieces, one for each part that a plan's sizes give a microbatch.

    Then memory is taken and given back inside them, and evictions start and end there: `0F3.1`, `0F3.2` ... save one part
    each, `0B3.2`, `0B3.1` need one part each.

    Raises:
        PlanError: the plan has no sizes.
    """
    lanes = []
    for lane in plan.actions:
        pieces: list[Action] = []
        for action in lane:
            parts = range(1, plan.num_parts(action.stage) + 1) if action.op in (Op.F, Op.B) else ()
            pieces += [action._replace(part=k) for k in (parts if action.op is Op.F else reversed(parts))] or [action]
        lanes.append(tuple(pieces))
    return replace(plan, actions=tuple(lanes))


def balance(
    plan: Plan,
    *,
    slots: int | Sequence[int | None] | None = None,
    sizes: Sizes | None = None,
    budgets: int | Sequence[int | None] | None = None,
    to: Destinations | None = None,
    costs: Costs | None = None,
    rule: str = "fewest",
) -> Plan:
    """Insert evictions and loads so that no rank occupies more than its budget; the order of computations stays.

    Args:
        plan: a plan of computations alone.
        slots: the budget in microbatches, one number or one a rank (None: unlimited).
        sizes: what a microbatch takes in bytes, if bytes are to be counted instead.
        budgets: with `sizes`, the budget in bytes, static ones included, one number or one a rank.
        to: who may take the evicted; default: the pair p-1-x, then any rank with room.
        costs: how long computations and transfers take; what can be hidden behind computations is evicted first.
        rule: "fewest" moves as little as the budget allows, what is needed again last;
            "eager" evicts one microbatch with each forward and loads one with each backward (the paper's steady state).

    Raises:
        BudgetError: no placement meets the budget; the message names the smallest one that works.
        ConfigurationError: budgets, destinations or rule make no sense.
    """
    if (slots is None) == (sizes is None) or (sizes is None) != (budgets is None):
        raise ConfigurationError("give slots=, or sizes= and budgets=")
    if rule not in ("fewest", "eager") or (rule == "eager" and sizes is not None):
        raise ConfigurationError(f"rule={rule!r}: choose one of 'fewest', 'eager' (the latter where slots are counted)")
    problem = _Problem(plan, sizes, Destinations() if to is None else to, costs, rule)
    given = problem.checked(slots if sizes is None else budgets)
    lacking = problem.attempt(given)
    if isinstance(lacking, Plan):
        return lacking
    raise problem.refusal(given, lacking)


def level(plan: Plan, sizes: Sizes, *, to: Destinations | None = None, costs: Costs | None = None) -> Plan:
    """Balance a plan as low as possible: the lowest highest peak in bytes that the pass reaches, then the fewest bytes.

    Returns:
        The balanced plan, with its peaks as budgets; where nothing is gained, the plan as it was, with its sizes.

    Raises:
        ConfigurationError: sizes or destinations make no sense.
    """
    problem = _Problem(plan, sizes, Destinations() if to is None else to, costs, "fewest")
    best = problem.plan
    highest = max(problem.peaks())
    lowest = max(problem.floor(), -(-sum(problem.peaks()) // plan.num_ranks) if problem.to.host == "no" else 0)
    while lowest < highest:
        middle = (lowest + highest) // 2
        found = problem.attempt((middle,) * plan.num_ranks)
        if isinstance(found, Plan):
            best, highest = found, middle
        else:
            lowest = middle + 1 + (highest - middle) // 64
    return best if best is problem.plan else replace(best, budgets=(max(communicate(best).peak_bytes),) * plan.num_ranks)


class _Problem:
    """A plan to be balanced: what does not change from one attempt to the next."""

    def __init__(self, plan: Plan, sizes: Sizes | None, to: Destinations, costs: Costs | None, rule: str) -> None:
        to.check(plan.num_ranks)
        self.plan, self.to, self.costs, self.rule = replace(plan, sizes=sizes), to, costs, rule
        self.ranks = steps_of(self.plan)
        self.static = (0,) * plan.num_ranks if sizes is None else sizes.static
        if costs is not None:
            self._set_times(costs)

    def _set_times(self, costs: Costs) -> None:
        timeline = simulate(communicate(self.plan), costs)
        for rank, steps in enumerate(self.ranks):
            spans = iter(timeline.computations(rank))
            end = 0.0
            for step in steps.steps:
                span = None if step is None else next(spans)
                steps.times.append(end if span is None else span.begin_s)
                end = end if span is None else span.end_s
            steps.times.append(end)

    def peaks(self) -> list[int]:
        """What each rank occupies without evictions, static bytes included."""
        return [static + rank.peak for static, rank in zip(self.static, self.ranks)]

    def floor(self) -> int:
        """Less than this no rank with computations can do with."""
        return max(self.static)

    def parts(self, rank: int) -> dict[int, Sequence[int]]:
        sizes = self.plan.sizes
        stages = [stage for stage, owner in enumerate(self.plan.stage_ranks) if owner == rank]
        return {stage: (1,) if sizes is None else sizes.stages[stage].parts for stage in stages}

    def checked(self, given: int | Sequence[int | None] | None) -> Budgets:
        """One budget a rank.

        Raises:
            ConfigurationError: they make none.
        """
        p, name = self.plan.num_ranks, "slots" if self.plan.sizes is None else "budgets"
        budgets = (given,) * p if isinstance(given, int) or given is None else tuple(given)
        if len(budgets) != p or any(k is not None and (not isinstance(k, int) or k < 1) for k in budgets):
            raise ConfigurationError(f"{name}={_show(budgets)}: give one number of at least 1, or one for each of {p} ranks")
        return budgets

    def attempt(self, budgets: Budgets) -> Plan | str:
        """The balanced plan, or in words what the budgets lack."""
        limits = [None if budget is None else budget - static for budget, static in zip(budgets, self.static)]
        room = [None if limit is None else max(0, limit - rank.peak) for limit, rank in zip(limits, self.ranks)]
        needy = [r for r, limit in enumerate(limits) if limit is not None and self.ranks[r].peak > limit]
        actions = [rank.actions for rank in self.ranks]
        served: list[list[Action]] = [list(lane) for lane in self.plan.served]
        for rank in sorted(needy, key=lambda r: self.ranks[r].peak - (limits[r] or 0), reverse=True):
            decided = self._decide(rank, limits[rank] or 0, room)
            if isinstance(decided, Shortage):
                return f"rank {rank} {decided.text}"
            actions[rank] = emit(self.ranks[rank], decided)
            for peer in sorted({eviction.peer for eviction in decided} - {HOST}):
                served[peer] += mirrored(actions[rank], rank, peer)
        in_bytes = self.plan.sizes is not None
        balanced = replace(
            self.plan,
            actions=tuple(map(tuple, actions)),
            served=tuple(map(tuple, served)),
            slots=self.plan.slots if in_bytes else budgets,
            budgets=budgets if in_bytes else None,
        )
        return self._over(balanced, budgets) or balanced

    def _decide(self, rank: int, limit: int, room: list[int | None]) -> list[Eviction] | Shortage:
        """What a rank evicts; takes from the others' room what its guests need there."""
        steps = self.ranks[rank]
        peers = self.to.of(rank, room)
        if not peers:
            return Shortage("has no other rank to evict to")
        if self.rule == "eager":
            return evict_eagerly(steps, limit, peers[0])
        guests = [Guests(peer, self._room(peer, room), len(steps.steps), self._seconds(rank, peer)) for peer in peers]
        decided = self._swept(rank, limit, guests[:1])
        if isinstance(decided, Shortage) and len(guests) > 1:
            decided = self._swept(rank, limit, guests)
        for taken in guests:
            left = None if taken.peer == HOST else room[taken.peer]
            if left is not None:
                room[taken.peer] = left - taken.most
        return decided

    def _swept(self, rank: int, limit: int, guests: Sequence[Guests]) -> list[Eviction] | Shortage:
        """Sweep with whole microbatches first, and if that fails with ever fewer parts of each, so that loads come more evenly."""
        parts = self.parts(rank)
        decided: list[Eviction] | Shortage = Shortage("")
        for most_parts in range(max(map(len, parts.values())), 0, -1):
            for one in guests:
                one.clear()
            decided = Sweep(self.ranks[rank], limit, parts, guests, most_parts).run()
            if not isinstance(decided, Shortage):
                break
        return decided

    def _room(self, peer: int, room: list[int | None]) -> int | None:
        return None if peer == HOST else room[peer]

    def _seconds(self, rank: int, peer: int) -> Callable[[int], float] | None:
        """How long a transfer of so many bytes takes, one way."""
        if self.costs is None:
            return None
        link = self.costs.link_between(rank, peer)
        return lambda size: link.latency_s + size / link.bytes_per_s

    def _over(self, balanced: Plan, budgets: Budgets) -> str | None:
        """The first rank whose own and whose guests together are over its budget."""
        sizes = balanced.sizes
        for rank, budget in enumerate(budgets):
            rooms = balanced.rooms(rank) if sizes is None else balanced.rooms(rank, sizes.moved)
            guests = sum(map(sum, rooms.values()))
            own = self.static[rank] + self.ranks[rank].peak
            if budget is not None and guests and own + guests > budget:
                return f"rank {rank} would occupy {own + guests}, of which {guests} are rooms for guests"
        return None

    def refusal(self, given: Budgets, lacking: str) -> BudgetError:
        """The error for budgets that cannot be met; it names the smallest that can."""
        in_bytes = self.plan.sizes is not None
        highest = max(self.peaks())
        tries = range(1, 2 * highest + 2, max(1, highest // 4096))

        def works(more: int) -> bool:
            return isinstance(self.attempt(_raised(given, more)), Plan)

        enough = _raised(given, tries[bisect_left(tries, True, key=works)])
        the = "The" if len(set(given)) == 1 else "With all raised alike, the"
        name, unit = ("budgets", "bytes") if in_bytes else ("slots", "slots")
        return BudgetError(
            f"{_show(given)} {unit} are too few for {self.plan.name} with {self.plan.num_stages} stages and "
            f"{self.plan.num_microbatches} microbatches: {lacking}. {the} smallest budget that works here is "
            f"{name}={_show(enough)}."
        )


def _raised(budgets: Budgets, more: int) -> Budgets:
    return tuple(None if k is None else k + more for k in budgets)


def _show(budgets: Budgets) -> str:
    return str(budgets[0]) if len(set(budgets)) == 1 else str(budgets)
