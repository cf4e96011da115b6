"""Transfers of a device's tensors over gloo, through pinned host memory and on separate streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch

from bpipe.comm.transport.base import Transfer
from bpipe.comm.transport.worker import Worker
from bpipe.comm.transport.works import transferring, wait_for
from bpipe.device import Event, Streams, current, current_stream, on_stream, reached
from bpipe.schedules import Channel

__all__: list[str] = []


class Staging:
    """The staged transfers of one rank.

    A channel's transfers run one after the other in the channel's own thread, because gloo may read the host's copy only once
    the device has written it, and on the channel's own stream. The thread runs none of the user's code.

    Args:
        device: the device of the tensors.
        streams: the streams of the pipeline.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device, self._streams = device, streams
        self._workers: dict[Channel, Worker] = {}

    def _submit(self, channel: Channel, job: Callable[[], Event]) -> Future[Event]:
        if channel not in self._workers:
            self._workers[channel] = Worker(f"bpipe-{channel.purpose.value}")

        def on_device() -> Event:
            with current(self._device):
                return job()

        return self._workers[channel].submit(on_device)

    def send(
        self, channel: Channel, tensors: Sequence[torch.Tensor], works: list[Any], post: Callable[[torch.Tensor], Any]
    ) -> Transfer:
        stream: Any = self._streams.of(channel, self._device)
        stream.wait_stream(current_stream(self._device))
        with on_stream(stream):
            copies = [
                torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors
            ]
            copied = reached(self._device)

        def job() -> Event:
            copied.synchronize()
            for work in [*works, *map(post, copies)]:
                wait_for(work)
            return copied

        return _Staged(self._submit(channel, job), self._device, tensors)

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], post: Callable[[torch.Tensor], Any]) -> Transfer:
        allocated, stream = reached(self._device), self._streams.of(channel, self._device)

        def job() -> Event:
            copies = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors]
            for work in [post(copy) for copy in copies]:
                wait_for(work)
            with on_stream(stream):
                current_stream(self._device).wait_event(allocated)
                for tensor, copy in zip(tensors, copies):
                    tensor.copy_(copy, non_blocking=True)
                return reached(self._device)

        return _Staged(self._submit(channel, job), self._device, tensors)

    def settle(self, most_s: float) -> None:
        """Wait until all jobs are done, so that none of them queues another copy, but at most for `most_s` seconds."""
        wait([worker.submit(_nothing) for worker in self._workers.values()], most_s)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def _nothing() -> None:
    """Do nothing, as the last job of a worker: when it is done, all jobs before it are done."""


class _Staged:
    """A transfer through pinned memory: the host waits for the network, and the current stream for the copy."""

    def __init__(self, future: Future[Event], device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._future, self._device = future, device
        self._tensors: Sequence[torch.Tensor] = tensors

    @transferring
    def wait(self) -> None:
        copied = self._future.result()
        current_stream(self._device).wait_event(copied)
        self._tensors = ()

    def has_come(self) -> bool:
        return self._future.done()
