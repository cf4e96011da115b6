"""Messages in 8 bits: each block of elements as whole numbers from -127 to 127, and one scale, as SWARM sends them.

An element differs from what was sent by at most the block's largest absolute value / 254, half a step, but for the rounding of its
own dtype. A block with a NaN or an infinity arrives as NaN, so that it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bpipe.comm.transport.base import Transfer
from bpipe.comm.transport.c10d import C10dTransport
from bpipe.plan.action import Channel, Purpose

__all__: list[str] = []

STEPS = 127  # on each side of 0
COMPRESSED = frozenset({Purpose.FORWARD, Purpose.BACKWARD})


def encode(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Return a tensor of floats as 8-bit numbers and the scale of each block of elements.

    Example:
        >>> [each.tolist() for each in encode(torch.tensor([1.0, -0.5, 0.0, 127.0, 4.0]), block=3)]
        [[127, -64, 0, 127, 4], [0.007874015718698502, 1.0]]
    """
    codes, scales = _empty(tensor, block)
    rows = _padded(tensor.detach().reshape(-1).to(scales.dtype), block)
    torch.div(rows.abs().amax(1), STEPS, out=scales)
    steps = rows / torch.where(scales == 0, 1, scales)[:, None]
    codes.copy_(steps.nan_to_num(0).round().clamp_(-STEPS, STEPS).reshape(-1)[: len(codes)])
    return [codes, scales]


def decode(codes: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Write what `encode` made of a tensor into one of its shape."""
    most = torch.finfo(scales.dtype).max  # which STEPS * scale may exceed by its rounding
    rows = (_padded(codes.to(scales.dtype), block) * scales[:, None]).clamp_(-most, most)
    out.copy_(rows.reshape(-1)[: len(codes)].view(out.shape))


def _empty(tensor: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Return tensors that hold another one encoded: the scales of float64 are as exact."""
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    codes = torch.empty(tensor.numel(), dtype=torch.int8, device=tensor.device)
    return [codes, torch.empty(math.ceil(tensor.numel() / block), dtype=dtype, device=tensor.device)]


def _padded(flat: torch.Tensor, block: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


def _is_encoded(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


class CompressedTransport(C10dTransport):
    """A transport whose messages between stages carry floats in 8 bits; other tensors, gradients of weights and states are exact.

    Args:
        block: how many elements have a scale in common.
        given: as for `C10dTransport`.
    """

    def __init__(self, *given: Any, block: int, **how: Any) -> None:
        super().__init__(*given, **how)
        self._block = block

    def send(self, channel: Channel, tensors: Sequence[torch.Tensor], *given: Any, **how: Any) -> Transfer:
        if channel.purpose in COMPRESSED:
            tensors = [part for one in tensors for part in (encode(one, self._block) if _is_encoded(one) else [one])]
        return super().send(channel, tensors, *given, **how)

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], **how: Any) -> Transfer:
        if channel.purpose not in COMPRESSED:
            return super().receive(channel, tensors, **how)
        parts = [_empty(one, self._block) if _is_encoded(one) else [one] for one in tensors]
        arriving = super().receive(channel, [part for one in parts for part in one], **how)
        return _Decoded(arriving, [(one, part) for one, part in zip(tensors, parts) if _is_encoded(one)], self._block)


class _Decoded:
    """A receive, after which what has arrived is decoded."""

    def __init__(self, arriving: Transfer, parts: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]], block: int) -> None:
        self._arriving, self._parts, self._block = arriving, parts, block

    def wait(self) -> bytes | None:
        note = self._arriving.wait()
        with torch.no_grad():
            for tensor, (codes, scales) in self._parts:
                decode(codes, scales, self._block, tensor)
        return note

    def has_come(self) -> bool | None:
        return self._arriving.has_come()
