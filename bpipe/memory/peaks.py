"""The peak memory of a rank's action list, given the footprints of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bpipe.memory.ledger import Key
from bpipe.memory.saved.footprint import Footprint
from bpipe.plan.meter import Amount, Amounts, Meter, by_unit, bytes_meter, occupancy
from bpipe.schedules import Op, Plan, Sizes, StageSizes

__all__: list[str] = []

BACKWARDS = (Op.B, Op.I)
ELSEWHERE = StageSizes(parts=(0,))  # for a stage of another rank


class Peaks:
    """The peaks of one rank's action lists, which are computed again only when the plan or a footprint has changed."""

    def __init__(self, *, with_messages: bool) -> None:
        self._with_messages = with_messages
        self._scanned: tuple[Plan | None, Mapping[Key, Footprint], int] = (None, {}, 0)

    def of(self, plan: Plan, rank: int, footprints: Mapping[Key, Footprint]) -> int:
        """Return the most bytes that a rank's own microbatches take."""
        known, same, peak = self._scanned
        if known is not plan or same != footprints:
            peak = max(taken(plan, rank, footprints, with_messages=self._with_messages), default=0)
            self._scanned = (plan, dict(footprints), peak)
        return peak


def taken(plan: Plan, rank: int, footprints: Mapping[Key, Footprint], *, with_messages: bool) -> Iterator[int]:
    """Yield the bytes that a rank's own microbatches take while each of its actions runs."""
    return occupancy(plan.actions[rank], _meter(plan, footprints, with_messages))


def _meter(plan: Plan, footprints: Mapping[Key, Footprint], with_messages: bool) -> Meter:
    """Return a meter of bytes in which each microbatch counts its own footprint."""
    stages = range(plan.num_stages)
    alike: dict[tuple[Footprint | None, ...], Meter] = {}
    meters = []
    for microbatch in range(plan.num_units):
        found = tuple(footprints.get((stage, microbatch)) for stage in stages)
        if found not in alike:
            counted = (ELSEWHERE if one is None else _sizes(one, plan.num_parts(s), with_messages) for s, one in enumerate(found))
            sizes = tuple(counted)
            alike[found] = _with_gradients_of_states(bytes_meter(Sizes(stages=sizes, static=()), plan.stage_ranks), found, sizes)
        meters.append(alike[found])
    return by_unit(meters)


def _with_gradients_of_states(meter: Meter, found: Sequence[Footprint | None], sizes: Sequence[StageSizes]) -> Meter:
    """Add the gradients that slices give to the states of earlier ones, which stay until these run backward."""
    if not any(one is not None and (one.given_bytes or one.collected_bytes) for one in found):
        return meter
    given = [0 if one is None else one.given_bytes for one in found]
    collected = [0 if one is None else one.collected_bytes for one in found]

    def takes(amount: Amount) -> Amount:
        return lambda action: amount(action) + given[action.stage] * (action.part in (0, 1))

    def gives(amount: Amount) -> Amount:
        return lambda action: amount(action) + collected[action.stage] * (action.part in (0, len(sizes[action.stage].parts)))

    def more(amounts: Amounts) -> Amounts:
        return Amounts(
            {op: takes(amount) if op in BACKWARDS else amount for op, amount in amounts.takes.items()},
            {op: gives(amount) if op in BACKWARDS else amount for op, amount in amounts.gives.items()},
        )

    return Meter(more(meter.usual), more(meter.recomputed))


def _sizes(footprint: Footprint, num_parts: int, with_messages: bool) -> StageSizes:
    sizes = footprint.sizes(num_parts)
    return sizes if with_messages else sizes.without_messages()
