"""The fields of a plan and properties that follow from them: memory peaks, channels, evictions and recomputations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bpipe.errors import PlanError
from bpipe.flow.flow import Flow
from bpipe.flow.units import Units
from bpipe.plan.action import (
    BETWEEN_STAGES,
    COMPUTE,
    HOST,
    MIRROR,
    OTHER_END,
    POSTS,
    Action,
    Channel,
    Identity,
    MicrobatchKey,
    Op,
    Purpose,
)
from bpipe.plan.meter import SLOTS, Meter, SizeOf, bytes_meter, occupancy, slot
from bpipe.plan.reserved import reserve
from bpipe.plan.sizes import Sizes

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanData:
    """The fields of a `Plan`, whose docstring explains them, and properties that follow from them.

    Functions of this class write and draw a plan, so that `Plan` can have them as methods without an import cycle.
    """

    name: str
    flow: Flow
    actions: tuple[tuple[Action, ...], ...]
    served: tuple[tuple[Action, ...], ...]
    slots: tuple[int | None, ...]
    sizes: Sizes | None = None
    budgets: tuple[int | None, ...] | None = None
    overlapped: frozenset[MicrobatchKey] = frozenset()

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, m: whole ones, into which a batch is cut along its samples."""
        return self.flow.num_microbatches

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        return self.flow.stage_ranks

    @property
    def has_backward(self) -> bool:
        """False for evaluation, where only forwards run."""
        return self.flow.has_backward

    @property
    def slices(self) -> int:
        """The slices into which each microbatch is cut along the sequence, k; they pass through the stages one behind the other."""
        return int(self.flow.units)

    @property
    def units(self) -> Units:
        """The same, with the units' names."""
        return self.flow.units

    @property
    def num_units(self) -> int:
        """The number of units, m*k: what actions, slots and sizes count. A unit is a slice, or a microbatch that is not cut."""
        return self.flow.num_units

    def slice_of(self, unit: int) -> tuple[int, int]:
        """Return the microbatch of a unit, and its slice, 0 for the beginning of the sequence."""
        return divmod(unit, self.units)

    @property
    def depth(self) -> int:
        """The number of stages that a microbatch passes: one for each part of the model."""
        return len(self.flow.routes)

    def is_last(self, stage: int) -> bool:
        """Return whether a stage is the last one that its microbatches pass."""
        return self.flow.parts[stage] == self.depth - 1

    def is_first(self, stage: int) -> bool:
        """Return whether a stage is the first one that its microbatches pass."""
        return self.flow.parts[stage] == 0

    def neighbour(self, stage: int, offset: int, unit: int = 0) -> int | None:
        """Return the stage before (-1) or behind (+1) a stage, on the route of a unit; None if there is none.

        Of a unit that does not pass the stage, it is the one for the first unit that does.
        """
        flow = self.flow
        turn, turns = flow.turn_of(unit), flow.turns_of(stage)
        turn = turn if turn in turns or not turns else turns[0]
        ends = (flow.gives if offset > 0 else flow.needs)(Op.F, stage, turn)
        return next((end.stage for end in ends if end.op == Op.F and not end.name), None)

    def passes(self, stage: int, unit: int) -> bool:
        """Return whether a unit passes a stage."""
        return self.flow.turn_of(unit) in self.flow.turns_of(stage)

    def other_end(self, action: Action) -> Identity:
        """Return the identity of the action at the other end of the transfer that an action starts."""
        op, stage, unit, part, _ = action
        if op is Op.REDUCE_GRAD:
            return op, self.flow.exchanges[stage, part].other, unit, part and stage + 1
        if op not in BETWEEN_STAGES:
            return OTHER_END[op], stage, unit, part
        other = part - 1 if part else self.neighbour(stage, 1 if op in (Op.SEND_F, Op.RECV_B) else -1, unit)
        assert other is not None, "a message leads to a stage"
        return OTHER_END[op], other, unit, part and stage + 1

    def show(self, action: Action) -> str:
        """Write an action for people: with its microbatch and slice."""
        return action.text(self.units)

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks together."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, p."""
        return len(self.actions)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def num_parts(self, stage: int) -> int:
        """Return how many parts of a stage's microbatch can move by themselves."""
        return 0 if self.sizes is None else len(self.sizes.stages[stage].parts)

    def compute(self, rank: int) -> list[Action]:
        """Return the forwards and backwards of a rank in order."""
        return [action for action in self.actions[rank] if action[0] in COMPUTE]

    def begins_pair(self, action: Action) -> bool:
        """Return whether an action is a forward that runs side by side with the backward that follows it in its lane."""
        return action[0] is Op.F and action[1:3] in self.overlapped

    def chains(self, rank: int) -> dict[int, tuple[Action, ...]]:
        """Return the acceptor's lane of a rank as one chain for each evictor that it serves."""
        chains: dict[int, list[Action]] = {}
        for action in self.served[rank]:
            if action[4] is not None:
                chains.setdefault(action[4], []).append(action)
        return {peer: tuple(chains[peer]) for peer in sorted(chains)}

    def acceptors(self, rank: int) -> list[int]:
        """Return the ranks that a rank evicts to."""
        return sorted({peer for op, *_, peer in self.actions[rank] if op is Op.EVICT and peer is not None and peer != HOST})

    def host_chain(self, rank: int) -> tuple[Action, ...]:
        """Return the actions that a rank's host would run if it were an acceptor with a lane of its own."""
        return tuple(a._replace(op=MIRROR[a.op]) for a in self.actions[rank] if a.peer == HOST)

    def remote_buffers(self, rank: int, size: SizeOf = slot) -> dict[int, tuple[int, ...]]:
        """Return the sizes of a rank's buffers by evictor that it serves: one buffer for each remote activation stored at once."""
        return {peer: reserve(chain, size).sizes for peer, chain in self.chains(rank).items()}

    def meter(self) -> Meter:
        """Return the meter that counts the plan's memory: in bytes where it has sizes, else in slots."""
        if self.sizes is None:
            return SLOTS
        return bytes_meter(self.sizes, self.flow)._replace(overlapped=self.overlapped)

    def activations_meter(self) -> Meter:
        """Return the meter that counts only saved bytes, without messages."""
        return bytes_meter(self._sized().without_messages(), self.flow)._replace(overlapped=self.overlapped)

    @property
    def peak_slots(self) -> tuple[int, ...]:
        """The most slots each rank occupies: its own microbatches (or slices) and the buffers it reserves for remote activations.

        A forward takes its slot when it starts, a backward frees it when it ends, and a transfer in flight counts
        at both ends.

        Raises:
            PlanError: the plan has no served lane for each rank.
        """
        with looking_up(self):
            own = (max(occupancy(actions), default=0) for actions in self.actions)
            return tuple(peak + sum(map(len, self.remote_buffers(rank).values())) for rank, peak in enumerate(own))

    @property
    def device_peak_bytes(self) -> tuple[int, ...]:
        """The peak bytes of each rank's device: static bytes, microbatches and messages, and its buffers for remote activations."""
        with looking_up(self):
            return tuple(
                self.idle_bytes(rank) + max(occupancy(self.actions[rank], self.meter()), default=0)
                for rank in range(self.num_ranks)
            )

    @property
    def activation_peak_bytes(self) -> tuple[int, ...]:
        """The peak bytes of activations on each rank: those saved by its microbatches, and its buffers for remote activations."""
        with looking_up(self):
            meter = self.activations_meter()
            own = (max(occupancy(actions, meter), default=0) for actions in self.actions)
            return tuple(peak + self.remote_buffer_bytes(rank) for rank, peak in enumerate(own))

    def idle_bytes(self, rank: int) -> int:
        """Return the bytes that a rank occupies without microbatches of its own: static bytes, and buffers for remote ones."""
        return self._sized().static[rank] + self.remote_buffer_bytes(rank)

    def remote_buffer_bytes(self, rank: int) -> int:
        """Return the bytes of the buffers that a rank reserves for remote activations."""
        return sum(map(sum, self.remote_buffers(rank, self._sized().moved).values()))

    def host_bytes(self, rank: int) -> int:
        """Return the most bytes that a rank's evictions keep in its host's memory."""
        with looking_up(self):
            return sum(reserve(self.host_chain(rank), self._sized().moved).sizes)

    def _sized(self) -> Sizes:
        if self.sizes is None:
            raise PlanError(f"plan {self.name!r} counts slots and has no sizes: give it sizes to count bytes")
        return self.sizes

    def channels(self) -> list[Channel]:
        """Return the channels that the plan uses, in the same order on all ranks."""
        lanes = [(rank, lane) for lanes in (self.actions, self.served) for rank, lane in enumerate(lanes)]
        channels = {a.channel(rank) for rank, lane in lanes for a in lane if a.op in POSTS and a.peer != HOST}
        exchanges = {(rank, a.peer) for rank, lane in enumerate(self.actions) for a in lane if a.peer is not None and a.is_exchange}
        return sorted({*channels, *(Channel(Purpose.TWIN, *ends) for ends in exchanges)})

    def evicted(self, rank: int) -> list[MicrobatchKey]:
        """Return the (stage, microbatch) pairs of which a rank evicts all or parts, in the order of their first eviction."""
        return list(dict.fromkeys(a[1:3] for a in self.actions[rank] if a.op is Op.EVICT))

    def recomputed(self, rank: int) -> set[MicrobatchKey]:
        """Return the (stage, microbatch) pairs whose forward runs twice on a rank: the first forward keeps only its input."""
        return {action.key for action in self.actions[rank] if action.op is Op.R}


@contextmanager
def looking_up(plan: PlanData) -> Iterator[None]:
    """Raise a PlanError if an unverified plan names something that it does not have."""
    try:
        yield
    except LookupError as error:
        raise PlanError(f"plan {plan.name!r} names something that it does not have; verify() shows where: {error}") from error
