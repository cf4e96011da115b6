"""Models cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.estimate import Execution, Transformer, model_named
from bpipe.estimate.activations import embedding_bytes, head_bytes, layer_bytes
from bpipe.estimate.flops import head_flops, layer_flops
from bpipe.estimate.stages import split_layers, stages_of
from tests.estimate.strategies import executions, transformers


@given(st.integers(1, 99), st.integers(1, 99))
def test_layers_are_split_evenly(layers: int, p: int) -> None:
    if layers < p:
        with pytest.raises(ConfigurationError, match="ask for fewer stages"):
            split_layers(layers, p)
        return
    counts = split_layers(layers, p)
    assert sum(counts) == layers and len(counts) == p and max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


@given(transformers(), executions, st.integers(1, 4), st.data())
def test_stages_make_up_the_model(model: Transformer, execution: Execution, b: int, data: st.DataObject) -> None:
    p = data.draw(st.integers(1, model.num_layers))
    stages = stages_of(model, execution, num_stages=p, microbatch_size=b)
    copies = model.head_parameters if model.is_tied and p > 1 else 0
    assert sum(stage.num_parameters for stage in stages) == model.num_parameters + copies
    assert sum(stage.forward_flops for stage in stages) == model.num_layers * layer_flops(model, b) + head_flops(model, b)
    ends = embedding_bytes(model, execution, b) + head_bytes(model, execution, b)
    assert sum(stage.saved_bytes for stage in stages) == model.num_layers * layer_bytes(model, execution, b) + ends
    assert all(stage.backward_flops >= 2 * stage.forward_flops for stage in stages)


def test_embedding_and_head_are_where_they_are() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100, is_tied=False)
    first, middle, *_, last = stages_of(model, Execution(), num_stages=4, microbatch_size=1)
    assert first.num_parameters - middle.num_parameters == (100 + 4) * 8
    assert last.num_parameters - middle.num_parameters == 100 * 8 + 2 * 8
    assert first.saved_bytes > middle.saved_bytes < last.saved_bytes
    assert first.forward_flops == middle.forward_flops < last.forward_flops


def test_layers_as_given() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100)
    stages = stages_of(model, Execution(recomputation="full"), num_stages=3, microbatch_size=1, layers=[0, 3, 1])
    assert [stage.num_layers for stage in stages] == [0, 3, 1]
    assert stages[0].forward_flops == stages[0].working_bytes == 0


@pytest.mark.parametrize("layers", [[4], [2, 1], [5, -1], [2.0, 2], "ab"])
def test_layers_that_are_no_split(layers: Sequence[Any]) -> None:
    with pytest.raises(ConfigurationError, match="layers"):
        split_layers(4, 2, layers)


def test_heads_that_do_not_divide() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100)
    with pytest.raises(ConfigurationError, match="2 heads of transformer do not divide over tensor_parallel=4"):
        stages_of(model, Execution(tensor_parallel=4), num_stages=2, microbatch_size=1)
    with pytest.raises(ConfigurationError, match="8 key and value heads of llama2-70b do not divide over tensor_parallel=16"):
        stages_of(model_named("llama2-70b"), Execution(tensor_parallel=16), num_stages=2, microbatch_size=1)
