"""What the control plane costs as ranks become many: how they meet, the agreement before a step, sockets, and a rank that is lost.

Ranks are threads of some processes, and meet through a TCPStore; all else is what a pipeline does: real connections, a control
thread for each rank, and the channels of a plan. CPU time is that of the processes, all ranks together, while nothing but
agreements runs. So, where there are more ranks than cores, it has the switches between them, too. The last rank has a process of
its own, which is killed; `alone_cpu_us` is the CPU time of that process.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks.intervals import as_they_are
from benchmarks.pictures import curves
from benchmarks.study import Claim, Row, Study
from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.health.links import links
from bpipe.comm.health.watchdog import Timeouts
from bpipe.comm.rendezvous.addresses import Address
from bpipe.comm.rendezvous.local_door import open_local_links
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import PeerConnection
from bpipe.comm.transport.connect import TOKEN_BYTES, open_connections
from bpipe.errors import AgreementError, CommError
from bpipe.schedules import Purpose, build

RANKS_A_PROCESS = 16  # so that threads of a process seldom wait for each other
STEPS = 10
TIMEOUTS = Timeouts(timeout_s=300.0, slow_s=300.0)
HERE = [Address("127.0.0.1", socket.AF_INET)]
WHY = "the ranks' and their control threads take turns on few cores, which the next line has not"

Ends = Sequence[tuple[Purpose, tuple[int, int]]]  # of each channel


class Work(NamedTuple):
    """So many ranks, rounds of steps, and samples of each way to fail."""

    p: int
    num_rounds: int = 5
    num_failures: int = 5


def _refuse(why: str) -> None:
    raise AssertionError(f"all ranks are on this host, and yet two cannot share memory: {why}")


class Rank:
    """A rank of a pipeline that agrees, and opens channels without sending anything."""

    def __init__(self, rank: int, size: int, store: Any, ends: Ends) -> None:
        self._rank, self._size, self._store, self._ends = rank, size, store, ends
        self.failed_s = 0.0  # when it heard of a failure, or that a rank has left

    def meet(self) -> None:
        """Meet the ranks that this one is linked with."""
        to, began = links(self._rank, self._size), time.monotonic()
        peers = meet_peers(self._store, "key", self._rank, self._size, self._check_time(), links=to)
        self.met_s, self._reached = time.monotonic() - began, peers.reached()
        self.plane = ConnectedControlPlane(peers.connections, self._rank, self._size, self._release, TIMEOUTS)

    def _check_time(self) -> Callable[[str], None]:
        began = time.monotonic()

        def check(missing: str) -> None:
            if time.monotonic() - began > TIMEOUTS.timeout_s:
                raise TimeoutError(f"rank {self._rank}: {missing}")

        return check

    def _release(self) -> None:
        self.failed_s = time.monotonic()

    def connect(self) -> None:
        """Open the channels of a plan, and the links of its evictions within one host."""
        token, ends = bytes(TOKEN_BYTES), [pair for _, pair in self._ends]
        opened = open_connections(ends, self._rank, HERE, token, self.plane, self._check_time(), self._reached)
        self.plane.channel_sockets += opened.values()
        evictions = [pair for purpose, pair in self._ends if purpose is Purpose.EVICT]
        local = open_local_links(evictions, self._rank, token, self.plane, _refuse, can_share=True)
        self.plane.channel_sockets += [link.connection for link, _ in local.values()]

    @property
    def num_sockets(self) -> int:
        """Its sockets: to its links, the pair that wakes its control thread, and its channels'."""
        return len(self.plane.peers) + 2 + len(self.plane.channel_sockets)

    def step(self, num_steps: int, *, alternates: bool = False) -> None:
        """Agree on some steps, whose records are alike, or differ from those of the step before."""
        for index in range(num_steps):
            call, trains = self.plane.activity.call, not (alternates and index % 2)
            record = StepRecord("1.0", "1f1b", "ab" * 16, trains, call, self._size, self._size, 8, 1, bytes(16), (self._rank,))
            records = self.plane.exchange(Collective.STEP, record.pack(call))
            assert len(records) == self._size

    def await_failure(self) -> None:
        """Take part in a call that one rank does not make, and note when this one hears why."""
        with suppress(CommError, AgreementError):
            self.plane.exchange(Collective.STEP, b"")
        self.failed_s = self.failed_s or time.monotonic()

    def close(self) -> None:
        self.plane.close()
        for connection in self.plane.channel_sockets:
            connection.close()


def num_sockets() -> int:
    """How many sockets this process has open."""
    number = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return number


