"""Where memory cannot be shared, for whatever reason, a step is the same over sockets, and one warning says why."""

from __future__ import annotations

import os
import resource
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bpipe
from bpipe import logs
from bpipe.engine.evictions import Evictions
from bpipe.errors import CommError
from bpipe.memory import shared_file
from bpipe.memory.saved.bundle import SMALL, Bundle
from bpipe.memory.shared_buffers import SharedBuffers
from bpipe.memory.shared_file import no_memory
from bpipe.schedules import build
from tests.over import Over
from tests.ranks import run_ranks

RANKS, MICROBATCHES, WIDTH, STEPS = 4, 6, 300, 3
IN_BYTES = Over(bpipe.OneFOneB, {"budget": "lowest"})
MOST_BYTES = 2**20  # of a file, in these tests: less than a ring takes, or the room of a microbatch

pytestmark = pytest.mark.usefixtures("one_thread")


def warnings_of_bpipe() -> list[str]:
    said: list[str] = []
    logs.LOG.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign, assignment]
    return said


def lower(limit: int, most: int) -> None:
    resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))


def no_map(*_: Any) -> Any:
    raise no_memory(0, "as the test says")


def limit_files() -> None:
    lower(resource.RLIMIT_FSIZE, MOST_BYTES)


def forbid_maps_of_rooms() -> None:
    SharedBuffers._reach = no_map  # type: ignore[method-assign]


def forbid_files() -> None:
    shared_file._new = partial(no_map)


def leave_no_memory() -> None:
    shared_file.available_bytes = lambda: MOST_BYTES


