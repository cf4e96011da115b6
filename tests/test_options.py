"""The options that few people set: each schedule and planner takes its own, refuses the others, and shows them to editors."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.api.options import Options
from bpipe.comm.transport.in_flight import TRANSFERS_AT_ONCE
from bpipe.errors import ConfigurationError
from bpipe.partition import LayerCost
from bpipe.schedules import build


def stage() -> bpipe.PipelineStage:
    return bpipe.PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def balanced(options: Options) -> Any:
    return bpipe.Balanced(bpipe.OneFOneB(stage(), 2, mse), options=options)


def chosen(options: Options) -> Any:
    layers = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=1.0, saved_bytes=1) for i in range(2)]
    return bpipe.choose_plan(layers, batch=2, num_ranks=2, options=options)


def advised(options: Options) -> Any:
    return bpipe.advise("gpt2", batch=8, num_stages=2, device="a100-80gb", options=options)


TAKERS: dict[str, tuple[Callable[[Options], Any], Options]] = {
    "OneFOneB": (lambda options: bpipe.OneFOneB(stage(), 2, mse, options=options), Options(parts=2)),
    "GPipe": (lambda options: bpipe.GPipe(stage(), 2, mse, options=options), Options(slice_lengths=[1.0])),
    "FromPlan": (lambda options: bpipe.FromPlan(stage(), build("1f1b", 1, 2), mse, options=options), Options(slots=2)),
    "Balanced": (balanced, Options(timeout_s=60)),
    "auto": (lambda options: bpipe.auto(stage(), 2, mse, options=options), Options(slots=2)),
    "choose_plan": (chosen, Options(margin=0.5)),
    "advise": (advised, Options(host=True)),
    "Stream": (lambda options: bpipe.Stream(stage(), mse, options=options), Options(transfers_at_once=2)),
}


@pytest.mark.parametrize("name", TAKERS)
def test_what_does_not_concern_it_is_refused_by_name(name: str) -> None:
    make, options = TAKERS[name]
    [other] = options.changed()
    with pytest.raises(ConfigurationError, match=f"{name} does not use {other}, which options= sets: leave it out"):
        make(options)
    with pytest.raises(ConfigurationError, match=r"give bpipe\.Options, such as Options\(timeout_s=600\.0\)"):
        make({"timeout_s": 60})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"timeout_s": 0}, "timeout_s=0: give a positive number of seconds"),
        ({"slow_s": None}, "slow_s=None: give a positive number of seconds"),
        ({"transfers_at_once": 0}, "transfers_at_once=0: give a whole number of at least 1"),
        ({"parts": 65}, "parts=65: give a whole number from 1 to 64"),
        ({"measure": "later"}, "choose 'auto' or 'in_order'"),
        ({"margin": float("nan")}, "margin=nan: give a share"),
        ({"effort": -1}, "effort=-1: give a whole number of at least 0"),
        ({"reserve_bytes": -1}, "reserve_bytes=-1: give a whole number of at least 0"),
        ({"bytes_per_parameter": 0}, "bytes_per_parameter=0"),
    ],
)
def test_wrong_values_are_refused_where_they_are_written(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Options(**wrong)


def test_names_are_visible() -> None:
    assert "hidden" not in inspect.signature(Options).parameters
    with pytest.raises(TypeError, match="time_out"):
        Options(time_out=3)  # type: ignore[call-arg]
    for kind in (bpipe.OneFOneB, bpipe.Interleaved1F1B, bpipe.FromPlan, bpipe.Balanced, bpipe.auto, bpipe.choose_plan):
        parameters = inspect.signature(kind).parameters
        assert parameters["options"].kind is parameters["options"].KEYWORD_ONLY
        assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())
    assert repr(pickle.loads(pickle.dumps(Options(slow_s=float("30"), effort=int("6000000"))))) == "Options()"
    assert Options.transfers_at_once == TRANSFERS_AT_ONCE, "the transport has the same default"
    assert repr(Options(parts=2, timeout_s=None)) == "Options(parts=2)"
