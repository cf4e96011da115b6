"""The cost model of a plan's actions: seconds of computations, saved and sent bytes, and the links between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from bpipe.errors import ConfigurationError
from bpipe.plan.action import HOST, Action, Op
from bpipe.plan.plan import Plan

__all__ = ["Costs", "Link"]

T = TypeVar("T", int, float)

Seconds = float | Sequence[float] | Sequence[Sequence[float]]
Bytes = int | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link between two ranks, for one direction: transfers take turns on it.

    Args:
        latency_s: seconds from the last byte's departure to its arrival.
        bytes_per_s: bandwidth; default: unlimited.

    Raises:
        ConfigurationError: a negative latency, or a bandwidth that is not positive.
    """

    latency_s: float = 0.0
    bytes_per_s: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= _MOST_SECONDS:
            raise ConfigurationError(f"latency_s={self.latency_s}: give seconds, at least 0")
        if not self.bytes_per_s > 0:
            raise ConfigurationError(f"bytes_per_s={self.bytes_per_s}: give a positive number of bytes per second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A cost model. Costs that are not given are zero, except that a forward takes 1 second and a backward twice a forward.

    Times may be one number, one for each stage, or for each stage a series with one for each microbatch. Bytes are one number
    or one for each stage, for one microbatch; a plan that has sizes of its own uses those instead.

    Args:
        forward_s: seconds of F, and of R.
        backward_s: seconds of B; default: twice those of F.
        input_s: seconds of I, the backward for the input in a split backward; default: half of B.
        weight_s: seconds of W, the backward for the weights; default: B less I.
        saved_bytes: bytes that a microbatch keeps on a stage from its forward to its backward.
        movable_bytes: how many of them an eviction moves; default: all.
        output_bytes: bytes that a stage's forward sends to the next stage.
        gradient_bytes: bytes that the next stage's backward sends back across the same boundary; default: `output_bytes`.
        static_bytes: bytes that a stage keeps throughout: parameters, gradients, optimizer states, buffers.
        link: the link between ranks of one node.
        cross_link: the link between ranks of different nodes, as given by `nodes`; default: `link`.
        host_link: the link between a rank and its own host's memory, in each direction; default: `link`.
        nodes: the node of each rank; default: all on one.
        slowdown: how many times longer a computation takes while a transfer of its rank is in flight; 1: no slowdown.

    Raises:
        ConfigurationError: a negative number, or a slowdown below 1.

    Example:
        >>> costs = Costs(forward_s=0.1, saved_bytes=2**30, link=Link(bytes_per_s=20e9))
        >>> costs.seconds(Op.B, stage=0, microbatch=0)
        0.2
    """

    forward_s: Seconds = 1.0
    backward_s: Seconds | None = None
    input_s: Seconds | None = None
    weight_s: Seconds | None = None
    saved_bytes: Bytes = 0
    movable_bytes: Bytes | None = None
    output_bytes: Bytes = 0
    gradient_bytes: Bytes | None = None
    static_bytes: Bytes = 0
    link: Link = field(default_factory=Link)
    cross_link: Link | None = None
    host_link: Link | None = None
    nodes: Sequence[int] | None = None
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        for name in _TIMES:
            object.__setattr__(self, name, _checked(name, getattr(self, name), float, levels=2))
        for name in _BYTES:
            object.__setattr__(self, name, _checked(name, getattr(self, name), int, levels=1))
        if not 1 <= self.slowdown <= _MOST_SECONDS:
            raise ConfigurationError(f"slowdown={self.slowdown}: give a factor of at least 1")

    def check(self, plan: Plan) -> None:
        """Raise unless each series fits a plan.

        Raises:
            ConfigurationError: a series has too few or too many entries, or a stage would move more than it saves.
        """
        for name in (*_TIMES, *_BYTES):
            value = getattr(self, name)
            if isinstance(value, tuple):
                _check_length(name, value, plan.num_stages, "stages")
                for stage, series in enumerate(value):
                    if isinstance(series, tuple):
                        _check_length(f"{name}[{stage}]", series, plan.num_microbatches, "microbatches")
        if self.nodes is not None:
            _check_length("nodes", self.nodes, plan.num_ranks, "ranks")
        for stage in range(plan.num_stages):
            if self.movable(stage) > self.saved(stage):
                raise ConfigurationError(
                    f"movable_bytes: stage {stage} would move {self.movable(stage)} bytes but saves only {self.saved(stage)}"
                )

    def seconds(self, op: Op, stage: int, microbatch: int) -> float:
        """Return the seconds that a computation takes by itself.

        Raises:
            KeyError: `op` is not a computation.
        """
        if op is Op.F or op is Op.R:
            return _of_microbatch(self.forward_s, stage, microbatch)
        backward = 2 * self.seconds(Op.F, stage, microbatch)
        if self.backward_s is not None:
            backward = _of_microbatch(self.backward_s, stage, microbatch)
        if op is Op.B:
            return backward
        half = backward / 2 if self.input_s is None else _of_microbatch(self.input_s, stage, microbatch)
        if op is Op.I:
            return half
        if op is Op.W:
            return max(backward - half, 0.0) if self.weight_s is None else _of_microbatch(self.weight_s, stage, microbatch)
        raise KeyError(op)

    def saved(self, stage: int) -> int:
        """Return the bytes that a microbatch keeps on a stage."""
        return _of_stage(self.saved_bytes, stage)

    def movable(self, stage: int) -> int:
        """Return the bytes that an eviction of a stage's microbatch moves."""
        return self.saved(stage) if self.movable_bytes is None else _of_stage(self.movable_bytes, stage)

    def static(self, stage: int) -> int:
        """Return the bytes that a stage keeps throughout."""
        return _of_stage(self.static_bytes, stage)

    def carried(self, action: Action) -> int:
        """Return the bytes that a transfer carries, on either end.

        Raises:
            KeyError: the action posts no transfer.
        """
        op, stage = action.op, action.stage
        if op in (Op.SEND_F, Op.RECV_F):
            return _of_stage(self.output_bytes, stage - (op is Op.RECV_F))
        if op in (Op.SEND_B, Op.RECV_B):
            sizes = self.output_bytes if self.gradient_bytes is None else self.gradient_bytes
            return _of_stage(sizes, stage - (op is Op.SEND_B))
        if op in (Op.EVICT, Op.ACCEPT, Op.LOAD, Op.RETURN):
            return self.movable(stage)
        raise KeyError(op)

    def link_between(self, src: int, dst: int) -> Link:
        """Return the link from one rank to another, or to or from its own host."""
        if HOST in (src, dst) and self.host_link is not None:
            return self.host_link
        is_across = self.nodes is not None and HOST not in (src, dst) and self.nodes[src] != self.nodes[dst]
        return self.cross_link if is_across and self.cross_link is not None else self.link


_TIMES = ("forward_s", "backward_s", "input_s", "weight_s")
_BYTES = ("saved_bytes", "movable_bytes", "output_bytes", "gradient_bytes", "static_bytes")
_MOST_SECONDS = 1e9
_MOST_BYTES = 2**56  # sums of some thousands of them stay numbers of 64 bits


def _checked(name: str, value: Any, kind: type[int] | type[float], levels: int) -> Any:
    """Return a number, or tuples of numbers nested up to `levels` deep; arrays count as sequences."""
    if value is None and name not in ("forward_s", "saved_bytes", "output_bytes", "static_bytes"):
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and levels:
        return tuple(_checked(name, part, kind, levels - 1) for part in value)
    is_number = isinstance(value, (int, float)) and 0 <= value <= (_MOST_BYTES if kind is int else _MOST_SECONDS)
    if not is_number or kind(value) != value:
        what = "whole bytes" if kind is int else "seconds"
        raise ConfigurationError(f"{name}={value!r}: give {what} of at least 0, one number or one for each stage")
    return kind(value)


def _check_length(name: str, series: Sequence[object], expected: int, what: str) -> None:
    if len(series) != expected:
        raise ConfigurationError(f"{name} has {len(series)} entries: give one number, or one for each of {expected} {what}")


def _of_stage(value: Sequence[T] | T, stage: int) -> T:
    return value[stage] if isinstance(value, Sequence) else value


def _of_microbatch(value: Seconds, stage: int, microbatch: int) -> float:
    series = value[stage] if isinstance(value, Sequence) else value
    return series[microbatch] if isinstance(series, Sequence) else series
