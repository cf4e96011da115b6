"""A connection from each rank of a pipeline to every other rank, for what must get through when transfers do not.

The ranks find each other through the store of their process group, once. After that no store is needed: a process that ends
closes its connections, and its peers see that at once, no matter which rank hosts the store.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any, NamedTuple

from bpipe.cleanup import noted_on
from bpipe.comm.rendezvous.addresses import own_address
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.frames import Frame, FrameReader, Kind
from bpipe.errors import AgreementError, CommError, text_of

__all__: list[str] = []

NAME_BYTES = 16
HELLO = struct.Struct(f"<8sII{NAME_BYTES}s{NAME_BYTES}s{NAME_BYTES}s")
MAGIC = b"bpmesh\0\2"
PLACE = struct.Struct(f"<{NAME_BYTES}sH")  # a rank's name in this meeting and its port; its address and its host follow
HELLO_S = 5.0
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02  # between two looks at who has come
MOST_SEND_S = 30.0  # without progress: a peer's reader is a thread that does nothing else
LOST_MACHINE_S = 15  # without an answer of its kernel


class OtherPipelineError(AgreementError):
    """Another rank opens a different one of the group's pipelines, or counts them differently."""

    def __init__(self, theirs: int, message: str) -> None:
        super().__init__(message)
        self.theirs = theirs


class PeerConnection:
    """The connection to one rank.

    Args:
        process: distinguishes its process from all others.
    """

    def __init__(self, connection: socket.socket, rank: int, process: bytes) -> None:
        self.rank, self.process = rank, process
        self.reader = FrameReader()
        self.connection = connection
        self._queue: deque[bytes] = deque()
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame, or leave it to the thread that is already sending one, because the thread that reads must not wait for it.

        Nothing is sent to a peer that is gone; the thread that reads from it notices that.
        """
        self._queue.append(frame.pack())
        while self._queue and self._sending.acquire(blocking=False):
            try:
                while self._queue:
                    self._send_whole(memoryview(self._queue.popleft()))
            except BaseException as error:  # a part of a frame may have left
                self._disconnect()
                if not isinstance(error, OSError):
                    raise
            finally:
                self._sending.release()

    def _send_whole(self, data: memoryview) -> None:
        """Send all of the data; the connection's timeout applies to each piece of it."""
        while data:
            data = data[self.connection.send(data) :]

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> bytes:
        """Return what has arrived, or nothing once the peer is gone. Call it only when the connection is readable."""
        try:
            return self.connection.recv(2**16)
        except TimeoutError as error:
            raise CommError("a connection was readable, and had nothing to read") from error
        except OSError:
            return b""

    def close(self) -> None:
        """Close the connection, after reading what has arrived, because a close with unread data might discard what was sent."""
        self._disconnect()
        with suppress(OSError):
            while self.connection.recv(2**16, socket.MSG_DONTWAIT):
                pass
        self.connection.close()


class Peers(NamedTuple):
    """All connections of a rank.

    Args:
        token: 16 bytes that only these ranks know, the same on all and never used again.
        connections: to the other ranks, in order.
    """

    token: bytes
    connections: list[PeerConnection]


class _Place(NamedTuple):
    """Where a rank can be reached."""

    name: bytes
    port: int
    address: str
    host: str

    def pack(self) -> bytes:
        return PLACE.pack(self.name, self.port) + f"{self.address} {self.host}".encode()

    @classmethod
    def unpack(cls, data: bytes) -> _Place:
        address, _, host = data[PLACE.size :].decode(errors="replace").partition(" ")
        name, port = PLACE.unpack_from(data)
        return cls(name, port, address, host)


def meet_peers(store: Any, key: str, rank: int, size: int, check: Callable[[str], None], *, pipeline: int = 0) -> Peers:
    """Connect a rank to all others. Collective; blocks until all have come.

    Args:
        store: a store of torch.distributed that all ranks reach.
        key: the key under which they find each other there.
        check: called repeatedly with what is waited for; raises to give up.
        pipeline: which of the group's pipelines this is.

    Raises:
        AgreementError: another rank opens a different pipeline, or has given up in the meantime.
    """
    address = own_address(store)
    with ExitStack() as unless_done:
        listener = unless_done.enter_context(socket.create_server((address.text, 0), family=address.family, backlog=size))
        own = _Place(os.urandom(NAME_BYTES), listener.getsockname()[1], address.text, socket.gethostname())
        meeting = _Meeting(store, key, rank, own, pipeline)
        peers = unless_done.enter_context(meeting)
        store.set(f"{key}/{rank}", own.pack())
        pause_s = LEAST_PAUSE_S
        while missing := [other for other in range(size) if other != rank and other not in peers]:
            for other in missing:
                if other < rank:
                    meeting.look_for(other)
            listener.settimeout(pause_s)
            while len(peers) + 1 < size and meeting.accept(listener):
                pass
            meeting.check_present()
            check(meeting.describe(missing))
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        done = meeting.finish()
        token = own.name if rank == 0 else meeting.token
        return Peers(token, [done[other] for other in sorted(done)])


