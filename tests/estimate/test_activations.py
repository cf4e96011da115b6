"""Activation bytes: the published formulas exactly, and layers that torch ran, counted by what the runtime counts with."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from bpipe.errors import ConfigurationError
from bpipe.estimate import Execution, Transformer
from bpipe.estimate.activations import embedding_bytes, head_bytes, layer_bytes, message_bytes, working_bytes
from bpipe.estimate.profile import profile
from tests.estimate.strategies import executions, gpts, transformers

sizes = st.integers(1, 8)
cuts = st.sampled_from([1, 2, 4])


@given(gpts(), sizes, cuts)
def test_korthikanti_with_sequence_parallelism(model: Transformer, b: int, t: int) -> None:
    """arXiv 2205.05198, equation 4: s b h (34 + 5as/h) / t; section 5: selective recomputation drops 5as/h. Exact."""
    s, h, a = model.sequence, model.hidden, model.num_heads
    kept = Execution(attention="materialised", tensor_parallel=t)
    assert layer_bytes(model, kept, b) == Fraction(s * b * h, t) * (34 + Fraction(5 * a * s, h))
    for dropped in (replace(kept, recomputation="selective"), replace(kept, attention="flash")):
        assert layer_bytes(model, dropped, b) == Fraction(34 * s * b * h, t)


@given(gpts(), sizes, cuts)
def test_korthikanti_without_sequence_parallelism(model: Transformer, b: int, t: int) -> None:
    """arXiv 2205.05198, equation 2: s b h (10 + 24/t + 5as/(ht)). Exact."""
    s, h, a = model.sequence, model.hidden, model.num_heads
    kept = Execution(attention="materialised", tensor_parallel=t, sequence_parallel=False)
    assert layer_bytes(model, kept, b) == s * b * h * (10 + Fraction(24, t) + Fraction(5 * a * s, h * t))


@given(gpts(), sizes, cuts)
def test_full_recomputation_keeps_a_layers_input(model: Transformer, b: int, t: int) -> None:
    """arXiv 2205.05198, table 2: 2 s b h; ours is cut along the sequence where the layer's input is."""
    input_bytes = 2 * model.sequence * b * model.hidden
    for attention in ("materialised", "flash"):
        execution = Execution(attention=attention, recomputation="full", tensor_parallel=t, sequence_parallel=False)
        assert layer_bytes(model, execution, b) == input_bytes
        assert layer_bytes(model, replace(execution, sequence_parallel=True), b) == input_bytes // t


@given(gpts(), sizes, cuts)
def test_korthikanti_embedding_and_head(model: Transformer, b: int, t: int) -> None:
    """arXiv 2205.05198, section 4.3: dropout's mask s b h / t, and 4 s b h / t (1 + v/h) at the head. Up to whole bytes."""
    s, h, v = model.sequence, model.hidden, model.vocabulary
    execution = Execution(tensor_parallel=t)
    assert embedding_bytes(model, execution, b) == s * b * h // t
    assert 0 <= head_bytes(model, execution, b) - Fraction(4 * s * b * h, t) * (1 + Fraction(v, h)) < 1
    assert message_bytes(model, execution, b) == 2 * s * b * h // t
    assert message_bytes(model, replace(execution, sequence_parallel=False), b) == 2 * s * b * h


@given(transformers(), executions, sizes)
def test_more_is_kept_by_larger_microbatches_and_less_by_recomputation(model: Transformer, execution: Execution, b: int) -> None:
    assert layer_bytes(model, execution, b) < layer_bytes(model, execution, b + 1)
    kept = [layer_bytes(model, replace(execution, recomputation=how), b) for how in ("none", "selective", "full")]
    assert kept[0] >= kept[1] > kept[2]
    for how, less in zip(("none", "selective", "full"), kept):
        assert working_bytes(model, replace(execution, recomputation=how), b) == kept[0] - less


