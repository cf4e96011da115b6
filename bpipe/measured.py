"""What steps have shown of the sizes of microbatches, for each form of their inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bpipe.memory.footprint import Footprint, largest_of
from bpipe.memory.ledger import Key
from bpipe.schedule import REMEMBERED_SHAPES, StepKey
from bpipe.schedules import Plan, Sizes, StageSizes

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the measuring step found on this rank: the sizes of its stages, what modules hold, what the step returns."""

    stages: dict[int, StageSizes]
    held_bytes: int
    returned_bytes: int


@dataclass(slots=True)
class Shapes:
    """What is known of steps whose inputs look alike.

    Args:
        revisions: how often each rank had asked to measure anew when they were measured.
        measured: by the latest step that measured.
        plan: made of that.
        seen: the largest microbatch of each stage that outgrew its plan.
        is_compared: whether replicas have compared what they measured.
    """

    revisions: tuple[int, ...] = ()
    measured: Measured | None = None
    plan: Plan | None = None
    seen: dict[int, StageSizes] = field(default_factory=dict)
    is_compared: bool = False

    def revise(self, revisions: tuple[int, ...]) -> bool:
        """Forget what was measured if a rank has asked for that; whether there was something to forget."""
        if self.revisions == revisions:
            return False
        was_known = self.measured is not None
        self.revisions, self.measured, self.plan = revisions, None, None
        return was_known

    def stages(self) -> dict[int, StageSizes]:
        """Sizes that cover what was measured, and seen in other steps."""
        assert self.measured is not None, "a plan is made of what was measured"
        return {stage: self._covered(stage, sizes) for stage, sizes in self.measured.stages.items()}

    def _covered(self, stage: int, sizes: StageSizes) -> StageSizes:
        """Sizes of a stage that have room for what was seen: of as much, the parts that it was cut into before say nothing."""
        seen = self.seen.get(stage, sizes)
        return sizes if seen.saved <= sizes.saved else largest_of([sizes, seen])

    def outgrown(self, sizes: Sizes, footprints: Mapping[Key, Footprint]) -> Iterable[int]:
        """Remember stages whose microbatches take more than planned, and than any of them before."""
        for stage in {stage for stage, _ in footprints}:
            found = largest_of(footprint.sizes() for (of, _), footprint in footprints.items() if of == stage)
            known = self.seen.get(stage, sizes.stages[stage])
            if found.saved > max(known.saved, sizes.stages[stage].saved):
                self.seen[stage] = largest_of([found, known])
                yield stage


class KnownShapes:
    """The forms of inputs that were seen last."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[StepKey, Shapes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shapes)

    def of(self, key: StepKey) -> Shapes:
        """What is known of a form, which is used now."""
        shapes = self._shapes.setdefault(key, Shapes())
        self._shapes.move_to_end(key)
        if len(self._shapes) > REMEMBERED_SHAPES:
            self._shapes.popitem(last=False)
        return shapes

    def latest(self) -> Shapes:
        return next(reversed(self._shapes.values()))
