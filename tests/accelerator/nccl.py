"""ProcessGroupNCCL's point-to-point rules on the simulated device, carried by gloo.

Connected when first used, once for transfers by themselves and once for those that are posted together; a stream of its own; a
kernel that blocks until its peer's runs; `wait` makes the current stream wait and not the host; `record_stream` on what is carried.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.accelerator.device import KIND, MODULE, simulator
from tests.accelerator.torch_module import Event, Stream

Gloo = dist.ProcessGroupGloo
TAG, NO_TAG, RECEIVED = 7, 8, 9  # of messages, of none, and of a word that one has been received
GROUP = threading.local()  # what a thread posts together, whichever the communicator, as NCCL


class Options:
    """As ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout, self.config = timedelta(minutes=5), SimpleNamespace(max_ctas=0)


class Sent:
    """As the work that ProcessGroupNCCL returns."""

    def __init__(self, end: Event, device: torch.device) -> None:
        self._end, self._device = end, device

    def wait(self, timeout: timedelta | None = None) -> bool:
        MODULE.current_stream(self._device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return bool(self._end._event.peek())


class Posted(NamedTuple):
    """One tensor that is sent or received."""

    tensor: torch.Tensor
    is_received: bool


class SimulatedNCCL:
    """As ProcessGroupNCCL, of two ranks."""

    Options = Options
    supports_coalescing = True
    room: AbstractContextManager[object] = nullcontext()  # on the device, for its kernels

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._how, self._peer = (store, rank, size, options._timeout), 1 - rank
        self._connections: dict[str, tuple[Any, Stream]] = {}
        self._unfinished: deque[str] = deque()  # kernels: as many names, which two threads may count
        self._is_aborted = False

    def _connection(self, kind: str, device: torch.device) -> tuple[Any, Stream]:
        if kind not in self._connections:  # blocks the host until the other rank does so, as ncclCommInitRank
            store, *how = self._how
            self._connections[kind] = Gloo(dist.PrefixStore(kind, store), *how), MODULE.Stream(device)
        return self._connections[kind]

    def _start_coalescing(self) -> None:
        assert not hasattr(GROUP, "posted"), "this thread has begun a group of NCCL's and not ended it"
        GROUP.posted = []

    def _end_coalescing(self) -> Sent:
        posted = GROUP.__dict__.pop("posted", None)
        if not posted:
            raise RuntimeError("a group that was not begun, or of no transfer")
        return self._kernel(posted, "together")

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Sent | None:
        return self._post(Posted(tensors[0], is_received=False))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Sent | None:
        return self._post(Posted(tensors[0], is_received=True))

    def _post(self, posted: Posted) -> Sent | None:
        if self._is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        if not hasattr(GROUP, "posted"):
            return self._kernel([posted], "alone")
        GROUP.posted.append(posted)
        return None

    def _kernel(self, posted: Sequence[Posted], kind: str) -> Sent:
        device = posted[0].tensor.device
        gloo, stream = self._connection(kind, device)
        stream.wait_stream(MODULE.current_stream(device))
        for one in posted:
            assert one.tensor.device.type == KIND and one.tensor.is_contiguous()
            simulator.record_stream(one.tensor, stream.stream_id)
        given, made = ([one for one in posted if one.is_received == is_received] for is_received in (False, True))
        peer, num_given = self._peer, len(given)  # the kernel keeps no tensor: its device has their memory for it
        assert not (given and made), "a group of bpipe's sends, or receives"

        def kernel(aliases: Sequence[torch.Tensor]) -> None:
            try:
                with self.room:
                    works = [gloo.send([alias], peer, TAG) for alias in aliases[:num_given]]
                    works += [gloo.recv([alias], peer, TAG) for alias in aliases[num_given:]]
                    for work in works:
                        work.wait()
                    # A send ends only with its receive, as NCCL's of more bytes than its buffers have.
                    (gloo.recv if num_given else gloo.send)([torch.zeros(1, device="cpu")], peer, RECEIVED).wait()
            except RuntimeError:
                if not self._is_aborted:
                    raise
            finally:
                self._unfinished.pop()

        name = "ncclSend" if given else "ncclRecv"
        self._unfinished.append(name)
        simulator.enqueue(stream.stream_id, name, [one.tensor for one in given], [one.tensor for one in made], kernel)
        return Sent(stream.record_event(), device)

    def abort(self) -> None:
        """End its kernels: a wait of gloo's that runs into its timeout closes the connection."""
        self._is_aborted = True
        if self._unfinished:
            for gloo, _ in self._connections.values():
                with suppress(RuntimeError):
                    gloo.recv([torch.empty(1, device="cpu")], self._peer, NO_TAG).wait(timedelta(milliseconds=1))
        self._connections = {}


class CheckedGloo:
    """gloo, whose reads and writes of pinned memory are the host's."""

    def __init__(self, *how: Any) -> None:
        self._gloo = Gloo(*how)

    def send(self, tensors: Sequence[torch.Tensor], *where: int) -> Any:
        for tensor in tensors:
            simulator.host_touch(tensor, False, "gloo.send")
        return self._gloo.send(tensors, *where)

    def recv(self, tensors: Sequence[torch.Tensor], *where: int) -> Any:
        for tensor in tensors:
            simulator.host_touch(tensor, True, "gloo.recv")
        return self._gloo.recv(tensors, *where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


def install(*, nccl: bool, most_kernels: int = 0, lends: bool = True, copies: bool = False) -> None:
    """Make this process's pipelines talk over simulated NCCL, or over gloo through pinned memory that is checked.

    For a make that torch does not know, the simulated NCCL is what its package would register, of the rank's process group.

    Args:
        nccl: which.
        most_kernels: how many of NCCL's kernels fit on the device at a time; 0: any number.
        lends: whether acceptors may lend memory of their device, so that evictions take neither.
        copies: whether devices may copy messages between stages to each other, so that these take no NCCL.
    """
    os.environ["BPIPE_COPY_MESSAGES"] = str(int(copies))
    if not lends:
        os.environ["BPIPE_SHARED_MEMORY"] = "0"
    if not nccl:
        dist.ProcessGroupGloo = CheckedGloo  # type: ignore[misc, assignment]
        return
    SimulatedNCCL.room = threading.Semaphore(most_kernels) if most_kernels else nullcontext()
    if KIND == "cuda":
        from bpipe.comm.transport import c10d

        dist.ProcessGroupNCCL = SimulatedNCCL  # type: ignore[misc, assignment]
        c10d.backends_of = lambda group: {"cpu": "gloo", "cuda": "nccl"}
    else:
        from tests.accelerator import plugin

        plugin.join_again()
