"""A fill job: work that has nothing to do with a rank's microbatches, and is done while the rank would wait for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import nn

from bpipe.checks import check_choice, check_count, check_seconds
from bpipe.errors import ConfigurationError, printable
from bpipe.plan.amounts import show_bytes

__all__ = ["Job"]

OnError = Literal["fail", "stop"]
MOST_NAME = 60  # characters


class Job:
    """A fill job, with the settings that any object with a `step` may have as well.

    Attributes:
        name: names it in errors, logs and traces.
        on_error: "fail": if `step` raises, takes much longer than it was given, or more bytes, the rank fails, and with it all
            ranks, by a `FillError`. "stop": the job is stopped with a warning, and training goes on.
        budget: bytes that the rank's device may hold at most while a piece runs, the rank's own ones included. None: the budget
            of `Balanced` for the rank, if it has one in bytes, else what the rank takes at its own peak, so that no job raises it.
        held_bytes: what may be left between pieces of what they have made. It takes its part of the budget at all times. None: they
            make nothing that is the job's own, and no bytes of them are counted.
        static_bytes: what the job holds beside that on the rank's device, and no piece makes, such as the parameters of its model.
            They take their part of the budget at all times, too.
        grace_s: seconds by which a piece may take longer than it was given before that is an error. All ranks fail then, even
            if the piece never returns.

    Example:
        >>> class Count(Job):
        ...     name, on_error, calls = "counter", "stop", 0
        ...
        ...     def step(self, seconds, num_bytes):
        ...         self.calls += 1
        ...         return 0.0  # the seconds that it took; None if no piece fits
        >>> job = Count()
        >>> job.step(0.1, 2**20), job.calls
        (0.0, 1)
    """

    name: str = ""
    on_error: OnError = "fail"
    budget: int | None = None
    held_bytes: int | None = 0
    static_bytes: int = 0
    grace_s: float = 5.0

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f", budget {show_bytes(self.budget)}"
        return f"{type(self).__name__}({self.name or 'a fill job'}{budget}, on an error: {self.on_error})"

    def begin(self, stages: Mapping[int, nn.Module]) -> None:
        """Learn for which stages the rank runs, by index, when it gets the job."""

    def step(self, seconds: float, num_bytes: int) -> float | None:
        """Do a piece of work that fits, or nothing. Called again and again while the rank waits.

        The thread is the job's own, in which all of its code runs while the one that called `schedule.step` waits. What a piece
        changes of the state of its thread or of the process, such as autocast, the default dtype or random numbers, holds in later
        pieces and not outside of the job; it begins as it is when a schedule gets the job for the first time. On CUDA the current
        stream is one of low priority, and the piece has to wait for its end before it returns.

        Args:
            seconds: until this rank expects to go on.
            num_bytes: what the piece may take of the device while it runs, beside `held_bytes`.

        Returns:
            The seconds that it took; None if nothing fits or nothing is left, and then it is not asked again in this wait.
        """
        raise NotImplementedError

    def stage_done(self, stage: int) -> None:
        """Learn that a stage of this rank has its gradients of this step, and is not used again in it."""

    def finish(self) -> None:
        """Do what must be done before a training step returns."""


class Settings(NamedTuple):
    """The settings of a job, checked."""

    name: str
    on_error: OnError
    budget: int | None
    held_bytes: int | None
    static_bytes: int
    grace_s: float

    @property
    def always_bytes(self) -> int:
        """The part of the budget that the job takes at all times."""
        return self.static_bytes + (self.held_bytes or 0)

    @classmethod
    def of(cls, job: Any) -> Settings:
        """Read the settings of any object that can be a job.

        Raises:
            ConfigurationError: it has no `step`, or a setting is not valid.
        """
        if not callable(getattr(job, "step", None)):
            raise ConfigurationError(f"fill={job!r:.80}: give an object with step(seconds, num_bytes), such as a bpipe.fill.Job")
        name, on_error, budget, held, static, grace = (getattr(job, key, getattr(Job, key)) for key in cls._fields)
        check_choice("the fill job's on_error", on_error, ("fail", "stop"))
        check_count("the fill job's budget", budget, or_none=True)
        check_count("the fill job's held_bytes", held, least=0, or_none=True)
        check_count("the fill job's static_bytes", static, least=0)
        check_seconds("the fill job's grace_s", grace)
        return cls(printable(str(name or type(job).__name__))[:MOST_NAME], on_error, budget, held, static, float(grace))
