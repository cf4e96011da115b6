"""Two ranks in network namespaces of their own, as on two machines, with a cable between them that can be cut and mended."""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.ranks import fork_server

NEWUSER, NEWNET = 0x10000000, 0x40000000  # of unshare(2)
HOSTS, MACS, NOWHERE = ("10.77.0.1", "10.77.0.2"), ("02:00:00:00:77:01", "02:00:00:00:77:02"), "02:00:00:00:77:99"
PORT, END_S = 29500, 200.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """The cable, and what the ranks tell each other beside it.

    While it is cut, each machine still sends, and to nobody: so no connection ends, and no address goes.
    """

    def __init__(self, rank: int, beside: socket.socket) -> None:
        self._rank, self._beside = rank, beside

    def cut(self) -> None:
        """Cut it in both directions. Rank 0 does it."""
        ip("link", "set", "end0", "address", NOWHERE)
        ip("neigh", "replace", HOSTS[1], "lladdr", NOWHERE, "dev", "end0", "nud", "permanent")

    def mend(self) -> None:
        ip("link", "set", "end0", "address", MACS[0])
        ip("neigh", "replace", HOSTS[1], "lladdr", MACS[1], "dev", "end0", "nud", "permanent")

    def cut_for(self, seconds: float, *, both: bool = True) -> None:
        """Cut it for as long on rank 0, which goes on meanwhile; on rank 1, wait until it is cut, if both call this."""
        if self._rank == 0:
            self.cut()
            Thread(target=lambda: (time.sleep(seconds), self.mend()), daemon=True).start()
        if both:
            self.meet()

    def meet(self) -> None:
        """Wait until the other rank has come here, too."""
        self._beside.sendall(b".")
        assert self._beside.recv(1) == b".", "the other rank has ended"


Play = Callable[[int, Cable], Any]


class Ended(NamedTuple):
    """How two ranks ended: what each has returned, or the error that it raised; and what they could not do before."""

    found: tuple[Any, Any] = (None, None)
    unable: str = ""


def played(plays: list[Play]) -> list[Ended]:
    """Play several pieces side by side, each by two ranks."""
    context, ends = fork_server(), []
    for play in plays:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(theirs, play), daemon=True)
        process.start()
        theirs.close()
        ends.append((ours, process))
    found = []
    for ours, process in ends:
        found.append(pickle.loads(ours.recv_bytes()) if ours.poll(END_S) else Ended((TimeoutError(), TimeoutError())))
        process.kill()
        process.join()
    return found


def _main(end: Any, play: Play) -> None:
    try:
        if shutil.which("ip") is None or ctypes.CDLL(None, use_errno=True).unshare(NEWNET | (NEWUSER if os.geteuid() else 0)):
            end.send_bytes(pickle.dumps(Ended(unable=f"no network namespace ({os.strerror(ctypes.get_errno())})")))
            return
        end.send_bytes(pickle.dumps(_both(play)))
    except BaseException:
        end.send_bytes(pickle.dumps(Ended((RuntimeError(traceback.format_exc()), None))))


def _both(play: Play) -> Ended:
    """Be rank 0, and fork rank 1."""
    beside = socket.socketpair()
    read, write = os.pipe()
    if not (child := os.fork()):
        with suppress(BaseException):
            assert ctypes.CDLL(None).unshare(NEWNET) == 0
            beside[1].sendall(b"u")
            assert beside[1].recv(1) == b"l"
            os.write(write, pickle.dumps(_rank(1, play, beside[1])))
        os._exit(0)
    os.close(write)
    beside[1].close()
    assert beside[0].recv(1) == b"u"
    ip("link", "add", "end0", "address", MACS[0], "type", "veth", "peer", "name", "end1", "address", MACS[1], "netns", str(child))
    beside[0].sendall(b"l")
    first = _rank(0, play, beside[0])
    with open(read, "rb") as told:
        data = told.read()
    return Ended((first, pickle.loads(data) if data else EOFError("rank 1 died without a word")))


def _rank(rank: int, play: Play, beside: socket.socket) -> Any:
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{HOSTS[rank]}/24", "dev", f"end{rank}")
    ip("link", "set", f"end{rank}", "up")
    ip("neigh", "replace", HOSTS[1 - rank], "lladdr", MACS[1 - rank], "dev", f"end{rank}", "nud", "permanent")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = f"end{rank}"
    cable = Cable(rank, beside)
    try:
        cable.meet()
        store = dist.TCPStore(HOSTS[0], PORT, 2, is_master=rank == 0, timeout=timedelta(seconds=100))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))
        found = play(rank, cable)
    except Exception as error:
        traceback.print_exc()
        found = error.with_traceback(None)
    with suppress(Exception):
        cable.meet()  # the store is rank 0's
    return found
