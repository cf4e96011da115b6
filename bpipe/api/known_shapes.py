"""The sizes of microbatches that steps have shown, for each form of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bpipe.memory.ledger import Key
from bpipe.memory.recent import Recent
from bpipe.memory.saved.footprint import Footprint, largest_of, with_margin
from bpipe.schedules import Plan, Sizes, StageSizes
from bpipe.session.session import REMEMBERED_SHAPES, StepKey

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """The results of a step that measured, on this rank: its stages' sizes, its modules' static bytes, and the returned bytes."""

    stages: dict[int, StageSizes]
    held_bytes: int
    returned_bytes: int


@dataclass(slots=True)
class Shapes:
    """Everything known about steps whose inputs look alike."""

    revisions: tuple[int, ...] = ()  # how often each rank had asked to measure again when these were measured
    measured: MeasuredSizes | None = None  # the results of the latest step that measured
    plan: Plan | None = None  # the plan made from them
    states: tuple[int, ...] = ()  # the bytes of each rank's optimizer states when the plan was made
    seen: dict[int, StageSizes] = field(default_factory=dict)  # the largest microbatch of each stage that exceeded its plan
    static_bytes: int = 0  # those of this rank's modules: the most that were planned with, or seen since
    varying: set[int] = field(default_factory=set)  # the stages whose microbatches took different memory in one step

    def revise(self, revisions: tuple[int, ...]) -> bool:
        """Forget the measurements if a rank has asked for that; return whether there was something to forget."""
        if self.revisions == revisions:
            return False
        was_known = self.measured is not None
        self.revisions, self.measured, self.plan = revisions, None, None
        return was_known

    def replan(self, states: tuple[int, ...]) -> bool:
        """Forget the plan, but not the sizes, if ranks have other optimizer states; return whether there was a plan."""
        if self.states == states:
            return False
        was_known = self.plan is not None
        self.states, self.plan = states, None
        return was_known

    def stages(self, margin: float) -> dict[int, StageSizes]:
        """Return sizes that cover the measured step and later ones, with a margin on the saved bytes of stages that vary."""
        assert self.measured is not None, "a plan is made from measurements"
        covered = {stage: self._covered(stage, sizes) for stage, sizes in self.measured.stages.items()}
        return {stage: with_margin(sizes, margin) if stage in self.varying else sizes for stage, sizes in covered.items()}

    def _covered(self, stage: int, sizes: StageSizes) -> StageSizes:
        """Return sizes of a stage that cover later microbatches; unchanged if these took no more, whatever parts they had."""
        seen = self.seen.get(stage, sizes)
        return sizes if seen.saved <= sizes.saved else largest_of([sizes, seen])

    def outgrown(self, sizes: Sizes, footprints: Mapping[Key, Footprint]) -> Iterable[int]:
        """Yield stages whose microbatches take more than planned and than any before, and remember their sizes."""
        for stage in {stage for stage, _ in footprints}:
            found = largest_of(footprint.sizes() for (of, _), footprint in footprints.items() if of == stage)
            known = self.seen.get(stage, found)
            if found.saved > sizes.stages[stage].saved and (known is found or found.saved > known.saved):
                self.seen[stage] = largest_of([found, known])
                yield stage


class KnownShapes(Recent[StepKey, Shapes]):
    """The sizes known for the most recently used forms of inputs."""

    def latest(self) -> Shapes:
        return next(reversed(self.values()))


@dataclass(slots=True)
class Comparison:
    """The comparison of replicas for the steps with some inputs."""

    shapes: Shapes  # the sizes that the first of these steps has measured
    num_steps: int = 0  # the number of these steps
    difference: str | None = None  # the result of the comparison; None before it


class Comparisons:
    """Let replicas compare the memory of their microbatches: in the second step with some inputs, as measured in the first one.

    The step of the comparison depends on the inputs alone. A replica's modules may change in any step and make it measure again.
    """

    def __init__(self) -> None:
        self._by_inputs = Recent[tuple[bytes, ...], Comparison](REMEMBERED_SHAPES)

    def is_due(self, inputs: tuple[bytes, ...], shapes: Shapes) -> bool:
        """Count a step with some inputs, and return whether replicas compare before it runs."""
        comparison = self._by_inputs.use(inputs, Comparison(shapes))
        comparison.num_steps += 1
        return comparison.num_steps == 2

    def of(self, inputs: tuple[bytes, ...]) -> Comparison:
        return self._by_inputs[inputs]
