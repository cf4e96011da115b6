"""Ways to damage the messages of skips, all of which do harm: each gives the plans that are damaged in its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from bpipe.schedules import Action, Op, Plan
from tests.schedules.mutations import at_other_place, exchanged, rewritten, with_lanes

WAITS = {Op.SEND_F: Op.WAIT_SEND_F, Op.RECV_F: Op.WAIT_RECV_F, Op.SEND_B: Op.WAIT_SEND_B, Op.RECV_B: Op.WAIT_RECV_B}

Place = tuple[int, int, Action]  # a lane, a position, and what stands there


def of_skips(plan: Plan, ops: Sequence[Op]) -> list[Place]:
    """The messages of skips of some kinds, or what waits for them."""
    return [(i, at, a) for i, lane in enumerate(plan.actions) for at, a in enumerate(lane) if a.part and a.op in ops]


def index(plan: Plan, rank: int, ops: Sequence[Op], like: Action) -> int:
    """Where a computation of an action's microbatch stands on its rank."""
    return next(at for at, a in enumerate(plan.actions[rank]) if a.op in ops and a[1:3] == like[1:3] and not a.part)


def without(plan: Plan, *gone: Place) -> Plan:
    left = {(rank, at) for rank, at, _ in gone}
    kept = {i: tuple(a for at, a in enumerate(lane) if (i, at) not in left) for i, lane in enumerate(plan.actions)}
    return with_lanes(plan, kept)


def dropped(plan: Plan) -> Iterator[Plan]:
    """A message or a wait at one end; a message with its wait; both ends with theirs."""
    posts = of_skips(plan, [*WAITS])
    waits = {(rank, a.start_identity): (rank, at, a) for rank, at, a in of_skips(plan, [*WAITS.values()])}
    ends = {(rank, a.identity): (rank, at, a) for rank, at, a in posts}
    for rank, at, post in posts:
        wait = waits[rank, post.identity]
        yield without(plan, (rank, at, post))
        yield without(plan, wait)
        yield without(plan, (rank, at, post), wait)
        assert post.peer is not None
        other = post.peer, plan.other_end(post)
        yield without(plan, (rank, at, post), wait, ends[other], waits[other])


def repeated(plan: Plan) -> Iterator[Plan]:
    for rank, at, action in of_skips(plan, [*WAITS, *WAITS.values()]):
        lane = plan.actions[rank]
        yield with_lanes(plan, {rank: (*lane[:at], action, *lane[at:])})


def out_of_place(plan: Plan) -> Iterator[Plan]:
    """A message before what makes it, a value after its use, a wait before what it waits for."""
    for op, ops, is_before in (
        (Op.SEND_F, [Op.F], True),
        (Op.WAIT_RECV_F, [Op.F], False),
        (Op.SEND_B, [Op.B, Op.I], True),
        (Op.WAIT_RECV_B, [Op.B, Op.I], False),
    ):
        for rank, at, action in of_skips(plan, [op]):
            computation = index(plan, rank, ops, action)
            assert (at > computation) is is_before
            yield at_other_place(plan, rank, at, computation)
    for rank, at, action in of_skips(plan, [*WAITS.values()]):
        post = next(i for i, a in enumerate(plan.actions[rank]) if a.op is not action.op and a.identity == action.start_identity)
        yield exchanged(plan, rank, at, post)


def under_way(plan: Plan) -> Iterator[Plan]:
    """A value that is still being sent when its microbatch leaves."""
    for rank, at, action in of_skips(plan, [Op.WAIT_SEND_F]):
        for gone, other in enumerate(plan.actions[rank]):
            if other.op is Op.WAIT_EVICT and other.key == action.key:
                assert at < gone
                yield at_other_place(plan, rank, at, gone)


def misdirected(plan: Plan) -> Iterator[Plan]:
    """A message with another rank, or with another stage, or with the next one, or with none: the first message of each kind."""
    messages = of_skips(plan, [*WAITS, *WAITS.values()])
    firsts = {(action.op, action.stage, action.part): (rank, at, action) for rank, at, action in reversed(messages)}
    for rank, at, action in firsts.values():
        for peer in {None, *range(-1, plan.num_ranks + 1)} - {action.peer}:
            yield rewritten(plan, rank, at, action._replace(peer=peer))
        for part in {*range(plan.num_stages + 2)} - {action.part}:
            yield rewritten(plan, rank, at, action._replace(part=part))
            if 0 < part <= plan.num_stages:
                yield rewritten(plan, rank, at, action._replace(part=part, peer=plan.stage_ranks[part - 1]))


def mistaken_for_each_other(plan: Plan) -> Iterator[Plan]:
    """Two messages of one microbatch change their other stages on one end, and not their peers; or both where that is one rank."""
    for post, with_waits in product(WAITS, (False, True)):
        for (rank, at, one), (rank_of_other, at_other, other) in product(of_skips(plan, [post]), repeat=2):
            if rank == rank_of_other and at < at_other and one.key == other.key:
                yield renamed(plan, rank, {one: one._replace(part=other.part), other: other._replace(part=one.part)}, with_waits)


def renamed(plan: Plan, rank: int, names: dict[Action, Action], with_waits: bool) -> Plan:
    """Other names of some messages in a rank's lane, also where it waits for them."""
    if with_waits:
        names = names | {a._replace(op=WAITS[a.op]): b._replace(op=WAITS[b.op]) for a, b in names.items()}
    return with_lanes(plan, {rank: tuple(names.get(action, action) for action in plan.actions[rank])})


def other_units(plan: Plan) -> Iterator[Plan]:
    """Messages of two microbatches change places on one end, with what waits for them or without."""
    for post, with_waits in product(WAITS, (False, True)):
        units: dict[tuple[int, int, int], list[Action]] = {}
        for rank, _, action in of_skips(plan, [post]):
            units.setdefault((rank, action.stage, action.part), []).append(action)
        for (rank, *_), (one, other, *_) in units.items():
            yield renamed(plan, rank, {one: other, other: one}, with_waits)


HARMS = {f.__name__: f for f in (dropped, repeated, out_of_place, under_way, misdirected, mistaken_for_each_other, other_units)}
