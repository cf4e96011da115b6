"""Strangers who come to the ports of ranks, each in his own way, again and again."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.meeting import Hello
from bpipe.comm.rendezvous.secret import NONCE_BYTES
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import HEAD, MAGIC, VERSION, Frame, Kind
from bpipe.errors import CommError

Place = tuple[str, int]
Words = Callable[[], Iterable[bytes]]  # what a stranger sends, piece by piece; he waits between two pieces

PAUSE_S = 1.0  # of a slow stranger, between two bytes
AT_ONCE = 20  # connections that strangers hold at most


def hello_of(rank: int, to: bytes, *, has_nonce: bool = False) -> bytes:
    nonce = os.urandom(NONCE_BYTES) if has_nonce else b""
    return Frame(Kind.HELLO, 0, encode(Hello(rank, 0, os.urandom(16), to, os.urandom(16), nonce))).pack()


WORDS: dict[str, Words] = {
    "silent": lambda: [],
    "partial": lambda: [hello_of(1, os.urandom(16))[:40]],
    "garbage": lambda: [os.urandom(300)],
    "http": lambda: [b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"],
    "slow": lambda: [bytes([byte]) for byte in hello_of(1, os.urandom(16))],
    "another meeting's hello": lambda: [hello_of(1, os.urandom(16))],
    "a long body": lambda: [HEAD.pack(MAGIC, VERSION, Kind.HELLO, 2**32 - 1, 0), b"x" * 1000],
    "another frame": lambda: [Frame(Kind.CALL, 1, b"\1").pack()],
}


def places_in(store: Any, size: int) -> list[Place]:
    """Where ranks listen, as far as the store says."""
    found: list[Place] = []
    for rank in range(size):
        with suppress(CommError, RuntimeError):
            if store.check([f"key/{rank}"]):
                found += decode(Endpoint, store.get(f"key/{rank}"), "endpoint").places
    return found


@contextmanager
def strangers_at(places: Callable[[], list[Place]], words: Callable[[Place], Iterable[bytes]]) -> Iterator[list[int]]:
    """Strangers come while this context lasts. It gives a list whose length is how many have been accepted."""
    stop, accepted, held = threading.Event(), list[int](), list[socket.socket]()

    def disturb() -> None:
        while not stop.wait(0.002):
            for place in places():
                with suppress(OSError):
                    stranger = socket.create_connection(place, timeout=0.5)
                    held.append(stranger)
                    accepted.append(place[1])
                    for index, piece in enumerate(words(place)):
                        if index and stop.wait(PAUSE_S):
                            break
                        stranger.sendall(piece)
            while len(held) > AT_ONCE:
                held.pop(0).close()

    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield accepted
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for stranger in held:
            stranger.close()


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
