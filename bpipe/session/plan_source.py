"""Where the plans of a pipeline's steps come from: one fixed plan, unless a subclass makes others as it learns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bpipe.comm.health.agreement import StepRecord
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Observer, Run
from bpipe.model.plain_numbers import InputForms
from bpipe.plan.plan import Plan
from bpipe.schedules.by_name import forward_plan
from bpipe.session.fullest import Fullest
from bpipe.session.prepare import PreparedCall

__all__: list[str] = []

Gather = Callable[[Callable[["PlanSource"], bytes]], list[bytes]]  # what each rank's source answers, by rank of the group


class Proven(NamedTuple):
    """A verified plan and its fingerprint, by which ranks notice that they have different ones."""

    plan: Plan
    fingerprint: str


class PlanSource:
    """One verified plan for all training steps, and its forwards for evaluations.

    A subclass that makes other plans overrides what it needs; `Session` calls the methods in the order in which they stand here.

    Args:
        plan: the plan that training steps announce to the other ranks, and run.
        rule: the name of the schedule.
        asked: what the plans follow from, if the ranks must have asked for the same before they can make them.
    """

    compares = True  # whether plans know nothing of each rank's bytes, so that a step must show how balance changes them

    def __init__(self, plan: Plan, rule: str, asked: str = "") -> None:
        self.plan, self.rule, self._asked = plan, rule, asked  # the plan is the latest training step's, or the first one's
        self.fullest = Fullest()
        self._announced = {True: self._proven(plan)}

    def prepare(self, memory: Memory, plan_rank: int, stages: Collection[int]) -> None:
        """Set what a rank's memory has to know of the plans."""
        memory.most_parts = {stage: max(1, self.plan.num_parts(stage)) for stage in stages}
        memory.is_inside = bool(self.plan.interrupted(plan_rank))

    def announced(self, *, is_training: bool) -> Proven:
        """Return the plan of a training step or of an evaluation, which is made and proven for the first one."""
        if is_training not in self._announced:
            self._announced[is_training] = self._proven(forward_plan(self._announced[True].plan))
        return self._announced[is_training]

    def _proven(self, plan: Plan) -> Proven:
        """Return a plan with a fingerprint of it and of what was asked for."""
        fingerprint = plan.fingerprint()
        if self._asked:
            fingerprint = hashlib.sha256(f"{fingerprint} {self._asked}".encode()).hexdigest()[:32]
        return Proven(plan, fingerprint)

    def completed(self, record: StepRecord, forms: InputForms) -> StepRecord:
        """Add to a step's record what ranks must know of each other before `plan_of` is called."""
        return record

    def plan_of(self, inputs: PreparedCall, records: Sequence[StepRecord], gather: Gather, *, is_training: bool) -> Plan:
        """Return the plan of a step that all ranks have described. Collective where it calls `gather`.

        Args:
            inputs: this rank's.
            records: one from each rank, by rank of the group.
            gather: asks all ranks' sources, and returns what they answer.
            is_training: whether the step trains.
        """
        return self.announced(is_training=is_training).plan

    def observer_of(self, inputs: PreparedCall, plan: Plan, observer: Observer | None) -> Observer | None:
        """Return the observer that follows a step: the given one, or one around it."""
        return observer

    def learn(self, run: Run) -> None:
        """Learn from a step whose actions have all run."""

    def measure_again(self, why: str) -> None:
        """Note that microbatches may have come to take other memory than before."""

    def counted(self, run: Run) -> None:
        """Look at the bytes of a step, once they are counted."""
