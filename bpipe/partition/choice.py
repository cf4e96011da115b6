"""The stages that were chosen, and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.estimate.columns import columns
from bpipe.schedules import Costs, Op, Plan

__all__ = ["StageChoice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """A model's stages, as `bpipe.choose_stages` found them. `str` formats them as a table.

    Args:
        stages: for each stage the names of its modules, as `split_model` takes them.
        plan: the plan that they were chosen for.
        costs: of each stage, with free links, as `bpipe.schedules.simulate` takes them: of whole microbatches.
        rank_bytes: the most that each rank holds, static bytes included; messages between stages are not counted.
        step_s: the simulated step.

    Example:
        >>> from bpipe import choose_stages
        >>> from bpipe.partition import LayerCost
        >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=1.0 + (i == 5), backward_s=2.0) for i in range(6)]
        >>> choice = choose_stages(layers, 3, 6)
        >>> choice.stages[0], choice.costs.forward_s
        (('layers.0', 'layers.1'), (2.0, 2.0, 3.0))
    """

    stages: tuple[tuple[str, ...], ...]
    plan: Plan
    costs: Costs
    rank_bytes: tuple[int, ...]
    step_s: float

    @property
    def rank_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes for one microbatch."""
        times = [sum(self.costs.seconds(op, stage, 0) for op in (Op.F, Op.B)) for stage in range(len(self.stages))]
        return tuple(sum(map(times.__getitem__, self.plan.stages_of(rank))) for rank in range(self.plan.num_ranks))

    def __repr__(self) -> str:
        layers = "+".join(str(len(names)) for names in self.stages)
        return f"StageChoice({layers} modules for {self.plan.name}: a step of {1e3 * self.step_s:.4g} ms, simulated)"

    def __str__(self) -> str:
        head = ("stage", "rank", "modules", "forward ms", "backward ms", "saved MiB", "static MiB")
        rows = [head, *map(self._row, range(len(self.stages)))]
        slowest, fullest = (values.index(max(values)) for values in (self.rank_s, self.rank_bytes))
        return "\n".join(
            [
                *columns(rows, numbers={*range(len(head))} - {head.index("modules")}),
                f"{self.plan.name}, {self.plan.num_microbatches} microbatches{self.plan.units.parts}: "
                f"a step of {1e3 * self.step_s:.4g} ms, simulated",
                f"slowest: rank {slowest}, {1e3 * self.rank_s[slowest]:.4g} ms per microbatch; "
                f"fullest: rank {fullest}, {_mib(self.rank_bytes[fullest])} MiB",
            ]
        )

    def _row(self, stage: int) -> tuple[str, ...]:
        names, costs = self.stages[stage], self.costs
        shown = ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"
        times = (f"{1e3 * costs.seconds(op, stage, 0):.3f}" for op in (Op.F, Op.B))
        return str(stage), str(self.plan.stage_ranks[stage]), shown, *times, _mib(costs.saved(stage)), _mib(costs.static(stage))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
