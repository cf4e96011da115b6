"""The errors bpipe raises: one base class, and a subclass for each cause a caller would treat differently."""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "BPipeError",
    "BudgetError",
    "CommError",
    "ConfigurationError",
    "PipelineBrokenError",
    "PlanError",
    "SavedTensorError",
    "StageError",
]


class BPipeError(Exception):
    """Base class of every error that bpipe raises on purpose."""


class ConfigurationError(BPipeError, ValueError):
    """An argument that cannot work: a wrong stage index, a batch that does not divide, a missing target."""


class PlanError(BPipeError, ValueError):
    """A plan that breaks a rule, or text that is no plan."""


class BudgetError(PlanError):
    """A memory budget that no placement of evictions meets; the message names the smallest one that works."""


class StageError(BPipeError, RuntimeError):
    """The user's module or loss returned something a pipeline cannot carry on with."""


class SavedTensorError(StageError):
    """A tensor that autograd saved was changed in place, or used while its bytes were on another rank."""


class CommError(BPipeError, RuntimeError):
    """A transfer failed, or a message is not the one that was agreed."""


class AgreementError(CommError):
    """The ranks of a pipeline do not agree on what they are about to run."""


class PipelineBrokenError(BPipeError, RuntimeError):
    """A call on a pipeline whose earlier step failed; build a new one over the same process group."""
