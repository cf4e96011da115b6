"""Find out by trying whether a rank reads and writes memory that another rank lends it on its device.

No query says so for sure: it takes a driver that gives handles for this memory, processes that see each other, and a way between
the devices. So the lender lends a few random bytes, and the user says what it reads there and writes the complement.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.device import current_stream
from bpipe.device.handles import OpenedMemory, handle_of

__all__: list[str] = []

NUM_BYTES = 64
NOT = "not: "  # in front of a reason, in place of a handle or of what was read

K = TypeVar("K", bound=Hashable)
Wait = Callable[[Callable[[], str]], str]  # makes a call that blocks, and returns what it returns

# Memory of trials that did not end, kept as long as the process, because the other one may still write there.
ABANDONED: list[torch.Tensor] = []


def find_reached(
    links: Mapping[K, tuple[LocalLink, bool]], device: torch.device, wait: Wait, refused: Mapping[K, str]
) -> dict[K, str]:
    """Try each link of this rank, and return those over which the user does not reach the lender's memory, each with why.

    Both ends find the same. Blocks until all have answered.

    Args:
        links: each with whether this rank is the user.
        device: this rank's.
        wait: calls what waits for another process.
        refused: why this end does not want a link; empty, or no entry, if it does.
    """
    users = {key: link for key, (link, is_user) in links.items() if is_user}
    trials = {key: _Trial(device, refused.get(key, "")) for key in links.keys() - users.keys()}
    try:
        for key, trial in trials.items():
            links[key][0].send_text(trial.handle)
        for key, link in users.items():
            link.send_text(_read_and_answered(wait(link.receive_text), device, refused.get(key, "")))
        found = {key: trial.why_not(wait(links[key][0].receive_text)) for key, trial in trials.items()}
    except BaseException:
        ABANDONED.extend(trial.memory for trial in trials.values())
        raise
    for key, why in found.items():
        links[key][0].send_text(why)
    found |= {key: wait(link.receive_text) for key, link in users.items()}
    return {key: "".join(c if c.isprintable() else "?" for c in why) for key, why in found.items() if why}


class _Trial:
    """The lender's end of a trial."""

    def __init__(self, device: torch.device, refused: str) -> None:
        self._bytes = torch.frombuffer(bytearray(os.urandom(NUM_BYTES)), dtype=torch.uint8)
        self.memory = self._bytes.to(device)
        try:
            self.handle = f"{NOT}{refused}" if refused else handle_of(self.memory).hex()
        except RuntimeError as error:
            self.handle = f"{NOT}{error}"

    def why_not(self, answer: str) -> str:
        """Return why the user does not reach the memory; empty if it does."""
        if answer.startswith(NOT):
            return answer.removeprefix(NOT)
        if answer != _hex(self._bytes):
            return "the other rank reads other bytes than there are"
        return "" if torch.equal(self.memory.cpu(), 255 - self._bytes) else "this rank does not see what the other one writes"


def _read_and_answered(handle: str, device: torch.device, refused: str) -> str:
    """Make the user's end of a trial, by the copies that evictions make; return what was read, or why nothing was."""
    if handle.startswith(NOT):
        return handle
    if refused:
        return f"{NOT}{refused}"
    try:
        opened = OpenedMemory(bytes.fromhex(handle), device)
        try:
            read = torch.empty_like(opened.memory).copy_(opened.memory)
            opened.memory.copy_(255 - read)
            current_stream(device).synchronize()
        finally:
            opened.close()
    except (RuntimeError, ValueError) as error:
        return f"{NOT}{error}"
    return _hex(read.cpu())


def _hex(bytes_: torch.Tensor) -> str:
    return bytes(bytes_.tolist()).hex()
