"""Count the memory that actions allocate and free, in slots or in bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from bpipe.plan.action import Action, MicrobatchKey, Op
from bpipe.plan.sizes import Sizes, StageSizes
from bpipe.skips.holds import Hold, changes, holds_of
from bpipe.skips.routes import Skip

__all__: list[str] = []

Amount = Callable[[Action], int]


class Amounts(NamedTuple):
    """The memory that actions allocate before they run and free after they ran, by operation."""

    takes: Mapping[Op, Amount]
    gives: Mapping[Op, Amount]


class Meter(NamedTuple):
    """The memory that actions allocate and free: for microbatches that stay or are evicted, and for those that are recomputed.

    The first forward of a recomputed microbatch keeps only its input; that of a slice also its state, until the second forward
    has made that again.
    """

    usual: Amounts
    recomputed: Amounts
    holds: tuple[tuple[Hold, ...], ...] = ()  # what skips take beside that, of consecutive units
    overlapped: Collection[MicrobatchKey] = ()  # forwards that run side by side with the next action, a backward

    def taken(self, action: Action) -> int:
        """Return the memory that an action allocates before it runs."""
        take = self.usual.takes.get(action[0])
        return 0 if take is None else take(action)


def meter_of(saved: Amount, moved: Amount) -> Meter:
    """Return a meter where a forward's saved memory counts until its backward ends, and moving memory counts at both ends."""
    takes = {Op.F: saved, Op.LOAD: moved, Op.ACCEPT: moved}
    gives = {Op.B: saved, Op.W: saved, Op.WAIT_EVICT: moved, Op.WAIT_RETURN: moved}
    return Meter(Amounts(takes, gives), Amounts({Op.R: saved}, {Op.B: saved, Op.W: saved}))


def slot(action: Action) -> int:
    """Count every microbatch as 1, and its parts as 0."""
    return 1 if action[3] == 0 else 0


SLOTS = meter_of(slot, slot)


def occupancy(actions: Sequence[Action], meter: Meter = SLOTS) -> Iterator[int]:
    """Yield the memory that is occupied while each action runs, in the meter's unit."""
    occupied = _with_holds(actions, meter) if meter.holds else _occupancy(actions, meter)
    return _side_by_side(actions, meter, occupied) if meter.overlapped else occupied


def _side_by_side(actions: Sequence[Action], meter: Meter, occupied: Iterator[int]) -> Iterator[int]:
    """Yield what is occupied if both of a pair allocate their memory when it begins, and free theirs when it has ended."""
    kept = 0  # what the forward of a pair would have freed by now
    for index, live in enumerate(occupied):
        action, live, kept = actions[index], live + kept, 0
        if action[0] is Op.F and action[1:3] in meter.overlapped:
            live += meter.taken(actions[index + 1])
            give = meter.usual.gives.get(Op.F)
            kept = 0 if give is None else give(action)
        yield live


def _with_holds(actions: Sequence[Action], meter: Meter) -> Iterator[int]:
    held = 0
    takes, gives = changes(actions, meter.holds)
    for index, live in enumerate(_occupancy(actions, meter)):
        held += takes.get(index, 0)
        yield live + held
        held -= gives.get(index, 0)


def _occupancy(actions: Sequence[Action], meter: Meter) -> Iterator[int]:
    again = Op.R  # looked up once: a plan has millions of actions
    recomputed = {action.key for action in actions if action[0] is again}
    both = meter.usual, meter.recomputed
    changing = {op for amounts in both for by_op in amounts for op in by_op}
    usually, when_recomputed = ({op: (takes.get(op), gives.get(op)) for op in changing} for takes, gives in both)
    live = 0
    for action in actions:
        change = usually.get(action[0])
        if change is None:
            yield live
            continue
        take, give = when_recomputed[action[0]] if recomputed and action.key in recomputed else change
        if take is not None:
            live += take(action)
        yield live
        if give is not None:
            live -= give(action)


class _Messages(NamedTuple):
    """The bytes that a microbatch takes on one stage besides its saved ones."""

    handed: int  # the part of the input that counts already when the forward begins
    kept: int  # the part of that which the forward saves, so that it counts once
    made: int  # the part of the output that is not among the saved bytes: it counts until it has arrived where it is used
    result: int  # the gradient for the previous stage
    used: int  # the gradient of the output, or of the results, which the backward uses up
    ended: int  # the part of `made` that is freed when the forward has run: an output that is not sent, once the loss exists
    begun: int  # the part of `used` that the backward makes itself: the gradient of that output
    in_flight: int  # what the end of a send frees: of a message that outlives its backward, all of it
    sending: int  # the saved part of such a message, which the backward does not free


