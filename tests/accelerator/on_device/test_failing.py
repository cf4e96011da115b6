"""What goes wrong over NCCL ends on all ranks in time: nobody waits for a device, or for a store, that will not answer."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.errors import PipelineBrokenError, RankFailedError, RankLostError, TransferTimeoutError
from tests.accelerator.device import KIND, MODULE, simulator, unordered
from tests.accelerator.work import batch_of, modules_of, results_of
from tests.patience import PATIENCE_S, too_late, until
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STRUCK = 4, 8, 1  # the rank where it happens, in its second step
TIMEOUT_S = 2.0


def schedule_of(rank: int, module: nn.Module, **how: Any) -> bpipe.BalancedOneFOneB:
    stage = bpipe.PipelineStage(module.to(KIND), rank, RANKS, KIND)
    return bpipe.BalancedOneFOneB(
        stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(**{"timeout_s": TIMEOUT_S, **how})
    )


def step_of(schedule: bpipe.BalancedOneFOneB, step: int) -> None:
    x = batch_of(step, MICROBATCHES).to(KIND)
    schedule.step(x, target=x, return_outputs=False)


def starts(rank: int) -> None:
    from tests.accelerator import nccl as transports

    transports.install(nccl=True)
    simulator.configure(True, 300, 0.2, rank)


def raises(_: nn.Module, __: object) -> None:
    raise ValueError("struck")


def interrupts(_: nn.Module, __: object) -> None:
    raise KeyboardInterrupt


def ends(*_: object) -> None:
    os._exit(9)


def freezes(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def struck(rank: int, strike: Callable[..., None], where: str) -> tuple[type[BaseException], float, bool]:
    """One rank: its error, the seconds until then, and whether a new pipeline over the same group has the CPU's gradients."""
    starts(rank)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"process {rank}", str(os.getpid()))
    schedule = schedule_of(rank, modules_of(RANKS)[rank], timeout_s=TIMEOUT_S if strike is freezes else PATIENCE_S)
    if rank == STRUCK and where == "connecting":
        type(schedule.session.context.transport._communicators).connect = strike  # type: ignore[attr-defined]
    began = time.monotonic()
    try:
        step_of(schedule, 0)
        if rank == STRUCK:
            part: Any = schedule.session.context.stages[rank].submod
            part.register_forward_pre_hook(strike) if where == "forward" else part.register_full_backward_pre_hook(strike)
        began = time.monotonic()
        for step in (1, 2):
            step_of(schedule, step)
    except BaseException as error:
        seconds, found = time.monotonic() - began, type(error)
    schedule.close()
    if strike is freezes:
        with suppress(ProcessLookupError):  # another rank has done so
            os.kill(int(store.get(f"process {STRUCK}")), signal.SIGKILL)
    return found, seconds, strike in (raises, interrupts) and is_exact(rank)


def is_exact(rank: int) -> bool:
    whole = nn.Sequential(*modules_of(RANKS))
    x = batch_of(0, MICROBATCHES)
    for xi in x.chunk(MICROBATCHES):
        (nn.functional.mse_loss(whole(xi), xi) / MICROBATCHES).backward()
    module = modules_of(RANKS)[rank]
    schedule = schedule_of(rank, module)
    step_of(schedule, 0)
    same = all(map(torch.equal, results_of([module]), results_of([whole[rank]])))
    schedule.close()
    return same


def instructions_of_a_posting() -> list[tuple[Any, int]]:
    """List the instructions at which Ctrl-C can strike while a transfer is posted: of which code, and where in it."""
    from bpipe.comm.transport import communicators

    codes = [communicators.Communicators.post.__code__, communicators._posted.__code__]
    return [(code, instruction.offset) for code in codes for instruction in dis.get_instructions(code)]


@contextmanager
def interrupting(code: Any, offset: int) -> Iterator[None]:
    """Raise KeyboardInterrupt where an instruction of this thread is about to run, once."""
    is_done = False

    def look(frame: Any, event: str, _: object) -> Any:
        nonlocal is_done
        frame.f_trace_opcodes = frame.f_code is code
        if event == "opcode" and frame.f_lasti == offset and not is_done:
            is_done = True
            raise KeyboardInterrupt
        return look if frame.f_code is code else None

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)


def interrupted_while_posting(rank: int, every: int) -> tuple[int, list[str]]:
    """One rank: how many of its steps were interrupted, and what the checker found."""
    starts(rank)
    num_interrupted = 0
    for code, offset in instructions_of_a_posting()[::every]:
        schedule = schedule_of(rank, modules_of(RANKS)[rank], timeout_s=30.0)
        step_of(schedule, 0)
        with suppress(RankFailedError, PipelineBrokenError), interrupting(code, offset) if rank == STRUCK else nullcontext():
            try:
                step_of(schedule, 1)
            except KeyboardInterrupt:
                num_interrupted += 1
        dist.barrier()
        schedule.close()
    assert is_exact(rank)
    return num_interrupted, unordered()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [41, 11])
def test_ctrl_c_while_a_transfer_is_posted(every: int, one_thread: None) -> None:
    found = run_ranks(interrupted_while_posting, RANKS, every, timeout_s=300.0)
    assert [races for _, races in found] == [[]] * RANKS
    assert found[STRUCK][0] > len(instructions_of_a_posting()) // every // 3  # the others are for errors, and do not run


