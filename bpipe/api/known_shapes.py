"""The sizes of microbatches that dry runs have said or steps have shown, for each form of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bpipe.memory.ledger import Key
from bpipe.memory.saved.footprint import Footprint, covering, largest_of, with_margin
from bpipe.plan.sizes import StageSizes
from bpipe.schedules import Plan
from bpipe.session.report import RankSizes

__all__: list[str] = []


@dataclass(slots=True)
class Shapes:
    """Everything known about steps whose inputs look alike."""

    revisions: tuple[int, ...] = ()  # how often each rank had asked to measure again when these were measured
    measured: RankSizes | None = None  # the sizes by the latest step that measured, or by a dry run
    is_predicted: bool = False  # whether no step has shown yet that a dry run's are right
    must_measure: bool = False  # because a dry run could not go on, or a rank has found wrong what one had said
    plan: Plan | None = None  # the plan made from them
    states: tuple[tuple[int, int], ...] = ()  # of each rank when the plan was made: optimizer states' bytes, wrong predictions
    seen: dict[tuple[int, int], StageSizes] = field(default_factory=dict)  # the largest slice of each stage that exceeded its plan
    static_bytes: int = 0  # those of this rank's modules: the most that were planned with, or seen since
    varying: set[int] = field(default_factory=set)  # the stages whose microbatches took different memory in one step

    def revise(self, revisions: tuple[int, ...]) -> bool:
        """Forget the measurements if a rank has asked for that; return whether there was something to forget."""
        if self.revisions == revisions:
            return False
        was_known = self.measured is not None
        self.revisions, self.measured, self.plan = revisions, None, None
        return was_known

    def replan(self, states: tuple[tuple[int, int], ...]) -> bool:
        """Forget the plan, but not the sizes, if ranks have other states or sizes; return whether there was one."""
        if self.states == states:
            return False
        was_known = self.plan is not None
        self.must_measure |= any(new[1] > old[1] for new, old in zip(states, self.states))
        self.states, self.plan = states, None
        return was_known

    def prove(self, found: RankSizes) -> bool:
        """Take the sizes that a step has shown in place of a dry run's; return whether they are the same."""
        is_equal = found == self.measured
        self.measured, self.is_predicted = found, False
        return is_equal

    def stages(self, margin: float) -> dict[int, tuple[StageSizes, ...]]:
        """Return sizes of each slice that cover the measured step and later ones, with a margin for stages that vary."""
        assert self.measured is not None, "a plan is made from measurements"
        covered = {stage: self._covered(stage, sizes) for stage, sizes in self.measured.stages.items()}
        for stage, gradients in self.measured.exchanged.items():
            covered[stage] = tuple(one.with_amounts(*gradients) for one in covered[stage])
        return {
            stage: tuple(with_margin(one, margin) for one in sizes) if stage in self.varying else sizes
            for stage, sizes in covered.items()
        }

    def _covered(self, stage: int, units: tuple[StageSizes, ...]) -> tuple[StageSizes, ...]:
        """Return sizes of a stage that cover later microbatches; unchanged if these took no more, whatever parts they had."""
        seen = [self.seen.get((stage, number), sizes) for number, sizes in enumerate(units)]
        return covering([[one, other] if other.saved > one.saved else [one] for one, other in zip(units, seen)])

    def outgrown(self, plan: Plan, footprints: Mapping[Key, Footprint]) -> list[int]:
        """Return the stages whose microbatches take more than planned and than any before, and remember their sizes."""
        assert plan.sizes is not None, "a plan in bytes"
        found: dict[tuple[int, int], list[StageSizes]] = {}
        for (stage, unit), footprint in footprints.items():
            found.setdefault((stage, unit % plan.units), []).append(footprint.sizes())
        grown = set()
        for key, some in found.items():
            largest, known = largest_of(some), self.seen.get(key)
            if largest.saved > max(plan.sizes.at(*key).saved, known.saved if known else 0):
                self.seen[key] = largest_of([largest, known or largest])
                grown.add(key[0])
        return sorted(grown)


@dataclass(slots=True)
class Comparison:
    """The comparison of replicas for the steps with some inputs: before the second one, by what the first one has measured.

    The step of the comparison depends on the inputs alone. A replica's modules may change in any step and make it measure again.
    """

    shapes: Shapes  # the sizes that the first of these steps has measured
    num_steps: int = 0  # the number of these steps
    difference: str | None = None  # the result of the comparison; None before it