@given(transformers(), executions, sizes)
def test_cutting_over_devices_keeps_the_whole(model: Transformer, execution: Execution, b: int) -> None:
    whole = layer_bytes(model, replace(execution, tensor_parallel=1), b)
    t = execution.tensor_parallel
    part = layer_bytes(model, execution, b)
    assert whole <= part * t
    if execution.sequence_parallel:
        assert part * t < whole + t


class Layer(nn.Module):
    """A transformer layer, written plainly, from which torch decides what to save."""

    def __init__(self, model: Transformer, execution: Execution) -> None:
        super().__init__()
        h, kv, f, bias = model.hidden, model.kv_hidden, model.ffn_hidden, model.has_biases
        self.heads, self.kv_heads, self.is_flash = (
            model.num_heads,
            model.num_kv_heads or model.num_heads,
            execution.attention == "flash",
        )
        self.norm1, self.norm2 = nn.LayerNorm(h, bias=bias), nn.LayerNorm(h, bias=bias)
        self.query, self.key, self.value = nn.Linear(h, h, bias), nn.Linear(h, kv, bias), nn.Linear(h, kv, bias)
        self.out, self.up, self.down = nn.Linear(h, h, bias), nn.Linear(h, f, bias), nn.Linear(f, h, bias)
        self.gate = nn.Linear(h, f, bias) if model.is_gated else None
        self.rate = 0.1 if model.has_dropout else 0.0

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout with a mask of bools, as on CUDA: on the CPU torch's own keeps a mask of values."""
        return x.masked_fill(torch.rand_like(x) < self.rate, 0) / (1 - self.rate) if self.rate else x

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.is_flash:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads != self.heads)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        maps = scores.softmax(-1)
        return self.drop(maps) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (one(y).view(b, s, -1, h // self.heads).transpose(1, 2) for one in (self.query, self.key, self.value))
        y = self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, s, h))
        x = x + self.drop(y)
        y = self.norm2(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y)))
        return x + self.drop(y)


GPT = Transformer(num_layers=1, hidden=128, num_heads=4, sequence=64, vocabulary=1)
LLAMA = replace(GPT, ffn=352, is_gated=True, has_biases=False, has_dropout=False)


@pytest.mark.parametrize(
    ("model", "execution"),
    [
        (GPT, Execution(attention="materialised", precision="fp32")),
        (GPT, Execution(attention="materialised")),
        (LLAMA, Execution(attention="materialised")),
        (LLAMA, Execution()),
        (replace(LLAMA, num_kv_heads=2), Execution()),
    ],
    ids=["gpt, fp32", "gpt", "gated, maps kept", "gated, fused", "gated, grouped queries, fused"],
)
def test_layers_that_torch_ran(model: Transformer, execution: Execution) -> None:
    """What torch saves on the CPU. Tolerance 2%: statistics of norms and of fused attention, which the formulas leave out."""
    layer = Layer(model, execution).to(torch.float32 if execution.precision == "fp32" else torch.bfloat16)
    example = torch.randn(1, model.sequence, model.hidden, dtype=layer.out.weight.dtype)
    measured = profile(layer, example, [1, 3], repeats=1)
    for one in measured.measurements:
        assert one.own_bytes == pytest.approx(layer_bytes(model, execution, one.microbatch_size), rel=0.02)
    assert measured.num_parameters == model.layer_parameters


def test_unknown_names() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'flash'"):
        Execution(attention="flashy")
    with pytest.raises(ConfigurationError, match="attention='materialised', recomputation='selective'"):
        Execution(attention="selective")
    with pytest.raises(ConfigurationError, match="did you mean 'full'"):
        Execution(recomputation="fulll")
    with pytest.raises(ConfigurationError, match="precision"):
        Execution(precision="fp4")
    with pytest.raises(ConfigurationError, match="tensor_parallel=0"):
        Execution(tensor_parallel=0)
    assert Execution(attention="Flash", precision="BF16") == Execution()
