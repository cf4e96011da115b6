"""The peak memory of a rank's action list, given the footprints of its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from bpipe.memory.ledger import Key
from bpipe.memory.saved.footprint import Footprint
from bpipe.plan.meter import Meter, UnitMeter, occupancy, unit_meter
from bpipe.plan.sizes import Amount, StageSizes
from bpipe.schedules import Plan

__all__: list[str] = []

Exchanged = Mapping[int, tuple[Amount, ...]]  # by stage, the gradients that other ranks have got and sent
ELSEWHERE = StageSizes(parts=(0,))  # for a stage of another rank
NOTHING: Exchanged = MappingProxyType({})


def peak(
    plan: Plan, rank: int, footprints: Mapping[Key, Footprint], exchanged: Exchanged = NOTHING, *, with_messages: bool
) -> int:
    """Return the most bytes that a rank's own microbatches take, with the gradients that ranks `exchanged`."""
    return max(taken(plan, rank, footprints, exchanged, with_messages=with_messages), default=0)


def taken(
    plan: Plan, rank: int, footprints: Mapping[Key, Footprint], exchanged: Exchanged = NOTHING, *, with_messages: bool
) -> Iterator[int]:
    """Yield the bytes that a rank's own microbatches take while each of its actions runs."""
    return occupancy(plan.actions[rank], _meter(plan, footprints, exchanged, with_messages))


def _meter(plan: Plan, footprints: Mapping[Key, Footprint], exchanged: Exchanged, with_messages: bool) -> Meter:
    """Return a meter of bytes in which each microbatch counts its own footprint."""
    stages, flow = range(plan.num_stages), plan.flow
    alike: dict[tuple[object, ...], UnitMeter] = {}
    meters = []
    for microbatch in range(plan.num_units):
        found = tuple(footprints.get((stage, microbatch)) for stage in stages)
        key = flow.turn_of(microbatch), found
        if key not in alike:
            sizes = [ELSEWHERE if one is None else _sizes(one, plan.num_parts(s), with_messages) for s, one in enumerate(found)]
            for stage, gradients in exchanged.items() if with_messages else ():
                sizes[stage] = sizes[stage].with_amounts(*gradients)
            alike[key] = unit_meter(flow, key[0], sizes.__getitem__)
        meters.append(alike[key])
    return Meter(tuple(meters), plan.overlapped)


def _sizes(footprint: Footprint, num_parts: int, with_messages: bool) -> StageSizes:
    sizes = footprint.sizes(num_parts)
    return sizes if with_messages else sizes.without_messages()
