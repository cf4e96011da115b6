"""What one GPU can show of kernels and graphs that a CPU has not. Without one these tests are skipped, saying so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.engine.run import Observer
from bpipe.errors import ConfigurationError, StageError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine: nothing on CUDA was tested"),
]

DEVICE = "cuda"
P, M, WIDTH, HEADS, TOKENS, BATCH = 4, 8, 512, 8, 512, 4


class FlashBlock(nn.Module):
    """A pre-norm block whose attention runs in torch's flash kernel, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if x.is_cuda else 0.0, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class InUse(Observer):
    """The bytes that the allocator has in use when an eviction of rank 0 begins, and when it is complete."""

    def __init__(self) -> None:
        self.freed: list[int] = []

    def before(self, run: Any, action: Any) -> None:
        if action.op.name == "WAIT_EVICT":
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_stats()["allocated_bytes.all.current"]

    def after(self, run: Any, action: Any) -> None:
        if action.op.name == "WAIT_EVICT":
            torch.cuda.synchronize()
            self.freed.append(self._before - torch.cuda.memory_stats()["allocated_bytes.all.current"])


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(schedule: Any, observer: Observer | None = None) -> tuple[list[torch.Tensor], list[bpipe.Schedule]]:
    torch.manual_seed(0)
    modules, loopback = [FlashBlock().to(DEVICE, torch.bfloat16) for _ in range(P)], bpipe.Loopback(P)
    loopback.manual_seed(7)
    stages = [bpipe.PipelineStage(module, i, P, DEVICE, loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [schedule(stage, M, loss_fn=F.mse_loss) for stage in stages]
    x = torch.randn(M * BATCH, TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    loopback.step(schedules, x, target=x)
    if observer is not None:
        schedules[0].session.observer = observer
    loopback.step(schedules, x, target=x)
    return [p.grad for module in modules for p in module.parameters()], schedules


def test_bf16_flash_attention_is_plain_1f1b_s_to_the_bit(deterministic: None) -> None:
    plain, _ = train(bpipe.OneFOneB)
    balanced, schedules = train(bpipe.BalancedOneFOneB)
    assert all(map(torch.equal, plain, balanced))
    assert schedules[0].stats["evicted_bytes"] > 0
    assert not schedules[0].ledger.held


def test_what_an_eviction_frees_by_the_allocator_s_statistics() -> None:
    """All that moved, and no less: between the two looks nothing else is allocated or freed by rank 0's action."""
    observer = InUse()
    _, schedules = train(bpipe.BalancedOneFOneB, observer)
    assert sum(observer.freed) >= schedules[0].stats["evicted_bytes"] > 0


def test_a_step_inside_a_capture_is_refused() -> None:
    stage = bpipe.PipelineStage(nn.Linear(8, 8).to(DEVICE), 0, 1, DEVICE)
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=F.mse_loss)
    x = torch.randn(4, 8, device=DEVICE)
    with pytest.raises(ConfigurationError, match="cannot be captured in a device graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        schedule.step(x, target=x)


def test_a_graphed_callable_is_refused() -> None:
    x = torch.randn(2, 8, device=DEVICE)
    module = torch.cuda.make_graphed_callables(nn.Linear(8, 8).to(DEVICE), (x,))
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, 0, 1, DEVICE), 2, loss_fn=F.mse_loss)
    with pytest.raises(StageError, match="the stage replays a graph of its device"):
        schedule.step(torch.cat([x, x]), target=torch.cat([x, x]))
