"""Measure one stage alone on slices of a sequence: several lengths, after several contexts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bpipe.backward.autograd import edges_of, enter, run_backward
from bpipe.backward.new_gradients import owned
from bpipe.checks import counts_of
from bpipe.cleanup import note
from bpipe.comm.wire.message import flatten_message, unflatten_message
from bpipe.device import name_of
from bpipe.engine.microbatch_state import MicrobatchStates
from bpipe.errors import ConfigurationError, StageError
from bpipe.estimate.bench import Bench, Forward, Loss, is_differentiable
from bpipe.estimate.slice_profile import SliceMeasurement, SliceProfile
from bpipe.flow.shaping import shaped, sliced
from bpipe.model.preserve_state import preserved_state
from bpipe.model.pytree import mapped
from bpipe.model.specs import check_specs
from bpipe.slices.positions import SliceCutting, UpTo
from bpipe.slices.protocol import check_takes_slices
from bpipe.slices.sequence_loss import checked_sum
from bpipe.slices.states import Sequences, past_of

__all__ = ["profile_slices"]


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
        loss_fn: for the last stage of a schedule with `loss_of_slices`: `loss_fn(output, target)` returns the sum of a slice's
            losses and their count, and is timed with the stage. A loss of whole sequences is no slice's: leave it out.
        target: what `loss_fn` gets, for whole sequences; each slice gets its part.
        is_first: whether it is the first stage, whose input needs no gradient; default: if no tensor of the example has floating
            point numbers.
        args_slice_spec: how arguments are cut, as `Seq1F1B` takes it.
        target_slice_spec: likewise for the target.
        repeats: timed runs of each slice, after one that is not timed; the median counts.

    Raises:
        ConfigurationError: a module that takes no slices, an example without positions, or lengths that its sequence does not have.
        StageError: nothing in the output needs a gradient, the module draws random numbers or does not return (output, state), or
            `loss_fn` does not return a sum and a count.

    What the module itself raises is passed on, with a note that names the slice.

    Example:
        >>> class Layer(torch.nn.Linear):
        ...     def forward(self, x, past=()):
        ...         return super().forward(x), None
        >>> measured = profile_slices(Layer(8, 8), torch.zeros(1, 16, 8), lengths=[8, 16], repeats=1)
        >>> measured.seconds(8, 8) > 0
        True
    """
    bench = Bench.of("profile_slices", stage_module, example, repeats, loss_fn=loss_fn, target=target, is_first=is_first)
    check_takes_slices(stage_module, "the stage")
    specs = args_slice_spec, target_slice_spec
    for spec, name in zip(specs, ("args", "target")):
        check_specs(spec, f"{name}_slice_spec", others=(UpTo,))
    n = _num_positions(bench, args_slice_spec)
    cases = _cases(n, lengths, contexts)
    with preserved_state([stage_module], bench.device), torch.enable_grad():
        measurements = tuple(_measured(bench, specs, n, length, context, repeats) for length, context in cases)
    return SliceProfile(name=type(stage_module).__name__, device=name_of(bench.device), measurements=measurements)


def _cases(n: int, lengths: Any, contexts: Any) -> list[tuple[int, int]]:
    """Return the lengths to measure, each with the contexts after which it fits into a sequence of n positions."""
    of_length = sorted({-(-n // 2**i) for i in range(5)}) if lengths is None else counts_of("lengths", lengths)
    given = None if contexts is None else counts_of("contexts", contexts, least=0)
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


def _num_positions(bench: Bench, args_spec: Any) -> int:
    """Return the length of the example's sequence."""
    cutting = SliceCutting(lambda size: [size], 1)
    cutting.split(bench.args, args_spec, "args")
    if not cutting.lengths:
        raise ConfigurationError("the example has no dimension of positions to cut: give a tensor [rows, positions, ...]")
    return int(cutting.lengths[0])


def _measured(bench: Bench, specs: tuple[Any, Any], n: int, length: int, context: int, repeats: int) -> SliceMeasurement:
    before = [*[context % length] * bool(context % length), *[length] * (context // length)]  # the first may be shorter
    rest = n - context - length
    try:
        slices = _Slices(bench, specs, [*before, length, *[rest] * bool(rest)], len(before))
        times = [slices.timed() for _ in range(repeats + 1)][1:]
    except Exception as error:
        name = type(bench.module).__name__
        note(error, f"while bpipe.profile_slices ran {name} on a slice of {length} positions after {context}")
        raise
    forward_s, backward_s = (median(column) for column in zip(*times))
    return SliceMeasurement(length=length, context=context, forward_s=forward_s, backward_s=backward_s)


class _Slices:
    """The example in slices, run as `bpipe.engine.compute` runs them: those before the one to measure have run forward.

    Args:
        bench: the stage, its example and target.
        specs: how arguments and the target are cut.
        lengths: of all slices.
        number: of the one to measure.
    """

    def __init__(self, bench: Bench, specs: tuple[Any, Any], lengths: list[int], number: int) -> None:
        cutting = SliceCutting(lambda _: lengths, len(lengths))
        args = cutting.split(bench.args, specs[0], "args")
        if not bench.is_first:
            args = mapped(torch.Tensor.contiguous, args)  # as they arrive from another stage
        self._bench, self._number, self._args = bench, number, args
        self._targets = cutting.split(bench.target, specs[1], "the target")
        self._states = MicrobatchStates(sliced(shaped(None, "chain", (0,), 1), number + 2))
        self._sequences = Sequences(self._states, number + 2, bench.device, has_backward=True)
        for earlier in range(number):
            self._forward(earlier)

    def timed(self) -> tuple[float, float]:
        """Return the seconds of the slice's forward and of its backward."""
        state = self._states[0, self._number]
        ran, forward_s = self._bench.measured(lambda: self._forward(self._number))
        left = state.left
        assert left is not None, "later slices may ask for it"
        needed = [tensor for tensor, is_needed in zip(left.tensors, left.is_needed) if is_needed]
        left.add([torch.ones_like(tensor) for tensor in needed])  # as later slices do

        def backward() -> None:
            run_backward(ran.edges, [*ran.gradients, *left.summed()])
            begin = len(ran.box.gradients) - sum(len(one.gradients) for one in self._sequences.before(state))
            self._sequences.hand_back(owned(ran.box.gradients[begin:]), state)

        return forward_s, self._bench.measured(backward)[1]

    def _forward(self, number: int) -> Forward:
        bench, args, state = self._bench, self._args[number], self._states[0, number]
        earlier = self._sequences.before(state)
        tree, tensors = ("", []) if bench.is_first else flatten_message(args, "the example")
        past = [tensor for left in earlier for tensor in left.tensors]
        needed = [*map(is_differentiable, tensors), *(is_needed for left in earlier for is_needed in left.is_needed)]
        entered, box = enter([*(tensor.detach() for tensor in tensors), *past], needed)
        received, again = entered[: len(tensors)], entered[len(tensors) :]
        args = args if bench.is_first else tuple(unflatten_message(tree, received))
        name = f"a slice of {type(bench.module).__name__}"
        with self._sequences.forward(name, [], sets_hooks=True) as casts:
            result = bench.module(*args, past=past_of(earlier, again, _no_mesh))
        output, left = self._sequences.take(result, state, casts)
        loss = None if bench.loss_fn is None else checked_sum(bench.loss_fn(output, self._targets[number]), name)[0]
        ran = bench.handed_on(output, loss, box, {})
        ran.edges.extend(edges_of(left))
        return ran


def _no_mesh(*_: Any) -> Any:
    raise StageError("profile_slices measures stages whose states are plain tensors: these are DTensors")
