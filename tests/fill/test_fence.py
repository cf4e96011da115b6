"""A fill job has a state of its own: training goes on to the bit, whatever a job touches, or the job is stopped by name."""

from __future__ import annotations

import contextvars
import decimal
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import bpipe
from bpipe.errors import FillError
from bpipe.fill import Job, Pieces
from bpipe.fill.fence import Fence, fence_of
from tests.patience import PATIENCE_S, ended, until
from tests.ranks import run_ranks
from tests.sleepers import Sleeper
from tests.storages import StorageCount
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NAME = contextvars.ContextVar("NAME", default="training")
HERE = threading.local()


class Doubled(TorchFunctionMode):
    """Doubles what linear layers return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is nn.functional.linear else made


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def doubled(*given: Any) -> Any:
    return given[-1] * 2


def entered(make: Callable[[], Any]) -> Callable[[], object]:
    """A touch that enters a context, which is left only where the job's generator is closed."""

    def enter() -> Any:
        context = make()
        context.__enter__()
        return context  # the caller keeps it: some are left when they are garbage

    return enter


# What a job may touch, and does not put back. Torch's, each for a thread; torch's, for the process; NumPy's and Python's.
TOUCHES: dict[str, Callable[[], object]] = {
    "saved tensors": entered(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x + 1, lambda x: x)),
    "no saved-tensor hooks": entered(lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here")),
    "saved on the CPU": entered(torch.autograd.graph.save_on_cpu),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "inference mode": entered(torch.inference_mode),
    "autocast": entered(lambda: torch.autocast("cpu", torch.bfloat16)),
    "the cache of autocast": lambda: torch.set_autocast_cache_enabled(True),
    "default device": lambda: torch.set_default_device("meta"),
    "function mode": entered(Doubled),
    "threads of backwards": lambda: torch.autograd.set_multithreading_enabled(False),
    "denormals": lambda: torch.set_flush_denormal(True),
    "attention": entered(lambda: sdpa_kernel(SDPBackend.MATH)),
    "order of attentions": entered(lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True)),
    "oneDNN": lambda: torch._C._set_mkldnn_enabled(False),  # what torch.backends.mkldnn.flags sets, without a warning
    "precision of matmuls": lambda: torch.set_float32_matmul_precision("medium"),
    "precision of one backend": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),  # type: ignore[attr-defined]
    "cuDNN": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "order of einsum": lambda: setattr(torch.backends.opt_einsum, "enabled", False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "uninitialized memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "hooks of all modules": lambda: nn.modules.module.register_module_forward_hook(doubled),
    "hooks of all backwards": lambda: nn.modules.module.register_module_full_backward_pre_hook(
        lambda module, grads: (grads[0] * 2,)
    ),
    "hooks of all optimizers": lambda: register_optimizer_step_pre_hook(lambda one, *_: one.zero_grad()),
    "parametrizations": entered(parametrize.cached),
    "checkpoints": entered(lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False)),
    "converted parameters": lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
    "fast path of attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "sparse invariants": entered(torch.sparse.check_sparse_tensor_invariants),
    "torch's numbers": lambda: torch.manual_seed(0),
    "drawn by torch": lambda: torch.rand(3, device="cpu"),
    "NumPy's numbers": lambda: np.random.seed(0),
    "drawn by NumPy": lambda: np.random.normal(),
    "NumPy's generator": lambda: np.random.set_bit_generator(np.random.PCG64(0)),  # type: ignore[attr-defined]
    "errors of NumPy": lambda: np.seterr(all="raise"),
    "Python's numbers": lambda: random.seed(0),
    "drawn by Python": random.random,
    "context variable": lambda: NAME.set("job"),
    "value of the thread": lambda: setattr(HERE, "name", "job"),
    "decimals": lambda: setattr(decimal.getcontext(), "prec", 3),
    "warnings": lambda: warnings.simplefilter("error"),
    "warnings in a context": entered(warnings.catch_warnings),
    "directory": lambda: os.chdir("/"),
    "collector": gc.disable,
    "recursion": lambda: sys.setrecursionlimit(1234),
    "output": lambda: setattr(sys, "stdout", None),
    "logs": lambda: logging.disable(logging.ERROR),
}


