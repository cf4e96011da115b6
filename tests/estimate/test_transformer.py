"""Parameters of a transformer from its dimensions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.estimate import Transformer
from tests.estimate.strategies import gpts

SMALL: dict[str, Any] = {"num_layers": 2, "hidden": 32, "num_heads": 4, "sequence": 8, "vocabulary": 100}


@given(gpts())
def test_a_gpt_layer_has_12_h_squared_and_13_h(model: Transformer) -> None:
    """Narayanan et al., arXiv 2104.04473, section 5.1: 12 L h^2 (1 + 13/12h + (V + s)/12Lh), without the final norm's 2h."""
    h = model.hidden
    assert model.layer_parameters == 12 * h * h + 13 * h
    assert model.num_parameters == model.num_layers * (12 * h * h + 13 * h) + (model.vocabulary + model.sequence) * h + 2 * h


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_a_layer_counted_by_torch(is_gated: bool, has_biases: bool, num_kv_heads: int | None) -> None:
    model = Transformer(**SMALL, ffn=48, is_gated=is_gated, has_biases=has_biases, num_kv_heads=num_kv_heads)
    h, kv, f = 32, 8 * (num_kv_heads or 4), 48
    shapes = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (f, h), *[(h, f)] * is_gated]
    linears = [nn.Linear(*shape, bias=has_biases) for shape in shapes]
    layer = nn.ModuleList([*linears, *(nn.LayerNorm(h, bias=has_biases) for _ in range(2))])
    assert model.layer_parameters == sum(parameter.numel() for parameter in layer.parameters())


def test_a_tied_head_counts_once() -> None:
    tied, untied = Transformer(**SMALL), Transformer(**SMALL, is_tied=False)
    assert untied.num_parameters - tied.num_parameters == 100 * 32 == tied.head_parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"hidden": 33}, "hidden=33 does not divide into num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 does not divide into num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"ffn": -1}, "ffn=-1"),
        ({"is_gated": True}, "give ffn="),
        ({"sequence": 1.5}, "sequence=1.5"),
        ({"vocabulary": "many"}, "vocabulary='many'"),
    ],
)
def test_impossible_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Transformer(**(SMALL | changes))
