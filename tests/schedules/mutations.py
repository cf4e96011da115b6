"""Ways to damage a plan: each takes one and a source of randomness, and gives another, or None where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from bpipe.errors import ConfigurationError, PlanError
from bpipe.plan.action import COMPUTE, HOST
from bpipe.schedules import Action, Op, Plan, verify
from tests.amounts import changed, number_of
from tests.schedules.replay import replay
from tests.schedules.shape_of_plan import reshaped

MOVES = frozenset(op for op in Op if any(name in op for name in ("EVICT", "LOAD", "ACCEPT", "RETURN")))

Mutation = Callable[[Plan, Random], Plan | None]


def refused(plan: Plan) -> bool:
    """Whether the verifier refuses a plan."""
    try:
        verify(plan)
    except PlanError:
        return True
    return False


Lane = tuple[Action, ...]


def lanes(plan: Plan) -> list[Lane]:
    """Every lane, computing ones first."""
    return [*plan.actions, *plan.served]


def with_lanes(plan: Plan, changed: dict[int, Lane]) -> Plan:
    """The plan with some of `lanes(plan)` changed, by index."""
    new = [changed.get(index, lane) for index, lane in enumerate(lanes(plan))]
    return replace(plan, actions=tuple(new[: plan.num_ranks]), served=tuple(new[plan.num_ranks :]))


def pick(plan: Plan, random: Random) -> tuple[int, int]:
    """A random lane with something in it, each lane as likely, and a position there."""
    index = random.choice([index for index, lane in enumerate(lanes(plan)) if lane])
    return index, random.randrange(len(lanes(plan)[index]))


def rewritten(plan: Plan, index: int, at: int, action: Action) -> Plan:
    lane = lanes(plan)[index]
    return with_lanes(plan, {index: (*lane[:at], action, *lane[at + 1 :])})


def dropped(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    lane = lanes(plan)[index]
    return with_lanes(plan, {index: lane[:at] + lane[at + 1 :]})


def duplicated(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    lane, to = lanes(plan)[index], random.randrange(len(lanes(plan)[index]) + 1)
    return with_lanes(plan, {index: (*lane[:to], lane[at], *lane[to:])})


def moved(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    return at_other_place(plan, index, at, random.randrange(len(lanes(plan)[index])))


def at_other_place(plan: Plan, index: int, at: int, to: int) -> Plan:
    rest = list(lanes(plan)[index])
    rest.insert(to, rest.pop(at))
    return with_lanes(plan, {index: tuple(rest)})


def swapped(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    return exchanged(plan, index, at, random.randrange(len(lanes(plan)[index])))


def exchanged(plan: Plan, index: int, one: int, other: int) -> Plan:
    lane = list(lanes(plan)[index])
    lane[one], lane[other] = lane[other], lane[one]
    return with_lanes(plan, {index: tuple(lane)})


def reordered_on_both_ends(plan: Plan, random: Random) -> Plan | None:
    """Exchange two microbatches in everything that one stage does with an operation, and with its twins elsewhere."""
    index, at = pick(plan, random)
    action = lanes(plan)[index][at]
    other = random.randrange(plan.num_microbatches)
    names = {action.microbatch: other, other: action.microbatch}
    ops = random.choice([{Op.F, Op.B, Op.I, Op.W}, {op for op in Op if ("EVICT" in op) or ("ACCEPT" in op)}, {*Op}])
    stages = random.choice([{action.stage}, {action.stage, action.stage + 1}, {*range(plan.num_stages)}])

    def renamed(a: Action) -> Action:
        return a._replace(microbatch=names.get(a.microbatch, a.microbatch)) if a.op in ops and a.stage in stages else a

    return with_lanes(plan, {i: tuple(map(renamed, lane)) for i, lane in enumerate(lanes(plan))})


def repeered(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    action = lanes(plan)[index][at]
    peers = [peer for peer in (None, *range(-1, plan.num_ranks + 1)) if peer != action.peer]
    return rewritten(plan, index, at, action._replace(peer=random.choice(peers))) if action.peer is not None else None


def repeered_on_one_end(plan: Plan, random: Random) -> Plan | None:
    """Send all of a rank's evictions to another rank, which nobody told."""
    evictors = [rank for rank in range(plan.num_ranks) if plan.evicted(rank)]
    if not evictors or plan.num_ranks < 3:
        return None
    rank = random.choice(evictors)
    acceptor = random.choice([r for r in range(plan.num_ranks) if r != rank and rank not in plan.chains(r)] or [-1])
    moves = {Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD}
    return with_lanes(plan, {rank: tuple(a._replace(peer=acceptor) if a.op in moves else a for a in plan.actions[rank])})


