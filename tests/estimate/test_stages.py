"""Models cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.estimate import Execution, Transformer, device_named, model_named
from bpipe.estimate.activations import embedding_bytes, head_bytes, layer_bytes
from bpipe.estimate.flops import head_flops, layer_flops
from bpipe.estimate.stages import layer_costs, split_layers
from bpipe.estimate.workload import Load, ModelWorkload
from bpipe.partition import LayerCost
from bpipe.schedules import Costs, Op
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


def costs(model: Transformer, execution: Execution, b: int = 1) -> tuple[LayerCost, ...]:
    """Costs in operations instead of seconds, and with one byte for each parameter."""
    return layer_costs(model, execution, b, flops_per_s=1.0, bytes_per_parameter=execution.tensor_parallel)


def workload(model: Transformer, layers: tuple[int, ...] | None = None) -> ModelWorkload:
    rest: dict[str, Any] = {"recomputations": ("none",), "efficiency": 1.0, "bytes_per_parameter": 1.0}
    return ModelWorkload(model=model, execution=Execution(), device=device_named("h100"), layers_by_stage=layers, **rest)


def stage_costs(workload: ModelWorkload, p: int) -> Costs:
    return workload.exact_costs(Load(1), workload.ends(p))


@given(transformers(), executions, st.integers(1, 4))
def test_layers_make_up_the_model(model: Transformer, execution: Execution, b: int) -> None:
    layers = costs(model, execution, b)
    copy = model.head_parameters if model.is_tied else 0
    assert len(layers) == model.num_layers + 2
    assert sum(one.static_bytes for one in layers) == model.num_parameters + copy
    assert sum(one.forward_s for one in layers) == model.num_layers * layer_flops(model, b) + head_flops(model, b)
    ends = embedding_bytes(model, execution, b) + head_bytes(model, execution, b)
    assert sum(one.saved_bytes for one in layers) == model.num_layers * layer_bytes(model, execution, b) + ends
    assert all(one.backward_s >= 2 * one.forward_s for one in layers)


@given(transformers(), st.data())
def test_a_tied_head_is_a_copy_unless_it_is_beside_the_embedding(model: Transformer, data: st.DataObject) -> None:
    p = data.draw(st.integers(1, model.num_layers))
    stages = stage_costs(workload(model), p)
    copies = model.head_parameters if model.is_tied and p > 1 else 0
    assert sum(map(stages.static, range(p))) == model.num_parameters + copies


def test_embedding_and_head_are_where_they_are() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100, is_tied=False)
    stages = stage_costs(workload(model), 4)
    first, middle, *_, last = map(stages.static, range(4))
    assert first - middle == (100 + 4) * 8 and last - middle == 100 * 8 + 2 * 8
    first, middle, *_, last = map(stages.saved, range(4))
    assert first > middle < last
    first_s, middle_s, *_, last_s = (stages.seconds(Op.F, stage, 0) for stage in range(4))
    assert first_s == middle_s < last_s


def test_layers_as_given() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100)
    assert workload(model, (0, 3, 1)).ends(3) == (0, 1, 4, 6)
    assert stage_costs(workload(model, (0, 3, 1)), 3).seconds(Op.F, 0, 0) == 0


@pytest.mark.parametrize("layers", [[4], [2, 1], [5, -1], [2.0, 2], "ab"])
def test_layers_that_are_no_split(layers: Sequence[Any]) -> None:
    with pytest.raises(ConfigurationError, match="layers"):
        split_layers(4, 2, layers)


def test_heads_that_do_not_divide() -> None:
    model = Transformer(num_layers=4, hidden=8, num_heads=2, sequence=4, vocabulary=100)
    with pytest.raises(ConfigurationError, match="2 heads of transformer do not divide over tensor_parallel=4"):
        costs(model, Execution(tensor_parallel=4))
    with pytest.raises(ConfigurationError, match="8 key and value heads of llama2-70b do not divide over tensor_parallel=16"):
        costs(model_named("llama2-70b"), Execution(tensor_parallel=16))
