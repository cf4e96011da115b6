"""The control plane over connections: a thread that lets events in to the rules, and does what they ask.

The thread keeps reading while the caller's thread computes or waits. It runs none of the user's code. When it learns of a failure,
it acts at once: it informs the others, releases every thread that waits in a transfer, and wakes every thread that waits here.
"""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from bpipe.cleanup import keeping
from bpipe.comm.health import call_order
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane, Meanwhile
from bpipe.comm.health.effects import Effect, Send, Signal, Warn
from bpipe.comm.health.failure import Failure
from bpipe.comm.health.membership import Membership
from bpipe.comm.health.watchdog import Timeouts
from bpipe.comm.rendezvous.peers import PeerConnection, close_all
from bpipe.comm.rendezvous.shortage import naming_shortage
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.frames import FrameReader
from bpipe.errors import CommError, TransferError
from bpipe.logs import LOG

__all__: list[str] = []

TICK_S = 0.25  # between two looks at whether something takes too long
LOOK_S = 0.5  # between two looks at what keeps the others
PATIENCE_S = 30.0  # until some peer reads some more before all are closed: their readers are threads that do nothing else
SETTLE_S = 1.0  # to wait for the reason of a failed transfer, if another rank caused it


class ConnectedControlPlane(ControlPlane):
    """One rank's end of the control plane of several ranks.

    Args:
        connections: to the ranks that it is linked with; they belong to the control plane from now on.
        rank: its rank in the pipeline's group, which has `size` ranks.
        release: called from the control thread after a failure; ends all transfers that are waited for.
        timeouts: how long a wait may take.
        name: the pipeline's, for messages.
    """

    def __init__(
        self,
        connections: Iterable[PeerConnection],
        rank: int,
        size: int,
        release: Callable[[], None],
        timeouts: Timeouts,
        name: str = "this pipeline",
    ) -> None:
        super().__init__()
        self.name, self._release = name, release
        self.peers = {peer.rank: peer for peer in connections}
        for peer in self.peers.values():
            prepare(peer.connection, timeouts.timeout_s)
            peer.reader = FrameReader(most_of_call=partial(self._most_of_call, peer.rank))
        self._members = Membership(rank, size, self.activity, timeouts, time.monotonic())
        self._changed = threading.Condition()  # held while an event is let in
        self._due: deque[Effect] = deque()  # for the control thread
        self._behind: set[PeerConnection] = set()  # for whom something waits that they have not read yet
        self._caller = 0  # the thread that made the latest call
        self._is_over = False
        self.looks: list[Callable[[float], None]] = []  # besides, at what takes too long; each gets the time
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="bpipe-control", daemon=True)
        self._thread.start()
        call_order.add(self)

    @property
    def failure(self) -> Failure | None:
        return self._members.failure

    # In the caller's thread

    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        self._caller, before = threading.get_ident(), self.activity.state
        try:
            with self._changed:
                effects = self._members.begin_call(call, data)
            self._do(effects)
            if meanwhile is not None:
                meanwhile(lambda: self._has_collected(call))
            return self._collected(call)
        finally:
            with self._changed:
                self._members.end_call(before)

    def refuse(self, why: str) -> None:
        with self._changed:
            effects = self._members.refuse(why)
        self._do(effects)

    def _has_collected(self, call: Collective) -> bool:
        with self._changed:
            return self._members.collected(call) is not None

    def _collected(self, call: Collective) -> list[bytes]:
        """Wait for what the ranks give to this call, and return it by rank."""
        crossed: dict[int, call_order.OpenPipeline] = {}
        looked = time.monotonic()
        with self._changed:
            while (given := self._members.collected(call)) is None:
                self._changed.wait(LOOK_S)
                if time.monotonic() - looked >= LOOK_S:
                    looked, before = time.monotonic(), crossed
                    crossed = call_order.crossed(self, self._members.late())
                    if twice := crossed.keys() & before.keys():
                        self._let_in(self._members.crossed(twice, self.name))
                        self._break_with(crossed[rank] for rank in twice)
            return given

    def _break_with(self, others: Iterable[call_order.OpenPipeline]) -> None:
        """Break these pipelines as this one broke, because the ranks that wait in them may not have noticed yet."""
        if (failure := self.failure) is not None:
            for other in others:
                other.fail(failure)

    def check(self) -> None:
        self._members.check()

    def broke(self, error: BaseException, place: str) -> BaseException:
        if isinstance(error, TransferError):
            self._wait_until_settled()
        with self._changed:
            self._let_in(self._members.raised(error, place))
        self._wait_until_settled()
        return self._members.error_for(error)

    def _wait_until_settled(self) -> None:
        """Wait briefly until all ranks know the first failure, if there is one, and no thread waits any longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._members.is_settled, SETTLE_S)

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

    def fail(self, failure: Failure) -> None:
        """Break the pipeline, unless it is broken already: the control thread then informs all ranks, and ends all waits."""
        with self._changed:
            self._let_in(self._members.fail(failure))

    def shows_waits(self) -> bool:
        """Return whether this rank's waits in this step are shown, or will be."""
        return self._members.shows_waits()

    def awaited_by(self) -> list[bytes]:
        """Return the processes that wait in a call of this pipeline that the current thread usually makes, and is not making."""
        if self._caller != threading.get_ident():
            return []
        return [self.peers[rank].process for rank in self._members.callers()]

    def close(self) -> None:
        with self._changed:
            if self._members.has_left:
                return
            effects = self._members.leave()
        call_order.remove(self)
        self._do(effects)
        self._is_over = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._members.original = None  # its frames keep the step's tensors alive

    def abandon(self) -> None:
        """Close the connections without a message to the peers, because this process is a fork of the one that owns them."""
        for one in [self._woken, self._waker, *(peer.connection for peer in self.peers.values()), *self.channel_sockets]:
            one.close()

    def _let_in(self, effects: Iterable[Effect]) -> None:
        """Wake threads at once if an event asks for it, and leave the rest to the control thread, because it may take long.

        The lock is held.
        """
        for effect in effects:
            if effect is Signal.WAKE:
                self._changed.notify_all()
            else:
                self._due.append(effect)
        if self._due and threading.current_thread() is not self._thread:
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")

    def _do(self, effects: Iterable[Effect]) -> None:
        """Do what the rules ask for. No lock is held meanwhile."""
        for effect in effects:
            if isinstance(effect, Send):
                packed = effect.frame.pack()
                for rank in self.peers if effect.to is None else effect.to:
                    self._send(self.peers[rank], packed)
            elif isinstance(effect, Warn):
                LOG.warning("%s", effect.text)
            elif effect is Signal.RELEASE:
                self._release()
                with self._changed:
                    self._let_in(self._members.released())

    def _send(self, peer: PeerConnection, packed: bytes) -> None:
        is_taken, num_waiting = peer.send_packed(packed), peer.num_waiting
        if not is_taken:
            with self._changed:
                self._let_in(self._members.does_not_read(peer.rank, num_waiting))
        if num_waiting:
            self._behind.add(peer)
            self._wake()

    # In the control thread

    def _serve(self) -> None:
        try:
            with naming_shortage(), selectors.DefaultSelector() as selector:
                self._listen(selector)
        except Exception as error:  # without this, the control plane would stop silently
            with self._changed:
                self._let_in(self._members.raised(error, "in its control thread"))
        self._do_due()
        close_all(self.peers.values(), PATIENCE_S if self.failure is None else SETTLE_S)
        self._woken.close()
        self._waker.close()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._woken, selectors.EVENT_READ)
        for peer in self.peers.values():
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        ticked = time.monotonic()
        while not self._is_over:
            self._let_leave(selector)
            for key, events in selector.select(TICK_S):
                if key.data is None:
                    self._heed(self._woken.recv(4096))
                    continue
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ and not self._read(key.data):
                    selector.unregister(key.fileobj)
            self._do_due()
            if (now := time.monotonic()) - ticked >= TICK_S / 2:
                ticked = now
                with self._changed:
                    self._let_in(self._members.tick(now))
                self._do_due()
                for look in self.looks:
                    look(now)
                self._do_due()

    def _let_leave(self, selector: selectors.BaseSelector) -> None:
        """Watch for when those peers read on for whom something waits."""
        for peer in list(self._behind):
            self._behind.discard(peer)  # before the look, because another thread may add to what waits
            events = selectors.EVENT_READ
            if peer.num_waiting:
                self._behind.add(peer)
                events |= selectors.EVENT_WRITE
            if peer.connection in selector.get_map():
                selector.modify(peer.connection, events, peer)

    def _do_due(self) -> None:
        while self._due:
            self._do([self._due.popleft()])

    def _heed(self, signals: bytes) -> None:
        if signal.SIGINT in signals:
            with self._changed:
                self._let_in(self._members.interrupted())

    def _most_of_call(self, rank: int, number: int, call: int) -> int:
        return self._members.most_of_call(rank, number, call)

    def _read(self, peer: PeerConnection) -> bool:
        """Take in what a peer sends; return False once the peer is gone, or has sent something that is not a message of bpipe."""
        data = peer.receive()
        with self._changed:
            self._members.heard_from(peer.rank)
            if not data:
                self._let_in(self._members.disconnected(peer.rank))
                return False
            try:
                for frame in peer.reader.feed(data):
                    self._let_in(self._members.receive(peer.rank, frame))
            except CommError as error:
                self._let_in(self._members.nonsense(peer.rank, error))
                return False
        return True
