"""Passes as values: a pipeline does what its passes do one after the other, and refuses an order that makes no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.errors import ConfigurationError
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import communicate, computations_only, forward_only
from bpipe.passes.pipeline import PHASES, Pass, Phase, Pipeline
from bpipe.passes.profiling_order import profiling_order
from bpipe.passes.recompute import recompute
from bpipe.schedules import Plan, Sizes, build, finish, verify

PLAN = build("1f1b", 4, 8)
SIZES = Sizes.of([8] * 4, num_parts=2)


def with_sizes(plan: Plan) -> Plan:
    return replace(plan, sizes=SIZES)


START = Pass.of(computations_only)
EVICT, RECOMPUTE, SEND = Pass.of(balance, slots=3), Pass.of(recompute, slots=3), Pass.of(communicate)
SIZED = Pass(name="with_sizes", phase=Phase.COMPUTATIONS, apply=with_sizes)
LOWEST = Pass.of(balance, sizes=SIZES)


@pytest.mark.parametrize(
    ("passes", "by_hand"),
    [
        ((START, EVICT, SEND), lambda plan: communicate(balance(computations_only(plan), slots=3))),
        ((START, RECOMPUTE, SEND), lambda plan: communicate(recompute(computations_only(plan), slots=3))),
        ((START, SIZED, LOWEST), lambda plan: balance(with_sizes(computations_only(plan)), sizes=SIZES)),
        ((Pass.of(profiling_order), SEND), lambda plan: communicate(profiling_order(plan))),
        ((Pass.of(forward_only), SEND), lambda plan: communicate(forward_only(plan))),
        ((), lambda plan: plan),
    ],
)
def test_a_pipeline_does_what_its_passes_do(passes: tuple[Pass, ...], by_hand: Any) -> None:
    made = Pipeline(*passes).apply(PLAN)
    assert made == by_hand(PLAN)
    verify(made if SEND in passes else finish(computations_only(made)))


@pytest.mark.parametrize(
    ("passes", "reason"),
    [
        ((EVICT, RECOMPUTE), "recompute after balance makes no sense: .* or evict_or_recompute for both"),
        ((START, RECOMPUTE, EVICT), "balance after recompute makes no sense"),
        ((SEND, EVICT), "balance after communicate .* it drops what communicate adds. Put balance before communicate"),
        ((SEND, SEND), "the transfers are there already"),
        ((EVICT, START), "Put computations_only before balance"),
        ((Pass.of(forward_only), EVICT), "forwards alone save nothing"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(passes: tuple[Pass, ...], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Pipeline(*passes)


def test_only_known_functions_become_passes_by_themselves() -> None:
    with pytest.raises(ConfigurationError, match="with_sizes is not a pass of bpipe: give Pass"):
        Pass.of(with_sizes)
    assert [Pass.of(function).name for function in PHASES] == [function.__name__ for function in PHASES]
