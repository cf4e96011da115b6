"""Transfers of torch.distributed's backends, with their errors turned into ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from bpipe.comm.rendezvous.shortage import named
from bpipe.comm.transport.base import Transfer
from bpipe.errors import CommError, TransferError

__all__: list[str] = []

Method = TypeVar("Method", bound=Callable[..., Any])


def transferring(method: Method) -> Method:
    """Make a method raise a backend's errors as ours."""

    @wraps(method)
    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except CommError:
            raise
        except (OSError, RuntimeError) as error:
            if (shortage := named(error)) is not None:
                raise shortage from error
            if isinstance(error, OSError):
                raise
            raise TransferError(f"a transfer failed: {error}") from error

    return cast(Method, calling)


def wait_for(work: Any) -> None:
    """Wait for a work. One that was aborted may say so only by returning False."""
    if work.wait() is False:
        raise TransferError("a transfer was aborted")


class Works:
    """Posted works and their tensors, kept until all have been waited for: dropping a gloo work loses its message.

    Args:
        works: of torch, or transfers beside them.
        tensors: what they read or write.
        is_told: whether works of torch know when they are over; gloo's know it once they were waited for.
    """

    def __init__(self, works: list[Any], tensors: Sequence[torch.Tensor], *, is_told: bool = False) -> None:
        self._works, self._is_told = works, is_told
        self._tensors: Sequence[torch.Tensor] = tensors

    @transferring
    def wait(self) -> None:
        for work in self._works:
            wait_for(work)
        self._works.clear()
        self._tensors = ()

    def has_come(self) -> bool | None:
        return all_have_come([self._is_over(work) for work in self._works])

    def _is_over(self, work: Any) -> bool | None:
        if hasattr(work, "has_come"):
            return cast("bool | None", work.has_come())
        return bool(work.is_completed()) if self._is_told else None


class Noted:
    """A receive of tensors that may come with a note, on a separate connection.

    Args:
        tensors: the transfer of the tensors.
        note: the transfer of the note; it waits for the sending host, and is over before the sending device has made the tensors.
    """

    def __init__(self, tensors: Transfer, note: Transfer) -> None:
        self._tensors, self._note = tensors, note

    def wait(self) -> bytes | None:
        note = self._note.wait()
        self._tensors.wait()
        return note

    def has_come(self) -> bool | None:
        return all_have_come([self._note.has_come(), self._tensors.has_come()])


def all_have_come(each: Sequence[bool | None]) -> bool | None:
    """Return whether all transfers have come, of which each may be unknown."""
    return False if False in each else None if None in each else True
