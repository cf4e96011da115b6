"""Measure one stage alone on slices of a sequence: several lengths, after several contexts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from bpipe.backward.autograd import edges_of, enter, run_backward
from bpipe.cleanup import note
from bpipe.comm.wire.message import flatten_message, unflatten_message
from bpipe.device import name_of
from bpipe.engine.microbatch_state import MicrobatchStates
from bpipe.errors import ConfigurationError, StageError
from bpipe.estimate.bench import Bench, Forward, Loss, check_measurable, device_of, is_differentiable, seems_first
from bpipe.estimate.checks import check_count
from bpipe.estimate.slice_profile import SliceMeasurement, SliceProfile
from bpipe.model.preserve_state import preserved_state
from bpipe.model.specs import check_specs
from bpipe.slices.positions import SliceCutting, UpTo
from bpipe.slices.protocol import check_takes_slices
from bpipe.slices.states import Sequences, past_of

__all__ = ["profile_slices"]

SHORTEST = 16  # of the lengths that are measured by default: this part of the sequence


def profile_slices(
    stage_module: torch.nn.Module,
    example: Any,
    lengths: Sequence[int] | None = None,
    *,
    contexts: Sequence[int] | None = None,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_first: bool | None = None,
    args_slice_spec: tuple[Any, ...] | None = None,
    target_slice_spec: Any = None,
    repeats: int = 5,
) -> SliceProfile:
    """Run a stage alone on slices of a sequence, and time their forwards and backwards.

    Short slices make kernels less efficient, which decides how many slices pay: `bpipe.partition.slice_lengths` finds their number
    and their lengths from the `seconds` of what this returns. The slices before one have its length, and it is measured as one that
    has others behind it. The module is left as `bpipe.profile` leaves it. Not collective; blocks the host. Two ranks never measure
    the same, and all of them must cut alike: measure on one, the slowest stage, and send the lengths to the others.

    Args:
        stage_module: a stage that takes slices (see `bpipe.slices`), where and as it will run.
        example: its input for a microbatch of whole sequences, or a tuple of positional arguments.
        lengths: of slices, in positions; default: the sequence, a half, a quarter, an eighth and a sixteenth of it.
        contexts: the positions before a slice, where the sequence has as many; default: none, half of the others, and all of them.
        loss_fn: for the last stage: `loss_fn(output, target)`, timed with the stage.
        target: what `loss_fn` gets, for whole sequences.
        is_first: whether it is the first stage, whose input needs no gradient; default: if no tensor of the example has floating
            point numbers.
        args_slice_spec: how arguments are cut, as `Seq1F1B` takes it.
        target_slice_spec: likewise for the target.
        repeats: timed runs of each slice, after one that is not timed; the median counts.

    Raises:
        ConfigurationError: a module that takes no slices, an example without positions, or lengths that its sequence does not have.
        StageError: nothing in the output needs a gradient, the module draws random numbers or does not return (output, state).

    What the module itself raises is passed on, with a note that names the slice.

    Example:
        >>> class Layer(torch.nn.Linear):
        ...     def forward(self, x, past=()):
        ...         return super().forward(x), None
        >>> measured = profile_slices(Layer(8, 8), torch.zeros(1, 16, 8), lengths=[8, 16], repeats=1)
        >>> measured.seconds(8, 8) > 0
        True
    """
    check_measurable(stage_module, example, repeats, "profile_slices")
    check_takes_slices(stage_module, "the stage")
    for spec, name in ((args_slice_spec, "args"), (target_slice_spec, "target")):
        check_specs(spec, f"{name}_slice_spec", others=(UpTo,))
    args = example if isinstance(example, tuple) else (example,)
    device = device_of(stage_module, args)
    if is_first is None:
        is_first = seems_first(args)
    bench = _SliceBench(Bench(stage_module, args, target, loss_fn, device, is_first, True), args_slice_spec, target_slice_spec)
    cases = _cases(bench.num_positions(), lengths, contexts)
    with preserved_state([stage_module], device), torch.enable_grad():
        measurements = tuple(_measured(bench, length, context, repeats) for length, context in cases)
    return SliceProfile(name=type(stage_module).__name__, device=name_of(device), measurements=measurements)


def _cases(n: int, lengths: Any, contexts: Any) -> list[tuple[int, int]]:
    """Return the lengths to measure, each with the contexts after which it fits into a sequence of n positions."""
    of_length = _counts("lengths", lengths, 1) if lengths is not None else sorted({-(-n // 2**i) for i in range(5)})
    given = None if contexts is None else _counts("contexts", contexts, 0)
    if of_length[-1] > n:
        raise ConfigurationError(f"lengths: a slice of {of_length[-1]} positions is longer than the example's sequence of {n}")
    cases = [
        (length, context)
        for length in of_length
        for context in (sorted({0, (n - length) // 2, n - length}) if given is None else given)
        if length + context <= n
    ]
    if not cases:
        raise ConfigurationError(f"contexts={given}: no slice of {of_length} positions is so far inside a sequence of {n}")
    return cases


def _counts(name: str, given: Any, least: int) -> list[int]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) or not (listed := list(given)):
        raise ConfigurationError(f"{name}={given!r}: give a list of whole numbers, such as [256, 512, 1024]")
    for one in listed:
        check_count(name, one, least=least)
    return sorted(set(listed))


def _measured(bench: _SliceBench, length: int, context: int, repeats: int) -> SliceMeasurement:
    try:
        case = bench.prepared(length, context)
        times = [bench.timed(case) for _ in range(repeats + 1)][1:]
    except Exception as error:
        name = type(bench.bench.module).__name__
        note(error, f"while bpipe.profile_slices ran {name} on a slice of {length} positions after {context}")
        raise
    forward_s, backward_s = (median(column) for column in zip(*times))
    return SliceMeasurement(length=length, context=context, forward_s=forward_s, backward_s=backward_s)


class _Case(NamedTuple):
    """A slice whose earlier slices have run forward.

    Args:
        sequences: what these have left.
        microbatches: their states, and that of the slice.
        number: of the slice.
        args: its inputs.
        target: of the loss; None if there is no loss.
    """

    sequences: Sequences
    microbatches: MicrobatchStates
    number: int
    args: tuple[Any, ...]
    target: Any


class _SliceBench:
    """A stage on slices, run as `bpipe.engine.compute` runs it."""

    def __init__(self, bench: Bench, args_spec: Any, target_spec: Any) -> None:
        self.bench, self._args_spec, self._target_spec = bench, args_spec, target_spec

    def num_positions(self) -> int:
        """Return the length of the example's sequence."""
        cutting = SliceCutting(lambda size: [size])
        cutting.split(self.bench.args, self._args_spec, "args", 1)
        if not cutting.lengths:
            raise ConfigurationError("the example has no dimension of positions to cut: give a tensor [rows, positions, ...]")
        return int(cutting.lengths[0])

    def prepared(self, length: int, context: int) -> _Case:
        """Cut the example, and run the slices before the measured one, the first of which may be shorter."""
        pieces = [*[context % length] * bool(context % length), *[length] * (context // length)]
        rest = self.num_positions() - context - length
        lengths = [*pieces, length, *[rest] * bool(rest)]
        cutting = SliceCutting(lambda _: lengths)
        args = cutting.split(self.bench.args, self._args_spec, "args", len(lengths))
        if not self.bench.is_first:
            args = tree_map_only(torch.Tensor, torch.Tensor.contiguous, args)  # as they arrive from another stage
        targets = cutting.split(self.bench.target, self._target_spec, "the target", len(lengths))
        microbatches, number = MicrobatchStates(), len(pieces)
        sequences = Sequences(microbatches, number + 2, self.bench.device, has_backward=True)
        for earlier in range(number):
            self._forward(_Case(sequences, microbatches, earlier, args[earlier], targets[earlier]))
        return _Case(sequences, microbatches, number, args[number], targets[number])

    def timed(self, case: _Case) -> tuple[float, float]:
        """Return the seconds of a slice's forward and of its backward."""
        start = self.bench.now()
        ran = self._forward(case)
        middle = self.bench.now()
        state = case.microbatches[0, case.number]
        assert state.left is not None, "later slices may ask for it"
        needed = [tensor for tensor, is_needed in zip(state.left.tensors, state.left.is_needed) if is_needed]
        state.left.add([torch.ones_like(tensor) for tensor in needed])  # as later slices do
        begun = self.bench.now()
        run_backward(ran.edges, [*ran.gradients, *state.left.summed()])
        case.sequences.hand_back(ran.box.gradients, state)
        return middle - start, self.bench.now() - begun

    def _forward(self, case: _Case) -> Forward:
        bench, state = self.bench, case.microbatches[0, case.number]
        earlier = case.sequences.before(state)
        tree, tensors = ("", []) if bench.is_first else flatten_message(case.args, "the example")
        past = [tensor for left in earlier for tensor in left.tensors]
        needed = [*map(is_differentiable, tensors), *(is_needed for left in earlier for is_needed in left.is_needed)]
        entered, box = enter([*(tensor.detach() for tensor in tensors), *past], needed)
        received, again = entered[: len(tensors)], entered[len(tensors) :]
        args = case.args if bench.is_first else tuple(unflatten_message(tree, received))
        name = f"a slice of {type(bench.module).__name__}"
        with case.sequences.forward(name, [], sets_hooks=True) as casts:
            result = bench.module(*args, past=past_of(earlier, again, _no_mesh))
        output, left = case.sequences.take(result, state, casts)
        loss = None if bench.loss_fn is None else bench.loss_fn(output, case.target)
        ran = bench.handed_on(output, loss, box, {})
        ran.edges.extend(edges_of(left))
        return ran


def _no_mesh(*_: Any) -> Any:
    raise StageError("profile_slices measures stages whose states are plain tensors: these are DTensors")