def _messages(sizes: Sizes, stage_ranks: tuple[int, ...], depth: int, stage: int, *, local: bool) -> _Messages:
    """Compute the bytes of a stage's messages; stages of one rank receive nothing: one's output is the other's input."""
    own = sizes.stages[stage]
    if local and (stage + 1) % depth:
        return _local_messages(own, is_first=stage % depth == 0)
    is_first, is_last = stage % depth == 0, (stage + 1) % depth == 0
    made = own.sent - own.kept_sent
    handed, used = own.received, own.sent
    if not is_first and stage_ranks[stage - 1] == stage_ranks[stage]:
        handed = sizes.stages[stage - 1].sent - sizes.stages[stage - 1].kept_sent
    if not is_last and stage_ranks[stage + 1] == stage_ranks[stage]:
        used = sizes.stages[stage + 1].received
    return _Messages(
        handed=0 if is_first else handed,
        kept=0 if is_first else min(own.kept_received, handed),
        made=made,
        result=0 if is_first or local else own.received,
        used=used,
        ended=made if is_last else 0,
        begun=used if is_last else 0,
        in_flight=made,
        sending=0,
    )


def _local_messages(own: StageSizes, *, is_first: bool) -> _Messages:
    """Compute the bytes of a stage that sends its output on and uses its prediction itself; its send ends behind its backward."""
    results = own.results - own.kept_results
    return _Messages(
        handed=0 if is_first else own.received,
        kept=0 if is_first else own.kept_received,
        made=own.sent - own.kept_sent + results,
        result=0,
        used=own.results,
        ended=results,
        begun=own.results,
        in_flight=own.sent,
        sending=own.kept_sent,
    )


@lru_cache(maxsize=64)
def bytes_meter(sizes: Sizes, stage_ranks: tuple[int, ...], depth: int, skips: tuple[Skip, ...] = (), *, local: bool) -> Meter:
    """Return a meter of bytes, messages between stages included; a microbatch passes `depth` stages.

    If plans are `local`, gradients stay in their stage.
    """
    meters = []
    for stages in sizes.by_slice:
        holds = (holds_of(stages, skips, stage_ranks, depth),) if skips else ()
        meters.append(_bytes_meter(Sizes(stages=stages, static=()), stage_ranks, depth, local=local)._replace(holds=holds))
    return by_unit(meters) if len(meters) > 1 else meters[0]


def by_unit(meters: Sequence[Meter]) -> Meter:
    """Combine meters of consecutive units into one, which begins with the first again after the last."""
    holds = tuple(of_unit for meter in meters for of_unit in meter.holds)
    return Meter(_by_unit([meter.usual for meter in meters]), _by_unit([meter.recomputed for meter in meters]), holds)


def _by_unit(each: Sequence[Amounts]) -> Amounts:
    takes = {op: _of_unit([one.takes[op] for one in each]) for op in each[0].takes}
    gives = {op: _of_unit([one.gives[op] for one in each]) for op in each[0].gives}
    return Amounts(takes, gives)


def _of_unit(amounts: Sequence[Amount]) -> Amount:
    return lambda action: amounts[action[2] % len(amounts)](action)


def _bytes_meter(sizes: Sizes, stage_ranks: tuple[int, ...], depth: int, *, local: bool) -> Meter:
    """Return a meter of bytes for units that all have the same sizes."""
    messages = [_messages(sizes, stage_ranks, depth, stage, local=local) for stage in range(len(stage_ranks))]

    def amounts(of: Callable[[StageSizes, _Messages], int]) -> Amount:
        """Tabulate the amount of a computation, or of a message with a neighbour, by the stage; messages of skips count apart."""
        table = list(map(of, sizes.stages, messages))
        return lambda action: 0 if action[3] else table[action[1]]

    moved = [[own.moved(part) for part in range(len(own.parts) + 1)] for own in sizes.stages]
    own = meter_of(amounts(lambda own, of: own.saved), lambda action: moved[action[1]][action[3]]).usual
    takes: dict[Op, Amount] = {
        Op.RECV_F: amounts(lambda own, of: own.received),
        Op.F: amounts(lambda own, of: own.saved + of.made - of.kept),
        Op.RECV_B: amounts(lambda own, of: own.sent),
        Op.B: amounts(lambda own, of: own.given + of.result + of.begun),
        Op.I: amounts(lambda own, of: own.given + of.result + of.begun),
        Op.REDUCE_GRAD: amounts(lambda own, of: own.gradients),
    }
    gives: dict[Op, Amount] = {
        Op.F: amounts(lambda own, of: of.handed + of.ended - of.kept),
        Op.WAIT_SEND_F: amounts(lambda own, of: of.in_flight),
        Op.B: amounts(lambda own, of: own.saved + of.used + own.collected - of.sending),
        Op.I: amounts(lambda own, of: own.saved + of.used + own.collected - own.late),
        Op.W: amounts(lambda own, of: own.late),
        Op.WAIT_SEND_B: amounts(lambda own, of: of.result),
        Op.WAIT_REDUCE_GRAD: amounts(lambda own, of: own.gradients),
    }
    takes_again = {
        Op.F: amounts(lambda own, of: own.sent + own.state),
        Op.R: amounts(lambda own, of: of.made + own.saved - of.kept),
    }
    gives_again = {
        Op.F: lambda action: sizes.stages[action[1]].sent * ((action[1] + 1) % depth == 0),
        Op.WAIT_SEND_F: amounts(lambda own, of: own.sent),
        Op.R: amounts(lambda own, of: of.made + of.handed - of.kept + own.state),
    }
    again = Amounts({**takes, **takes_again}, {**gives, **gives_again})
    return Meter(Amounts({**own.takes, **takes}, {**own.gives, **gives}), again)