FAULTS = {
    "raise in a forward": (raises, "forward", ValueError, RankFailedError),
    "raise in a backward": (raises, "backward", ValueError, RankFailedError),
    "KeyboardInterrupt in a forward": (interrupts, "forward", KeyboardInterrupt, RankFailedError),
    "killed in a forward": (ends, "forward", None, RankLostError),
    "killed in a backward": (ends, "backward", None, RankLostError),
    "killed while communicators are made": (ends, "connecting", None, RankLostError),
    "frozen in a forward": (freezes, "forward", None, TransferTimeoutError),
    "frozen while communicators are made": (freezes, "connecting", None, (TransferTimeoutError, RankFailedError)),  # who is first
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_raise(fault: str, one_thread: None) -> None:
    strike, where, own, others = FAULTS[fault]
    for rank, found in enumerate(run_ranks(struck, RANKS, strike, where, expect_errors=True)):
        if rank == STRUCK and own is None:
            assert "died without a word" in str(found)
            continue
        error, seconds, works_again = found
        assert issubclass(error, own if rank == STRUCK else others)
        assert seconds < PATIENCE_S, too_late("an error")
        assert works_again == (own is not None)


def beside_a_stuck_device(rank: int) -> tuple[float, list[str]]:
    """One rank: seconds that `close` takes while a device computes for ever, and what is said of it."""
    starts(rank)
    schedule = schedule_of(rank, modules_of(RANKS)[rank])
    step_of(schedule, 0)
    gate, said, x = threading.Event(), [], batch_of(1, MICROBATCHES).to(KIND)
    if rank == STRUCK:
        simulator.enqueue(MODULE.current_stream().stream_id, "stuck", [], [], lambda _: gate.wait())
    schedule.step(x, target=x, return_outputs=False)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bpipe.comm.transport.c10d.LOG.warning", lambda text, *values: said.append(text % values))
        began = time.monotonic()
        schedule.close()
        seconds = time.monotonic() - began
    gate.set()
    return seconds, said


def test_closing_waits_for_no_device_for_ever(one_thread: None) -> None:
    for seconds, said in run_ranks(beside_a_stuck_device, RANKS):
        assert seconds < PATIENCE_S, too_late("the end of close()")
        assert said == [] or "transfers that never completed" in said[0]


def behind_a_stuck_device(rank: int) -> tuple[float, str, bool]:
    """One rank: seconds that its device waits for one that never goes on, why it ends, and whether the next pipeline is exact."""
    starts(rank)
    schedule, gate = schedule_of(rank, modules_of(RANKS)[rank]), threading.Event()
    step_of(schedule, 0)
    x = batch_of(1, MICROBATCHES).to(KIND)
    MODULE.synchronize()
    if rank == STRUCK:
        simulator.enqueue(MODULE.current_stream().stream_id, "stuck", [], [], lambda _: gate.wait())
    began, store = time.monotonic(), dist.distributed_c10d._get_default_store()
    with suppress(TransferTimeoutError, RankFailedError):  # a host that waits for a note hears of it in the step
        schedule.step(x, target=x, return_outputs=False)
    if rank == STRUCK:
        store.wait([f"rank {other} goes on" for other in range(RANKS) if other != rank])
        gate.set()
    MODULE.synchronize()
    seconds = time.monotonic() - began
    store.set(f"rank {rank} goes on", "")
    with pytest.raises((PipelineBrokenError, TransferTimeoutError, RankFailedError)) as caught:
        step_of(schedule, 2)
    schedule.close()
    return seconds, str(caught.value), is_exact(rank)


def test_a_device_that_waits_too_long_is_told_of(one_thread: None) -> None:
    for seconds, why, works_again in run_ranks(behind_a_stuck_device, RANKS):
        assert seconds < PATIENCE_S, too_late("the end of a device's wait")
        assert "has waited " in why and "timeout_s=2" in why
        assert works_again


def behind_a_slow_device(rank: int) -> list[str]:
    """One rank: what is said while one's device stands for two seconds, and all hosts have gone on."""
    starts(rank)
    schedule, gate, said = (
        schedule_of(rank, modules_of(RANKS)[rank], timeout_s=30.0, slow_s=0.3),
        threading.Event(),
        [],
    )
    x = batch_of(0, MICROBATCHES).to(KIND)
    schedule.eval(x)
    MODULE.synchronize()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bpipe.comm.transport.device_watchdog.LOG.warning", lambda text, *values: said.append(text % values))
        if rank == STRUCK:
            simulator.enqueue(MODULE.current_stream().stream_id, "stuck", [], [], lambda _: gate.wait())
        schedule.eval(x)
        until(lambda: rank == STRUCK or said, "a device that waits long is told of")
        time.sleep(1)  # and not told of again
        dist.barrier()
        gate.set()
        MODULE.synchronize()
    schedule.close()
    return [text for text in said if text.startswith("the device of")]  # and no grid, if ranks met slowly


def test_a_device_that_waits_long_is_told_of_where_no_host_waits(one_thread: None) -> None:
    for rank, said in enumerate(run_ranks(behind_a_slow_device, RANKS)):
        expected = f"the device of rank {rank} has waited "
        assert [text[: len(expected)] for text in said] == ([expected] if rank != STRUCK else [])
