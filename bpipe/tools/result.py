"""The result of a command: data for scripts, and the same for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a command.

    Args:
        data: what `--json` prints.
        shown: makes what is printed otherwise: strings, and rich's renderables.
        exit_code: 0, or 1 if the answer is no.
    """

    data: Any
    shown: Callable[[], Sequence[Any]]
    exit_code: int = 0
