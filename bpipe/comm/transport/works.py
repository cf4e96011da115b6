"""Transfers of torch.distributed's backends, with their errors turned into ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

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
        except RuntimeError as error:
            raise TransferError(f"a transfer failed: {error}") from error

    return cast(Method, calling)


def wait_for(work: Any) -> None:
    """Wait for a work. One that was aborted may say so only by returning False."""
    if work.wait() is False:
        raise TransferError("a transfer was aborted")


class Works:
    """Posted works and their tensors, kept until all have been waited for: dropping a gloo work loses its message."""

    def __init__(self, works: list[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._tensors: Sequence[torch.Tensor] = tensors

    @transferring
    def wait(self) -> None:
        for work in self._works:
            wait_for(work)
        self._works.clear()
        self._tensors = ()


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