class Process:
    """Some ranks, each in a thread, which do what is asked for. The first ones have the store."""

    def __init__(self, which: range, size: int, ends: Ends, pipe: Connection) -> None:
        self._pipe = pipe
        store = dist.TCPStore(
            "127.0.0.1", pipe.recv(), is_master=0 in which, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        pipe.send(store.port)
        self._ranks = [Rank(rank, size, store, ends) for rank in which]
        threading.stack_size(2**18)

    def serve(self) -> None:
        with ThreadPoolExecutor(len(self._ranks)) as self._pool:
            while (asked := self._pipe.recv()) != "end":
                self._pipe.send(getattr(self, asked)())
            self._all(Rank.close)
        self._pipe.send(None)

    def _all(self, do: Callable[..., Any], *args: Any, **options: Any) -> None:
        list(self._pool.map(lambda rank: do(rank, *args, **options), self._ranks))

    def meet(self) -> list[float]:
        self._before = num_sockets()  # all processes have come to the store by now, which is here or elsewhere
        self._all(Rank.meet)
        return [rank.met_s for rank in self._ranks]

    def connect(self) -> list[int]:
        """Sockets of each rank."""
        self._all(Rank.connect)
        of_ranks = [rank.num_sockets for rank in self._ranks]
        assert sum(of_ranks) == num_sockets() - self._before, "a rank has sockets that are not counted"
        return of_ranks

    def step(self, *, alternates: bool = False) -> tuple[float, float]:
        began, cpu_s = time.perf_counter(), time.process_time()
        self._all(Rank.step, STEPS, alternates=alternates)
        return time.perf_counter() - began, time.process_time() - cpu_s

    def alternate(self) -> tuple[float, float]:
        return self.step(alternates=True)

    def count(self) -> Counter[str]:
        """What the ranks send in some steps."""
        sent, send_packed = list[int](), PeerConnection.send_packed  # a list, to which many threads may append at once

        def counting(peer: PeerConnection, data: bytes) -> bool:
            sent.append(len(data))
            return send_packed(peer, data)

        PeerConnection.send_packed = counting  # type: ignore[method-assign]
        self._all(Rank.step, STEPS)
        PeerConnection.send_packed = send_packed  # type: ignore[method-assign]
        return Counter(frames=len(sent), bytes=sum(sent))

    def wait_for_failure(self) -> None:
        """Let the ranks take part in a call in the background."""
        self._waiting = [self._pool.submit(rank.await_failure) for rank in self._ranks]

    def failed(self) -> float:
        """When the last rank here heard of the failure."""
        for one in self._waiting:
            one.result()
        return max(rank.failed_s for rank in self._ranks)

    def leave(self) -> float:
        """Close the pipeline, and give the time before that."""
        began = time.monotonic()
        self._all(Rank.close)
        return began


def process(which: range, size: int, ends: Ends, pipe: Connection) -> None:
    Process(which, size, ends, pipe).serve()


class Fleet:
    """Processes that have all ranks; the last rank is alone in the last one."""

    def __init__(self, size: int, ends: Ends) -> None:
        context = mp.get_context("fork")
        firsts = range(0, size - 1, RANKS_A_PROCESS)
        groups = [range(first, min(first + RANKS_A_PROCESS, size - 1)) for first in firsts] + [range(size - 1, size)]
        self.pipes, self.processes = list[Connection](), list[Any]()
        for which in groups:
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=process, args=(which, size, ends, theirs)))
            self.processes[-1].start()
            theirs.close()  # so that the end of its process is noticed here
            self.pipes.append(ours)
        port = 0
        for pipe in self.pipes:
            pipe.send(port)
            port = pipe.recv()

    def do(self, what: str, pipes: Sequence[Connection] | None = None) -> list[Any]:
        """Let processes do something at the same time."""
        pipes = self.pipes if pipes is None else pipes
        for pipe in pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in pipes]

    def told_s(self, how: str) -> float:
        """Lose the last rank while all others wait for it in a call; return after how long the last one of them has heard of it."""
        others = self.pipes[:-1]
        self.do("wait_for_failure", others)
        time.sleep(0.5)  # until all of them wait
        if how == "killed":
            began = time.monotonic()
            os.kill(self.processes[-1].pid, signal.SIGKILL)
            self.pipes.pop()
        else:
            (began,) = self.do("leave", self.pipes[-1:])
        return float(max(self.do("failed", others)) - began)

    def end(self) -> None:
        self.do("end")
        for one in self.processes:
            one.join()


def ends_of(size: int) -> Ends:
    """The channels of balanced 1F1B."""
    return [(channel.purpose, (channel.src, channel.dst)) for channel in build("balanced_1f1b", size, size).channels()]


def allowed_sockets(size: int, ends: Ends) -> list[int]:
    """How many sockets each rank may have."""
    peers = [{other for _, pair in ends if rank in pair for other in pair} - {rank} for rank in range(size)]
    return [2 * math.ceil(math.log2(size)) + 4 * len(of_rank) + 8 for of_rank in peers]


def failures(size: int, ends: Ends, how: str, number: int) -> list[float]:
    """The seconds of some failures, each of a pipeline that has met for it."""
    told = []
    for _ in range(number):
        fleet = Fleet(size, ends)
        fleet.do("meet")
        told.append(fleet.told_s(how))
        fleet.end()
    return told


