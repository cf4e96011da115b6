"""A thread of control for a fill job: what a piece leaves behind stays there, and training goes on as if it had not run.

What torch, NumPy and Python keep for each thread or context (autocast, the grad mode, hooks, modes, a device and its stream) is the
thread's own. What they keep for the process is swapped around each piece. One of the two threads runs at a time.
"""

from __future__ import annotations

import decimal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from bpipe.backward import loss_scale
from bpipe.device import is_asynchronous
from bpipe.device.thread_state import ThreadState
from bpipe.errors import FillError
from bpipe.fill.counted import Counted
from bpipe.fill.own_state import OwnState
from bpipe.torch_private.modes import derivative_level, dispatch_modes

__all__: list[str] = []

LOOK_S = 0.2  # Python handles Ctrl-C in its main thread, but only while that runs
GRACE_S = 5.0  # seconds that a piece gets to end after Ctrl-C
END_S = 1.0  # likewise an idle thread, at the end of the process: torch must not be unloaded under it

T = TypeVar("T")


class _Answer(NamedTuple):
    value: Any
    error: BaseException | None
    left_on: str
    num_threads: int  # with which the job's operations run from now on


class _Request(NamedTuple):
    work: Callable[[], Any]
    num_threads: int
    answer: Future[_Answer]


class _Thread(threading.Thread):
    fence: Callable[[], Fence | None]


class Fence:
    """A thread for a job's code, with the state of the thread that makes it, and the job's own state of the process.

    Attributes:
        own: the job's own state of the process.
        left_on: what the latest piece has left on, a mode or a level, which was switched off; empty if nothing.
        generators: those that are closed in this thread before it ends.

    Raises:
        FillError: no thread can start.
    """

    def __init__(self, device: torch.device) -> None:
        self.own, self.device, self.left_on = OwnState(device), device, ""
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._num_threads: int | None = None  # of the job's operations, if it has set that
        self._is_stuck = False
        self._user = threading.current_thread()
        state, default_device = ThreadState([device] if is_asynchronous(device) else []), torch.get_default_device()
        work = (_serve, self._requests, state)
        self._thread = _Thread(target=state.context.run, args=work, name="bpipe-fill", daemon=True)
        self._thread.fence = weakref.ref(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise FillError(
                f"a fill job takes a thread of its own, and none can start ({error}): raise the limit of threads (`ulimit -u`, or "
                "the container's), or leave schedule.fill unset"
            ) from error
        self.generators: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, _end, self._requests, self._thread, self.generators)
        if self.run(torch.get_default_device) != default_device:
            self.run(lambda: torch.set_default_device(default_device))

    @property
    def is_open(self) -> bool:
        """Whether work can run here."""
        return self._thread.is_alive() and not self._is_stuck

    @property
    def is_of_this_thread(self) -> bool:
        """Whether work can run, and this is called in the job's thread, or in the last one that had work run: training's."""
        return self.is_open and threading.current_thread() in (self._thread, self._user)

    def run(self, work: Callable[[], T]) -> T:
        """Run the job's code in its thread, wait for its end, and return what it returns or raise what it raises.

        Raises:
            FillError: the thread has ended, or still runs what Ctrl-C did not end.
        """
        if threading.current_thread() is self._thread:
            return work()
        if not self.is_open:
            raise FillError("the fill job's thread is gone, or still runs a piece that Ctrl-C has not ended: set a new job")
        self._user = threading.current_thread()
        num_threads = torch.get_num_threads()
        wanted = self._num_threads or num_threads
        with loss_scale.apart(), self.own.active():
            answer = self._answer(_Request(work, wanted, Future()))
            self.left_on = answer.left_on
            if answer.num_threads != wanted:
                self._num_threads = answer.num_threads
            if {wanted, answer.num_threads} != {num_threads}:
                torch.set_num_threads(num_threads)  # a part of that is the thread's, a part the process's
        if answer.error is None:
            return answer.value  # type: ignore[no-any-return]
        try:
            raise answer.error
        finally:
            del answer  # whose error would keep this frame alive

    def _answer(self, request: _Request) -> _Answer:
        try:
            self._requests.put(request)
            while True:
                with suppress(TimeoutError):
                    return request.answer.result(LOOK_S)
                if not self._thread.is_alive():
                    raise FillError("the fill job's thread has ended in the midst of a piece")
        except BaseException:  # Ctrl-C
            self._is_stuck = True
            with suppress(TimeoutError):
                request.answer.result(GRACE_S)
                self._is_stuck = False
            raise


_FENCES: weakref.WeakKeyDictionary[Any, Fence] = weakref.WeakKeyDictionary()  # a generator goes on in the thread where it began


def fence_of(job: Any, device: torch.device) -> Fence:
    """Return the fence of a job, the same one each time if the job can be a key.

    Raises:
        FillError: no thread can start.
    """
    with suppress(TypeError):
        fence = _FENCES.get(job)
        if fence is None or not fence.is_open or fence.device != device:
            fence = _FENCES[job] = Fence(device)
        return fence
    return Fence(device)


def fence_here() -> Fence | None:
    """Return the fence whose thread calls this; None in any other thread."""
    thread = threading.current_thread()
    return thread.fence() if isinstance(thread, _Thread) else None


def _serve(requests: SimpleQueue[_Request | None], state: ThreadState) -> None:
    with state.entered():
        decimal.setcontext(decimal.getcontext().copy())  # which a copy of Python's context variables shares
        torch.set_autocast_cache_enabled(False)  # what is cached stays until the end of the user's autocast
        while (request := requests.get()) is not None:
            if request.num_threads != torch.get_num_threads():
                torch.set_num_threads(request.num_threads)
            request.answer.set_running_or_notify_cancel()
            value, error, level = None, None, derivative_level()
            try:
                value = request.work()
            except BaseException as raised:
                error = raised
                _let_go(error)
            request.answer.set_result(_Answer(value, error, _leave_modes(level), torch.get_num_threads()))
            del request, value, error


def _let_go(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: some of it, such as `torch.inference_mode`, changes the thread that frees it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _leave_modes(level: int) -> str:
    """Switch off what a piece has on and torch notes for the process, too; return what the job has left on, if anything.

    Derivatives go forward on as many levels as before the piece.
    """
    modes, left = dispatch_modes(), "a level of forward derivatives" if derivative_level() > level else ""
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    while derivative_level() > level:
        torch.autograd.forward_ad.exit_dual_level()
    return left if all(isinstance(mode, Counted) for mode in modes) else "a dispatch mode"


def _end(requests: SimpleQueue[_Request | None], thread: threading.Thread, generators: Iterable[Any]) -> None:
    for generator in list(generators):
        requests.put(_Request(generator.close, torch.get_num_threads(), Future()))
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(END_S)
