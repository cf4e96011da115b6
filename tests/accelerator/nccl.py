"""ProcessGroupNCCL's point-to-point rules on the simulated device, carried by gloo.

Connected when first used; a stream of its own; a kernel that blocks until its peer's runs; `wait` makes the current stream wait and
not the host; `record_stream` on what is carried.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.device import simulator

Gloo = dist.ProcessGroupGloo
TAG, NO_TAG = 7, 8  # of messages, and of none


class Options:
    """As ProcessGroupNCCL.Options."""

    _timeout = timedelta(minutes=5)


class Sent:
    """As the work that ProcessGroupNCCL returns."""

    def __init__(self, end: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> None:
        self._end, self._tensors = end, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream().wait_event(self._end)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._end.query()


class SimulatedNCCL:
    """As ProcessGroupNCCL, of two ranks."""

    Options = Options
    room: AbstractContextManager[object] = nullcontext()  # on the device, for its kernels

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._how, self._peer = (store, rank, size, options._timeout), 1 - rank
        self._gloo: Any = None
        self._unfinished: deque[str] = deque()  # kernels: as many names, which two threads may count
        self._is_aborted = False

    def _connect(self) -> None:
        if self._gloo is None:  # blocks the host until the other rank does so, as ncclCommInitRank
            self._gloo, self._stream = Gloo(*self._how), torch.cuda.Stream()

    def _post(self, name: str, tensor: torch.Tensor, carry: Callable[[Any, torch.Tensor], Any], *, writes: bool) -> Sent:
        self._connect()
        assert tensor.is_cuda and tensor.is_contiguous()
        self._stream.wait_stream(torch.cuda.current_stream())
        simulator.record_stream(tensor, self._stream.stream_id)
        gloo = self._gloo

        def kernel(aliases: Sequence[torch.Tensor]) -> None:
            try:
                with self.room:
                    carry(gloo, aliases[0])
            except RuntimeError:
                if not self._is_aborted:
                    raise
            finally:
                self._unfinished.pop()

        self._unfinished.append(name)
        given, made = ([], [tensor]) if writes else ([tensor], [])
        simulator.enqueue(self._stream.stream_id, name, given, made, kernel)
        return Sent(self._stream.record_event(), [tensor])

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Sent:
        return self._post("ncclSend", tensors[0], lambda gloo, tensor: gloo.send([tensor], peer, TAG).wait(), writes=False)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Sent:
        return self._post("ncclRecv", tensors[0], lambda gloo, tensor: gloo.recv([tensor], peer, TAG).wait(), writes=True)

    def abort(self) -> None:
        """End its kernels: a wait of gloo's that runs into its timeout closes the connection."""
        self._is_aborted = True
        if self._unfinished:
            with suppress(RuntimeError):
                self._gloo.recv([torch.empty(1, device="cpu")], self._peer, NO_TAG).wait(timedelta(milliseconds=1))
        self._gloo = None


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


def install(*, nccl: bool, most_kernels: int = 0) -> None:
    """Make this process's pipelines talk over simulated NCCL, or over gloo through pinned memory that is checked.

    Args:
        nccl: which.
        most_kernels: how many of NCCL's kernels fit on the device at a time; 0: any number.
    """
    if nccl:
        from bpipe.comm.c10d import C10dTransport

        SimulatedNCCL.room = threading.Semaphore(most_kernels) if most_kernels else nullcontext()
        dist.ProcessGroupNCCL = SimulatedNCCL  # type: ignore[misc, assignment]
        C10dTransport._has_nccl = lambda self: True  # type: ignore[method-assign]
    else:
        dist.ProcessGroupGloo = CheckedGloo  # type: ignore[misc, assignment]
