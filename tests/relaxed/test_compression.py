"""Messages in 8 bits: an error within what is said, and everything that is not a float is exact."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bpipe.relaxed.compression import decode, encode

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def through(tensor: Tensor, block: int) -> Tensor:
    codes, scales = encode(tensor, block)
    assert codes.dtype is torch.int8
    assert (codes.numel(), scales.numel()) == (tensor.numel(), -(-tensor.numel() // block))
    out = torch.full_like(tensor, 7)
    decode(codes, scales, block, out)
    return out


@given(st.integers(1, 300), st.sampled_from([1, 3, 64, 2048]), st.sampled_from(FLOATS), st.integers(-50, 38))
def test_the_error_is_within_a_254th_of_the_largest_of_the_block(n: int, block: int, dtype: torch.dtype, power: int) -> None:
    numbers = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) ** 3 * 10.0**power
    tensor = numbers.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    error = (through(tensor, block).double() - tensor.double()).abs()
    for begin in range(0, n, block):
        largest = float(tensor[begin : begin + block].double().abs().max())
        of_dtype = torch.finfo(dtype).eps * largest + float(torch.finfo(dtype).tiny)
        assert float(error[begin : begin + block].max()) <= largest / 254 * (1 + 1e-6) + of_dtype


def test_zeros_and_what_is_largest_are_exact() -> None:
    tensor = torch.tensor([[0.0, 0.0, 0.0], [2.0, -2.0, 0.0]])
    assert torch.equal(through(tensor, 3), tensor)


def test_a_block_that_is_not_finite_arrives_as_nan() -> None:
    """And only that one."""
    for odd in (float("nan"), float("inf")):
        found = through(torch.tensor([1.0, odd, 3.0, 4.0]), 2)
        assert found.isnan().tolist() == [True, True, False, False]


def test_it_takes_a_quarter_of_the_bytes() -> None:
    parts = encode(torch.randn(64 * 1024), 64)
    assert sum(part.nbytes for part in parts) / (64 * 1024 * 4) == 0.265625


def test_the_ends_of_the_range() -> None:
    """The smallest numbers keep their sign, and the largest ones stay finite."""
    for dtype in (torch.float32, torch.float64):
        info = torch.finfo(dtype)
        tiny = torch.tensor([190 * info.smallest_normal * info.eps, -info.smallest_normal * info.eps, 0.0], dtype=dtype)
        assert (through(tiny, 3) * tiny >= 0).all()
        most = torch.tensor([info.max, -info.max, 0.0], dtype=dtype)
        assert through(most, 3).isfinite().all()
