"""Clean up after an error without replacing it: an error raised during the cleanup becomes a note on the first one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

from bpipe.errors import format_error
from bpipe.logs import LOG

__all__: list[str] = []

T = TypeVar("T")


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
