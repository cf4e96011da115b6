"""Ranks that are about to run different things: refused on all of them before the first transfer, with both values and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import bpipe
from bpipe.comm.health import agreement
from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.driver import TICK_S
from bpipe.errors import AgreementError, BudgetError, ConfigurationError
from tests.faults.case import After, Case, Setup
from tests.faults.pipeline import Pipeline
from tests.faults.scene import Scene

Call = Callable[[Pipeline], object]
LATE_S = 2.5 * TICK_S


def disagreement(
    what: str,
    says: tuple[str, ...],
    *,
    setup: Setup | None = None,
    other: Setup | None = None,
    held: list[int] | None = None,
    call: Call = Pipeline.step,
    after: After = After.UNFIT,
    num_ranks: int = 2,
) -> Case:
    """The last rank differs from the others.

    Args:
        other: its setup; `held`: its stages; `call`: what it calls.
    """
    last = num_ranks - 1

    def play(scene: Scene) -> None:
        pipeline = scene.open(other, held) if scene.is_culprit else scene.open()
        scene.fired()
        (call if scene.is_culprit else Pipeline.step)(pipeline)

    return Case(
        name=f"the ranks disagree on {what}",
        outcome="AgreementError on all ranks, with both values and both ranks",
        num_ranks=num_ranks,
        setup=setup or Setup(),
        play=play,
        culprits=frozenset({last}),
        here=AgreementError,
        there=AgreementError,
        says=says,
        after=after,
    )


def slowly(pipeline: Pipeline) -> None:
    """Compare what the ranks gave so late that the others have raised, and closed their pipelines, by then."""

    def check(records: Sequence[StepRecord]) -> None:
        time.sleep(LATE_S)
        agreement.check(records)

    with patch("bpipe.session.session.check", check):
        pipeline.step()


def of_another_version(pipeline: Pipeline) -> None:
    with patch("bpipe.session.session.__version__", "0.0.1"):
        pipeline.step()


def of_another_number(pipeline: Pipeline) -> None:
    pipeline.schedule.session.guard.num_steps += 7
    pipeline.step()


def too_many_ranks(scene: Scene) -> None:
    scene.fired()
    scene.open(Setup(num_stages=4), [scene.rank])


def balanced(slots: int) -> Setup:
    return Setup(schedule=bpipe.BalancedOneFOneB, m=8, options={"options": bpipe.Options(slots=slots)})


def budget(num_bytes: int) -> Setup:
    return Setup(balanced={"budget": num_bytes})


def interleaved(num_stages: int) -> Setup:
    return Setup(schedule=bpipe.Interleaved1F1B, num_stages=num_stages)


def steps_over_budget(scene: Scene) -> None:
    pipeline = scene.open(budget(9))
    scene.fired()
    pipeline.step()


CASES = [
    disagreement(
        "bpipe's version",
        ("version", f"has {bpipe.__version__}", "has 0.0.1"),
        call=of_another_version,
        after=After.WHOLE,
    ),
    disagreement("train or eval", ("rank 0 has train", "rank 1 has eval"), call=Pipeline.eval, after=After.WHOLE),
    disagreement("the schedule", ("rank 0 has 1f1b", "rank 1 has gpipe"), other=Setup(schedule=bpipe.GPipe)),
    disagreement("the plan", ("the plan", "rank 0 has", "rank 3 has"), setup=balanced(3), other=balanced(4), num_ranks=4),
    disagreement(
        "the plan, and one compares late",
        ("the plan", "rank 0 has", "rank 3 has"),
        setup=balanced(3),
        other=balanced(4),
        num_ranks=4,
        call=slowly,
    ),
    disagreement("the budget", ("the plan", "rank 0 has", "rank 1 has"), setup=budget(10**9), other=budget(10**8)),
    disagreement("m", ("number of microbatches", "rank 0 has 4", "rank 1 has 8"), other=Setup(m=8)),
    disagreement("v", ("number of stages", "rank 0 has 4", "rank 1 has 6"), setup=interleaved(4), other=interleaved(6)),
    disagreement("who holds a stage", ("stage 0 is on two ranks, 0 and 1",), held=[0]),
    disagreement("the number of the step", ("number of the step", "rank 0 has 0", "rank 1 has 7"), call=of_another_number),
    Case(
        name="a budget that no plan meets",
        outcome="BudgetError on all ranks when sizes are known, with a budget that works",
        play=steps_over_budget,
        culprits=frozenset({0, 1}),
        here=BudgetError,
        says=("9 bytes are too few", "smallest budget that works"),
        after=After.UNFIT,
    ),
    Case(
        name="a pipeline of more ranks than the group has",
        outcome="ConfigurationError when it is built, with both numbers",
        play=too_many_ranks,
        culprits=frozenset({0, 1}),
        here=ConfigurationError,
        says=("needs 4 ranks, but the group has 2",),
    ),
]
