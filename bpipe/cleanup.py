"""Errors on their way to the user: cleaning up does not replace them, and tracebacks show the user's code rather than bpipe's."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from itertools import takewhile
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from bpipe.environment import shows_own_frames
from bpipe.errors import BPipeError, format_error
from bpipe.logs import LOG

__all__: list[str] = []

P = ParamSpec("P")
T = TypeVar("T")

OWN_FILES = os.path.dirname(__file__) + os.sep
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
PASSED_ON = contextlib.__file__, os.path.join("torch", "nn", "modules", "module.py")  # files whose frames only call others


def note(error: BaseException, text: str) -> None:
    """Add a note to an error, or log the text if the error accepts no notes (because it is frozen, for example)."""
    try:
        BaseException.add_note(error, text)
    except Exception:
        LOG.error("%s: %s", format_error(error), text)


class noted_on:  # noqa: N801  a context manager, as contextlib's are written
    """A context for cleaning up after an error: an exception raised inside, even an interrupt, becomes a note on that error.

    Args:
        error: the error that is being raised; None if there is none, and then exceptions pass through.
        what: the text of the note, before the exception that was raised inside.
    """

    def __init__(self, error: BaseException | None, what: str = "cleaning up after this error failed as well") -> None:
        self._error, self._what = error, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None) -> bool:
        if failure is None or self._error is None:
            return False
        if failure is not self._error:
            note(self._error, f"bpipe: {self._what}: {format_error(failure)}")
        return True


class keeping(Generic[T]):  # noqa: N801  likewise
    """A context that enters another context, and keeps the other one's exit from replacing an error raised inside.

    Around an `ExitStack`, each of its callbacks runs, even if another callback fails.
    """

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context = context

    def __enter__(self) -> T:
        return self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        with noted_on(error):
            return bool(self._context.__exit__(kind, error, traceback))
        return False


def concise(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function raise errors whose tracebacks lead from the user's call to the user's code, without bpipe's frames."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave_own_frames_out(error)
            raise

    return called


def leave_own_frames_out(error: BaseException) -> None:
    """Remove bpipe's frames from the tracebacks of an error and of those that it came from, because they tell a user nothing.

    They stay if bpipe's own code raised an error that it does not raise on purpose, which is a defect to report; and always if
    the environment says BPIPE_TRACEBACKS=full. The last of them stays where it called a library and not the user's code.
    """
    one: BaseException | None = None if shows_own_frames() else error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _of_others(one)
        one = one.__cause__ if one.__cause__ is not None or one.__suppress_context__ else one.__context__


def concise_traceback(error: BaseException) -> str:
    """Return the text of an error without bpipe's frames; nothing if only bpipe's own code raised it. The error stays as it is."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    before = [one.__traceback__ for one in chain]
    try:
        leave_own_frames_out(error)
        is_own = error.__traceback__ is None and error.__cause__ is None
        return "" if is_own else "".join(traceback.format_exception(error))
    finally:
        for one, frames in zip(chain, before):
            one.__traceback__ = frames


def _of_others(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without bpipe's frames; all of it if bpipe did not raise the error on purpose."""
    frames, following = list[TracebackType](), error.__traceback__
    while following is not None:
        frames.append(following)
        following = following.tb_next
    if frames and _is_own(frames[-1]) and not isinstance(error, BPipeError):
        return error.__traceback__
    kept: TracebackType | None = None
    since_own = list(takewhile(lambda frame: not _is_own(frame), reversed(frames)))
    called_library = not isinstance(error, BPipeError) and all(_file(frame).startswith(LIBRARIES) for frame in since_own)
    last_own = frames[-len(since_own) - 1] if called_library and len(since_own) < len(frames) else None
    for frame in reversed(frames):
        is_passed_on = frame is not frames[-1] and _file(frame).endswith(PASSED_ON)
        if frame is last_own or not (_is_own(frame) or is_passed_on):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _is_own(frame: TracebackType) -> bool:
    return _file(frame).startswith(OWN_FILES)


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
