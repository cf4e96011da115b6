"""The source of the plans of a pipeline's steps: one fixed plan, unless a subclass makes others as it learns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from bpipe.comm.health.agreement import RoomRecord, StepRecord
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Observer, Run
from bpipe.flow.shape_arguments import holders_of
from bpipe.parallel.shared_weights import Shared
from bpipe.passes.gradient_exchanges import with_sums
from bpipe.plan.plan import Plan
from bpipe.schedules import verify
from bpipe.schedules.by_name import forward_plan
from bpipe.session.fullest import Fullest
from bpipe.session.prepare import PreparedCall

__all__: list[str] = []

Gather = Callable[[Callable[["PlanSource"], bytes]], list[bytes]]  # returns each rank's answer, by rank of the group


class Proven(NamedTuple):
    """A verified plan and its fingerprint, by which ranks detect that they have different plans."""

    plan: Plan
    fingerprint: str


class PlanSource:
    """One verified plan for all training steps, and its forwards for evaluations.

    A subclass that makes other plans overrides the methods that it needs; `Session` calls them in the order of their definition.

    Args:
        asked: the settings that plans follow from, if ranks must compare them before they can make the plans.
    """

    compares = True  # whether plans ignore each rank's bytes, so that a step must show how balancing changes them

    def __init__(self, plan: Plan, rule: str, asked: str = "") -> None:
        self.plan, self.rule, self._asked = plan, rule, asked  # the plan is the latest training step's, or the first one's
        self.fullest = Fullest()
        self._announced = {True: self._proven(plan)}

    def prepare(self, memory: Memory, plan_rank: int, stages: Collection[int]) -> None:
        """Set everything that a rank's memory has to know about the plans."""
        memory.most_parts = {stage: max(1, self.plan.num_parts(stage)) for stage in stages}

    def announced(self, *, is_training: bool) -> Proven:
        """Return the plan of a training step or of an evaluation; an evaluation's plan is made at the first one."""
        if is_training not in self._announced:
            self._announced[is_training] = self._proven(forward_plan(self._announced[True].plan))
        return self._announced[is_training]

    def share(self, shared: Shared) -> bool:
        """Let stages add up the gradients of weights that they have in common, in the plans from now on; return whether it is news.

        Args:
            shared: these weights, on which all ranks have agreed.
        """
        known = self._announced[True].plan
        if shared.holders == holders_of(known.flow):
            return False
        plan = with_sums(known, shared.holders)
        verify(plan)
        self.plan, self._announced = plan, {True: self._proven(plan)}
        return True

    def _proven(self, plan: Plan) -> Proven:
        """Return a plan with a fingerprint of the plan and of the user's settings."""
        fingerprint = plan.fingerprint()
        if self._asked:
            fingerprint = hashlib.sha256(f"{fingerprint} {self._asked}".encode()).hexdigest()[:32]
        return Proven(plan, fingerprint)

    def records(self, inputs: PreparedCall, states: int) -> tuple[RoomRecord, ...]:
        """Return what ranks must know of each other before `plan_of` is called.

        Args:
            inputs: of the step.
            states: the bytes of this rank's optimizer states.
        """
        return (self.fullest.record(states),)

    def plan_of(self, inputs: PreparedCall, records: Sequence[StepRecord], gather: Gather, *, is_training: bool) -> Plan:
        """Return the plan of a step that all ranks have described. Collective if it calls `gather`.

        Args:
            records: one from each rank, by rank of the group.
            gather: asks all ranks' sources, and returns their answers.
        """
        return self.announced(is_training=is_training).plan

    def observer_of(self, inputs: PreparedCall, plan: Plan, observer: Observer | None) -> Observer | None:
        """Return the observer that follows a step: the given one, or one around it."""
        return observer

    def learn(self, run: Run) -> None:
        """Learn from a step whose actions have all run."""

    def measure_again(self, why: str) -> None:
        """Note that microbatches may take a different amount of memory than before."""

    def budget(self, plan_rank: int) -> int | None:
        """Return the bytes that a rank may take, if it was given a budget in bytes."""
        return None

    def counted(self, run: Run, stats: Mapping[str, float]) -> None:
        """Look at a training step after its bytes are counted; `stats` are its numbers."""
