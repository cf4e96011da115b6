"""Advice about slices: Seq1F1B is ranked beside the schedules of whole microbatches, at the same costs."""

from __future__ import annotations

from typing import Any

import pytest

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.estimate.even_slices import even_shares
from bpipe.partition.sequence import slice_lengths
from tests.partition.test_sequence import attention

LONG: dict[str, Any] = {
    "batch": 16,
    "num_stages": 8,
    "tensor_parallel": 8,
    "device": "a100-80gb",
    "sequence": 32768,
    "microbatch_sizes": [1],
}


def test_slices_fit_where_whole_microbatches_do_not() -> None:
    advice = bpipe.advise("llama2-70b", slices=4, **LONG)
    best = advice.best
    assert best is not None and best.name == "seq_1f1b in 4 slices, 8 stages, microbatch 1, recomputation none"
    found = {(one.schedule, one.is_balanced, one.recomputation): one for one in advice.candidates}
    whole = found["1f1b", False, "none"]
    assert best.fits and not whole.fits and best.step_s < 0.8 * whole.step_s
    even = found["seq_1f1b", True, "none"]
    assert even.label == "seq_1f1b in 4 slices balanced, 8 slices" and even.step_s == pytest.approx(best.step_s)
    assert max(even.peak_bytes) < max(best.peak_bytes)
    assert 2.8 / 8 < max(best.peak_bytes) / max(whole.peak_bytes) < 3 / 8  # more than 2.75 of 8: first slices are longer
    assert ("seq_1f1b", False, "full") not in found and ("1f1b", False, "full") in found
    assert "seq_1f1b with 4 slices of equal cost" in advice.assumptions[-1] and advice.to_json()


def test_without_slices_nothing_changes() -> None:
    advice = bpipe.advise("llama2-70b", **LONG)
    assert {one.schedule for one in advice.candidates} == {"1f1b", "gpipe"} and {one.slices for one in advice.candidates} == {1}
    assert advice == bpipe.advise("llama2-70b", slices=1, **LONG)
    assert not any("seq_1f1b" in text for text in advice.assumptions)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"slices": 0}, "slices"), ({"slices": 4, "attention": "materialised"}, "slices=4 with attention='materialised'")],
)
def test_slices_that_cannot_be_estimated_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bpipe.advise("llama2-70b", **LONG, **given)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_even_shares_are_the_lengths_of_equal_cost(share: float, k: int) -> None:
    lengths = slice_lengths(400, attention(share, 400), num_stages=8, num_slices=k)
    assert even_shares(share, k) == pytest.approx([length / 400 for length in lengths], abs=2 / 400)
