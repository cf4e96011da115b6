"""How a schedule cuts microbatches into slices, and puts their outputs and losses together again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from bpipe.comm.health.agreement import RoomRecord, StepRecord, unlike
from bpipe.engine.run import MakeConvention
from bpipe.errors import AgreementError, ConfigurationError
from bpipe.model import merging
from bpipe.model.call import CutBatch
from bpipe.model.chunks import check_joinable, join
from bpipe.model.merging import join_values, merge
from bpipe.model.specs import check_specs
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.plan.plan import Plan
from bpipe.session.context import Cutter
from bpipe.slices.past_states import PastStates
from bpipe.slices.positions import SEQUENCE, Lengths, SliceCutting, UpTo, rule_of
from bpipe.slices.protocol import check_takes_slices, takes_past

__all__: list[str] = []

ADVICE = merging.ADVICE.replace("output_merge_spec", "output_slice_spec")
ADVICE_FOR_LOSS = (
    "loss_fn gets the outputs of a sequence's slices together: give an output_slice_spec that says how they are joined, or compute "
    "the losses of slices one by one, with options=bpipe.Options(loss_of_slices=True) and a loss_fn that returns the sum of a "
    "slice's losses and their count"
)
UNKNOWN = 0  # the length of a slice that this rank has nothing of


@dataclass(frozen=True, slots=True)
class SliceLengths(RoomRecord):
    """The lengths of all slices of a step, in positions: 0 where a rank has nothing of a microbatch, () if it cuts none."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def agreed(cls, records: Sequence[StepRecord]) -> tuple[int, ...]:
        """Return the lengths that all ranks know together; () if no rank cuts anything."""
        return tuple(map(max, zip(*{one.lengths for one in cls.of(records) if one.lengths}, strict=True)))

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        given, m = [one.lengths for one in cls.of(records)], records[0].num_microbatches
        if found := unlike([*map(len, given)]):
            raise AgreementError(
                "ranks {} and {} cut the {m} microbatches of this step into {} and {} slices: give all ranks the same number of "
                "slices".format(*found, m=m)
            )
        agreed = cls.agreed(records)
        each = len(agreed) // max(m, 1)  # slices in a microbatch
        for number in () if 0 not in agreed and all(one in ((), agreed) for one in given) else range(m):
            _check_slices_of(number, [lengths[number * each :][:each] for lengths in given])


def _check_slices_of(microbatch: int, slices: Sequence[Sequence[int]]) -> None:
    """Raise if two ranks cut a microbatch at different places, or if none has a sequence.

    Args:
        microbatch: its number.
        slices: by rank, how long the slices are: 0 where the rank has nothing of the microbatch, () if it cuts none.
    """
    known = [lengths if any(lengths) else () for lengths in slices]
    if not any(known):
        raise AgreementError(
            f"microbatch {microbatch} of this step has no sequence that could be cut into slices, and others have one: give it "
            "an input whose dimension 1 are the positions, or a slice spec that says which dimension they are"
        )
    if found := unlike(known):
        first, rank, expected, lengths = found
        at = next(i for i, (one, other) in enumerate(zip(lengths, expected)) if one != other)
        raise AgreementError(
            f"ranks {first} and {rank} cut microbatch {microbatch} of this step at different places: their slices have "
            f"{_shown(expected, at)} and {_shown(lengths, at)} positions. Give all ranks the same slice_lengths, and inputs "
            "and targets of as many positions (or a slice spec for a value that is not along the sequence)"
        )


def _shown(lengths: Sequence[int], at: int) -> str:
    """Return a few of the lengths of slices, around one of them."""
    begin, end = max(0, at - 2), at + 6
    return f"{'... ' if begin else ''}{', '.join(map(str, lengths[begin:end]))}{' ...' if end < len(lengths) else ''}"


