"""Processes that play case after case over one process group, and what they report."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from tests.faults.case import Case, Fate
from tests.faults.scene import Leave, Report, Scene
from tests.patience import PATIENCE_S
from tests.ranks import fork_server, join

START_S = 120.0  # for new processes


@dataclass(slots=True)
class Outcome:
    """Of a case.

    Args:
        fired: when the fault happened, by rank.
        reports: by rank.
        missing: the ranks that should have reported and did not in time.
        thawed_at: when stopped processes were continued.
    """

    fired: dict[int, float] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    thawed_at: float = 0.0

    def seconds(self, ranks: Iterable[int]) -> float:
        """From the fault to the last error of these ranks."""
        return max(self.reports[rank].fault.at for rank in ranks) - max(self.fired.values())


class Company:
    """The ranks of one process group.

    Args:
        size: how many.
        store_on: the rank whose process hosts the store; None: this process.
        copies: whether simulated devices copy messages between stages to each other, instead of using NCCL.
    """

    def __init__(self, size: int, store_on: int | None = None, *, copies: bool = False) -> None:
        self.size, self.is_gone = size, False
        context = fork_server()
        pairs = [context.Pipe() for _ in range(size)]
        self._ends: list[Connection] = [ours for ours, _ in pairs]
        self._has_played = False
        self._processes = [
            context.Process(target=_rank, args=(theirs, rank, size, rank == store_on, copies), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs):
            process.start()
            theirs.close()
        self._store = None if store_on is not None else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port if self._store is not None else self._ends[store_on or 0].recv()
        for end in self._ends:
            end.send((port, [process.pid for process in self._processes]))

    def play(self, case: Case) -> Outcome:
        """Play a case on all ranks, and wait for their reports."""
        for end in self._ends:
            end.send(case.name)
        outcome, silent = Outcome(), case.culprits if case.fate is not Fate.LIVES else frozenset()
        self._listen(case, outcome, set(range(self.size)) - silent)
        if case.fate is Fate.THAWS and not outcome.missing:
            outcome.thawed_at = time.monotonic()
            for rank in silent:
                os.kill(self._processes[rank].pid, signal.SIGCONT)
            self._listen(case, outcome, set(silent))
        if outcome.missing or case.is_alone:
            self.kill(show=outcome.missing)
        return outcome

    def _listen(self, case: Case, outcome: Outcome, expected: set[int]) -> None:
        """Hear what ranks tell, until those expected have reported."""
        patience_s = case.bound_s + PATIENCE_S + (0.0 if self._has_played else START_S)
        ranks, deadline, self._has_played = dict(zip(self._ends, range(self.size))), time.monotonic() + patience_s, True
        while expected & {*ranks.values()} and (ready := wait(list(ranks), deadline - time.monotonic())):
            for end in ready:
                assert isinstance(end, Connection)
                try:
                    told = end.recv()
                except (EOFError, ConnectionError):
                    ranks.pop(end)
                    continue
                if isinstance(told, Report):
                    outcome.reports[ranks[end]] = told
                    expected.discard(ranks[end])
                else:
                    outcome.fired[ranks[end]] = told
        outcome.missing |= expected

    def dismiss(self) -> list[int | None]:
        """Let the processes end by themselves; their exit codes."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes

    def kill(self, show: Iterable[int] = ()) -> None:
        """End all processes; those to be shown print their threads' stacks first."""
        self.is_gone = True
        for rank in show:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.1)
        for process, end in zip(self._processes, self._ends):
            process.kill()
            process.join()
            end.close()


class Companies:
    """Processes for the cases that leave them alive, by number of ranks; each other case gets its own."""

    def __init__(self, *, copies: bool = False) -> None:
        self._copies = copies
        self._started: dict[int, Company] = {}

    def play(self, case: Case) -> Outcome:
        if case.is_alone or case.store_on is not None:
            return Company(case.num_ranks, case.store_on, copies=self._copies).play(case)
        if case.num_ranks not in self._started or self._started[case.num_ranks].is_gone:
            self._started[case.num_ranks] = Company(case.num_ranks, copies=self._copies)
        return self._started[case.num_ranks].play(case)

    def dismiss(self) -> dict[int, list[int | None]]:
        """Let all end by themselves; their exit codes, by number of ranks."""
        return {size: company.dismiss() for size, company in self._started.items() if not company.is_gone}

    def kill(self) -> None:
        for company in self._started.values():
            company.kill()


def _rank(end: Connection, rank: int, size: int, hosts_store: bool, copies: bool) -> None:
    """A process that plays cases until it is dismissed."""
    from tests.faults.cases import CASES
    from tests.faults.pipeline import DEVICE

    faulthandler.register(signal.SIGUSR1)
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hosts_store else None
    if store is not None:
        end.send(store.port)
    port, pids = end.recv()
    join(rank, size, port)
    if DEVICE != "cpu":
        from tests.accelerator import nccl

        nccl.install(nccl=True, copies=copies)
    with suppress(Leave):
        while (name := end.recv()) is not None:
            dist.barrier()
            end.send(Scene(CASES[name], rank, pids, end.send).play())
    dist.destroy_process_group()
