"""The cost model of a plan's actions: seconds of computations, saved and sent bytes, and the links between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from math import inf, isclose
from typing import Any, TypeVar

from bpipe.checks import check_length
from bpipe.errors import ConfigurationError
from bpipe.plan.action import BETWEEN_STAGES, COMPUTE, HOST, POSTS, Action, Op
from bpipe.plan.plan import Plan

__all__ = ["Costs", "Link"]

T = TypeVar("T", int, float)

Seconds = float | Sequence[float] | Sequence[Sequence[float]]
Bytes = int | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link between two ranks, for one direction: transfers take turns on it.

    Args:
        latency_s: seconds from the last byte's departure to its arrival.
        bytes_per_s: bandwidth; default: unlimited.

    Raises:
        ConfigurationError: a negative latency, or a bandwidth that is not positive.

    Example:
        >>> fast, slow = Link(bytes_per_s=450e9), Link(latency_s=5e-6, bytes_per_s=25e9)
        >>> costs = Costs(forward_s=0.02, saved_bytes=2**30, link=fast, cross_link=slow, nodes=[0, 0, 1, 1])
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

    Times may be one number, one for each stage, or for each stage a series with one for each microbatch. Bytes are one number or
    one for each stage, for one microbatch; a plan that has sizes of its own uses those instead. In a plan of slices all of these
    are of one slice, and a stage may have a series with one for each slice of a microbatch (or of times, for each slice of all);
    `of_slices` makes them from those of a microbatch.

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
        exchanged_bytes: bytes of a stage's gradients in an exchange, of twins or of stages that have weights in common.
        link: the link between ranks of one node.
        cross_link: the link between ranks of different nodes, as given by `nodes`; default: `link`.
        host_link: the link between a rank and its own host's memory, in each direction; default: `link`.
        nodes: the node of each rank; default: all on one.
        slowdown: how many times longer a computation takes while a transfer of its rank is in flight; 1: no slowdown.
        overlapped_share: the share of F + B that a plan's pairs of a forward and a backward gain by running side by side, such as
            the share in which each of them only communicates; 0: they run one after the other. A pair lasts as long as the
            longer of both at least.

    Raises:
        ConfigurationError: a negative number, a slowdown below 1, or a share above 1.

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
    exchanged_bytes: Bytes = 0
    link: Link = field(default_factory=Link)
    cross_link: Link | None = None
    host_link: Link | None = None
    nodes: Sequence[int] | None = None
    slowdown: float = 1.0
    overlapped_share: float = 0.0

    def __post_init__(self) -> None:
        for name in _TIMES:
            object.__setattr__(self, name, _checked(name, getattr(self, name), float, levels=2))
        for name in _BYTES:
            object.__setattr__(self, name, _checked(name, getattr(self, name), int, levels=1 if name in OF_STAGE else 2))
        if not 1 <= self.slowdown <= _MOST_SECONDS:
            raise ConfigurationError(f"slowdown={self.slowdown}: give a factor of at least 1")
        if not 0 <= self.overlapped_share <= 1:
            raise ConfigurationError(f"overlapped_share={self.overlapped_share}: give a share of F + B, from 0 to 1")

    def check(self, plan: Plan) -> None:
        """Raise unless each series fits a plan.

        Raises:
            ConfigurationError: a series has too few or too many entries, or a stage would move more than it saves.
        """
        for name in (*_TIMES, *_BYTES):
            value = getattr(self, name)
            if isinstance(value, tuple):
                check_length(name, value, plan.num_stages, "stages")
                for stage, series in enumerate(value):
                    if isinstance(series, tuple):
                        _check_series(f"{name}[{stage}]", series, plan, is_bytes=name in _BYTES)
        if self.nodes is not None:
            check_length("nodes", self.nodes, plan.num_ranks, "ranks")
        for stage, unit in product(range(plan.num_stages), plan.units.of(0)):
            saved, movable = self.saved(stage, unit), self.movable(stage, unit)
            if movable > saved:
                raise ConfigurationError(f"movable_bytes: stage {stage} would move {movable} bytes but saves only {saved}")

    def seconds(self, op: Op, stage: int, microbatch: int) -> float:
        """Return the seconds that a computation takes by itself.

        Raises:
            KeyError: `op` is not a computation.
        """
        given: Seconds | None = getattr(self, _TIME_OF[op])
        if given is not None:
            return _of_microbatch(given, stage, microbatch)
        if op is Op.B:
            return 2 * self.seconds(Op.F, stage, microbatch)
        backward_s = self.seconds(Op.B, stage, microbatch)
        return backward_s / 2 if op is Op.I else max(backward_s - self.seconds(Op.I, stage, microbatch), 0.0)

    def seconds_of(self, plan: Plan) -> Callable[[Op, int, int], float]:
        """Return a function that is as `seconds`, and faster for many computations of a plan."""
        if not self.are_of_stages:
            return self.seconds
        times = {(op, stage): self.seconds(op, stage, 0) for op in COMPUTE for stage in range(plan.num_stages)}
        return lambda op, stage, _: times[op, stage]

    @property
    def are_of_stages(self) -> bool:
        """Whether each computation of a stage takes as long, whichever its microbatch or slice."""
        series = [getattr(self, name) for name in _TIMES]
        return not any(isinstance(of_stage, tuple) for one in series if isinstance(one, tuple) for of_stage in one)

    def pair_s(self, forward: Action, backward: Action) -> float:
        """Return the seconds that a forward and a backward take which run side by side."""
        both = self.seconds(*forward.op_key), self.seconds(*backward.op_key)
        return max(*both, (1 - self.overlapped_share) * sum(both))

    def saved(self, stage: int, microbatch: int = 0) -> int:
        """Return the bytes that a microbatch keeps on a stage."""
        return _of_microbatch(self.saved_bytes, stage, microbatch)

    def movable(self, stage: int, microbatch: int = 0) -> int:
        """Return the bytes that an eviction of a stage's microbatch moves."""
        of_all = self.saved_bytes if self.movable_bytes is None else self.movable_bytes
        return _of_microbatch(of_all, stage, microbatch)

    def static(self, stage: int) -> int:
        """Return the bytes that a stage keeps throughout."""
        return _of_microbatch(self.static_bytes, stage, 0)

    def of_slices(self, plan: Plan, *, lengths: Sequence[float] | None = None, seconds: Sequence[float] | None = None) -> Costs:
        """Return the costs of a plan's slices, where these costs are those of its microbatches.

        Args:
            plan: gives the number of slices of a microbatch, k.
            lengths: the share of the sequence, and so of the bytes, in each slice; default: 1/k.
            seconds: the share of the time that each slice takes; default: 1/k, as slices that are cut by cost take.

        Raises:
            ConfigurationError: a series has not k shares, or they do not add up to 1.

        Example:
            >>> from bpipe.schedules import build
            >>> costs = Costs(forward_s=8.0, saved_bytes=100)
            >>> costs.of_slices(build("seq_1f1b", 2, 4, slices=2), lengths=[0.6, 0.4]).saved_bytes
            ((60, 40), (60, 40))
        """
        shares = {name: _shares(name, given, plan.units) for name, given in (("lengths", lengths), ("seconds", seconds))}
        cut: dict[str, Any] = {}
        for name in (*_TIMES, *_BYTES):
            value, of_what = getattr(self, name), "lengths" if name in _BYTES else "seconds"
            if plan.units.are_slices and value is not None and name not in OF_STAGE:
                cut[name] = [_cut(value, stage, shares[of_what], is_whole=name in _BYTES) for stage in range(plan.num_stages)]
        return replace(self, **cut)

    def carried(self, action: Action) -> int:
        """Return the bytes that a transfer carries, on either end; a message of skips counts like the output of their source.

        Raises:
            KeyError: the action posts no transfer.
        """
        op, stage, microbatch, part, _ = action
        if op in BETWEEN_STAGES:  # an output, or the gradient of one, which is its maker's either way
            maker = stage if op in (Op.SEND_F, Op.RECV_B) else part - 1 if part else stage - 1
            gradient_bytes = self.output_bytes if self.gradient_bytes is None else self.gradient_bytes
            return _of_microbatch(self.output_bytes if op in (Op.SEND_F, Op.RECV_F) else gradient_bytes, maker, microbatch)
        if op in POSTS:
            return self.movable(stage, microbatch)
        if op is Op.REDUCE_GRAD:
            return _of_microbatch(self.exchanged_bytes, stage, 0)
        raise KeyError(op)

    def link_between(self, src: int, dst: int) -> Link:
        """Return the link from one rank to another, or to or from its own host."""
        if HOST in (src, dst) and self.host_link is not None:
            return self.host_link
        is_across = self.nodes is not None and HOST not in (src, dst) and self.nodes[src] != self.nodes[dst]
        return self.cross_link if is_across and self.cross_link is not None else self.link


