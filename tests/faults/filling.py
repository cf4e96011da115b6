"""What a fill job does wrong while its rank waits for another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bpipe.errors import FillError, RankFailedError
from tests.faults.case import BOUND_S, After, Case
from tests.faults.effects import Effect, boom, calling, raising, send, sleeping, until_given_up
from tests.faults.pipeline import DEVICE
from tests.faults.scene import Scene
from tests.patience import PATIENCE_S

GRACE_S, STEPS = 0.2, 40  # the grace of a job that does not end; others get one that does not end first on a busy machine
THERE = "the others raise too"


@dataclass
class Striking:
    """A job whose first piece is the fault.

    Args:
        settings: of the job.
    """

    scene: Scene
    effect: Effect
    on_error: str = "fail"
    held_bytes: int = 0
    budget: int | None = None
    grace_s: float = PATIENCE_S
    name: str = "striking"
    kept: list[Any] = field(default_factory=list)
    has_struck: bool = False

    def step(self, seconds: float, num_bytes: int) -> float | None:
        if self.has_struck:
            return None
        self.has_struck = True
        self.effect(self.scene, self)
        return seconds


def filled(effect: Effect, *, works: bool = False, **settings: Any) -> Callable[[Scene], None]:
    """Steps until the fault, and some more; exact ones where it works: on a device, results before an error may be wrong."""

    def play(scene: Scene) -> None:
        pipeline = scene.open()
        if scene.is_culprit:
            pipeline.schedule.fill = Striking(scene, effect, **settings)
        for _ in range(STEPS):
            pipeline.check_step() if works else pipeline.step()

    return play


def in_a_job(name: str, effect: Effect, error: str, **more: Any) -> Case:
    case = Case(
        name=name,
        outcome=f"FillError there, which names the job; {THERE}",
        num_ranks=3,
        play=filled(effect),
        here=FillError,
        there=RankFailedError,
        error=error,
        says=("fill job striking",),
    )
    return replace(case, **more)


def keep(scene: Scene, job: Any) -> Any:
    scene.fired()
    job.kept.append(torch.ones(100, device=DEVICE))


def take_much(scene: Scene, job: Any) -> Any:
    scene.fired()
    torch.ones(10**7, device=DEVICE)


CASES = [
    in_a_job("a fill job raises", raising(boom), "FillError: the fill job striking raised ValueError: boom"),
    in_a_job(
        "a fill job calls step() of its schedule",
        calling(lambda scene: scene.pipelines[-1].step()),
        "raised PipelineBrokenError: step() was called inside another step",
    ),
    in_a_job(
        "a fill job frees nothing",
        keep,
        "the fill job striking keeps 400 bytes between pieces, and says held_bytes=0",
        play=filled(keep, budget=2**40),
    ),
    in_a_job("a fill job takes more bytes than it was given", take_much, "took 40,000,000 bytes at a time and was given "),
    in_a_job(
        "a fill job does not end",
        until_given_up,
        "the fill job striking does not end",
        play=filled(until_given_up, grace_s=GRACE_S),
        outcome="after grace_s the others raise RankFailedError, which names the job; its rank raises when it returns",
        here=(FillError, RankFailedError),
        bound_s=GRACE_S + BOUND_S,
    ),
    in_a_job(
        "KeyboardInterrupt in a fill job",
        calling(lambda scene: send(signal.SIGINT, os.getpid())),
        "KeyboardInterrupt",
        outcome=f"KeyboardInterrupt there; {THERE}",
        here=KeyboardInterrupt,
        says=(),
    ),
    Case(
        name='a fill job raises, of on_error="stop"',
        outcome="works; the job is stopped, with a warning",
        num_ranks=3,
        play=filled(raising(boom), works=True, on_error="stop"),
        after=After.WHOLE,
    ),
    Case(
        name='a fill job takes too long, of on_error="stop"',
        outcome="works; the job is stopped when it returns, with a warning",
        num_ranks=3,
        play=filled(sleeping(2 * GRACE_S), works=True, on_error="stop", grace_s=GRACE_S),
        after=After.WHOLE,
    ),
]
