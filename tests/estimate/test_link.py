"""The link that hides an eviction: FACTS.md's formula and figures."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.estimate import Execution, Transformer, model_named
from bpipe.estimate.devices import link_named
from bpipe.estimate.stages import hiding_bytes_per_s
from tests.estimate.strategies import gpts


@given(gpts(), st.sampled_from([1, 2, 4]), st.sampled_from([True, False]))
def test_formula(model: Transformer, t: int, keeps_maps: bool) -> None:
    """FACTS.md: (34 or 34 + 5as/h) / (24 h (1 + s/6h)) x achieved FLOP/s, whatever t with sequence parallelism."""
    s, h, a = model.sequence, model.hidden, model.num_heads
    kept = 34 + (Fraction(5 * a * s, h) if keeps_maps else 0)
    execution = Execution(attention="materialised" if keeps_maps else "flash", tensor_parallel=t)
    assert hiding_bytes_per_s(model, execution, 140e12) == pytest.approx(float(kept / (24 * h * (1 + Fraction(s, 6 * h)))) * 140e12)


@pytest.mark.parametrize(
    ("name", "attention", "gb_per_s"), [("gpt3-96b", "flash", 19), ("gpt3-96b", "materialised", 79), ("gpt3-13b", "flash", 36)]
)
def test_figures(name: str, attention: str, gb_per_s: float) -> None:
    """FACTS.md and issue: h = 9984 19 GB/s, 79 with maps; h = 5120 36 GB/s; s = 2048, 140 TFLOP/s. Tolerance: whole GB/s."""
    execution = Execution(attention=attention, tensor_parallel=4)
    assert hiding_bytes_per_s(model_named(name), execution, 140e12) / 1e9 == pytest.approx(gb_per_s, abs=0.5)


def test_where_it_hides() -> None:
    """Issue: h = 5120 with fused attention is hidden over NVLink, not over PCIe 4.0's 25 GB/s; h = 9984 over both."""
    small, large = (hiding_bytes_per_s(model_named(name), Execution(), 140e12) for name in ("gpt3-13b", "gpt3-96b"))
    assert large < link_named("pcie4") < small < link_named("nvlink3")
