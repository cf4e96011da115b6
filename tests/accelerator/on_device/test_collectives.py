"""Collectives on the simulated device: gloo's results, and ProcessGroupNCCL's rules about streams, memory and who waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.device import reports, simulator
from tests.ranks import run_ranks

SIZE = 1024


def numbers(rank: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def all_results(rank: int, group: Any, device: str) -> list[torch.Tensor]:
    """What each collective makes, of both ranks' numbers."""
    x = numbers(rank).to(device)
    gathered, half, exchanged, part = (torch.empty(size, device=device) for size in (2 * SIZE, SIZE // 2, SIZE, SIZE // 2))
    summed, sent = x.clone(), x.clone()
    listed = [torch.empty_like(x) for _ in range(2)]
    dist.all_reduce(summed, group=group)
    dist.broadcast(sent, 1, group=group)
    dist.all_gather(listed, x, group=group)
    dist.all_gather_single(gathered, x, group=group)
    dist.reduce_scatter_single(half, x, op=dist.ReduceOp.AVG, group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.scatter(part, list(x.chunk(2)) if rank == 0 else None, src=0, group=group)
    pairs = [x.clone(), x * 2]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as together:
        for one in pairs:
            dist.all_reduce(one, group=group)
    together.wait()
    received, peer = torch.empty_like(x), dist.get_global_rank(group, 1 - rank)
    posted = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    for work in dist.batch_isend_irecv(posted):
        work.wait()
    dist.barrier(group)
    return [one.cpu() for one in (summed, sent, *listed, gathered, half, exchanged, part, received, *pairs)]


def waited(rank: int, group: Any, x: torch.Tensor) -> None:
    dist.all_reduce(x, group=group, async_op=True).wait()
    x.sum()


def by_its_future(rank: int, group: Any, x: torch.Tensor) -> None:
    dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    x.sum()


def by_a_callback(rank: int, group: Any, x: torch.Tensor) -> None:
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    future.then(lambda done: done.value()[0].mul_(2)).wait()
    x.sum()


def on_the_current_stream(rank: int, group: Any, x: torch.Tensor) -> None:
    before = simulator.statistics(0)["streams"]
    dist.all_reduce(x, group=group)
    x.sum()
    assert simulator.statistics(0)["streams"] == before


def kept_until_it_is_waited_for(rank: int, group: Any, x: torch.Tensor) -> None:
    y = x * 2
    work = dist.reduce_scatter_single(torch.empty(SIZE // 2, device="cuda"), y, group=group, async_op=True)
    del y
    torch.empty_like(x)
    work.wait()
    torch.empty_like(x)


def work_that_is_dropped(rank: int, group: Any, x: torch.Tensor) -> None:
    for _ in range(2):
        dist.all_reduce(x * 2, group=group, async_op=True)
        torch.empty_like(x)
        torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    dist.all_reduce(x, group=group)
    assert torch.cuda.memory_allocated() == allocated - x.nbytes  # of the last one's


def the_host_goes_on(rank: int, group: Any, x: torch.Tensor) -> None:
    """The kernel on rank 0 blocks until that on rank 1 runs, and nobody waits but streams."""
    if rank == 1:
        dist.barrier()  # over gloo
    before, work = simulator.statistics(0)["host_waits"], dist.all_reduce(x, group=group, async_op=True)
    if rank == 0:
        time.sleep(0.01)
        assert not work.is_completed()
    work.wait()
    assert simulator.statistics(0)["host_waits"] == before
    if rank == 0:
        dist.barrier()


def read_without_a_wait(rank: int, group: Any, x: torch.Tensor) -> None:
    dist.all_reduce(x, group=group, async_op=True)
    x.sum()


def written_without_a_wait(rank: int, group: Any, x: torch.Tensor) -> None:
    work = dist.reduce_scatter_single(torch.empty(SIZE // 2, device="cuda"), x, group=group, async_op=True)
    x.add_(1)
    work.wait()


def given_out_again_too_early(rank: int, group: Any, x: torch.Tensor) -> None:
    """Who waits is not the stream on which the memory was allocated."""
    y = x * 2
    work = dist.reduce_scatter_single(torch.empty(SIZE // 2, device="cuda"), y, group=group, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    del y
    torch.empty_like(x)


Use = Callable[[int, Any, torch.Tensor], None]
RIGHT: list[Use] = [
    *(waited, by_its_future, by_a_callback, on_the_current_stream),
    *(kept_until_it_is_waited_for, work_that_is_dropped, the_host_goes_on),
]
WRONG: dict[Use, str] = {read_without_a_wait: "race", written_without_a_wait: "race", given_out_again_too_early: "reuse"}


def everything(rank: int) -> dict[str, Any]:
    from tests.accelerator import collectives

    collectives.install()
    simulator.configure(True, 500, 0.3, rank)
    group, found = dist.new_group(backend=collectives.BACKENDS), {}
    for use in [*RIGHT, *WRONG]:
        x = numbers(rank).cuda()
        use(rank, group, x)
        found[use.__name__] = [report.split(":")[0] for report in reports()]
        simulator.clear_reports()
        del x
    return {"results": (all_results(rank, group, "cuda"), all_results(rank, group, "cpu")), **found, "in the end": reports()}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


def test_results_are_gloos(seen: list[dict[str, Any]]) -> None:
    for of_rank in seen:
        on_device, on_cpu = of_rank["results"]
        assert all(map(torch.equal, on_device, on_cpu)) and not of_rank["in the end"]


@pytest.mark.parametrize("use", RIGHT)
def test_what_waits_is_right(seen: list[dict[str, Any]], use: Use) -> None:
    assert not any(of_rank[use.__name__] for of_rank in seen)


@pytest.mark.parametrize("use", WRONG)
def test_what_does_not_is_reported(seen: list[dict[str, Any]], use: Use) -> None:
    for of_rank in seen:
        assert set(of_rank[use.__name__]) == {WRONG[use]}
