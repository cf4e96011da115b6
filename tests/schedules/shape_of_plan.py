"""The shape of a plan's flow, as the arguments of what made it say: for tests that derive what they expect without the flow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped, sliced
from bpipe.schedules import Plan


@dataclass(frozen=True)
class PlanShape:
    """The seven things that a plan may be besides a chain of stages; `depth` is how many stages a microbatch passes."""

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    has_backward: bool = True
    slices: int = 1
    directions: int = 1
    skips: tuple[tuple[int, ...], ...] = ()
    local: bool = False
    paths: tuple[tuple[int, ...], ...] = ()
    sums: tuple[tuple[int, ...], ...] = ()

    @property
    def depth(self) -> int:
        return len(self.paths[0]) if self.paths else len(self.stage_ranks) // self.directions

    def flow(self) -> Flow:
        flow = shaped(None, "chain", self.stage_ranks[: self.depth], self.num_microbatches, self.has_backward)
        if self.directions > 1:
            ways = tuple(tuple(range(first, first + self.depth)) for first in range(0, len(self.stage_ranks), self.depth))
            flow = shaped(flow, "alternatives", self.stage_ranks, ways, True)
        if self.paths:
            flow = shaped(flow, "alternatives", self.stage_ranks, self.paths, False)
        flow = sliced(flow, self.slices)
        flow = shaped(flow, "skips", self.skips) if self.skips else flow
        flow = shaped(flow, "local") if self.local else flow
        return shaped(flow, "sums", self.sums) if self.sums else flow


def shape_of(plan: Plan) -> PlanShape:
    found: dict[str, Any] = {}
    for name, arguments in plan.flow.shapes:
        if name == "chain":
            found |= dict(zip(("stage_ranks", "num_microbatches", "has_backward"), arguments))
        elif name == "alternatives":
            stage_ranks, routes, are_twins = arguments
            found |= {"stage_ranks": stage_ranks} | ({"directions": len(routes)} if are_twins else {"paths": routes})
        else:
            found[name] = arguments[0] if arguments else True
    return PlanShape(**found)


def reshaped(plan: Plan, **changes: Any) -> Plan:
    """A plan of the same actions over another flow, in the order of shapes in which bpipe makes it."""
    return replace(plan, flow=replace(shape_of(plan), **changes).flow())
