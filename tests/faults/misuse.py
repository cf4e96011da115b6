"""Calls that do not fit together: refused by name, on every rank, and the pipeline is as good as before where nothing was sent."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bpipe.api.options import Options
from bpipe.errors import AgreementError, CommError, ConfigurationError, PipelineBrokenError, TransferTimeoutError
from tests.faults.case import BOUND_S, FROZEN_S, After, Case, Setup, Strike
from tests.faults.effects import calling, given_up
from tests.faults.pipeline import Pipeline
from tests.faults.raises import raised
from tests.faults.scene import Scene, Seen, seen

# A step inside a step.


def step_again(scene: Scene) -> None:
    scene.pipelines[-1].step()


def step_in_thread(scene: Scene) -> None:
    found: list[Seen] = []
    thread = threading.Thread(target=lambda: found.append(seen(scene.pipelines[-1].step)))
    thread.start()
    thread.join()
    assert found[0].kind is PipelineBrokenError and "second thread" in found[0].text, found


def two_exact_steps(scene: Scene) -> None:
    pipeline = scene.open()
    pipeline.step()
    pipeline.check_step()


NESTED = [
    raised("step() inside a step", PipelineBrokenError, calling(step_again), error="PipelineBrokenError: step() was called"),
    Case(
        name="step() from a second thread",
        outcome="PipelineBrokenError in that thread; the step under way is exact",
        strike=Strike(stage=1, step=1, effect=calling(step_in_thread)),
        play=two_exact_steps,
        after=After.WHOLE,
    ),
    raised(
        "close() inside a step",
        PipelineBrokenError,
        calling(lambda scene: scene.pipelines[-1].schedule.close()),
        error="PipelineBrokenError: close() was called",
    ),
]

# One rank's arguments.


def refused(name: str, call: Callable[[Pipeline], object], says: tuple[str, ...]) -> Case:
    """A call that one rank refuses before anything is sent."""

    def play(scene: Scene) -> None:
        pipeline = scene.open()
        pipeline.check_step()
        scene.fired()
        call(pipeline) if scene.is_culprit else pipeline.step()

    return Case(
        name=name,
        outcome="ConfigurationError there, AgreementError with its text on the others; the next step is exact",
        play=play,
        here=ConfigurationError,
        there=AgreementError,
        error="rank 1 cannot run this step: ConfigurationError",
        says=says,
        after=After.WHOLE,
    )


def short_batch(pipeline: Pipeline) -> None:
    x, y = pipeline.batch
    pipeline.schedule.step(x[:-1], target=y)


def without_gradients(pipeline: Pipeline) -> None:
    with torch.no_grad():
        pipeline.step()


REFUSED = [
    refused("a batch that does not divide into m", short_batch, ("drop_last=True", "arg_mbs")),
    refused("no target on the last rank", lambda pipeline: pipeline.schedule.step(pipeline.batch[0]), ("got no target",)),
    refused("gradients are switched off on one rank", without_gradients, ("call eval() instead",)),
    refused(
        "the wrong number of microbatches on one rank",
        lambda pipeline: pipeline.schedule.step(arg_mbs=[(torch.ones(1, 8),)], target=pipeline.batch[1]),
        ("arg_mbs", "each of 4 microbatches"),
    ),
]

# Steps in other orders on other ranks, and more of them.

BOTH = frozenset({0, 1})


NOTICES_LATER_S = 0.25  # the other rank has left its call by then, and is in its next one


def crossed(scene: Scene, healthy_steps: int) -> None:
    pipelines = [scene.open(), scene.open()]
    for pipeline in pipelines * healthy_steps:
        pipeline.check_step()
    scene.fired()
    time.sleep(NOTICES_LATER_S * scene.rank)
    pipelines[scene.rank].step()


def crossing(name: str, healthy_steps: int, outcome: str, after: After) -> Case:
    return Case(
        name=name,
        outcome=f"AgreementError on all ranks; {outcome}",
        play=lambda scene: crossed(scene, healthy_steps),
        culprits=BOTH,
        here=AgreementError,
        says=("pipeline",),
        after=after,
    )


def alone(name: str, leave: Callable[[Scene], object], outcome: str, **more: Any) -> Case:
    """One rank steps once more than the other, which leaves after a healthy step."""

    def play(scene: Scene) -> None:
        scene.open().step()
        scene.fired()
        leave(scene) if scene.is_culprit else scene.pipelines[-1].step()

    case = Case(name=name, outcome=outcome, play=play, there=AgreementError, says=("rank 1 closed",), after=After.LEFT)
    return replace(case, **more)


def idle(scene: Scene) -> None:
    given_up(scene)
    scene.pipelines[-1].step()


def forget(scene: Scene) -> None:
    scene.pipelines.clear()
    gc.collect()


ORDERS = [
    crossing("two pipelines in crossed order, first step", 0, "the next steps, in one order, are exact", After.WHOLE),
    crossing("two pipelines in crossed order, later step", 1, "both are broken, and say so", After.LEFT),
    alone(
        "one rank steps more often, the other has closed",
        lambda scene: scene.pipelines[-1].schedule.close(),
        "an error with the rank that closed",
    ),
    alone("one rank steps more often, the other's schedule is garbage", forget, "an error with the rank that closed"),
    alone(
        "one rank steps more often, the other does something else",
        idle,
        "after timeout_s TransferTimeoutError with the rank that has not come",
        setup=Setup(options={"options": Options(timeout_s=FROZEN_S)}),
        here=CommError,
        there=TransferTimeoutError,
        says=("rank 1",),
        after=After.BROKEN,
        bound_s=FROZEN_S + BOUND_S,
    ),
]

CASES = [*NESTED, *REFUSED, *ORDERS]
