"""What goes wrong in local learning, where no rank waits for a gradient."""

from __future__ import annotations

from dataclasses import replace

import bpipe
from bpipe.errors import RankFailedError
from tests.faults.case import Case, Setup, Strike, Where
from tests.faults.effects import boom, raising
from tests.faults.misuse import refused

SETUP = Setup(schedule=bpipe.LocalLearning)


def raised(where: Where, stage: int) -> Case:
    """The ranks before have perhaps done their part of the step, because nothing comes back to them."""
    early = frozenset(range(stage))
    return Case(
        name=f"raise in a {where} of local learning, stage {stage} of 3",
        outcome="ValueError there; the others raise too" + ", in their next call if they have done their part" * bool(early),
        setup=SETUP,
        strike=Strike(where=where, stage=stage, step=1, effect=raising(boom)),
        num_ranks=3,
        culprits=frozenset({stage}),
        early=early,
        here=ValueError,
        there=RankFailedError,
        error="ValueError: boom",
    )


UNTOLD = refused(
    "no target on the middle rank of local learning",
    lambda pipeline: pipeline.schedule.step(pipeline.batch[0]),
    ("stage 1 has a loss of its own but step() got no target", "on every rank"),
)
CASES = [
    raised("forward", 1),
    raised("backward", 0),
    raised("backward", 2),
    replace(UNTOLD, setup=SETUP, num_ranks=3, culprits=frozenset({1})),
]
