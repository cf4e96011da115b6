"""Start the ranks of a test as processes: one helper, 0.3 s for four, because a fork server has torch loaded already."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import LIBRARY
from tests.patience import too_late

TIMEOUT_S = 150.0  # also of the process group: many times what a test takes
START_S, END_S = 200.0, 30.0  # for the first processes, because their server loads torch; and to end by themselves

LOADED = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pytest", "hypothesis"),
    *(
        "bpipe.comm.transport.c10d",
        "bpipe.api.balanced",
        "bpipe.training.checkpoint",
        "bpipe.training.scaler",
        "bpipe.partition.split_check",
    ),
    *("bpipe.partition.model_split", "bpipe.tools.tracing", "tests.models", "tests.over", "tests.ranks"),
]


class RankError(AssertionError):
    """A rank raised; the message has its traceback."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, expect_errors: bool = False, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call `function(rank, *args)` in `num_ranks` processes joined by gloo on the loopback address, one thread each.

    Returns:
        What each rank returned; with `expect_errors`, the exception of a rank that raised, in its place.

    Raises:
        RankError: a rank raised (without `expect_errors`), died, or did not end in time: then with what its threads did.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run_ranks(function, num_ranks, args, expect_errors, timeout_s, Path(folder))


def _run_ranks(
    function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], expect_errors: bool, timeout_s: float, folder: Path
) -> list[Any]:
    context = fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends: list[Connection] = []
    processes = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        how = (theirs, function, rank, num_ranks, store.port, timeout_s, args, folder)
        process = context.Process(target=_main, args=how, daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        results = [_result(end, rank, timeout_s, folder) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.join(END_S if all(not isinstance(r, RankError) for r in locals().get("results", [])) else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures and not expect_errors:
        raise RankError("\n".join(str(getattr(error, "rank_traceback", error)) for error in failures))
    return results


def fork_server() -> Any:
    """The context of processes that have torch and bpipe loaded when they start: a rank would take 0.13 s of CPU for bpipe."""
    context = multiprocessing.get_context("forkserver")
    simulated = ["tests.accelerator.device"] if LIBRARY in os.environ else []  # before torch
    context.set_forkserver_preload([*simulated, *LOADED])
    return context


def join(rank: int, size: int, port: int, timeout_s: float = TIMEOUT_S) -> None:
    """Make this process a rank: one thread, and gloo on the loopback address with a store that is there."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    dist.barrier()  # all are connected: none may leave before


def _result(end: Connection, rank: int, timeout_s: float, folder: Path) -> Any:
    try:
        if not wait([end], START_S):
            return RankError(too_late(f"the start of rank {rank}", START_S))
        end.recv_bytes()
        if not wait([end], timeout_s + 10):
            stacks = _stacks(folder, rank).read_text()
            return RankError(f"{too_late(f'the end of rank {rank}', timeout_s + 10)}. After {timeout_s} s:\n{stacks}")
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return RankError(f"rank {rank} died without a word")


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


def _main(
    end: Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    timeout_s: float,
    args: tuple[Any, ...],
    folder: Path,
) -> None:
    end.send_bytes(b"it has started")
    stacks = _stacks(folder, rank).open("w")  # open as long as the process lives
    faulthandler.dump_traceback_later(timeout_s, file=stacks)
    try:
        join(rank, size, port, timeout_s)
        result = function(rank, *args)
    except BaseException as error:
        error.rank_traceback = f"rank {rank}:\n{traceback.format_exc()}"  # type: ignore[attr-defined]
        result = error
    faulthandler.cancel_dump_traceback_later()
    end.send_bytes(_pickled(result))
    end.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled(result: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        pickle.dump(result, buffer)
    except Exception:
        text = getattr(result, "rank_traceback", repr(result))
        return pickle.dumps(RankError(f"{type(result).__name__}: {result}\n{text}"))
    return buffer.getvalue()