def trained(rank: int, rule: Any, lacks: dict[int, Any]) -> tuple[list[torch.Tensor], dict[str, Any], list[str]]:
    """One rank: its gradients, how its tensors travel and what they take, and what it warns of."""
    said = warnings_of_bpipe()
    lacks.get(rank, lambda: None)()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(2 * MICROBATCHES, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    schedule = rule(
        bpipe.PipelineStage(module, rank, RANKS, "cpu"),
        MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        options=bpipe.Options(timeout_s=20),
    )
    for _ in range(STEPS):
        schedule.step(x, target=x, return_outputs=False)
    context, stats = schedule.session.context, schedule.stats
    seen = {
        "lent": sum(isinstance(one, SharedBuffers) for one in context.memory.remote_buffers.values()),
        "reached": len(context.memory.stores),
        "rings": stats["shared_message_bytes"],
        "bytes": [stats[name] for name in ("peak_bytes", "evicted_bytes", "remote_buffer_bytes", "device_peak_bytes")],
    }
    assert stats["peak_bytes"] == stats["predicted_peak_bytes"]
    dist.barrier()
    schedule.close()
    return [p.grad for p in module.parameters() if p.grad is not None], seen, said


ALL = range(RANKS)  # rank 1 evicts to ranks 0 and 3
SHARED = [(1, 0), (0, 2), (0, 0), (1, 0)]  # how many each rank lends to, and how many lend to it
NONE = [(0, 0)] * RANKS


@pytest.mark.parametrize(
    "lacks, left, who_warns, why",
    [
        (dict.fromkeys(ALL, limit_files), NONE, ALL, "bytes of it cannot be reserved (File too large)"),
        (dict.fromkeys(ALL, leave_no_memory), NONE, ALL, "bytes of it cannot be reserved (Cannot allocate memory)"),
        ({3: limit_files}, [(1, 0), (0, 1), (0, 0), (0, 0)], (1, 3), "bytes of it cannot be reserved (File too large)"),
        ({1: forbid_maps_of_rooms}, NONE, (0, 1, 3), "it cannot be made (as the test says)"),
        ({3: forbid_files}, [(1, 0), (0, 1), (0, 0), (0, 0)], (3,), "it cannot be made (as the test says)"),
    ],
    ids=["no large files", "no memory", "no large files at an acceptor", "no maps at the evictor", "no files at an acceptor"],
)
def test_a_step_is_the_same(lacks: dict[int, Any], left: list[tuple[int, int]], who_warns: tuple[int, ...], why: str) -> None:
    shared, other = run_ranks(trained, RANKS, IN_BYTES, {}), run_ranks(trained, RANKS, IN_BYTES, lacks)
    for rank, ((ours, seen, quiet), (theirs, otherwise, said)) in enumerate(zip(shared, other)):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == 4
        assert seen["bytes"] == otherwise["bytes"]
        assert (seen["lent"], seen["reached"]) == SHARED[rank] and seen["rings"] > 0 and not quiet
        assert (otherwise["lent"], otherwise["reached"]) == left[rank]
        assert otherwise["rings"] == 0 or lacks.get(rank, forbid_maps_of_rooms) is forbid_maps_of_rooms
        assert len(said) == (rank in who_warns) and all(why in text and "BPIPE_SHARED_MEMORY=0" in text for text in said)


def test_memory_that_is_wanted_in_a_step_is_an_error_with_the_way_out() -> None:
    """The sizes of a plan's slots are known only when the first one is filled."""
    lacks = dict.fromkeys(ALL, limit_files)
    for error in run_ranks(trained, RANKS, bpipe.BalancedOneFOneB, lacks, expect_errors=True):
        assert isinstance(error, CommError) and "BPIPE_SHARED_MEMORY=0" in str(error), error


def opened_files(rank: int, m: int, most: int) -> tuple[int, int, list[str]]:
    """One rank with few open files: how many it has then, and how many buffers it lends."""
    said = warnings_of_bpipe()
    lower(resource.RLIMIT_NOFILE, most)
    plan = build("gpipe", 2, m, slots=(3, 2 * m))
    stage = bpipe.PipelineStage(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), rank, 2, "cpu")
    schedule = bpipe.FromPlan(stage, plan, loss_fn=nn.functional.mse_loss)
    x = torch.randn(m, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        schedule.step(x, target=x, return_outputs=False)
    num_open, lent = len(os.listdir("/proc/self/fd")), schedule.session.context.memory.remote_buffers.values()
    dist.barrier()
    schedule.close()
    return num_open, sum(len(one._reserved.sizes) for one in lent if isinstance(one, SharedBuffers)), said


def test_open_files_do_not_grow_with_the_microbatches() -> None:
    few, many = run_ranks(opened_files, 2, 20, 256), run_ranks(opened_files, 2, 300, 256)
    assert [num_open for num_open, *_ in few] == [num_open for num_open, *_ in many]
    assert many[1][1] > 256 and not any(said for *_, said in [*few, *many])


class CopiesOfTorch(TorchDispatchMode):
    """Count the bytes that torch's operations copy."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(word in func.name() for word in ("cat", "copy", "clone", "contiguous")):
            self.num_bytes += result.nbytes
        return result


def counted_copies(rank: int) -> tuple[int, int, int, float]:
    """One rank: the bytes that are copied because it evicts, by its thread and by torch; its small storages; what it moves."""
    by_thread: list[int] = []
    num_small: list[int] = []
    of_torch = CopiesOfTorch()
    copyto, messages = np.copyto, Bundle.messages

    def counting(target: Any, source: Any) -> None:
        if threading.current_thread().name == "bpipe-evict":
            by_thread.append(source.nbytes)
        copyto(target, source)

    def noting(self: Bundle) -> list[torch.Tensor]:
        num_small.append(len(self._small))
        return messages(self)

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))]
    schedule = bpipe.BalancedOneFOneB(
        bpipe.PipelineStage(nn.Sequential(*layers), rank, RANKS, "cpu"), MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(2 * MICROBATCHES, WIDTH, WIDTH)
    schedule.step(x, target=x, return_outputs=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "copyto", counting)
        patch.setattr(Bundle, "messages", noting)
        for name in ("evict", "complete_evict", "load", "complete_load"):
            original = getattr(Evictions, name)
            patch.setattr(Evictions, name, lambda *args, original=original: under(of_torch, original, *args))
        schedule.step(x, target=x, return_outputs=False)
        dist.barrier()
    moved = schedule.stats["evicted_bytes"]
    dist.barrier()
    schedule.close()
    return sum(by_thread), of_torch.num_bytes, sum(num_small), moved


def under(mode: TorchDispatchMode, function: Any, *args: Any) -> None:
    with mode:
        function(*args)


def test_an_evictor_copies_a_microbatch_once_in_and_once_out() -> None:
    """But small storages once more each way, because one message of all is cheaper: of less than 64 KiB each."""
    evictors = [one for one in run_ranks(counted_copies, RANKS) if one[3]]
    assert evictors
    for by_thread, by_torch, num_small, moved in evictors:
        assert by_thread == 2 * moved
        assert 0 < by_torch < 2 * num_small * SMALL and by_torch < moved / 10