class Trained:
    """Steps of a model which use all of that, and the same ones each time."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        self._layer = parametrize.register_parametrization(nn.Linear(16, 16), "weight", Halved())
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=0.1)

    def step(self) -> list[Any]:
        """Return what a step has found."""
        x = torch.rand(2, 2, 8, 16) * torch.ones(16) + float(np.random.normal()) + random.random()
        y = torch.utils.checkpoint.checkpoint(self._layer, x.requires_grad_(), use_reentrant=False)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        y = torch.einsum("abcd,abed,de->abce", y, y, torch.ones(16, 8)) + x.mean()
        y.square().mean().backward()
        self._optimizer.step()
        found = [y.detach(), x.grad, *(p.grad for p in self._layer.parameters())]
        self._optimizer.zero_grad()
        drawn = torch.rand(1).item(), np.random.rand(), random.random(), torch.full((1,), 1e-40).mul(1.0).item()
        return [*(one.numpy().tobytes() for one in found if one is not None), *drawn, *seen()]


def seen() -> list[Any]:
    """The state of the process and of the thread, as their public names tell it."""
    return [
        *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.get_num_threads()),
        *(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), torch.get_deterministic_debug_mode()),
        *(torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(), torch.get_float32_matmul_precision()),
        *(torch.backends.mkldnn.enabled, torch.backends.cudnn.deterministic, torch.backends.opt_einsum.enabled),
        *(torch.utils.deterministic.fill_uninitialized_memory, torch.sparse.check_sparse_tensor_invariants.is_enabled()),
        *(NAME.get(), getattr(HERE, "name", "training"), decimal.getcontext().prec, np.geterr()["over"], os.getcwd()),
        *(
            gc.isenabled(),
            sys.getrecursionlimit(),
            sys.stdout is not None,
            logging.root.manager.disable,
            repr(warnings.filters[:1]),
        ),
        type(np.random.get_bit_generator()).__name__,  # type: ignore[attr-defined]
    ]


def expected(num_steps: int) -> list[list[Any]]:
    training = Trained()
    return [training.step() for _ in range(num_steps)]


def job_of(pieces: list[list[str]], how: str) -> Iterator[None]:
    """Touch what each piece is told, and end as told: by a yield, within contexts, or by an error."""
    kept = []
    for names in pieces:
        for name in names:
            with suppress(RuntimeError):  # torch refuses some in the midst of others
                kept.append(TOUCHES[name]())
        yield
    if how == "error":
        raise ValueError("no more data")
    if how == "StopIteration":
        next(iter(()))


PIECES = st.lists(st.lists(st.sampled_from(sorted(TOUCHES)), max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(pieces=PIECES, how=st.sampled_from(["yield", "error", "StopIteration"]), ends_early=st.booleans())
def test_training_is_the_same_whatever_a_job_touches(pieces: list[list[str]], how: str, ends_early: bool) -> None:
    """Between its pieces, behind its error, and when a generator is dropped that is within contexts."""
    plain = expected(len(pieces) + 3)
    training, job = Trained(), Pieces(partial(job_of, pieces, how))
    fence, found = fence_of(job, CPU), []
    for _ in range(len(pieces) + 1 - ends_early):
        with suppress(ValueError, RuntimeError):
            fence.run(partial(job.step, 60.0, 0))
        assert not fence.own.left and not fence.left_on
        found.append(training.step())
    del job, fence
    found.append(training.step())
    assert found == plain[: len(found)]


@pytest.mark.parametrize("name", sorted(TOUCHES))
def test_training_is_the_same_whatever_one_piece_leaves(name: str) -> None:
    plain = expected(2)
    training, job = Trained(), Pieces(partial(job_of, [[name]], "yield"))
    fence = fence_of(job, CPU)
    fence.run(partial(job.step, 60.0, 0))
    first = training.step()
    fence.run(partial(job.step, 60.0, 0))
    assert [first, training.step()] == plain


@pytest.mark.parametrize("name", ["attention", "default dtype", "autocast", "NumPy's generator", "directory", "number of threads"])
def test_what_a_piece_leaves_holds_in_the_job_s_later_ones(name: str) -> None:
    told: list[list[Any]] = []

    def work() -> Iterator[None]:
        TOUCHES[name]()
        for _ in range(3):
            told.append(seen())
            yield

    before = seen()
    fence = Fence(CPU)
    job = work()
    for _ in range(3):
        fence.run(lambda: next(job))
        assert seen() == before
    assert told[0] == told[1] == told[2] != before


def a_generator(seen_by: list[object]) -> Iterator[None]:
    try:
        while True:
            seen_by.append(threading.current_thread())
            yield
    finally:
        seen_by.append(threading.current_thread())


def test_a_generator_goes_on_and_ends_in_one_thread() -> None:
    """Also when the schedule gets the job a second time; and its thread ends with it."""
    where: list[Any] = []
    job = Pieces(partial(a_generator, where))
    for _ in range(2):
        fence_of(job, CPU).run(partial(job.step, 60.0, 0))
    del job
    assert len(where) == 3 and set(where) == {where[0]} and where[0] is not threading.current_thread()
    ended(where[0])


class Unhashable(Job):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class Slotted:
    __slots__ = ("name",)

    def step(self, seconds: float, num_bytes: int) -> float | None:
        return None


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_a_job_that_is_no_key_has_a_fence_too(kind: type) -> None:
    assert fence_of(kind(), CPU).run(threading.current_thread) is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration(3), KeyboardInterrupt(), GeneratorExit(), SystemExit(2)])
def test_an_error_comes_as_it_is(error: BaseException) -> None:
    """With the lines where it was raised, and without what they hold."""
    fence, held = Fence(CPU), []

    def raising() -> None:
        module = nn.Linear(1, 1)
        held.append(weakref.ref(module))
        raise error

    with pytest.raises(type(error)) as caught:
        fence.run(raising)
    assert caught.value is error and "raising" in [entry.name for entry in caught.traceback]
    assert held[0]() is None and fence.run(lambda: threading.current_thread().name) == "bpipe-fill"


def test_an_error_that_is_its_own_cause_comes_too() -> None:
    def raising() -> None:
        error, cause = ValueError("one"), ValueError("other")
        error.__cause__, cause.__cause__ = cause, error
        raise error

    with pytest.raises(ValueError, match="one"):
        Fence(CPU).run(raising)


def test_a_job_that_the_garbage_collector_drops_leaves_the_process_s_state_alone() -> None:
    """Whichever thread that is: training goes on beside it."""
    ended, dropped = threading.Event(), threading.Event()

    def pieces() -> Iterator[None]:
        try:
            while True:
                yield
        finally:
            dropped.set()
            ended.wait()

    gc.disable()  # in this thread
    try:
        job: Any = Pieces(pieces)
        job.itself = job
        fence_of(job, CPU).run(partial(job.step, 1.0, 0))
        torch.manual_seed(0)
        expected = [torch.rand(3) for _ in range(2)]
        torch.manual_seed(0)
        first = torch.rand(3)
        del job
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        until(dropped.is_set, "the generator is closed")
        second = torch.rand(3)
        ended.set()
        collecting.join()
    finally:
        gc.enable()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(
        FillError, match=r"takes a thread of its own, and none can start \(can't start new thread\): raise the limit"
    ):
        Fence(CPU)


def test_ctrl_c_as_a_piece_ends_loses_no_answer() -> None:
    fence = Fence(CPU)
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            fence.run(lambda: os.kill(os.getpid(), signal.SIGINT))
        assert fence.is_open


def functions_of(thread: int) -> list[str]:
    return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]


def test_ctrl_c_ends_a_piece_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised when the piece has ended, and training's state is its own again; one that does not end is left behind."""
    free, begun, fence, main = threading.Event(), threading.Event(), Fence(CPU), threading.get_ident()

    def piece() -> None:
        torch.set_default_dtype(torch.float64)
        begun.set()
        free.wait()

    def interrupt(is_freed: bool) -> None:
        begun.wait()
        until(lambda: "_answer" in functions_of(main), "training waits")
        signal.raise_signal(signal.SIGINT)
        if is_freed:
            until(lambda: not fence.is_open, "Ctrl-C has come")
            free.set()

    for is_freed in (True, False):
        free.clear()
        begun.clear()
        threading.Thread(target=interrupt, args=(is_freed,)).start()
        with pytest.raises(KeyboardInterrupt):
            fence.run(piece)
        assert fence.is_open == is_freed and torch.get_default_dtype() is torch.float32
        monkeypatch.setattr("bpipe.fill.fence.GRACE_S", 0.1)
    with pytest.raises(FillError, match="still runs a piece that Ctrl-C has not ended"):
        fence.run(int)
    free.set()


