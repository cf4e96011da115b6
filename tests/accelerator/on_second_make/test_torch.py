"""What bpipe asks of torch for any make of device, on one that torch does not know: none of it is bpipe's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from bpipe.comm.transport.communicators import lend
from bpipe.device import (
    Streams,
    default_kind,
    fork_random_states,
    free_bytes,
    is_asynchronous,
    is_capturing,
    name_of,
    pin,
    with_index,
)
from tests.accelerator.device import KIND, MODULE, reports, simulator

SIZE = 1024
HERE = torch.device(KIND, 0)


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(KIND) and default_kind() == KIND
    assert torch.get_device_module(HERE) is MODULE and is_asynchronous(HERE) and with_index(torch.device(KIND)) == HERE
    assert name_of(HERE) == "simulated" and not is_capturing(HERE)
    assert torch.accelerator.current_stream().stream_id == MODULE.current_stream().stream_id


def test_streams_are_told_apart() -> None:
    streams = Streams()
    assert streams.of("a", HERE) is streams.of("a", HERE) and streams.of("a", HERE) != streams.of("b", HERE)


def test_pinned_memory_is_its_own() -> None:
    before = simulator.statistics(0)["pinned"]
    assert torch.empty(SIZE, pin_memory=True).is_pinned() and torch.ones(SIZE).pin_memory().is_pinned()
    assert simulator.statistics(0)["pinned"] == before + 2 * 4 * SIZE
    assert not pin(torch.ones(SIZE).data_ptr(), SIZE, HERE)  # it has no cudaHostRegister: torch's own pinned memory is taken


def test_a_tensor_is_lent_without_its_allocator() -> None:
    x, side = torch.ones(SIZE, device=KIND), MODULE.Stream()
    alias = lend(x)
    assert alias.device == HERE and alias.data_ptr() == x.data_ptr() and alias.numel() == x.nbytes
    assert torch.from_dlpack(to_dlpack(x)).equal(x)
    deferred = simulator.statistics(0)["deferred"]
    for tensor in (alias, x):
        tensor.record_stream(side)
    del tensor, alias
    assert simulator.statistics(0)["deferred"] == deferred
    del x
    assert simulator.statistics(0)["deferred"] == deferred + 4 * SIZE


def test_random_numbers_are_put_back() -> None:
    torch.manual_seed(3)
    with torch.random.fork_rng([0], device_type=KIND):
        first = torch.rand(SIZE, device=KIND)
    with fork_random_states([HERE]):
        second = torch.rand(SIZE, device=KIND)
    generator = torch.Generator(KIND).manual_seed(3)
    assert generator.device == HERE and torch.equal(first, second)
    assert torch.equal(first, torch.rand(SIZE, device=KIND, generator=generator))


def test_a_storage_can_be_emptied() -> None:
    x = torch.ones(SIZE, device=KIND)
    free = free_bytes(HERE)
    x.untyped_storage().resize_(0)
    assert free_bytes(HERE) == free + 4 * SIZE
    x.untyped_storage().resize_(4 * SIZE)
    assert x.fill_(2).sum().item() == 2 * SIZE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts(dtype: torch.dtype) -> None:
    x = torch.ones(4, 4, device=KIND)
    with torch.autocast(KIND, dtype):
        assert torch.is_autocast_enabled(KIND) and torch.get_autocast_dtype(KIND) == dtype
        assert (x @ x).dtype == dtype and (x @ x).exp().dtype == torch.float32


def test_nothing_was_reported() -> None:
    assert not reports()
