"""What the control plane costs as ranks become many: the agreement before a step, a failure that all are told, and how they meet.

Ranks are threads of some processes, and meet through a TCPStore; all else is what a pipeline does: real connections, a control
thread for each rank. CPU time is that of the processes, all ranks together, while nothing but agreements runs. So, where there are
more ranks than cores, it has the switches between them, too. `alone_cpu_us` is that of one rank in a process of its own, whose
links are played by another process. Writes benchmarks/results/many_ranks.csv.

    .venv/bin/python -m benchmarks.many_ranks 2 8 32 128 512
"""

from __future__ import annotations

import csv
import multiprocessing as mp
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.gather import Part
from bpipe.comm.health.links import links, strides
from bpipe.comm.health.watchdog import Timeouts
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import PeerConnection
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.frames import HEAD, Frame, Kind

RESULTS = Path(__file__).parent / "results"
SIZES = (2, 8, 32, 128, 512)
RANKS_A_PROCESS = 16  # so that threads of a process seldom wait for each other
STEPS, ROUNDS, STEPS_ALONE = 10, 5, 300
RECORD_BYTES = 450
TIMEOUTS = Timeouts(timeout_s=300.0, slow_s=300.0)

Row = dict[str, float]


class CountingStore:
    """A store that counts what it is asked."""

    host, port = "127.0.0.1", 1  # where the ranks are: any port tells the way

    def __init__(self, store: Any) -> None:
        self._store, self.num_requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += 1
        return getattr(self._store, name)


