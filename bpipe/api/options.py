"""What few people set: the options that schedules and planners take, in one object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from bpipe.checks import check_choice, check_count, check_positive, check_seconds, is_number
from bpipe.comm.health.watchdog import SLOW_S
from bpipe.errors import ConfigurationError

if TYPE_CHECKING:
    from bpipe.simulator.costs import Link
    from bpipe.slices.positions import Lengths

__all__ = ["Options"]

Measure = Literal["auto", "in_order"]
MOST_PARTS = 64  # of a microbatch: more parts save no more memory


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of schedules, `Balanced`, `auto`, `choose_plan` and `advise`: each takes those that concern it, and refuses others.

    Args:
        slots: of a schedule, the most microbatches per rank, one number or one for each rank (None: no limit); ranks with more
            evict. Default: no limit, but ceil((p+2)/2) for `BalancedOneFOneB`.
        target_chunk_spec: of a schedule, a `TensorChunkSpec` for the target, or a pytree of these, nested like it, with None for
            what each microbatch gets whole; default: cut along dimension 0, or along that of the inputs if this rank gets them,
            too, and the sizes leave no other reading.
        slice_lengths: of a schedule of slices, their lengths in positions or as shares of the sequence that add up to 1; or a
            function that returns the positions of each slice, given those of a microbatch, of which each may have another number;
            default: equal ones.
        args_slice_spec: of a schedule of slices, for each positional argument a `TensorChunkSpec` with the dimension of the
            positions, a `slices.UpTo`, None to give it to each slice whole, or a pytree of these; default: tensors are cut along
            dimension 1.
        kwargs_slice_spec: the same for each keyword argument.
        target_slice_spec: the same for the target, which is cut with `loss_of_slices` alone.
        output_slice_spec: of a schedule of slices, how the outputs of slices become those of microbatches: a `TensorChunkSpec` or
            one of torch's reducers for each value; default: tensors are concatenated along dimension 1. Then `output_merge_spec`
            merges microbatches.
        loss_of_slices: of a schedule of slices, whether `loss_fn` gets each slice by itself, and returns a pair: the sum of its
            losses, and their count, a number or a tensor without gradient. The loss of a sequence is the sum of the sums by the sum
            of the counts, or 0 if that is 0. Default: `loss_fn` gets whole sequences, whose outputs wait for it on the last stage.
        timeout_s: of a schedule, a `Stream` and `Routes`, the seconds that a rank waits for another one, in a transfer or at the
            start of a step, before the pipeline fails on all ranks, and after which a machine that says nothing counts as lost.
            Default: the process group's timeout, and 300 for `Routes`. For a `Stream` give more than the longest pause between two
            samples, because other ranks wait in `push` meanwhile; for `Routes` more than a step takes, and the start of all ranks.
        slow_s: of those that take `timeout_s`, the seconds in one wait after which the logger "bpipe" shows, once per step, what
            every rank is doing.
        transfers_at_once: of a schedule over NCCL, the most transfers that may be in flight on a device, each of which occupies
            some of its multiprocessors until the other rank joins it; any number from 1 on is free of deadlock.
        parts: of `Balanced`, `auto` and `choose_plan`, the most parts, up to 64, into which a microbatch may be cut, each of which
            can move by itself. Parts are whole storages, so there are never more parts than saved storages.
        measure: of `Balanced` and `auto`: "auto", or "in_order". `Balanced` makes no dry run then: the first step with inputs of a
            form measures. `auto` keeps the order of `start` in the step that measures, and in its plans. Such a step is balanced by
            count, as with budget=None, and needs the memory for that: with one stage per rank, at most ceil((p+2)/2) microbatches.
        margin: of `Balanced` and `auto`, for a stage whose microbatches took different memory in one step (stochastic depth, sizes
            that depend on data): plan for the largest one seen plus this share of its saved bytes, so that not each new largest one
            is measured again. Stages that never varied, and known `sizes`, get no margin.
        reserve_bytes: bytes of a device to set aside. Of `Balanced` and `auto`, with budget "auto": for memory that operations need
            while they run, such as the last stage's softmax, and for fragmentation; default: 1 GiB. Of `choose_plan` and `advise`:
            for what is not counted; default: 5%, which is 4 of 80 GiB.
        host: of `auto` and `choose_plan`, whether activations may go to the host's memory where no rank has room.
        host_link: of both, the link between a rank and its host's memory, in each direction.
        bytes_per_parameter: of `choose_plan` and `advise`, see `bpipe.estimate.state_bytes`; default: 18, or what was measured and
            Adam's states.
        effort: of `auto` and `choose_plan`, the items of work that run while orders are made to measure; 0: named schedules only.
            In `auto`, the other ranks wait meanwhile, so that it must end within `timeout_s`.
        seed: of `auto` and `choose_plan`, of the same search.
        progress: of `auto`, `choose_plan` and `advise`, called as `progress(done, total)` meanwhile; in `auto` on rank 0.

    Raises:
        ConfigurationError: a value is not valid.

    Example:
        >>> Options(timeout_s=600.0, parts=4)
        Options(timeout_s=600.0, parts=4)
    """

    slots: int | Sequence[int | None] | None = None
    target_chunk_spec: Any = None
    slice_lengths: Lengths | None = None
    args_slice_spec: tuple[Any, ...] | None = None
    kwargs_slice_spec: dict[str, Any] | None = None
    target_slice_spec: Any = None
    output_slice_spec: Any = None
    loss_of_slices: bool = False
    timeout_s: float | None = None
    slow_s: float = SLOW_S
    transfers_at_once: int = 8
    parts: int = 1
    measure: Measure = "auto"
    margin: float = 0.1
    reserve_bytes: int | None = None
    host: bool = False
    host_link: str | float | Link = "pcie4"
    bytes_per_parameter: float | None = None
    effort: int = 6_000_000
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        check_count("transfers_at_once", self.transfers_at_once)
        check_count("effort", self.effort, least=0)
        check_count("reserve_bytes", self.reserve_bytes, least=0, or_none=True)
        if self.bytes_per_parameter is not None:
            check_positive("bytes_per_parameter", self.bytes_per_parameter, most=1024)
        check_seconds("timeout_s", self.timeout_s, or_none=True)
        check_seconds("slow_s", self.slow_s)
        check_count("parts", self.parts, most=MOST_PARTS)
        for name in ("host", "loss_of_slices"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give True or False")
        check_choice("measure", self.measure, get_args(Measure))
        if not is_number(self.margin) or not 0 <= self.margin < float("inf"):
            raise ConfigurationError(f"margin={self.margin!r}: give a share of a stage's saved bytes, at least 0, such as 0.1")

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={getattr(self, name)!r}' for name in self.changed())})"

    def changed(self) -> list[str]:
        """Return the names of the options that do not have their default."""
        each = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return [name for name, value, default in each if value is not default and (default is None or value != default)]


SLICING = ("slice_lengths", "args_slice_spec", "kwargs_slice_spec", "target_slice_spec", "output_slice_spec", "loss_of_slices")
WAITS = ("timeout_s", "slow_s")
TRANSPORT = (*WAITS, "transfers_at_once")
RUNNING = (*TRANSPORT, "target_chunk_spec")
BALANCING = ("parts", "measure", "margin", "reserve_bytes")
SEARCHING = ("effort", "seed")
TO_HOST = ("host", "host_link")
ASIDE = ("reserve_bytes", "bytes_per_parameter")


def values_of(options: Options, names: Collection[str]) -> dict[str, Any]:
    """Return the values of some options by their names."""
    return {name: getattr(options, name) for name in names}


def options_for(taker: str, options: Options | None, taken: Collection[str]) -> Options:
    """Return the options of a schedule or a planner, or the default ones.

    Raises:
        ConfigurationError: these are no options, or some of them do not concern it.
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise ConfigurationError(f"options={options!r:.80}: give bpipe.Options, such as Options(timeout_s=600.0)")
    if others := [name for name in options.changed() if name not in taken]:
        raise ConfigurationError(
            f"{taker} does not use {', '.join(others)}, which options= sets: leave {'these' if others[1:] else 'it'} out there"
        )
    return options
