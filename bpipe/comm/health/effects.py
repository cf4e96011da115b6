"""The effects that the rules of a pipeline's membership ask their driver to carry out."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from bpipe.comm.wire.frames import Frame

__all__: list[str] = []


class Send(NamedTuple):
    """Send a frame to some ranks that this one is linked with, or to all of those if `to` is None."""

    frame: Frame
    to: Collection[int] | None = None


class Warn(NamedTuple):
    """Log a warning."""

    text: str


class Signal(Enum):
    """Let threads of this process go on."""

    WAKE = auto()  # those that wait in a collective call or for a failure to be settled, to look again
    RELEASE = auto()  # those that wait in a transfer, which has failed; report `released` afterwards


Effect = Send | Warn | Signal
