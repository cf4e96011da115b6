"""Clean up after an error without replacing it: what goes wrong meanwhile becomes a note on the error."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

from bpipe.errors import format_error
from bpipe.logs import LOG

__all__: list[str] = []

T = TypeVar("T")


def note(error: BaseException, text: str) -> None:
    """Add a note to an error; log it where the error takes none (one that is frozen, say)."""
    try:
        BaseException.add_note(error, text)
    except Exception:
        LOG.error("%s: %s", format_error(error), text)


class noted_on:  # noqa: N801  a context manager, as contextlib's are written
    """A context for cleaning up after an error: whatever is raised inside, even an interrupt, becomes a note on that error.

    Args:
        error: the one that is being raised; None if there is none, and then nothing is held back.
        what: what a failure in here means, for the note.
    """

    def __init__(self, error: BaseException | None, what: str = "cleaning up after this error failed, too") -> None:
        self._error, self._what = error, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None) -> bool:
        if failure is None or self._error is None:
            return False
        if failure is not self._error:
            note(self._error, f"bpipe: {self._what}: {format_error(failure)}")
        return True


class keeping(Generic[T]):  # noqa: N801  likewise
    """A context that enters another one, and keeps its exit from replacing an error raised inside.

    Around an `ExitStack`, each of its callbacks runs, whatever becomes of the others.

    Args:
        context: what to enter.
    """

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context = context

    def __enter__(self) -> T:
        return self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        with noted_on(error):
            return bool(self._context.__exit__(kind, error, traceback))
        return False
