"""The control plane of a pipeline, beside its transfers: collective calls, failures, and what each rank is doing.

A thread reads it, whatever the caller's thread computes or waits for. It runs none of the user's code. When it learns of a
failure, it acts at once: it wakes every thread that waits here, and releases every thread that waits in a transfer.
"""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum

from bpipe.cleanup import keeping
from bpipe.comm.health import call_order as crossing
from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.watchdog import Timeouts, Watchdog
from bpipe.comm.rendezvous.peers import Mesh, Peer
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError, CommError, TransferError

__all__: list[str] = []

TICK_S = 0.25  # between two looks at whether something takes too long
LOOK_S = 0.5  # between two looks at what keeps the others
SETTLE_S = 1.0  # in which a failed transfer's reason arrives, if it is another rank's


class Collective(IntEnum):
    """What a collective call is for, which must be the same on all ranks."""

    STEP = 1
    PLAN = 2
    TRACE = 3
    GATHER = 4
    CONNECT = 5


DOING = {
    Collective.STEP: "runs a step",
    Collective.PLAN: "makes a plan",
    Collective.TRACE: "starts a trace",
    Collective.GATHER: "gathers a trace",
    Collective.CONNECT: "opens channels",
}

CANNOT = {
    Collective.STEP: "run this step",
    Collective.PLAN: "make a plan",
    Collective.TRACE: "trace",
    Collective.GATHER: "gather a trace",
    Collective.CONNECT: "open channels",
}


