"""Causal attention by pieces is attention to the whole sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bpipe.errors import StageError
from bpipe.memory.saved.joined import join, keeping_pieces
from bpipe.slices import by_pieces, causal_attention

LENGTHS = [5, 3, 4, 1]
LIMITS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", LIMITS)
def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, key_heads: int, has_kernel: bool) -> None:
    if not has_kernel:
        monkeypatch.setattr(by_pieces, "has_kernel", lambda *_: False)
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, sum(LENGTHS), 16, dtype=dtype, requires_grad=True) for heads in (4, key_heads, key_heads)]
    expected = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=key_heads < 4)
    expected.backward(gradient := torch.randn_like(expected))
    expected_gradients = [one.grad for one in whole]
    again = [one.detach().requires_grad_() for one in whole]
    q, k, v = (one.split(LENGTHS, 2) for one in again)
    found = torch.cat([causal_attention(q[s], k[s], v[s], list(zip(k[:s], v[:s]))) for s in range(len(LENGTHS))], 2)
    found.backward(gradient)
    for one, other in zip([found, *(each.grad for each in again)], [expected, *expected_gradients]):
        assert one is not None and other is not None
        assert float((one - other).abs().max().detach() / other.abs().max().detach()) < LIMITS[dtype]


def test_widths_of_values_may_differ() -> None:
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 4)
    found = causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [(k[:, :, :4], v[:, :, :4])])
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, 4:])


def test_the_first_slice_is_torch_s_own() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    assert torch.equal(causal_attention(q, k, v, []), scaled_dot_product_attention(q, k, v, is_causal=True))


def shape(*sizes: int) -> torch.Tensor:
    return torch.randn(1, *sizes, 8)


@pytest.mark.parametrize(
    "q, k, v, earlier",
    [
        (shape(3, 2), shape(2, 2), shape(2, 2), []),
        (shape(2, 2), shape(2, 3), shape(2, 3), []),
        (shape(2, 2), shape(2, 2), shape(2, 1), []),
        (shape(4, 2), shape(4, 2), shape(1, 2), []),
        (shape(2, 2), shape(2, 2), shape(2, 2), [(shape(2, 3), shape(2, 2))]),
        (shape(4, 2), shape(2, 2), shape(2, 2), [(shape(4, 3), shape(4, 3))]),
        (torch.randn(2, 2, 2, 8), shape(2, 2), shape(2, 2), []),
    ],
)
def test_shapes_that_do_not_fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, earlier: Any) -> None:
    """The kernels would read memory of others."""
    with pytest.raises(StageError, match=r"causal_attention got queries .*: give \[batch, heads, positions, width\]"):
        causal_attention(q, k, v, earlier)


def test_rows_that_do_not_lie_in_one_piece() -> None:
    q, k, v = (torch.randn(2, 8, 4, 3, dtype=torch.float64).permute(0, 3, 1, 2) for _ in range(3))
    found = causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [(k[:, :, :4], v[:, :, :4])])
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, 4:])


def test_autocast() -> None:
    """Rotary embeddings leave queries and keys in single precision, and values in half."""
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True)[:, :, 4:]
        found = causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:].bfloat16(), [(k[:, :, :4], v[:, :, :4].bfloat16())])
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_what_is_saved_of_a_conjugate() -> None:
    pieces = [torch.randn(2, 3, dtype=torch.complex64, requires_grad=True) for _ in range(2)]
    weight, gradients = torch.randn(2, 6, dtype=torch.complex64, requires_grad=True), []
    for kept in (keeping_pieces(sets_hooks=True), nullcontext()):
        with kept:
            made = (join(pieces, 1).conj() * weight).abs().sum()
        gradients.append(torch.autograd.grad(made, [weight, *pieces]))
    assert all(map(torch.equal, *gradients))


def in_documents(documents: torch.Tensor, whole: list[torch.Tensor]) -> torch.Tensor:
    """Each document by itself."""
    rows = []
    for row, of_row in enumerate(documents):
        parts = [[one[row : row + 1, :, of_row == document] for one in whole] for document in of_row.unique_consecutive()]
        rows.append(torch.cat([scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts], 2))
    return torch.cat(rows)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_documents_that_are_packed(monkeypatch: pytest.MonkeyPatch, key_heads: int, has_kernel: bool) -> None:
    """Short sequences in one long one, which is cut in the middle of some."""
    if not has_kernel:
        monkeypatch.setattr(by_pieces, "has_kernel", lambda *_: False)
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 4, [7] * 7 + [8] * 1 + [9] * 5])
    whole = [torch.randn(2, heads, 13, 8, dtype=torch.float64, requires_grad=True) for heads in (4, key_heads, key_heads)]
    expected = in_documents(documents, whole)
    expected.backward(gradient := torch.randn_like(expected))
    again = [one.detach().requires_grad_() for one in whole]
    q, k, v = (one.split(LENGTHS, 2) for one in again)
    ends = torch.tensor(LENGTHS).cumsum(0)
    found = torch.cat(
        [causal_attention(q[s], k[s], v[s], list(zip(k[:s], v[:s])), documents=documents[:, : ends[s]]) for s in range(4)], 2
    )
    found.backward(gradient)
    for one, other in zip([found, *(each.grad for each in again)], [expected, *(each.grad for each in whole)]):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_documents_of_the_slice_alone() -> None:
    q = torch.randn(2, 2, 3, 8)
    with pytest.raises(StageError, match=r"got documents \[2, 3\] for 2 sequences up to position 6: .* UpTo\(1\)"):
        causal_attention(q, q, q, [(q, q)], documents=torch.zeros(2, 3))
