"""Operations: the published formula exactly, and what torch counts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bpipe.estimate import Execution, Transformer
from bpipe.estimate.flops import core_flops, head_flops, layer_flops, recomputed_flops
from tests.estimate.strategies import executions, gpts, transformers
from tests.estimate.test_activations import GPT, LLAMA, Layer

sizes = st.integers(1, 8)


@given(gpts(), sizes)
def test_korthikanti(model: Transformer, b: int) -> None:
    """arXiv 2205.05198, appendix A: F and B of L layers and head take 72 b L s h^2 (1 + s/6h + v/12hL). Exact."""
    s, h, v, count = model.sequence, model.hidden, model.vocabulary, model.num_layers
    ours = 3 * (count * layer_flops(model, b) + head_flops(model, b))
    assert ours == 72 * b * count * s * h * h * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * h * count))


@given(transformers(), executions, sizes)
def test_recomputation(model: Transformer, execution: Execution, b: int) -> None:
    def again(how: str) -> int:
        return recomputed_flops(model, replace(execution, recomputation=how), b)

    assert again("none") == 0
    assert again("full") == layer_flops(model, b)
    assert again("selective") == (core_flops(model, b) if execution.attention == "materialised" else 0)


def test_layers_that_torch_ran() -> None:
    for model in (GPT, LLAMA):
        layer = Layer(model, Execution(attention="materialised"))
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(3, model.sequence, model.hidden, requires_grad=True)).sum().backward()
        assert counter.get_total_flops() == 3 * layer_flops(model, 3)
