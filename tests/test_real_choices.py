"""The plan that is chosen is the fastest one measured: real models, over gloo, on devices that sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from benchmarks.device_layers import OnDevice, wake_in_time
from benchmarks.real_choices import MOST_OVER_BEST, MOST_WRONG, Work, measure, wrong
from benchmarks.real_models import MODELS
from bpipe.partition import LayerCost
from tests.tries import holds_in_one_try


@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_plan_is_the_fastest_and_takes_what_was_predicted(model: str) -> None:
    """A few candidates and steps; the study `real_choices` has all of them."""
    work = Work(model, m=4, speed=0.75, seconds=0.0, fewest_rounds=3, is_short=True, effort=200_000)

    def is_right(rows: Any) -> bool:
        chosen = [row for row in rows if row["is_chosen"]]
        assert len(rows) >= 6 and len(chosen) == 2
        is_best = all(row["time"] <= MOST_OVER_BEST for row in chosen)
        return is_best and all(wrong(row).median <= MOST_WRONG for row in rows)

    holds_in_one_try(lambda: measure(work), is_right)


def on_a_device() -> tuple[nn.Module, nn.Module]:
    """Two layers, and the same ones on a device."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))]
    costs = [LayerCost(names=("0",), forward_s=0.01, backward_s=0.03, input_s=0.01)] * 2
    return nn.Sequential(*layers), nn.Sequential(*map(OnDevice, layers, costs))


def test_a_layer_on_a_device_computes_the_same() -> None:
    (plain, slow), x = on_a_device(), torch.randn(4, 8)
    outputs, gradients = [], []
    for module in (slow, plain):
        outputs.append(module(x))
        outputs[-1].sum().backward()
        gradients.append([parameter.grad for parameter in plain.parameters()])
        plain.zero_grad()
    assert torch.equal(*outputs) and all(map(torch.equal, *gradients))


def test_a_layer_on_a_device_takes_its_time() -> None:
    """In halves as well: each takes its share, whichever comes first in a whole backward."""
    (_, slow), x = on_a_device(), torch.randn(4, 8)

    def found() -> list[float]:
        wake_in_time()
        one = bpipe.measure_layers(slow, x)[1]
        assert one.input_s is not None and one.weight_s is not None
        return [one.forward_s, one.backward_s, one.input_s, one.weight_s]

    holds_in_one_try(found, lambda times: times == pytest.approx([0.01, 0.03, 0.01, 0.02], rel=0.2))
