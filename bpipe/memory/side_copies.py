"""Copies that a device makes on a stream of its own, beside what the compute stream runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.device import Event, Stream, current_stream, on_stream

__all__: list[str] = []


def copy_beside(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Stream | None, device: torch.device
) -> Copied:
    """Copy tensors on a stream, behind what the current stream has been given; None copies at once.

    Copies on one stream follow each other, so a target may be the source of a later copy, and be overwritten by one after that.
    """
    if stream is not None:
        stream.wait_stream(current_stream(device))
    with on_stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        event = None if stream is None else stream.record_event()
    return Copied(event, device, [*sources, *targets])


class Copied:
    """Copies on a stream: the current stream waits for them, the host does not."""

    def __init__(self, event: Event | None, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self._device = event, device
        self._tensors: Sequence[torch.Tensor] = tensors

    def wait(self) -> None:
        """Make the current stream wait for the copies, so that later work may use their targets and free their sources."""
        if self._event is not None:
            current_stream(self._device).wait_event(self._event)
        self._tensors = ()

    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())
