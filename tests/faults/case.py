"""What a case of the fault suite says: where a fault strikes, and what bpipe does about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import bpipe

if TYPE_CHECKING:
    from tests.faults.scene import Scene

BOUND_S, FROZEN_S = 2.0, 2.0  # from a fault to the last rank's error; and the timeout_s of those that wait for a frozen peer

Errors = type[BaseException] | tuple[type[BaseException], ...] | None
Where = Literal["forward", "backward", "weight", "loss"]


class After(Enum):
    """What a pipeline is after the fault."""

    BROKEN = "its next call is refused as broken, on every rank at once"
    LEFT = "its next call is refused at once, with the reason"
    WHOLE = "its next step is exact"
    UNFIT = "it was never one: its ranks were made to differ"


class Fate(Enum):
    """Of the process where it happens."""

    LIVES = "it goes on"
    ENDS = "it ends in the fault"
    STOPS = "it is stopped in the fault, and killed in the end"
    THAWS = "it is stopped in the fault, and continued when the others have raised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The pipeline of a case.

    Args:
        num_stages: None: one on each rank.
        rows: of a microbatch.
        balanced: arguments of `bpipe.Balanced` around the schedule; None: it is not balanced.
    """

    schedule: type[bpipe.Schedule] = bpipe.OneFOneB
    m: int = 4
    num_stages: int | None = None
    rows: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    balanced: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Where a fault is in the user's code: at one call of a stage's forward, of a hook on its output or its weight, or of the loss.

    Args:
        effect: takes the scene and the output, gradient or loss, and returns what takes its place.
    """

    where: Where = "forward"
    stage: int
    microbatch: int = 2
    step: int = 0
    effect: Callable[[Scene, Any], Any]

    @property
    def action(self) -> str:
        return f"{self.stage}{'F' if self.where in ('forward', 'loss') else 'B'}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault, and the ideal outcome.

    Args:
        name: what happens.
        outcome: what bpipe does, for the table.
        culprits: the ranks on which it happens.
        here: the error there; None: none.
        there: the error on the other ranks.
        early: those that may have done their part of the step, and hear of it in their next call.
        error: of the culprit, as the others name it, with its place.
        action: in which it happens; by default where the strike is.
        says: what every error's text has in it, and `says_not` what none has.
        strike: the fault, if it is in the user's modules.
        play: what each rank does; by default steps until the strike.
        bound_s: from the fault to the last rank's error.
        store_on: the rank whose process hosts the store; None: another process.
    """

    name: str
    outcome: str
    num_ranks: int = 2
    setup: Setup = field(default_factory=Setup)
    strike: Strike | None = None
    play: Callable[[Scene], None] | None = None
    culprits: frozenset[int] = frozenset({1})
    here: Errors = None
    there: Errors = None
    early: frozenset[int] = frozenset()
    error: str = ""
    action: str = ""
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()
    after: After = After.BROKEN
    fate: Fate = Fate.LIVES
    store_on: int | None = None
    bound_s: float = BOUND_S

    @property
    def place(self) -> tuple[str, ...]:
        """What names where it happened, in the words of the other ranks' errors."""
        if self.strike is None or not self.error:
            return ()
        stage, microbatch, *_ = re.findall(r"\d+", self.failing)
        return (f"stage {stage}", f"microbatch {microbatch}", f"action {self.failing}", f"step {self.strike.step}")

    @property
    def failing(self) -> str:
        """The action that fails; empty where the case names none."""
        return self.action or (self.strike.action if self.strike is not None else "")

    @property
    def is_alone(self) -> bool:
        """Whether it takes processes that play nothing else."""
        return self.fate is not Fate.LIVES
