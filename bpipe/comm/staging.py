"""CUDA tensors over gloo: through pinned host memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from bpipe.comm.transport import Transfer
from bpipe.comm.worker import Worker
from bpipe.comm.works import transferring, wait_for
from bpipe.schedules import Channel

__all__: list[str] = []


class Staging:
    """The transfers of one rank.

    A channel's transfers run one after the other in its own thread, because gloo may read the host's copy only once the
    device has written it. The thread runs none of the user's code.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._workers: dict[Channel, Worker] = {}

    def _submit(self, channel: Channel, job: Callable[[], torch.cuda.Event]) -> Future[torch.cuda.Event]:
        if channel not in self._workers:
            self._workers[channel] = Worker(f"bpipe-{channel.purpose.value}")
        return self._workers[channel].submit(job)

    def send(
        self, channel: Channel, tensors: Sequence[torch.Tensor], works: list[Any], post: Callable[[torch.Tensor], Any]
    ) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            copied: torch.cuda.Event = self._stream.record_event()

        def job() -> torch.cuda.Event:
            copied.synchronize()
            for work in [*works, *map(post, copies)]:
                wait_for(work)
            return copied

        return _Staged(self._submit(channel, job), self._device, tensors)

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], post: Callable[[torch.Tensor], Any]) -> Transfer:
        allocated = torch.cuda.current_stream(self._device).record_event()

        def job() -> torch.cuda.Event:
            copies = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors]
            for work in [post(copy) for copy in copies]:
                wait_for(work)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(allocated)
                for tensor, copy in zip(tensors, copies):
                    tensor.copy_(copy, non_blocking=True)
                arrived: torch.cuda.Event = self._stream.record_event()
            return arrived

        return _Staged(self._submit(channel, job), self._device, tensors)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


class _Staged:
    """A transfer through pinned memory: the host waits for the network, the current stream for the copy."""

    def __init__(self, future: Future[torch.cuda.Event], device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._future, self._device = future, device
        self._tensors: Sequence[torch.Tensor] = tensors

    @transferring
    def wait(self) -> None:
        copied = self._future.result()
        torch.cuda.current_stream(self._device).wait_event(copied)
        self._tensors = ()
