"""flash-attn is used where it is installed, and imported only there. Its stand-in here saves what it saves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bpipe.memory.saved.joined import in_pieces, joined_again, keeping_pieces
from bpipe.slices import causal_attention, flash


class Kernel(torch.autograd.Function):
    """Attention of [batch, positions, heads, width], whose mask is aligned at the lower right."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return computed(q, k, v, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        again = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            output = computed(*again, ctx.scale)
        return (*torch.autograd.grad(output, again, gradient), None)


def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    mask: Any = causal_lower_right(q.shape[1], k.shape[1])
    turned = [one.transpose(1, 2) for one in (q, k, v)]
    return scaled_dot_product_attention(*turned, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


Calls = list[tuple[tuple[int, ...], tuple[int, ...], bool]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found: Calls = []

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: Any, causal: bool) -> torch.Tensor:
        found.append((tuple(q.shape), tuple(k.shape), causal))
        return Kernel.apply(q, k, v, softmax_scale)  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr(flash, "DEVICE", "cpu")
    flash._flash_attn.cache_clear()
    yield found
    flash._flash_attn.cache_clear()


def heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, count, 7, 8).bfloat16().requires_grad_() for count in (4, 2, 2))
    return q, k, v


def test_one_call_for_all_pieces(calls: Calls) -> None:
    given, again = heads(), heads()
    expected = scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    expected.backward(gradient := torch.randn_like(expected))
    q, k, v = (one.split([3, 2, 2], 2) for one in again)
    found = torch.cat([causal_attention(q[s], k[s], v[s], list(zip(k[:s], v[:s]))) for s in range(3)], 2)
    found.backward(gradient)
    assert calls == [((2, 2, 4, 8), (2, 5, 2, 8), True), ((2, 2, 4, 8), (2, 7, 2, 8), True)]  # the first slice is torch's own
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(again, given):
        torch.testing.assert_close(one.grad, other.grad, atol=5e-2, rtol=5e-2)


def test_the_pieces_alone_are_saved(calls: Calls) -> None:
    q, k, v = heads()
    saved: list[Any] = []

    def pack(tensor: torch.Tensor) -> Any:
        saved.append(in_pieces(tensor))
        return saved[-1]

    with keeping_pieces(sets_hooks=False), torch.autograd.graph.saved_tensors_hooks(pack, joined_again):
        causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [(k[:, :, :4].clone(), v[:, :, :4].clone())])
    kept = [one for one in saved if not isinstance(one, torch.Tensor)]
    assert len(calls) == 1 and [[piece.shape[2] for piece in one.pieces] for one in kept] == [[4, 3], [4, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_take_torch_s_kernels(calls: Calls, dtype: torch.dtype) -> None:
    q, k, v = (one.detach().to(dtype) for one in heads())
    causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [(k[:, :, :4], v[:, :, :4])])
    assert not calls


def test_it_is_imported_only_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a package that does not fit to this torch is as none."""
    asked: list[str] = []

    def import_module(name: str) -> Any:
        asked.append(name)
        raise OSError("undefined symbol")

    monkeypatch.setattr(flash, "import_module", import_module)
    flash._flash_attn.cache_clear()
    q, k, v = (one.detach() for one in heads())
    pieces = [(k[:, :, :4], v[:, :, :4])]
    expected = causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], pieces)
    assert asked == []
    monkeypatch.setattr(flash, "DEVICE", "cpu")
    assert torch.equal(causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], pieces), expected) and asked == ["flash_attn"]
    flash._flash_attn.cache_clear()