class Rank:
    """A rank of a pipeline that only agrees."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, CountingStore(store)
        self.number = 0
        self.failed_s = 0.0

    def meet(self) -> None:
        """Meet the ranks that this one is linked with."""
        to = links(self._rank, self._size)
        began = time.monotonic()

        def check(missing: str) -> None:
            if time.monotonic() - began > TIMEOUTS.timeout_s:
                raise TimeoutError(f"rank {self._rank}: {missing}")

        peers = meet_peers(self._store, "key", self._rank, self._size, check, links=to)
        self.met_s = time.monotonic() - began
        self.num_requests = self._store.num_requests
        self.plane = ConnectedControlPlane(peers.connections, self._rank, self._size, self._release, TIMEOUTS)

    def _release(self) -> None:
        self.failed_s = time.monotonic()

    def step(self, num_steps: int) -> None:
        """Agree on some steps, whose records are alike."""
        for _ in range(num_steps):
            self.number += 1
            call = self.plane.activity.call
            record = StepRecord("1.0", "1f1b", "ab" * 16, True, call, self._size, self._size, 8, 1, bytes(16), (self._rank,))
            records = self.plane.exchange(Collective.STEP, record.pack(call))
            assert len(records) == self._size

    @property
    def num_sockets(self) -> int:
        return len(self.plane.peers)


def some_ranks(which: range, size: int, pipe: Connection) -> None:
    """Do with some ranks, each in a thread of its own, what is asked for. The first ones have the store."""
    store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=0 in which, wait_for_workers=False, timeout=timedelta(seconds=300))
    pipe.send(store.port)
    ranks = [Rank(rank, size, store) for rank in which]
    threading.stack_size(2**18)
    frames: Counter[str] = Counter()

    def counting(peer: PeerConnection, data: bytes, send: Any = PeerConnection.send_packed) -> bool:
        frames["frames"] += 1
        frames["bytes"] += len(data)
        return bool(send(peer, data))

    with ThreadPoolExecutor(len(ranks)) as pool:
        while (asked := pipe.recv()) != "end":
            if asked == "meet":
                list(pool.map(Rank.meet, ranks))
                pipe.send([(rank.num_requests, rank.num_sockets, rank.met_s) for rank in ranks])
            elif asked == "count":
                PeerConnection.send_packed, send = counting, PeerConnection.send_packed  # type: ignore[method-assign]
                list(pool.map(Rank.step, ranks, [STEPS] * len(ranks)))
                PeerConnection.send_packed = send  # type: ignore[method-assign]
                pipe.send(dict(frames))
            elif asked == "step":
                began, cpu_s = time.perf_counter(), time.process_time()
                list(pool.map(Rank.step, ranks, [STEPS] * len(ranks)))
                pipe.send((time.perf_counter() - began, time.process_time() - cpu_s))
            elif asked == "fail":
                began = time.monotonic()
                if 0 in which:
                    ranks[0].plane.fail(Failure(Cause.RAISED, 0, 1, "", "ValueError: boom"))
                while not all(rank.failed_s for rank in ranks):
                    time.sleep(0.01)
                pipe.send((began if 0 in which else 0.0, max(rank.failed_s for rank in ranks)))
        for rank in ranks:
            rank.plane.close()
    pipe.send(None)


def rank_alone(size: int, ends: dict[int, socket.socket], pipe: Connection) -> None:
    """Agree as rank 0, and give the CPU seconds of a step."""
    peers = [PeerConnection(connection, rank, b"") for rank, connection in ends.items()]
    plane, record = ConnectedControlPlane(peers, 0, size, lambda: None, TIMEOUTS), bytes(RECORD_BYTES)
    plane.exchange(Collective.STEP, record)
    began = time.process_time()
    for _ in range(STEPS_ALONE):
        plane.exchange(Collective.STEP, record)
    pipe.send((time.process_time() - began) / STEPS_ALONE)


def alone_cpu_s(size: int) -> float:
    """Return the CPU seconds of a step of one rank, whose links send their message of a round once it has sent its own."""
    ours, theirs = {}, {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in links(0, size):
            ours[rank] = socket.create_connection(listener.getsockname())
            theirs[rank], _ = listener.accept()
            prepare(ours[rank])
            prepare(theirs[rank])
            theirs[rank].settimeout(TIMEOUTS.timeout_s)
    mine, pipe = mp.Pipe()
    process = mp.get_context("fork").Process(target=rank_alone, args=(size, theirs, pipe))
    process.start()
    for number in range(1, STEPS_ALONE + 2):
        for of_round in strides(size):
            for stride in of_round:
                head = ours[stride].recv(HEAD.size, socket.MSG_WAITALL)
                ours[stride].recv(HEAD.unpack(head)[3], socket.MSG_WAITALL)
            num_known = min(of_round)
            for stride in of_round:
                told = {(rank - stride) % size: bytes(RECORD_BYTES) for rank in range(0, -num_known, -1)} if number == 1 else {}
                ours[-stride % size].sendall(Frame(Kind.CALL, number, Part(Collective.STEP, number - 1, told).pack()).pack())
    seconds = float(mine.recv())
    process.kill()
    process.join()
    for connection in [*ours.values(), *theirs.values()]:
        connection.close()
    return seconds


def measured(size: int) -> Row:
    """What `size` ranks cost, each on the average but where it says otherwise."""
    pipes, processes = [], []
    context = mp.get_context("fork")
    for first in range(0, size, RANKS_A_PROCESS):
        ours, theirs = context.Pipe()
        which = range(first, min(first + RANKS_A_PROCESS, size))
        processes.append(context.Process(target=some_ranks, args=(which, size, theirs)))
        processes[-1].start()
        theirs.close()  # so that the end of its process is noticed here
        pipes.append(ours)

    port = 0
    for pipe in pipes:
        pipe.send(port)
        port = pipe.recv()

    def all_do(what: str) -> list[Any]:
        for pipe in pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in pipes]

    met = [each for of_process in all_do("meet") for each in of_process]
    all_do("step")
    counted = [Counter(each) for each in all_do("count")]
    frames = sum(counted, Counter())
    rounds = [all_do("step") for _ in range(ROUNDS)]
    told = all_do("fail")
    all_do("end")
    for process in processes:
        process.join()
    of_all = size * STEPS
    return {
        "ranks": size,
        "alone_cpu_us": median(1e6 * alone_cpu_s(size) for _ in range(ROUNDS)),
        "agreement_cpu_us": median(1e6 * sum(cpu_s for _, cpu_s in each) / of_all for each in rounds),
        "agreement_ms": median(1e3 * max(took for took, _ in each) / STEPS for each in rounds),
        "frames": frames["frames"] / of_all,
        "bytes": frames["bytes"] / of_all,
        "most_sockets": max(sockets for _, sockets, _ in met),
        "store_requests": sum(requests for requests, _, _ in met) / size,
        "meeting_s": max(took for _, _, took in met),
        "failure_told_s": max(when for _, when in told) - max(began for began, _ in told),
    }


def main() -> None:
    """Measure each number of ranks, print the table and write it."""
    rows = []
    for size in [int(text) for text in sys.argv[1:]] or SIZES:
        rows.append({name: round(value, 4) for name, value in measured(size).items()})
        print(rows[-1], flush=True)
    with (RESULTS / "many_ranks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