def test_a_dispatch_mode_that_is_left_on_is_switched_off() -> None:
    """torch notes for the process that there is one, so a job cannot hold it between pieces."""
    fence, count = Fence(CPU), StorageCount()
    fence.run(lambda: count.mode().__enter__())
    assert fence.left_on and not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    fence.run(int)
    assert not fence.left_on


PROGRAM = """
import sys, threading, torch
from bpipe.fill import Pieces
from bpipe.fill.fence import fence_of

def work():
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu(), torch.inference_mode():
        try:
            while True:
                yield
        finally:
            print("closed in", threading.current_thread().name, flush=True)

job = Pieces(work)
fence_of(job, torch.device("cpu")).run(lambda: job.step(60.0, 0))
"""


def test_the_process_ends_beside_a_generator_that_waits() -> None:
    """Which is closed in its own thread first."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed in bpipe-fill\n", "")


def in_steps(rank: int, folder: str) -> dict[str, str]:
    """For each kind of job in turn, whether the gradients of steps with it were those without it, and whether it has run."""
    stage = bpipe.PipelineStage(nn.Sequential(Sleeper(0.003, 1000), nn.Linear(8, 8), nn.Dropout(0.1)), rank, 2, "cpu")
    schedule, x = bpipe.OneFOneB(stage, 2, loss_fn=nn.functional.mse_loss), torch.ones(2, 8)

    def trained(job: Any) -> tuple[list[bytes], bool, bool]:
        torch.manual_seed(1)
        schedule.fill, found, has_run = job, [], False
        for _ in range(3):
            stage.submod.zero_grad()
            schedule.step(x, target=x)
            has_run |= schedule.stats.get("fill_pieces", 0.0) > 0 or schedule.stats.get("fill_overrun_s", 0.0) > 0
            found += [p.grad.numpy().tobytes() for p in stage.submod.parameters() if p.grad is not None]
        is_stopped, schedule.fill = job is not None and schedule.fill is None, None
        return found, has_run, is_stopped

    trained(None)
    trained(Pieces(partial(job_of, [[]] * 1000, "yield"), unknown_s=0.0))  # so that waits are known
    plain, _, _ = trained(None)
    told = {}
    for name in TOUCHES:
        for how in ("yield", "error"):
            found, has_run, _ = trained(Pieces(partial(job_of, [[name]] * 3, how), unknown_s=0.0, on_error="stop"))
            told[f"{name}, {how}"] = f"{found == plain} {has_run}"
    schedule.close()
    return told


def test_gradients_of_steps_are_the_same_beside_such_jobs() -> None:
    for told in run_ranks(in_steps, 2, ""):
        assert all(one.startswith("True") for one in told.values()), told
        assert sum(one == "True True" for one in told.values()) > len(told) / 2
