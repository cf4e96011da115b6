"""flash-attn is chosen where its symbol imports, and what its kernels save moves: log-sum-exp and random state included."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, WIDTH, HEADS, TOKENS = 4, 8, 32, 2, 16
EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")


class FlashAttnFunc(torch.autograd.Function):
    """Saves what flash-attn's Function saves, in its layout: (batch, sequence, heads, head width). Plain arithmetic inside."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        lse, rng_state = scores.logsumexp(-1), torch.empty(2, dtype=torch.int64).random_()
        out = torch.einsum("bhts,bshd->bthd", torch.exp(scores - lse.unsqueeze(-1)), v)
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        q, k, v, out, lse, _ = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
        p = torch.exp(scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf) - lse.unsqueeze(-1))
        d_p = torch.einsum("bthd,bshd->bhts", d_out, v)
        d_scores = p * (d_p - (d_out * out).sum(-1).transpose(1, 2).unsqueeze(-1)) * scale
        d_q, d_k = torch.einsum("bhts,bshd->bthd", d_scores, k), torch.einsum("bhts,bthd->bshd", d_scores, q)
        return d_q, d_k, torch.einsum("bhts,bthd->bshd", p, d_out)


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    assert causal
    return FlashAttnFunc.apply(q, k, v)


class Block(nn.Module):
    """Attention by a kernel: one that takes and gives (batch, sequence, heads, head width)."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel, self.qkv = kernel, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return x + self.kernel(q, k, v, causal=True).flatten(2)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def train(schedule: Any, kernel: Any) -> tuple[list[torch.Tensor], bpipe.Schedule]:
    torch.manual_seed(0)
    modules, loopback = [Block(kernel) for _ in range(P)], bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [schedule(stage, M, loss_fn=F.mse_loss) for stage in stages]
    x = torch.randn(2 * M, TOKENS, WIDTH)
    for _ in range(2):
        loopback.step(schedules, x, target=x)
    return [p.grad for module in modules for p in module.parameters()], schedules[0]


@pytest.mark.parametrize("kernel, num_random", [(flash_attn_func, 2), (sdpa, 0)], ids=["flash-attn", "torch's on CPU"])
def test_all_that_a_flash_kernel_saves_moves(kernel: Any, num_random: int) -> None:
    plain, _ = train(bpipe.OneFOneB, kernel)
    balanced, first = train(bpipe.BalancedOneFOneB, kernel)
    assert all(map(torch.equal, plain, balanced))
    assert not first.ledger.held
    tokens = 2 * TOKENS
    floats = tokens * WIDTH * (3 + 1) + tokens * HEADS  # queries, keys and values; the result; log-sum-exp. The input is the user's
    moved = {action.microbatch for action in first.plan.actions[0] if action.op.name == "EVICT"}
    assert first.stats["evicted_bytes"] == len(moved) * (4 * floats + 8 * num_random) > 0


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the examples, new."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "attention", raising=False)
    import attention

    yield attention
    sys.modules.pop("attention")


@pytest.mark.parametrize("home", ["flash_attn", "flash_attn.cute"])
def test_flash_attn_is_chosen_where_its_symbol_imports(attention: Any, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # version 4 alone leaves it empty
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert attention.flash_kernel() is None
    attention.flash_kernel.cache_clear()
    module = ModuleType(home)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, home, module)
    assert attention.flash_kernel() is flash_attn_func


def test_on_the_cpu_and_in_full_precision_it_is_torchs(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_kernel", lambda: pytest.fail)
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention.causal_attention(q, k, v), expected)
    mine = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    torch.testing.assert_close(mine, expected)  # the stand-in computes attention, in another order