def relabelled(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    action = lanes(plan)[index][at]
    changes = (
        [action._replace(microbatch=i) for i in range(-1, plan.num_microbatches + 1)]
        + [action._replace(stage=s) for s in range(-1, plan.num_stages + 1)]
        + [action._replace(op=op) for op in Op]
    )
    return rewritten(plan, index, at, random.choice([change for change in changes if change != action]))


def on_other_lane(plan: Plan, random: Random) -> Plan | None:
    """Move an action to another rank, or between a rank's compute lane and its served one."""
    index, at = pick(plan, random)
    to = random.choice([i for i in range(2 * plan.num_ranks) if i != index])
    lane, other = lanes(plan)[index], lanes(plan)[to]
    place = random.randrange(len(other) + 1)
    return with_lanes(plan, {index: lane[:at] + lane[at + 1 :], to: (*other[:place], lane[at], *other[place:])})


def lanes_exchanged(plan: Plan, random: Random) -> Plan | None:
    index = random.randrange(2 * plan.num_ranks)
    other = random.randrange(2 * plan.num_ranks)
    return with_lanes(plan, {index: lanes(plan)[other], other: lanes(plan)[index]})


def cut_off(plan: Plan, random: Random) -> Plan | None:
    index, at = pick(plan, random)
    return with_lanes(plan, {index: lanes(plan)[index][:at]})


def budget_lowered(plan: Plan, random: Random) -> Plan | None:
    """One slot less than a rank occupies."""
    rank = random.randrange(plan.num_ranks)
    return replace(plan, slots=tuple(peak - 1 if r == rank else k for r, (k, peak) in enumerate(zip(plan.slots, plan.peak_slots))))


def byte_budget_lowered(plan: Plan, random: Random) -> Plan | None:
    """One byte less than a rank occupies."""
    if plan.sizes is None:
        return None
    rank = random.randrange(plan.num_ranks)
    given = plan.budgets or (None,) * plan.num_ranks
    return replace(plan, budgets=tuple(k - 1 if r == rank else b for r, (b, k) in enumerate(zip(given, plan.device_peak_bytes))))


def size_changed(plan: Plan, random: Random) -> Plan | None:
    """One number of a stage's sizes, or of what stays on a rank, a little more or less."""
    if plan.sizes is None:
        return None
    less_or_more, sizes = random.choice([-2, -1, 1, 2, 9]), plan.sizes
    stage, name = random.randrange(plan.num_stages), random.choice(["parts", "fixed", "received", "sent", "static"])
    if name == "static":
        rank = random.randrange(plan.num_ranks)
        static = tuple(max(0, b + less_or_more) if r == rank else b for r, b in enumerate(sizes.static))
        return replace(plan, sizes=replace(sizes, static=static))
    old = sizes.stages[stage]
    with suppress(ConfigurationError):
        if name == "parts":
            new = replace(old, parts=(max(0, old.parts[0] + less_or_more), *old.parts[1:]))
        elif name == "fixed":
            new = replace(old, fixed=max(0, old.fixed + less_or_more))
        else:
            new = changed(old, **{name: max(0, number_of(old, name) + less_or_more)})
        stages = tuple(new if s == stage else one for s, one in enumerate(sizes.stages))
        return replace(plan, sizes=replace(sizes, stages=stages))
    return None


def part_renumbered(plan: Plan, random: Random) -> Plan | None:
    """Another part moves, or runs, than was meant."""
    found = [(i, at) for i, lane in enumerate(lanes(plan)) for at, a in enumerate(lane) if plan.num_parts(max(0, a.stage)) > 1]
    found = [(i, at) for i, at in found if lanes(plan)[i][at].part]
    if not found:
        return None
    index, at = random.choice(found)
    action = lanes(plan)[index][at]
    others = [part for part in range(plan.num_parts(action.stage) + 2) if part != action.part]
    return rewritten(plan, index, at, action._replace(part=random.choice(others)))


def parts_exchanged_on_both_ends(plan: Plan, random: Random) -> Plan | None:
    """Two parts of one microbatch change places in everything that moves them."""
    found = [a for lane in lanes(plan) for a in lane if a.op in MOVES and a.part and plan.num_parts(a.stage)]
    if not found:  # an earlier mutation may have made a move of something else, of a stage without parts
        return None
    chosen = random.choice(found)
    other = random.randrange(1, plan.num_parts(chosen.stage) + 1)
    names = {chosen.part: other, other: chosen.part}

    def renamed(a: Action) -> Action:
        is_meant = a.op in MOVES and a[1:3] == chosen[1:3]
        return a._replace(part=names.get(a.part, a.part)) if is_meant else a

    return with_lanes(plan, {i: tuple(map(renamed, lane)) for i, lane in enumerate(lanes(plan))})


def computed_in_part(plan: Plan, random: Random) -> Plan | None:
    """A computation is of a part of its microbatch."""
    computations = [(i, at) for i, lane in enumerate(plan.actions) for at, a in enumerate(lane) if a.op in COMPUTE]
    if not computations:
        return None
    index, at = random.choice(computations)
    return rewritten(plan, index, at, plan.actions[index][at]._replace(part=random.randint(1, 3)))


def to_host_instead(plan: Plan, random: Random) -> Plan | None:
    """A rank keeps in its host's memory what its acceptor expects, or the other way round."""
    evictions = [(i, at) for i, lane in enumerate(plan.actions) for at, a in enumerate(lane) if a.op in MOVES]
    if not evictions:
        return None
    index, at = random.choice(evictions)
    action = plan.actions[index][at]
    other = HOST if action.peer != HOST else random.randrange(plan.num_ranks)
    return rewritten(plan, index, at, action._replace(peer=other))


def stage_elsewhere(plan: Plan, random: Random) -> Plan | None:
    stage, rank = random.randrange(plan.num_stages), random.randrange(plan.num_ranks)
    ranks = tuple(rank if s == stage else r for s, r in enumerate(plan.stage_ranks))
    return reshaped(plan, stage_ranks=ranks) if ranks != plan.stage_ranks else None


def microbatches_miscounted(plan: Plan, random: Random) -> Plan | None:
    return reshaped(plan, num_microbatches=plan.num_microbatches + (random.choice([-1, 1]) if plan.num_microbatches > 1 else 1))


def direction_mistaken(plan: Plan, random: Random) -> Plan | None:
    return reshaped(plan, has_backward=not plan.has_backward)


# No plan survives one of these.
STRUCTURAL: tuple[Mutation, ...] = (
    dropped,
    duplicated,
    repeered,
    repeered_on_one_end,
    relabelled,
    on_other_lane,
    cut_off,
    budget_lowered,
    stage_elsewhere,
    microbatches_miscounted,
    direction_mistaken,
    byte_budget_lowered,
    part_renumbered,
    to_host_instead,
    computed_in_part,
)
# Some of these do no harm: whether one does is for the replay to say.
ORDERING: tuple[Mutation, ...] = (
    moved,
    swapped,
    reordered_on_both_ends,
    lanes_exchanged,
    parts_exchanged_on_both_ends,
)


def damaged(plan: Plan, chosen: Sequence[Mutation], random: Random) -> Plan:
    """A plan after some mutations, as far as they can be made."""
    for mutation in chosen:
        if plan.num_microbatches and any(lanes(plan)):
            plan = mutation(plan, random) or plan
    return plan


def assert_caught(mutant: Plan) -> None:
    """The verifier refuses what the independent machine cannot run."""
    harm = replay(mutant)
    assert harm is None or refused(mutant), harm
