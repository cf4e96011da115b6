"""The errors that bpipe raises: one base class, and one subclass for each cause that a caller would treat differently."""

from __future__ import annotations

import re

__all__ = [
    "AgreementError",
    "BPipeError",
    "BudgetError",
    "CommError",
    "ConfigurationError",
    "FillError",
    "PipelineBrokenError",
    "PlanError",
    "RankFailedError",
    "RankLostError",
    "SavedTensorError",
    "StageError",
    "TransferError",
    "TransferTimeoutError",
]


class BPipeError(Exception):
    """Base class of every error that bpipe raises on purpose."""


class ConfigurationError(BPipeError, ValueError):
    """An argument that cannot work: a wrong stage index, a batch that does not divide, a missing target."""


class FillError(BPipeError, RuntimeError):
    """A fill job raised an error, took more time or bytes than it was given, or kept more bytes than it said."""


class PlanError(BPipeError, ValueError):
    """A plan that breaks a rule, or text that does not describe a plan."""


class BudgetError(PlanError):
    """A memory budget that no placement of evictions meets; the message names the smallest one that works.

    Attributes:
        smallest: the smallest budget that works, in the unit of the one that was given: for each rank a number, or None for no
            limit; () if it is not known.
    """

    def __init__(self, message: str, *, smallest: tuple[int | None, ...] = (), argument: str = "") -> None:
        super().__init__(message)
        self.smallest = smallest
        self._argument = argument  # as the message writes it, with the smallest budget

    def said_as(self, argument: str) -> BudgetError:
        """Let the message speak of the argument that the user gave, such as `budget=24`, and return the error."""
        self.args = (self.args[0].replace(self._argument, argument),) if self._argument else self.args
        self._argument = argument
        return self


class StageError(BPipeError, RuntimeError):
    """The user's module or loss returned a value that a pipeline cannot use."""


class SavedTensorError(StageError):
    """A tensor that autograd saved was changed in place, or used while its bytes were on another rank."""


class CommError(BPipeError, RuntimeError):
    """A transfer failed, or a message differs from the one that the ranks agreed on."""


class TransferError(CommError):
    """A backend ended a transfer. Usually another rank caused this, and bpipe raises that rank's error instead if it knows it."""


class AgreementError(CommError):
    """The ranks of a pipeline do not agree on what they are about to run."""


class RankFailedError(CommError):
    """Another rank failed, so this one cannot go on. On that rank, the error keeps its own type.

    Attributes:
        rank: the rank of the pipeline's group on which the error happened.
        step: that rank's step number; -1 if unknown.
        action: the action that it was running, such as "1F2"; empty if unknown, or if it ran none.
        error: the type and text of its error.
    """

    def __init__(self, message: str, *, rank: int = -1, step: int = -1, action: str = "", error: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.action, self.error = rank, step, action, error


class RankLostError(RankFailedError):
    """Another rank's process or machine ended without reporting an error."""


class TransferTimeoutError(CommError, TimeoutError):
    """A rank waited longer than the pipeline's timeout; the message names that rank and shows what every rank was doing."""


class PipelineBrokenError(BPipeError, RuntimeError):
    """A call on a pipeline that an earlier error has broken; build a new one over the same process group."""


# What a terminal obeys or reorders instead of showing it: C0 controls but tab and newline, DEL, C1, marks and overrides of the
# direction of writing, separators of lines; and half characters, which cannot be written at all.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return text of a stranger as it can be shown: what controls a terminal is written as an escape, such as `\x1b`.

    Example:
        >>> printable("\x1b[31mred")
        '\\x1b[31mred'
    """
    return text if text.isprintable() else _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def is_printable(text: str) -> bool:
    """Return whether text can be shown as it is."""
    return _UNPRINTABLE.search(text) is None


def text_of(error: BaseException) -> str:
    """Return an error's text, even if its class fails to format it, so that the error is always reported."""
    try:
        return str(error)
    except BaseException as failure:
        return f"its text cannot be formatted, {type(failure).__name__}"


def format_error(error: BaseException) -> str:
    """Return an error's type, and its text if it has one."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
