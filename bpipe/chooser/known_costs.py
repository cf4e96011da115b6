"""What steps have shown of the costs of a model's stages: the latest measurement of each operation, and of each kind of link."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from bpipe.estimate.calibrate import LINKS, SECONDS_OF, calibrated
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import OUT, Sizes
from bpipe.simulator.costs import Costs, Link
from bpipe.simulator.measured import Measured

__all__: list[str] = []


@dataclass(slots=True)
class KnownCosts:
    """The costs of the stages, as far as they are known.

    Args:
        assumed: the links, and what a transfer slows computations down by, until steps show them.
        nodes: the node of each rank; None: all on one.
    """

    assumed: Costs = field(default_factory=Costs)
    nodes: Sequence[int] | None = None
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)  # of each operation that has run, by stage and slice
    links: dict[str, Link] = field(default_factory=dict)
    slowdown: float | None = None

    def copy(self) -> KnownCosts:
        """Return costs that learn by themselves."""
        return deepcopy(self)

    def learn(self, steps: Sequence[Measured], plan: Plan) -> None:
        """Take the costs of some steps of a plan in place of what was known."""
        found = calibrated(steps, plan, nodes=self.nodes)
        latest = {SECONDS_OF[action.op] for lane in plan.actions for action in lane if action.op in SECONDS_OF}
        for name in latest:
            by_stage = getattr(found, name)
            self.seconds[name] = [[median(one[slice_ :: plan.slices]) for slice_ in range(plan.slices)] for one in by_stage]
        self.bring_together(latest)
        for name in LINKS:
            if (link := getattr(found, name)) not in (None, Link()):
                self.links[name] = link
        self.slowdown = found.slowdown

    def bring_together(self, latest: set[str]) -> None:
        """Let whole backwards and their halves take equally long, as the latest of these were measured."""
        if not {"backward_s", "input_s", "weight_s"} <= self.seconds.keys() or {"backward_s", "input_s"} <= latest:
            return
        whole, inputs, weights = (self.seconds[name] for name in ("backward_s", "input_s", "weight_s"))
        for of_stage in zip(whole, inputs, weights):
            for slice_, (b, i, w) in enumerate(zip(*of_stage)):
                if "input_s" in latest or i + w == 0:
                    of_stage[0][slice_] = i + w
                else:
                    of_stage[1][slice_], of_stage[2][slice_] = b * i / (i + w), b * w / (i + w)

    def costs(self, sizes: Sizes) -> Costs:
        """Return all costs: a whole backward takes as long as its halves, and each half as much of it, until they have run."""
        seconds = dict(self.seconds)
        if "backward_s" not in seconds and "input_s" in seconds:
            halves = zip(seconds["input_s"], seconds["weight_s"])
            seconds["backward_s"] = [list(map(float.__add__, *of_stage)) for of_stage in halves]
        known: dict[str, Any] = {
            name: [of_slices if len(of_slices) > 1 else of_slices[0] for of_slices in stages] for name, stages in seconds.items()
        }
        return replace(
            self.assumed,
            **known | self.links,
            slowdown=self.assumed.slowdown if self.slowdown is None else self.slowdown,
            nodes=self.nodes,
            saved_bytes=[stage.saved for stage in sizes.stages],
            movable_bytes=[stage.movable for stage in sizes.stages],
            output_bytes=[stage[OUT].num_bytes for stage in sizes.stages],
        )