class Control:
    """The no-op control plane of a single-rank pipeline, which has nobody to tell and nothing to wait for."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.failure: Failure | None = None
        self.original: BaseException | None = None  # of the failure, if it is this rank's own
        self.others: list[socket.socket] = []  # connections of the pipeline that are not for a forked child either

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        """Give every rank's bytes to all ranks. Collective; blocks the host, and can be interrupted.

        Returns:
            One bytes object per rank, by rank of the group.

        Raises:
            AgreementError: another rank cannot make this call, makes a different one, or has closed the pipeline.
            CommError: something has failed.
        """
        return [data]

    def refuse(self, why: str) -> None:
        """Tell the others, in place of the next call, that this rank cannot make it."""

    def check(self) -> None:
        """Raise if something has failed."""

    def broke(self, error: BaseException, place: str) -> BaseException:
        """Tell all ranks of an error on this rank, which breaks the pipeline.

        Args:
            error: what was raised.
            place: where it was raised.

        Returns:
            The error to raise: the same one, or the reason why a transfer ended, which is another rank's error or another thread's.
        """
        return error

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run a step in this context, so that an interrupt can end it."""
        yield

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and release the thread and the connections."""


class Line(Control):
    """One rank's end of the control plane.

    Args:
        mesh: the rank's connections.
        rank: its rank in the pipeline's group.
        release: called from any thread after a failure; ends all transfers that are waited for.
        timeouts: how long a wait may take.
    """

    def __init__(self, mesh: Mesh, rank: int, release: Callable[[], None], timeouts: Timeouts) -> None:
        super().__init__()
        self.name = "this pipeline"
        self._rank, self._size, self._release = rank, len(mesh.peers) + 1, release
        self.peers = {peer.rank: peer for peer in mesh.peers}
        self._changed = threading.Condition()
        self.calls: dict[int, dict[int, Frame]] = defaultdict(dict)  # of the others, by number and rank
        self._left: dict[int, int] = {}  # after how many steps each rank that closed the pipeline did so
        self.caller = 0  # the thread that made the latest call
        self._waits_for: frozenset[int] = frozenset()
        self.is_closing = self._has_left = self._is_told = self._is_known = False
        self.looks: list[Callable[[float], None]] = []  # besides, at what takes too long; each gets the time
        self._watch = Watchdog(rank, self._size, self.activity, self._send_all, self.fail, lambda: self._waits_for, timeouts)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="bpipe-control", daemon=True)
        crossing.add(self)
        self._thread.start()

    def _sockets(self) -> list[socket.socket]:
        return [self._woken, self._waker, *(peer.connection for peer in self.peers.values())]

    # In the caller's thread

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        self.caller = threading.get_ident()
        before, self.activity.state = self.activity.state, State.MEETING
        try:
            self._begin_call(Frame(Kind.CALL, self.activity.call + 1, bytes([call]) + data))
            theirs = self._collected(call)
        finally:
            self.activity.state, self._waits_for = before, frozenset()
        return [theirs[rank].body[1:] if rank in theirs else data for rank in range(self._size)]

    def refuse(self, why: str) -> None:
        self._begin_call(Frame(Kind.REFUSAL, self.activity.call + 1, why.encode(errors="replace")[:4096]))

    def _begin_call(self, frame: Frame) -> None:
        self.activity.call += 1
        with self._changed:
            for number in [number for number in self.calls if number < self.activity.call]:
                del self.calls[number]
        self._send_all(frame)

    def _collected(self, call: Collective) -> dict[int, Frame]:
        """Wait for what the other ranks send in this call, and return it by rank."""
        crossed: set[int] = set()
        looked = time.monotonic()
        with self._changed:
            while True:
                self.check()
                theirs = self.calls[self.activity.call]
                for rank, frame in sorted(theirs.items()):
                    _check_alike(rank, frame, call)
                missing = self.peers.keys() - theirs.keys()
                if not missing:
                    return self.calls.pop(self.activity.call)
                self._check_present(missing)
                self._waits_for = frozenset(missing)
                self._changed.wait(LOOK_S)
                if time.monotonic() - looked >= LOOK_S:
                    looked, before = time.monotonic(), crossed
                    crossed = crossing.crossed(self, missing)
                    self._refuse_crossing(crossed & before)

    def _check_present(self, missing: set[int]) -> None:
        for rank in sorted(missing & self._left.keys()):
            raise AgreementError(
                f"rank {rank} closed this pipeline after {self._left[rank]} steps, and rank {self._rank} makes another call: "
                "make the same calls on all ranks"
            )

    def _refuse_crossing(self, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            error = (
                f"rank {self._rank} calls {self.name} while rank {rank} waits for it in another pipeline: "
                "call pipelines in the same order on all ranks"
            )
            self.fail(Failure(Cause.DISAGREED, self._rank, self.activity.step, "", error))

    def check(self) -> None:
        if self.failure is not None:
            raise self._error()

    def _error(self) -> BaseException:
        assert self.failure is not None
        if self.original is not None:
            return self.original
        return self.failure.as_error(self._rank, self.activity.place())

    def broke(self, error: BaseException, place: str) -> BaseException:
        if isinstance(error, TransferError):
            self._wait_until_known()
        if self.failure is None:
            self.fail(Failure.raised(error, self._rank, self.activity.step, place), error)
        self._wait_until_known()
        return self._error() if isinstance(error, CommError) and self.failure is not None else error

    def _wait_until_known(self) -> None:
        """Wait briefly until the first failure, if there is one, is known everywhere and nobody waits any longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_known, SETTLE_S)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the control thread notice Ctrl-C, because a blocking transfer does not; it breaks the pipeline, which ends the wait.

        It does so only where Ctrl-C raises KeyboardInterrupt, and nothing else uses the signal wakeup descriptor.
        """
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        before = signal.set_wakeup_fd(-1)
        with keeping(ExitStack()) as after:
            after.callback(signal.set_wakeup_fd, before)
            signal.set_wakeup_fd(self._waker.fileno() if before == -1 else before, warn_on_full_buffer=False)
            yield

    # In any thread

    def shows_waits(self) -> bool:
        """Return whether this rank's waits in this step are shown, or will be."""
        return self._watch.shows()

    def fail(self, failure: Failure, original: BaseException | None = None, *, is_told: bool = False) -> None:
        """Break the pipeline, unless it is broken already: the control thread then tells all ranks, and ends all waits.

        Args:
            failure: what happened.
            original: this rank's own error.
            is_told: whether another rank reported it.
        """
        with self._changed:
            if self.failure is not None or self.is_closing:
                return
            self._is_told = is_told
            self.original, self.failure = original, failure
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")

    def _send_all(self, frame: Frame) -> None:
        for peer in list(self.peers.values()):
            peer.send(frame)

    def close(self) -> None:
        with self._changed:
            if self.is_closing:
                return
            self.is_closing = True
        crossing.remove(self)
        failure = self.failure
        self._send_all(Frame(Kind.LEFT, self.activity.step) if failure is None else Frame(Kind.FAILED, 0, failure.pack()))
        self._has_left = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.original = None  # its frames keep the step's tensors alive

    # In the control thread

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._listen(selector)
        except Exception as error:  # without this, nobody would hear of anything any more
            self.fail(Failure.raised(error, self._rank, self.activity.step, "in its control thread"))
        self._spread()
        for peer in self.peers.values():
            peer.close()
        self._woken.close()
        self._waker.close()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._woken, selectors.EVENT_READ)
        for peer in self.peers.values():
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        ticked = time.monotonic()
        while not self._has_left:
            for key, _ in selector.select(TICK_S):
                if key.data is None:
                    self._heed(self._woken.recv(4096))
                elif not self._read(key.data):
                    selector.unregister(key.fileobj)
            self._spread()
            if (now := time.monotonic()) - ticked >= TICK_S / 2:
                ticked = now
                for look in (self._watch.tick, *self.looks):
                    look(now)

    def _spread(self) -> None:
        """Tell the other ranks of a failure, if there is one that they do not know of, and then end all waits."""
        if self.failure is None or self._is_known:
            return
        if not self._is_told:
            self._send_all(Frame(Kind.FAILED, 0, self.failure.pack()))
        self._release()
        with self._changed:
            self._is_known = True
            self._changed.notify_all()

    def _heed(self, signals: bytes) -> None:
        if signal.SIGINT in signals:
            place = self.activity.place()
            self.fail(Failure(Cause.RAISED, self._rank, self.activity.step, place, "KeyboardInterrupt"))

    def _read(self, peer: Peer) -> bool:
        """Take in what a peer sends; return False once the peer is gone, or has sent something that is not a message of bpipe."""
        data = peer.receive()
        self._watch.heard(peer.rank)
        if not data:
            self._gone(peer)
            return False
        try:
            for frame in peer.reader.feed(data):
                self._take(peer, frame)
        except CommError as error:
            text = f"rank {peer.rank} sent rank {self._rank} something that is no message of bpipe: {error}"
            self.fail(Failure(Cause.DISAGREED, peer.rank, -1, "", text))
            return False
        return True

    def _gone(self, peer: Peer) -> None:
        if peer.rank not in self._left:
            where = f" while rank {self._rank} was at {place}" if (place := self.activity.place()) else ""
            error = (
                f"rank {peer.rank} was lost{where}, step {self.activity.step}: its process ended without a word, killed perhaps "
                "(out of memory?), or its machine did. Look at its log, and start again from a checkpoint."
            )
            self.fail(Failure(Cause.LOST, peer.rank, self.activity.step, "", error))

    def _take(self, peer: Peer, frame: Frame) -> None:
        if frame.kind in (Kind.CALL, Kind.REFUSAL):
            with self._changed:
                if frame.number >= self.activity.call:
                    self.calls[frame.number][peer.rank] = frame
                self._changed.notify_all()
        elif frame.kind is Kind.FAILED:
            self.fail(Failure.unpack(frame.body, self._size), is_told=True)
        elif frame.kind is Kind.LEFT:
            self._take_leave(peer.rank, frame.number)
        elif frame.kind is Kind.ASK:
            peer.send(Frame(Kind.TELL, frame.number, self._watch.answer(peer.rank).pack()))
        else:
            self._watch.told(peer.rank, frame.number, Status.unpack(frame.body))

    def _take_leave(self, rank: int, num_steps: int) -> None:
        with self._changed:
            self._left[rank] = num_steps
            self._changed.notify_all()
        if self.activity.state is State.RUNNING and num_steps <= self.activity.step:
            error = f"rank {rank} closed this pipeline in the middle of step {self.activity.step}: its program ends, perhaps"
            self.fail(Failure(Cause.LOST, rank, self.activity.step, "", error))

    def abandon(self) -> None:
        """Close the connections without telling the peers, because this process is a forked child of the one that owns them."""
        for one in [*self._sockets(), *self.others]:
            one.close()


def _check_alike(rank: int, frame: Frame, call: Collective) -> None:
    """Raise unless a rank makes the same call as this one."""
    if frame.kind is Kind.REFUSAL:
        raise AgreementError(f"rank {rank} cannot {CANNOT[call]}: {frame.body.decode(errors='replace')}")
    theirs = frame.body[0] if frame.body else 0
    if theirs != call:
        doing = DOING[Collective(theirs)] if theirs in Collective.__members__.values() else "does something unknown"
        raise AgreementError(f"rank {rank} {doing} while this one {DOING[call]}: make the same calls on all ranks")
