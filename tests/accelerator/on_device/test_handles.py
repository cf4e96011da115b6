"""Memory that another process opens by a handle: what is in order is right, and what is not is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bpipe.device.handles import OpenedMemory, handle_of
from bpipe.errors import CommError
from tests.accelerator.device import KIND, MODULE, reports, simulator
from tests.ranks import run_ranks

SIZE = 10_000
DEVICE = torch.device(KIND, 0)

pytestmark = pytest.mark.skipif(KIND != "cuda", reason="only CUDA has such handles")


def numbers() -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.int32).to(torch.uint8)


def used(opened: OpenedMemory) -> None:
    """Double what is there, on a stream of its own."""
    stream = MODULE.Stream()
    with MODULE.stream(stream):
        opened.memory.copy_(opened.memory * 2)
    stream.synchronize()


def closed_too_early(opened: OpenedMemory) -> None:
    with MODULE.stream(MODULE.Stream()):
        opened.memory.copy_(opened.memory * 2)


def on_two_streams(opened: OpenedMemory) -> None:
    with MODULE.stream(MODULE.Stream()):
        opened.memory.fill_(1)
    opened.memory.fill_(2)
    MODULE.synchronize()


def through_a_handle(
    rank: int, use: Callable[[OpenedMemory], None], frees_early: bool, lends_early: bool
) -> tuple[bool, list[str]]:
    """Rank 0 lends memory to rank 1: what it finds there in the end, and what the checker reports."""
    simulator.configure(True, 500, 0.3, rank)
    store = dist.PrefixStore("handles", dist.distributed_c10d._get_default_store())
    if rank == 0:
        memory = numbers().to(KIND)
        if lends_early:
            with MODULE.stream(MODULE.Stream()):
                memory.mul_(1)
        store.set("handle", handle_of(memory))
        store.wait(["opened"])
        if frees_early:
            del memory
        store.set("go", "")
        store.wait(["closed"])
        return frees_early or torch.equal(memory.cpu(), numbers() * 2), reports()
    opened = OpenedMemory(store.get("handle"), DEVICE)
    again = OpenedMemory(store.get("handle"), DEVICE)
    assert again.memory.data_ptr() == opened.memory.data_ptr() and len(opened.memory) == SIZE
    again.close()
    store.set("opened", "")
    store.wait(["go"])
    use(opened)
    opened.close()
    store.set("closed", "")
    return True, reports()


def test_memory_of_another_process() -> None:
    assert run_ranks(through_a_handle, 2, used, False, False, timeout_s=20) == [(True, [])] * 2


@pytest.mark.parametrize(
    ("use", "frees_early", "lends_early", "rank", "expected"),
    [
        (closed_too_early, False, False, 1, "reuse: block .* of another process is closed while copy_ on stream"),
        (on_two_streams, False, False, 1, "race: write of 10000 bytes"),
        (used, True, False, 0, "reuse: block .* is freed while process .* has it open"),
        (used, False, True, 0, "race: block .* is lent while mul on stream"),
    ],
)
def test_what_is_not_in_order_is_reported(
    use: Callable[[OpenedMemory], None], frees_early: bool, lends_early: bool, rank: int, expected: str
) -> None:
    found = run_ranks(through_a_handle, 2, use, frees_early, lends_early, timeout_s=20)
    with pytest.raises(AssertionError, match=expected):
        assert not found[rank][1], found[rank][1][0]
    assert not found[1 - rank][1]


def test_no_handle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(10, dtype=torch.uint8, device=KIND)
    handle = handle_of(memory)
    with pytest.raises(CommError, match="cuIpcOpenMemHandle_v2 says CUDA_ERROR_INVALID_CONTEXT"):
        OpenedMemory(handle, DEVICE)
    monkeypatch.setenv("SIMULATED_HANDLES", "0")
    with pytest.raises(CommError, match="cuIpcGetMemHandle says CUDA_ERROR_INVALID_VALUE"):
        handle_of(memory)
