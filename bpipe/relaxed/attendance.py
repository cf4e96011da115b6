"""Who takes part: processes meet in a store that outlives them, and meet again when one is lost or comes back.

Meetings have numbers. Who has come to a meeting waits until all who are expected have come, or until the timeout; then the first
one to write who takes part decides for all. Who is not among those comes to the next meeting, as a newcomer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from bpipe.comm.rendezvous.store import using_store
from bpipe.errors import PipelineBrokenError, TransferTimeoutError

__all__: list[str] = []

POLL_S = 0.02
FIRST = 1  # the meeting to which all seats are expected


class Attendance:
    """One process's part in the meetings of a pipeline.

    Args:
        store: a store of torch.distributed in a process that outlives the ranks; its keys begin with `bpipe/routes`.
        seat: the place of this process: the stage of the plan, r*S + s.
        timeout_s: how long to wait for those who are expected.

    Attributes:
        number: that of the latest meeting this process takes part in.
        seats: of those who take part, in ascending order; empty before the first meeting, and for who is left out.
    """

    def __init__(self, store: Any, seat: int, depth: int, num_seats: int, timeout_s: float) -> None:
        self.store = dist.PrefixStore("bpipe/routes", store)
        self.number, self.seats, self.seat = 0, list[int](), seat
        self._depth, self._num_seats, self._timeout_s = depth, num_seats, timeout_s
        self._process = uuid.uuid4().hex  # tells this process from an earlier one of the same seat
        self._num_known = 0  # announcements that the latest meeting has seen

    def meet(self, lost: Collection[int] = ()) -> None:
        """Meet the others: those of the latest meeting but the lost ones, and newcomers. Blocks until it is decided who takes part.

        Raises:
            TransferTimeoutError: nobody opens a meeting for this newcomer, or not everybody comes to the first one.
            CommError: the store does not answer.
        """
        with using_store():
            if self.seats:
                number = self.number + 1
                while (latest := self._latest()) < number:
                    self.store.compare_set("open", str(latest), str(number))
                if self._takes_part(number, self._hold(number, set(self.seats) - set(lost))):
                    return
            self._come_back()

    def _come_back(self) -> None:
        """Wait until the others let this newcomer take part; at the very beginning, until all are there."""
        self.seats = []
        began, number = time.monotonic(), self._latest()
        while True:
            decided = self._decided(number)
            if number == FIRST and decided is None:
                decided = self._hold(FIRST, set(range(self._num_seats)))
            elif decided is None:
                self._announce()
                self.store.set(f"{number}/come/{self.seat}", self._process)
                while (decided := self._decided(number)) is None:
                    self._check_time(began, f"meeting {number} to decide who takes part")
            if self._takes_part(number, decided):
                return
            self._announce()
            while self._latest() == number:
                self._check_time(began, f"{self.listed(map(int, decided['seats']))} to begin their next step")
            number = self._latest()

    def has_newcomers(self) -> bool:
        """Return whether processes have announced themselves since the latest meeting."""
        with using_store():
            return self.store.add("announced", 0) > self._num_known

    def settle(self, step: int, result: str) -> str:
        """Return what became of a step: the result that a process has settled first, for all of them.

        Args:
            result: what this process would settle; the empty text if the step is to be run again.
        """
        with using_store():
            settled: bytes = self.store.compare_set(f"{self.number}/step/{step}", "", f"={result}")
            if result and self.seat == self.seats[0]:  # all have come to the end of this step, and so know of the one before
                with suppress(RuntimeError):  # a store that cannot delete keeps a key for each step
                    self.store.delete_key(f"{self.number}/step/{step - 1}")
            return settled.decode().removeprefix("=")

    def _announce(self) -> None:
        """Let the others know that this process wants to take part, if they do not know it."""
        if self._read(f"waiting/{self.seat}") != self._process:
            self.store.set(f"waiting/{self.seat}", self._process)
            self.store.add("announced", 1)

    def _latest(self) -> int:
        return int(self.store.compare_set("open", "", str(FIRST)))

    def _hold(self, number: int, expected: set[int]) -> dict[str, Any]:
        """Take part in a meeting until it is decided who does, by this process or another one."""
        self.store.set(f"{number}/come/{self.seat}", self._process)
        began = time.monotonic()
        while (decided := self._decided(number)) is None:
            announced = self.store.add("announced", 0)  # before looking who waits: who comes later is seen at the next boundary
            waiting = self._processes("waiting").keys()
            come = self._processes(f"{number}/come")
            missing = (expected | waiting) - come.keys()
            is_late = time.monotonic() - began > self._timeout_s
            if missing and is_late and number == FIRST:
                raise TransferTimeoutError(f"{self.named} waits for {self.listed(missing)} in vain")
            if not missing or is_late:
                for seat in missing & waiting:
                    self.store.set(f"waiting/{seat}", "")  # it has ended since; if not, it announces itself again
                self.store.compare_set(f"{number}/decided", "", json.dumps({"announced": announced, "seats": come}))
            else:
                time.sleep(POLL_S)
        return decided

    def _takes_part(self, number: int, decided: dict[str, Any]) -> bool:
        seats = decided["seats"]
        if seats.get(str(self.seat)) != self._process:
            return False
        self.number, self.seats, self._num_known = number, sorted(map(int, seats)), decided["announced"]
        if self._read(f"waiting/{self.seat}") is not None:
            self.store.set(f"waiting/{self.seat}", "")  # not deleted: another rank may be about to read it, and would wait for it
        return True

    def _decided(self, number: int) -> dict[str, Any] | None:
        """Return the seats and processes that take part in a meeting, and how many announcements were known there."""
        text = self._read(f"{number}/decided")
        return None if text is None else json.loads(text)

    def _processes(self, key: str) -> dict[int, str]:
        """Return the process of each seat that has left its name under a key."""
        found = {seat: self._read(f"{key}/{seat}") for seat in range(self._num_seats)}
        return {seat: process for seat, process in found.items() if process is not None}

    def _read(self, key: str) -> str | None:
        """Return a text that processes have left in the store, and that nobody deletes; None if it is not there, or empty."""
        return self.store.get(key).decode() or None if self.store.check([key]) else None

    def _check_time(self, began: float, whom: str) -> None:
        if time.monotonic() - began > self._timeout_s:
            raise TransferTimeoutError(
                f"{self.named} waited longer than timeout_s={self._timeout_s:g} for {whom}: have they "
                "all ended? A new run needs a new store, or a prefix of its own"
            )
        time.sleep(POLL_S)

    @property
    def named(self) -> str:
        """This rank's place in words."""
        return self.listed([self.seat])

    def listed(self, seats: Iterable[int]) -> str:
        """Name seats in words."""
        return ", ".join(f"replica {seat // self._depth} of stage {seat % self._depth}" for seat in sorted(seats))

    def check_stages(self) -> None:
        """Raise if the last replica of a stage is gone.

        Raises:
            PipelineBrokenError: nobody has the stage's weights any more.
        """
        for stage in range(self._depth):
            if not any(seat % self._depth == stage for seat in self.seats):
                raise PipelineBrokenError(
                    f"stage {stage} has lost its last replica, and its weights with it; what is left: {self.listed(self.seats)}. "
                    "Load a checkpoint in a new run, with a new store"
                )