_TIME_OF = {Op.F: "forward_s", Op.R: "forward_s", Op.B: "backward_s", Op.I: "input_s", Op.W: "weight_s"}
_TIMES = tuple(dict.fromkeys(_TIME_OF.values()))
OF_STAGE = ("static_bytes", "exchanged_bytes")  # not of a microbatch
_BYTES = ("saved_bytes", "movable_bytes", "output_bytes", "gradient_bytes", *OF_STAGE)
_MOST_SECONDS = 1e9
_MOST_BYTES = 2**56  # sums of some thousands of them stay numbers of 64 bits


def _checked(name: str, value: Any, kind: type[int] | type[float], levels: int) -> Any:
    """Return a number, or tuples of numbers nested up to `levels` deep; arrays count as sequences."""
    if value is None and name not in ("forward_s", "saved_bytes", "output_bytes", *OF_STAGE):
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


def _check_series(name: str, series: Sequence[object], plan: Plan, *, is_bytes: bool) -> None:
    """Raise unless a series has an entry for each slice of a microbatch; or, if it is of times, for all of all microbatches."""
    units = plan.units
    if is_bytes and not units.are_slices:
        raise ConfigurationError(f"{name} has {len(series)} entries: give one number, because microbatches are not cut into slices")
    if is_bytes:
        check_length(name, series, units, "slices of a microbatch")
    elif not units.are_slices:
        check_length(name, series, plan.num_microbatches, "microbatches")
    elif len(series) != units:
        check_length(name, series, plan.num_units, f"slices, or of the {units} of a microbatch")