def agreement_of(what: str, rounds: Sequence[Sequence[tuple[float, float]]], size: int) -> dict[str, float]:
    """The CPU time of a rank and the time of all for a step, from the seconds and CPU seconds of each round's processes."""
    cpu_us = median(1e6 * sum(cpu_s for _, cpu_s in each) / size / STEPS for each in rounds)
    return {f"{what}_cpu_us": cpu_us, f"{what}_ms": median(1e3 * max(took for took, _ in each) / STEPS for each in rounds)}


def measure(work: Work) -> list[Row]:
    """What some ranks cost, each on the average but where it says otherwise."""
    size, num_rounds, num_failures = work
    ends, of_all = ends_of(size), size * STEPS
    fleet = Fleet(size, ends)
    met = [each for of_process in fleet.do("meet") for each in of_process]
    fleet.do("step")
    frames = sum(fleet.do("count"), Counter())
    rounds = [fleet.do("step") for _ in range(num_rounds)]
    alternating = [fleet.do("alternate") for _ in range(num_rounds)]
    sockets, allowed = fleet.do("connect"), allowed_sockets(size, ends)
    of_ranks = [each for of_process in sockets for each in of_process]
    killed = [fleet.told_s("killed")]
    fleet.end()
    killed += failures(size, ends, "killed", num_failures - 1)
    closed = failures(size, ends, "closed", num_failures)
    row = {
        "ranks": size,
        "alone_cpu_us": median(1e6 * each[-1][1] / STEPS for each in rounds),
        **agreement_of("agreement", rounds, size),
        **agreement_of("alternating", alternating, size),
        "frames": frames["frames"] / of_all,
        "bytes": frames["bytes"] / of_all,
        "sockets": max(of_ranks),
        "allowed_sockets": allowed[of_ranks.index(max(of_ranks))],
        "socket_share": max(one / other for one, other in zip(of_ranks, allowed, strict=True)),
        "meeting_s": max(met),
        "killed_told_s": max(killed),
        "closed_told_s": max(closed),
        "num_failures": len(killed) + len(closed),
    }
    return [{name: round(value, 4) for name, value in row.items()}]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What hundreds of ranks may cost."""
    row = rows[-1]
    at = f"at p = {row['ranks']}"
    agreement = "CPU ms of a rank for the agreement on a step"
    sockets = f"sockets of a rank, over 2 log2 p + 4 for each peer of its plan + 8, {at}"
    return [
        Claim(f"{agreement}, all ranks on this machine, {at}", 1.0, row["agreement_cpu_us"] / 1e3, why=WHY),
        Claim(f"the same for a rank by itself, {at}", 1.0, row["alone_cpu_us"] / 1e3),
        Claim.of(row, "socket_share", sockets, 1.0),
        Claim.of(row, "killed_told_s", f"seconds until the last rank is told of one that was killed, {at}", 1.0),
        Claim.of(row, "closed_told_s", f"seconds until the last rank is told of one that has closed the pipeline, {at}", 1.0),
    ]


STUDY = Study(
    name="many_ranks",
    title="Many ranks",
    text=(
        "Ranks as threads of processes, 16 a process, with real connections: they meet over a TCPStore, agree on steps, open the\n"
        "channels of balanced 1F1B with the links of its evictions within a host, and lose the last rank, whose process is killed\n"
        "or closes the pipeline while all others wait for it in a call. CPU time is that of the processes, over their ranks;\n"
        "sockets are those of the busiest rank, and their sum is what /proc/self/fd has; times of failures are the longest of all\n"
        "ranks and samples. In alternating steps, training and evaluation in turn, all records differ from those of the step\n"
        "before, and every rank is told those of all others. A rank by itself is the last one, whose process has no other rank;\n"
        "the table below is from before 336000d, when the ranks that it talked to were played by another process."
    ),
    works=(Work(2), Work(8), Work(32), Work(128), Work(512, num_failures=3)),
    measure=measure,
    columns=[
        *as_they_are("ranks"),
        ("alone_cpu_us", "CPU µs of a rank and step, by itself", ".0f"),
        ("agreement_cpu_us", "all ranks here", ".0f"),
        ("alternating_cpu_us", "where records differ", ".0f"),
        ("agreement_ms", "ms of a step's agreement", ".1f"),
        ("alternating_ms", "where records differ", ".1f"),
        ("frames", "frames a step", ".0f"),
        ("bytes", "bytes", ".0f"),
        ("sockets", "most sockets of a rank", "d"),
        ("allowed_sockets", "allowed", "d"),
        ("meeting_s", "s to meet", ".2f"),
        ("killed_told_s", "s until all know of a killed rank", ".3f"),
        ("closed_told_s", "of a closed one", ".3f"),
    ],
    claims=claims,
    draw=partial(
        curves,
        over="ranks",
        groups={
            "CPU µs of a rank and step": {
                "alone_cpu_us": "a rank by itself",
                "agreement_cpu_us": "all ranks on two cores",
                "alternating_cpu_us": "the same, records change each step",
            },
            "sockets of a rank": {"sockets": "most of a rank", "allowed_sockets": "allowed"},
        },
    ),
)