class Slicing(Cutter):
    """Cut microbatches into k slices, by the lengths and the specs that `Options` describes."""

    is_whole = False

    def __init__(
        self,
        num_slices: int,
        lengths: Lengths | None = None,
        args_spec: Any = None,
        kwargs_spec: Any = None,
        target_spec: Any = None,
        output_spec: Any = None,
        sums_losses: bool = False,
    ) -> None:
        for spec, name in ((args_spec, "args"), (kwargs_spec, "kwargs"), (target_spec, "target")):
            check_specs(spec, f"{name}_slice_spec", others=(UpTo,))
        check_specs(output_spec, "output_slice_spec", may_reduce=True)
        self.num_slices = num_slices
        self._lengths_of = rule_of(lengths, num_slices)
        self._specs, self._output_spec = (args_spec, kwargs_spec, target_spec), output_spec
        self._makeups: dict[int, int] = {}  # of the stages, as they were checked
        self._lengths: Sequence[int] = ()  # of all slices of the latest step, in positions; () if no rank has cut anything
        self._sums_losses = sums_losses
        if target_spec is not None and not sums_losses:
            raise ConfigurationError(
                "target_slice_spec cuts targets for losses of slices, and a loss of whole sequences gets them as they are: leave "
                "it out, or give loss_of_slices=True, too"
            )

    def check(self, stages: Mapping[int, PipelineStage], parts: Mapping[int, ModuleSnapshot]) -> None:
        """Check again the modules that have changed since the step before."""
        for index, part in parts.items():
            if self._makeups.get(index) != part.makeup:
                check_takes_slices(stages[index].submod, f"stage {index}")
                self._makeups[index] = part.makeup

    def agreed(self, records: Sequence[StepRecord]) -> None:
        """Take the lengths from the records of all ranks, because only that of the first stage may have got a sequence."""
        self._lengths = SliceLengths.agreed(records)

    def conventions(self) -> Sequence[MakeConvention]:
        join = partial(self._joined, join=_join_for_loss, advice=ADVICE_FOR_LOSS)
        return [partial(PastStates, None if self._sums_losses else join)]

    def cut(self, given: CutBatch) -> CutBatch:
        """Cut all microbatches of a call, each by its own number of positions; a ConfigurationError names the microbatch."""
        found = []
        for number in range(len(given.args)):
            try:
                found.append(self._cut(given, number))
            except ConfigurationError as error:
                raise ConfigurationError(f"microbatch {number}: {error}") from error
        args, kwargs, targets, lengths = (list(chain.from_iterable(column)) for column in zip(*found))
        records = (SliceLengths(tuple(lengths) if any(lengths) else ()),)
        return CutBatch(args, kwargs, targets if given.targets is not None else None, False, records)

    def _cut(self, given: CutBatch, number: int) -> Sequence[Sequence[Any]]:
        """Return the args, kwargs, targets and lengths of one microbatch's slices; for a loss of whole sequences, whole targets."""
        args_spec, kwargs_spec, target_spec = self._specs
        cutting = SliceCutting(self._lengths_of, self.num_slices, len(given.args))
        args = cutting.split(given.args[number], args_spec, "args")
        kwargs = cutting.split(given.kwargs[number], kwargs_spec, "kwargs")
        known, targets = cutting.lengths, list[Any]()
        if given.targets is not None:
            target = given.targets[number]
            targets = cutting.split(target, target_spec, "the target") if self._sums_losses else [target] * self.num_slices
        cutting.finish()
        known = cutting.lengths if target_spec is None else known
        return args, kwargs, targets, known or [UNKNOWN] * self.num_slices

    def merged(self, outputs: Mapping[int, Any]) -> list[Any]:
        if self.num_slices == 1:
            return list(outputs.values())
        slices = [list(outputs)[i : i + self.num_slices] for i in range(0, len(outputs), self.num_slices)]
        return [self._joined([outputs[one] for one in each], each[0], join=_join) for each in slices]

    def _joined(self, outputs: Sequence[Any], first: int, *, join: Callable[..., Any], advice: str = ADVICE) -> Any:
        """Return the output of a sequence, given those of its slices and the number of the first one."""
        of_slices = self._lengths[first : first + self.num_slices]
        return merge(outputs, self._output_spec, join_leaves=partial(join, lengths=of_slices), advice=advice)

    def expected(self, output: Any) -> list[Any]:
        """Return one output of a microbatch, or all if their sequences have different lengths: tensors without content."""
        if self.num_slices == 1:
            return [output]
        merged, lengths = partial(merge, [output], self._output_spec, advice=ADVICE), self._lengths
        first = merged(join_leaves=partial(_join, lengths=lengths[:1]))
        sizes = [sum(lengths[i : i + self.num_slices]) for i in range(0, len(lengths), self.num_slices)]
        return [merged(join_leaves=partial(_outline, size=size)) for size in sizes] if len(set(sizes)) > 1 else [first]


