"""Somebody between the ranks, who hands on what they say, writes it down, and says it again to the same port, again and again."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

from tests.attacks.strangers import Place

REPEATS = 3  # of each call, while the ranks may still listen
CALL_S = 5.0


class Relay(ExitStack):
    """A port in front of a rank's port.

    Args:
        target: the rank's.
        before: what was written down earlier, to be said to this rank, too.
    """

    def __init__(self, target: Place, before: list[bytes]) -> None:
        super().__init__()
        self._target, self.overheard, self.num_replays = target, list[bytes](), 0
        self._listener = self.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.place: Place = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept), threading.Thread(target=self._replay, args=(before,))]
        self.callback(self._end)
        for thread in list(self._threads):
            thread.start()

    def _end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                thread = threading.Thread(target=self._hand_on, args=(caller,))
                self._threads.append(thread)
                thread.start()

    def _hand_on(self, caller: socket.socket) -> None:
        with caller, suppress(OSError), socket.create_connection(self._target) as rank:
            back = threading.Thread(target=_copy, args=(rank, caller))
            back.start()
            said = bytearray()
            while data := caller.recv(4096):
                said += data
                rank.sendall(data)
                self._replay([bytes(said)])
            self.overheard.append(bytes(said))
            with suppress(OSError):
                rank.shutdown(socket.SHUT_WR)
            back.join()

    def _replay(self, calls: list[bytes]) -> None:
        """Call the rank in another one's place, with his words."""
        for call in calls * REPEATS:
            with suppress(OSError):
                connection = self.enter_context(socket.create_connection(self._target, timeout=CALL_S))
                connection.sendall(call)
                self.num_replays += 1


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
