"""What one GPU can show. Without one these tests are skipped, saying so."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.engine.run import Observer
from bpipe.errors import RankFailedError
from bpipe.memory.device_buffers import DevicePeerMemory
from tests.models import Block, Result, as_rank, assert_same, joined, mse
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine: nothing on CUDA was tested"),
]

P, M, WIDTH, TOKENS, BATCH = 4, 8, 512, 512, 4


class InUse(Observer):
    """The bytes that the allocator has in use after each action."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def after(self, run: Any, action: Any) -> None:
        self.num_bytes.append(torch.cuda.memory_allocated())


def on_one_gpu(schedule: type[bpipe.Schedule]) -> tuple[Result, list[int]]:
    """Train blocks in a loopback on CUDA; the bytes that the allocator had in use after each action of rank 0."""
    torch.manual_seed(0)
    modules = [Block(WIDTH, 8, 0.1).cuda() for _ in range(P)]
    loopback = bpipe.Loopback(P)
    loopback.manual_seed(7)
    schedules = [schedule(bpipe.PipelineStage(module, i, P, "cuda", loopback.rank(i)), M, mse) for i, module in enumerate(modules)]
    result, in_use = Result(), InUse()
    schedules[0].session.observer = in_use
    x, y = torch.randn(2, M * BATCH, TOKENS, WIDTH, device="cuda").unbind()
    for _ in range(2):
        in_use.num_bytes.clear()
        output = loopback.step(schedules, x, target=y, losses=result.losses)
    torch.cuda.synchronize()
    result.outputs = [output]
    result.gradients = [[p.grad for p in module.parameters()] for module in modules]
    result.stats = [one.stats for one in schedules]
    return result, in_use.num_bytes


def test_loopback_with_a_stream_for_each_rank():
    plain, _ = on_one_gpu(bpipe.OneFOneB)
    balanced, _ = on_one_gpu(bpipe.BalancedOneFOneB)
    assert_same(plain, balanced)
    assert [s["peak_slots"] for s in balanced.stats] == [3, 3, 2, 3]
    assert balanced.stats[0]["evicted_bytes"] > 0
    assert [s["peak_bytes"] for s in balanced.stats] == [s["predicted_peak_bytes"] for s in balanced.stats]


def test_an_eviction_frees_the_allocator_s_memory():
    """An empty storage is memory that the caching allocator can use again: by its statistics, not by ours."""
    module = Block(WIDTH, 8, 0.0).cuda()
    from bpipe.memory.saved.bundle import Bundle
    from bpipe.memory.saved.stash import Stash
    from bpipe.memory.saved.storages import keys_of

    stash = Stash("microbatch 0 of stage 0", dict.fromkeys(keys_of(module.parameters()), "a parameter"))
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    with stash.capture():
        edge = torch.autograd.graph.get_gradient_edge(module(x).sum())
    bundle = Bundle(stash.send_away(stash.contents(), 0), stash.name)
    before = torch.cuda.memory_allocated()
    away = [message.cpu() for message in bundle.messages()]
    bundle.empty()
    assert before - torch.cuda.memory_allocated() >= bundle.num_bytes
    landing = bundle.refill()
    for target, source in zip(landing, away):
        target.copy_(source)
    bundle.scatter(landing)
    stash.take_back(0)
    torch.autograd.backward([edge], [torch.ones((), device="cuda")])
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected))


def start_nccl(rank: int, store_port: int) -> None:
    dist.destroy_process_group()
    os.environ["NCCL_HOSTID"] = f"rank{rank}"  # lets NCCL take two ranks on one device, over sockets
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=2, timeout=timedelta(seconds=60))


def nccl_rank(rank: int, schedule: type[bpipe.Schedule], slots: Any, store_port: int) -> list[torch.Tensor]:
    start_nccl(rank, store_port)
    torch.manual_seed(rank)
    module = nn.Sequential(Block(64, 4, 0.0), Block(64, 4, 0.0)).cuda()
    pipeline = schedule(bpipe.PipelineStage(module, rank, 2, "cuda"), 6, mse, options=bpipe.Options(slots=slots))
    x = torch.randn(12, 16, 64, generator=torch.Generator().manual_seed(5)).cuda()
    for _ in range(2):
        pipeline.step(x, target=x)
    gradients = [p.grad.cpu() for p in module.parameters()]
    pipeline.close()
    return gradients


def test_two_nccl_ranks_smoke():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = run_ranks(nccl_rank, 2, bpipe.GPipe, None, store.port)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    balanced = run_ranks(nccl_rank, 2, bpipe.GPipe, (4, 9), store.port)
    assert all(torch.equal(a, b) for x, y in zip(plain, balanced) for a, b in zip(x, y))


class Failing(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 9:  # in the second step
            raise ValueError("boom")
        return super().forward(x)


def fails_on_nccl(rank: int, store_port: int) -> tuple[str, float]:
    start_nccl(rank, store_port)
    module = (Failing if rank else nn.Linear)(64, 64).cuda()
    pipeline = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cuda"), 6, mse)
    x = torch.randn(12, 64).cuda()
    pipeline.step(x, target=x)
    began = time.monotonic()
    try:
        for _ in range(2):  # the host may be done with its part before it hears
            pipeline.step(x, target=x)
        return "nothing", 0.0
    except (ValueError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        pipeline.close()


def test_nccl_ranks_fail_together():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (other, seconds), (own, _) = run_ranks(fails_on_nccl, 2, store.port)
    assert own == "ValueError: boom"
    assert other.startswith("RankFailedError: rank 1 failed in step 1, stage 1, microbatch 2, action 1F2: ValueError: boom")
    assert seconds < 5


def test_cuda_tensors_over_gloo_through_pinned_memory():
    plain, balanced = (
        joined(run_ranks(as_rank, 4, "transformer", 4, 8, schedule, 2, {}, "cuda"))
        for schedule in (bpipe.OneFOneB, bpipe.BalancedOneFOneB)
    )
    assert_same(plain, balanced)
    assert balanced.stats[0]["evicted_bytes"] > 0


def lending_rank(rank: int, shares: str) -> tuple[list[torch.Tensor], int]:
    """One rank of four on one GPU, over gloo: its gradients, and in how many ranks' memory it keeps microbatches by itself."""
    os.environ["BPIPE_SHARED_MEMORY"] = shares
    torch.manual_seed(rank)
    module = nn.Sequential(Block(64, 4, 0.0), Block(64, 4, 0.0)).cuda()
    pipeline = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, P, "cuda"), M, mse), budget="lowest")
    x = torch.randn(2 * M, 16, 64, generator=torch.Generator().manual_seed(5)).cuda()
    for _ in range(3):
        pipeline.step(x, target=x)
    borrowed = sum(isinstance(one, DevicePeerMemory) for one in pipeline.session.context.memory.stores.values())
    gradients = [p.grad.cpu() for p in module.parameters()]
    pipeline.close()
    return gradients, borrowed


def test_memory_lent_to_another_process():
    expected, ranks = (run_ranks(lending_rank, P, shares) for shares in ("0", "1"))
    assert all(torch.equal(a, b) for (x, _), (y, _) in zip(ranks, expected) for a, b in zip(x, y))
    assert [borrowed for _, borrowed in ranks] == [1, 0, 0, 0]