def cutter_for(
    plan: Plan, stages: Mapping[int, PipelineStage], options: Collection[Any], *, is_given: bool, may_slice: bool
) -> Cutter:
    """Return what cuts microbatches into a plan's slices; it leaves them whole, if stages take them so.

    Args:
        options: the arguments of `Slicing` that users give.
        is_given: whether they gave one.
        may_slice: whether the schedule is one of slices, of which a plan may have one.

    Raises:
        ConfigurationError: stages take no slices, or an option was given for none.
    """
    if may_slice and (plan.slices > 1 or any(takes_past(stage.submod) for stage in stages.values())):
        for stage in stages.values():
            check_takes_slices(stage.submod, f"stage {stage.stage_index}")
        return Slicing(plan.slices, *options)
    if is_given:
        more = ", or say how many slices there are, by slices=k or, for FromPlan, by a plan that was built with it"
        takers, more = ("the stages take no slices", "") if may_slice else (f"{plan.name} takes whole microbatches here", more)
        raise ConfigurationError(f"{takers}, but slice_lengths, a slice spec or loss_of_slices was given: leave these out{more}")
    return Cutter()


def _outline(parts: Sequence[Any], spec: Any, *, size: int) -> Any:
    """Return what `_join` will make of the values at one place, for a sequence of so many positions."""
    joined = _join(parts, spec)
    if hasattr(spec, "reduce_fn") or not isinstance(joined, torch.Tensor):
        return joined
    shape = list(joined.shape)
    shape[getattr(spec, "split_dim", SEQUENCE)] = size
    return torch.empty(shape, dtype=joined.dtype, device="meta")


def _join(parts: Sequence[Any], spec: Any, *, lengths: Sequence[int] = ()) -> Any:
    """Join the values at one place in the outputs of a sequence's slices."""
    if hasattr(spec, "reduce_fn") or not isinstance(parts[0], torch.Tensor):
        return join_values(parts, spec)
    dim = getattr(spec, "split_dim", SEQUENCE)
    shapes = [list(part.shape) for part in parts]
    if any(not -part.ndim <= dim < part.ndim for part in parts):
        raise TypeError(f"slices returned tensors of the shapes {shapes}, which have no dimension {dim} of positions")
    check_joinable(parts[0], dim)
    if lengths and [part.shape[dim] for part in parts] != list(lengths):
        raise TypeError(
            f"slices of {list(lengths)} positions returned tensors of the shapes {shapes}, not with these in dimension {dim}"
        )
    return join(parts, dim)


def _join_for_loss(parts: Sequence[Any], spec: Any, *, lengths: Sequence[int]) -> Any:
    """Join values that the loss of a sequence gets; a number of each slice may be a count, a mean or a setting."""
    if type(parts[0]) in (int, float) and not hasattr(spec, "reduce_fn"):
        raise TypeError(f"slices returned the numbers {list(parts)}")
    return _join(parts, spec, lengths=lengths)
