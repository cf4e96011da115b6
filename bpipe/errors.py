"""The errors that bpipe raises: one base class, and one subclass for each cause that a caller would treat differently."""

from __future__ import annotations

import re

__all__ = [
    "AgreementError",
    "BPipeError",
    "BudgetError",
    "CommError",
    "ConfigurationError",
    "CopyError",
    "FillError",
    "PipelineBrokenError",
    "PlanError",
    "RankFailedError",
    "RankLostError",
    "SavedTensorError",
    "StageError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedTorchError",
]


class BPipeError(Exception):
    """Base class of every error that bpipe raises on purpose.

    Example:
        >>> from bpipe.schedules import build
        >>> try:
        ...     build("no such schedule", num_stages=4, num_microbatches=8)
        ... except BPipeError as error:
        ...     print(type(error).__name__)
        ConfigurationError
    """


class ConfigurationError(BPipeError, ValueError):
    """An argument that cannot work: a wrong stage index, a batch that does not divide, a missing target.

    Example:
        >>> from bpipe.schedules import build
        >>> try:
        ...     build("interleaved_1f1b", num_stages=8, num_microbatches=11, num_ranks=4)
        ... except ValueError as error:  # a ConfigurationError is one
        ...     print(error)
        interleaved_1f1b takes a multiple of floor(m/p) microbatches: 11 on p = 4 ranks do not fit, 12 would
    """


class CopyError(ConfigurationError, TypeError):
    """A copy or a pickle of what belongs to one pipeline in one process; the message says what can be copied instead.

    It is a TypeError, too, as Python's for what it cannot pickle.

    Example:
        >>> import pickle
        >>> from bpipe import Loopback
        >>> try:
        ...     pickle.dumps(Loopback(2))
        ... except CopyError as error:
        ...     print(error)
        a Loopback cannot be copied or pickled: its ranks are in this process, so make another one
    """


class UnsupportedTorchError(BPipeError, RuntimeError):
    """A feature that needs a private name of torch which the installed torch does not have; the message names both.

    Example:
        >>> from bpipe.torch_private.names import missing
        >>> isinstance(missing("_storage_Use_Count"), UnsupportedTorchError)
        True
    """


class FillError(BPipeError, RuntimeError):
    """A fill job raised an error, took more time or bytes than it was given, or kept more bytes than it said.

    Example:
        >>> issubclass(FillError, RuntimeError)
        True
    """


class PlanError(BPipeError, ValueError):
    """A plan that breaks a rule, or text that does not describe a plan.

    Example:
        >>> from bpipe.schedules import Plan
        >>> try:
        ...     Plan.from_text("no plan")
        ... except PlanError as error:
        ...     print(type(error).__name__)
        PlanError
    """


class BudgetError(PlanError):
    """A memory budget that no placement of evictions meets; the message names the smallest one that works.

    Attributes:
        smallest: the smallest budget that works, in the unit of the one that was given: for each rank a number, or None for no
            limit; () if it is not known.

    Example:
        >>> from bpipe.schedules import build
        >>> try:
        ...     build("1f1b", num_stages=4, num_microbatches=8, slots=2)
        ... except BudgetError as error:
        ...     print(type(error).__name__)
        BudgetError
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
    """The user's module or loss returned a value that a pipeline cannot use.

    Example:
        >>> import torch
        >>> from bpipe import OneFOneB, PipelineStage
        >>> stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, "cpu")
        >>> schedule = OneFOneB(stage, n_microbatches=2, loss_fn=lambda output, target: "no loss")
        >>> try:
        ...     schedule.step(torch.zeros(4, 4), target=torch.zeros(4, 4))
        ... except StageError as error:
        ...     print(type(error).__name__)
        StageError
    """


class SavedTensorError(StageError):
    """A tensor that autograd saved was changed in place, or used while its bytes were on another rank.

    Example:
        >>> issubclass(SavedTensorError, StageError)
        True
    """


class CommError(BPipeError, RuntimeError):
    """A transfer failed, or a message differs from the one that the ranks agreed on.

    Close the schedule and make a new one, except after an `AgreementError`.

    Example:
        >>> issubclass(TransferTimeoutError, CommError) and issubclass(RankLostError, CommError)
        True
    """


class TransferError(CommError):
    """A backend ended a transfer. Usually another rank caused this, and bpipe raises that rank's error instead if it knows it.

    Example:
        >>> issubclass(TransferError, CommError)
        True
    """


class AgreementError(CommError):
    """The ranks of a pipeline do not agree on what they are about to run: make the same call on all ranks.

    Example:
        >>> issubclass(AgreementError, CommError)
        True
    """


class RankFailedError(CommError):
    """Another rank failed, so this one cannot go on. On that rank, the error keeps its own type.

    Attributes:
        rank: the rank of the pipeline's group on which the error happened.
        step: that rank's step number; -1 if unknown.
        action: the action that it was running, such as "1F2"; empty if unknown, or if it ran none.
        error: the type and text of its error.

    Example:
        >>> error = RankFailedError("rank 1 failed in step 3", rank=1, step=3, action="1F2", error="ValueError: boom")
        >>> error.rank, error.action, isinstance(error, CommError)
        (1, '1F2', True)
    """

    def __init__(self, message: str, *, rank: int = -1, step: int = -1, action: str = "", error: str = "") -> None:
        super().__init__(message)
        self.rank, self.step, self.action, self.error = rank, step, action, error


class RankLostError(RankFailedError):
    """Another rank's process or machine ended without reporting an error.

    Example:
        >>> error = RankLostError("rank 1 was lost", rank=1)
        >>> error.rank, isinstance(error, RankFailedError)
        (1, True)
    """


class TransferTimeoutError(CommError, TimeoutError):
    """A rank waited longer than the pipeline's timeout; the message names that rank and shows what every rank was doing.

    Example:
        >>> issubclass(TransferTimeoutError, TimeoutError)
        True
    """


class PipelineBrokenError(BPipeError, RuntimeError):
    """A call on a pipeline that an earlier error has broken; build a new one over the same process group.

    Example:
        >>> import torch
        >>> from bpipe import OneFOneB, PipelineStage
        >>> stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, "cpu")
        >>> schedule = OneFOneB(stage, n_microbatches=2, loss_fn=lambda output, target: 1 / 0)
        >>> for attempt in range(2):
        ...     try:
        ...         schedule.step(torch.zeros(4, 4), target=torch.zeros(4, 4))
        ...     except (ZeroDivisionError, PipelineBrokenError) as error:
        ...         print(type(error).__name__)
        ZeroDivisionError
        PipelineBrokenError
    """


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