class _Meeting:
    """The connections of a rank while some are still missing; closed if the meeting fails."""

    def __init__(self, store: Any, key: str, rank: int, own: _Place, pipeline: int) -> None:
        self._store, self._key, self._rank, self._own, self._pipeline = store, key, rank, own, pipeline
        self._peers: dict[int, PeerConnection] = {}
        self._unreachable: dict[int, _Place] = {}
        self.token = b""

    def __enter__(self) -> dict[int, PeerConnection]:
        return self._peers

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        why = b"" if error is None else text_of(error).encode(errors="replace")
        for peer in self._peers.values():
            with noted_on(error):
                peer.send(Frame(Kind.REFUSAL, 0, why))
            with noted_on(error):
                peer.close()

    def finish(self) -> dict[int, PeerConnection]:
        """Hand over the connections."""
        done, self._peers = self._peers, {}
        return done

    def describe(self, missing: list[int]) -> str:
        lines = [f"ranks {missing} have not come to their first step"]
        for other, place in sorted(self._unreachable.items()):
            if other in missing:
                lines.append(
                    f"; rank {other} waits at {place.address}, port {place.port}, of {place.host}, and does not answer there: "
                    "if ranks are on several machines, set GLOO_SOCKET_IFNAME to the interface between them"
                )
                break
        return "".join(lines)

    def accept(self, listener: socket.socket) -> bool:
        """Accept a rank that connects before the listener's timeout; return whether anybody connected."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return False
        with suppress(OSError, struct.error), ExitStack() as unless_done:
            unless_done.callback(connection.close)
            connection.settimeout(HELLO_S)
            rank, pipeline, name, process = self._heard(connection, self._own.name)
            self._say_hello(connection, name)
            self._check_pipeline(rank, pipeline)
            unless_done.pop_all()
            self._add(rank, connection, process)
        return True

    def look_for(self, other: int) -> None:
        """Connect to a rank that has published its address, if it is still there."""
        if not self._store.check([f"{self._key}/{other}"]):
            return
        place = _Place.unpack(self._store.get(f"{self._key}/{other}"))
        self._unreachable[other] = place
        with suppress(OSError, struct.error), ExitStack() as unless_done:
            connection = socket.create_connection((place.address, place.port), timeout=HELLO_S)
            unless_done.callback(connection.close)
            self._say_hello(connection, place.name)
            rank, pipeline, name, process = self._heard(connection, self._own.name)
            if (rank, name) != (other, place.name):
                raise ConnectionError("somebody else")
            self._check_pipeline(rank, pipeline)
            unless_done.pop_all()
            self._add(other, connection, process)
            self.token = name if other == 0 else self.token

    def _add(self, rank: int, connection: socket.socket, process: bytes) -> None:
        connection.settimeout(MOST_SEND_S)
        prepare(connection, TCP_USER_TIMEOUT=1000 * LOST_MACHINE_S)
        if rank in self._peers:
            self._peers.pop(rank).close()
        self._peers[rank] = PeerConnection(connection, rank, process)

    def _say_hello(self, connection: socket.socket, to: bytes) -> None:
        connection.sendall(HELLO.pack(MAGIC, self._rank, self._pipeline, self._own.name, to, process_name(os.getpid())))

    def _check_pipeline(self, rank: int, pipeline: int) -> None:
        if pipeline != self._pipeline:
            have = ", ".join(f"rank {one} has {number}" for one, number in sorted([(self._rank, self._pipeline), (rank, pipeline)]))
            raise OtherPipelineError(
                pipeline,
                f"the ranks disagree on which of the group's pipelines this is: {have}. "
                "Make the same schedules, and call their steps in the same order, on all ranks.",
            )

    @staticmethod
    def _heard(connection: socket.socket, expected: bytes) -> tuple[int, int, bytes, bytes]:
        """Read a hello, and return its rank, its pipeline, its name in this meeting, and its process."""
        data = connection.recv(HELLO.size, socket.MSG_WAITALL)
        magic, rank, pipeline, name, to, process = HELLO.unpack(data)
        if magic != MAGIC or to != expected:
            raise ConnectionError("a stranger, or somebody's earlier pipeline")
        return rank, pipeline, name, process

    def check_present(self) -> None:
        """Raise if a rank that had connected has gone."""
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            for key, _ in selector.select(0):
                with suppress(OSError):
                    _check_stays(key.data.rank, key.data.connection.recv(4096, socket.MSG_PEEK))


def _check_stays(rank: int, seen: bytes) -> None:
    """Raise if a rank's first frame says that it gives up, or if it has gone."""
    first = next(FrameReader().feed(seen), None)
    if not seen or (first is not None and (first.kind, first.number) == (Kind.REFUSAL, 0)):
        why = ", or ended" if first is None else f": {first.body.decode(errors='replace')}"
        raise AgreementError(f"rank {rank} gave up, while the ranks met for their first step{why}")


@cache
def process_name(pid: int) -> bytes:
    """Return 16 bytes that distinguish a process from all others; a fork gets its own."""
    return os.urandom(NAME_BYTES)
