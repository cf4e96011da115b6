"""A case on one rank: the fault, then what is left of the pipeline, then a new one over the same process group."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tests.faults.case import After, Case, Fate, Setup, Where
from tests.faults.pipeline import DEVICE, Pipeline

ATTRIBUTES = ("rank", "step", "action", "error")


class Leave(BaseException):
    """Ends this process, as the end of a program does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How a call ended.

    Args:
        kind: the error; None: there was none.
        message: its text without notes, and `text` with them.
        attributes: what it tells programs.
        traceback: for the reader of a failed test.
        seconds: how long it took, and at what time of all processes' clock it ended.
    """

    kind: type[BaseException] | None = None
    message: str = ""
    text: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    seconds: float
    at: float


def seen(call: Callable[[], object]) -> Seen:
    """Make a call and tell how it ended."""
    started = time.monotonic()
    try:
        call()
    except Leave:
        raise
    except BaseException as error:
        at = time.monotonic()
        return Seen(
            kind=type(error),
            message=message_of(error),
            text="\n".join([message_of(error), *getattr(error, "__notes__", [])]),
            attributes={name: getattr(error, name) for name in ATTRIBUTES if hasattr(error, name)},
            traceback="".join(traceback.format_exception(error)),
            seconds=at - started,
            at=at,
        )
    at = time.monotonic()
    return Seen(seconds=at - started, at=at)


def message_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, unprintable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank saw: the fault, the pipeline's next call, and a step of a new pipeline; None where the case has none."""

    fault: Seen
    next: Seen | None = None
    retry: Seen | None = None


class Scene:
    """What a case has at hand on a rank.

    Args:
        pids: of all ranks.
        tell: tells the parent something at once, whatever becomes of this process.
    """

    def __init__(self, case: Case, rank: int, pids: Sequence[int], tell: Callable[[Any], None]) -> None:
        self.case, self.rank, self.pids, self._tell = case, rank, pids, tell
        self.is_culprit = rank in case.culprits
        self.pipelines: list[Pipeline] = []

    def fired(self) -> None:
        """Call it where the fault is, just before."""
        self._tell(time.monotonic())

    def open(self, setup: Setup | None = None, held: list[int] | None = None) -> Pipeline:
        pipeline = Pipeline(self.rank, self.case.num_ranks, setup or self.case.setup, self._struck, held)
        self.pipelines.append(pipeline)
        return pipeline

    def _struck(self, stage: int, where: Where, call: int, value: Any) -> Any:
        strike = self.case.strike
        at = (stage, where, *divmod(call, self.case.setup.m))
        if strike is None or at != (strike.stage, strike.where, strike.step, strike.microbatch):
            return value
        return strike.effect(self, value)

    def play(self) -> Report:
        fault = seen(lambda: (self.case.play or until_the_strike)(self))
        following = seen(self._next_call) if self.pipelines and self.case.after is not After.UNFIT else None
        for pipeline in self.pipelines:
            pipeline.schedule.close()
        self.pipelines.clear()
        return Report(fault=fault, next=following, retry=seen(self._retry) if self.case.fate is Fate.LIVES else None)

    def _next_call(self) -> None:
        pipeline = self.pipelines[-1]
        pipeline.check_step() if self.case.after is After.WHOLE else pipeline.step()

    def _retry(self) -> None:
        dist.barrier()
        again = Pipeline(self.rank, self.case.num_ranks, self.case.setup)
        again.check_step()
        again.schedule.close()
        if DEVICE != "cpu":
            from tests.accelerator.device import simulator, unordered

            found = unordered()
            simulator.clear_reports()
            assert not found, found[0]


def until_the_strike(scene: Scene) -> None:
    """Train, one step further than to the strike: ranks whose part of that step was done raise in the next one."""
    assert scene.case.strike is not None
    pipeline = scene.open()
    for _ in range(scene.case.strike.step + 2):
        pipeline.step()
