"""The stages that were chosen, and what is expected of them."""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.estimate.columns import columns
from bpipe.partition.layers import OF_STAGES
from bpipe.simulator.costs import Costs

__all__ = ["StageChoice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """A model's stages, as `bpipe.choose_stages` found them. `str` formats them as a table.

    Args:
        stages: for each stage the names of its modules, as `split_model` takes them.
        schedule: the schedule it was chosen for.
        num_microbatches: m.
        stage_ranks: the rank of each stage.
        forward_s: seconds of each stage's forward, of one microbatch.
        backward_s: likewise of its backward.
        input_s: likewise of the half of a split backward that computes the gradients of its inputs.
        weight_s: likewise of the other half.
        saved_bytes: what a microbatch keeps on each stage.
        output_bytes: what each stage's forward sends.
        static_bytes: what stays on each stage: parameters, gradients, optimizer states.
        rank_bytes: the most that each rank holds, static bytes included; messages between stages are not counted.
        step_s: the simulated step.
        slices: k, of each microbatch.

    Example:
        >>> from bpipe import choose_stages
        >>> from bpipe.partition import LayerCost
        >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=1.0 + (i == 5), backward_s=2.0) for i in range(6)]
        >>> choice = choose_stages(layers, 3, 6)
        >>> choice.stages[0], choice.forward_s
        (('layers.0', 'layers.1'), (2.0, 2.0, 3.0))
    """

    stages: tuple[tuple[str, ...], ...]
    schedule: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    static_bytes: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    step_s: float
    slices: int = 1

    @property
    def costs(self) -> Costs:
        """The stages' costs, with free links, as `bpipe.schedules.simulate` takes them: of whole microbatches."""
        return Costs(**{name: getattr(self, name) for name in OF_STAGES})

    @property
    def rank_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes for one microbatch."""
        seconds = [0.0] * len(self.rank_bytes)
        for rank, forward, backward in zip(self.stage_ranks, self.forward_s, self.backward_s):
            seconds[rank] += forward + backward
        return tuple(seconds)

    def __repr__(self) -> str:
        layers = "+".join(str(len(names)) for names in self.stages)
        return f"StageChoice({layers} modules for {self.schedule}: a step of {1e3 * self.step_s:.4g} ms, simulated)"

    def __str__(self) -> str:
        head = ("stage", "rank", "modules", "forward ms", "backward ms", "saved MiB", "static MiB")
        rows = [head, *(self._row(stage) for stage in range(len(self.stages)))]
        slowest, fullest = (values.index(max(values)) for values in (self.rank_s, self.rank_bytes))
        cut = f" of {self.slices} slices" if self.slices > 1 else ""
        return "\n".join(
            [
                *columns(rows, numbers={*range(len(head))} - {head.index("modules")}),
                f"{self.schedule}, {self.num_microbatches} microbatches{cut}: a step of {1e3 * self.step_s:.4g} ms, simulated",
                f"slowest: rank {slowest}, {1e3 * self.rank_s[slowest]:.4g} ms per microbatch; "
                f"fullest: rank {fullest}, {_mib(self.rank_bytes[fullest])} MiB",
            ]
        )

    def _row(self, stage: int) -> tuple[str, ...]:
        names = self.stages[stage]
        shown = ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"
        times = (f"{1e3 * seconds[stage]:.3f}" for seconds in (self.forward_s, self.backward_s))
        return (
            str(stage),
            str(self.stage_ranks[stage]),
            shown,
            *times,
            _mib(self.saved_bytes[stage]),
            _mib(self.static_bytes[stage]),
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