def _shares(name: str, given: Sequence[float] | None, k: int) -> list[float]:
    shares = [1 / k] * k if given is None else [float(share) for share in given]
    if len(shares) != k or not all(share >= 0 for share in shares) or not isclose(sum(shares), 1.0):
        raise ConfigurationError(f"{name}={given!r}: give {k} shares of at least 0, one for each slice, that add up to 1")
    return shares


def _cut(value: Any, stage: int, shares: Sequence[float], *, is_whole: bool) -> list[float]:
    """Return the costs of a stage's slices from those of its microbatches; whole ones add up to the microbatch's."""
    of_stage = value[stage] if isinstance(value, Sequence) else value
    ends = [0.0, *accumulate(shares)]
    cut: list[float] = []
    for amount in of_stage if isinstance(of_stage, Sequence) else (of_stage,):
        if is_whole:
            cut += [end - begin for begin, end in pairwise([round(amount * end) for end in ends])]
        else:
            cut += [amount * share for share in shares]
    return cut


def _of_microbatch(value: Sequence[Sequence[T] | T] | T, stage: int, microbatch: int) -> T:
    """Return a cost; a series that is shorter than the plan is for each slice of a microbatch."""
    if not isinstance(value, tuple):
        return value  # type: ignore[return-value]  # all sequences are tuples here, and to ask for a Sequence takes longer
    series: T | tuple[T, ...] = value[stage]
    return series[microbatch % len(series)] if isinstance(series, tuple) else series
