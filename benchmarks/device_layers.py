"""Layers that compute really and take a device's time: a forward or a backward sleeps for what its real work leaves of it."""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from bpipe.partition import LayerCost

SCHED_SETATTR, ATTR_SIZE = 314, 56  # the number of the system call on x86-64, and the bytes that it takes
SLICE_NS = 100_000
MOST_LATE_S = 0.005  # by which a gradient of parameters may begin and yet follow the one before


class OnDevice(nn.Module):
    """A layer on a device that takes its time.

    Gradients of matrices sleep for their shares of the time of those of parameters, wherever they are computed: in a whole backward
    or in the second half of one that is split: so each half takes what a device takes for it.

    Args:
        layer: what really runs, with tensors as arguments.
        cost: the device's seconds.
    """

    def __init__(self, layer: nn.Module, cost: LayerCost) -> None:
        super().__init__()
        self.layer = layer
        self._forward_s, self._input_s = cost.forward_s, cost.input_s or 0.0
        matrices = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.ndim > 1}
        weight_s = cost.backward_s - self._input_s
        self._weight_s = {name: weight_s * size / sum(matrices.values()) for name, size in matrices.items()}

    def forward(self, *inputs: torch.Tensor) -> Any:
        begin, backward = time.perf_counter(), _Backward()
        weights = {name: self.layer.get_parameter(name) for name in self._weight_s}
        slow = {name: _Weight.apply(one, backward, self._weight_s[name]) for name, one in weights.items()}
        has_gradient = any(one.requires_grad for one in inputs)
        if has_gradient:
            inputs = _Enter.apply(backward, self._input_s, *inputs)
        output = functional_call(self.layer, slow, inputs)
        if has_gradient:
            output = _Leave.apply(backward, output)
        sleep_until(begin + self._forward_s)
        return output


class _Backward:
    """The backward of a layer for one microbatch, from its output to its input."""

    begin_s: float | None = None  # None: it does not run, or computes no gradient of an input
    weights_s = 0.0  # for gradients of parameters that it has computed meanwhile


class _Leave(torch.autograd.Function):
    """The identity, at the output: a backward begins here."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, output: torch.Tensor) -> torch.Tensor:
        ctx.of = backward
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.of.begin_s, ctx.of.weights_s = time.perf_counter(), 0.0
        return None, gradient


class _Enter(torch.autograd.Function):
    """The identity, at the inputs: a backward ends here."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, input_s: float, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.of, ctx.input_s = backward, input_s
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.of.begin_s is not None, "what ends has begun"
        sleep_until(ctx.of.begin_s + ctx.input_s + ctx.of.weights_s)
        ctx.of.begin_s = None
        return (None, None, *gradients)


class _Weight(torch.autograd.Function):
    """The identity, at a matrix: its gradient takes its time when it is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward: _Backward, seconds: float) -> torch.Tensor:
        ctx.of, ctx.seconds = backward, seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.of.begin_s is not None:
            ctx.of.weights_s += ctx.seconds
            return gradient, None, None
        now = time.perf_counter()
        begin_s = now - (time.thread_time() - _Latest.worked_s)  # nothing marks it: since the latest sleep, all work was for this
        if _Latest.was_of_weights and now < _Latest.due_s + MOST_LATE_S:
            begin_s = _Latest.due_s
        sleep_until(begin_s + ctx.seconds)
        _Latest.was_of_weights = True
        return gradient, None, None


class _Latest:
    """The latest sleep of the thread that computes, one in each process: when it was due to end, and how long it had worked."""

    due_s = 0.0
    worked_s = 0.0
    was_of_weights = False


def sleep_until(due_s: float) -> None:
    """Sleep until a time of `perf_counter`, or not at all."""
    time.sleep(max(0.0, due_s - time.perf_counter()))
    _Latest.due_s, _Latest.worked_s, _Latest.was_of_weights = due_s, time.thread_time(), False


def wake_in_time() -> None:
    """Ask Linux for short slices for this thread and those that it starts, so that their sleeps end in time on a busy machine.

    Otherwise a thread that wakes waits until others have used up their slices, some milliseconds each. Linux before 6.12 knows only
    slices of one length, and does nothing.
    """
    if sys.platform == "linux" and sys.maxsize > 2**32:
        attributes = struct.pack("IIQiIQQQII", ATTR_SIZE, 0, 0, 0, 0, SLICE_NS, 0, 0, 0, 0)  # the usual policy, with this slice
        ctypes.CDLL(None).syscall(SCHED_SETATTR, 0, attributes, 0)
