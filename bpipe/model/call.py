"""The arguments of `step` and `eval`, and how they are cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bpipe.comm.health.agreement import RoomRecord
from bpipe.errors import ConfigurationError
from bpipe.model import microbatch as mb
from bpipe.model.cutting import INPUTS, Cutting
from bpipe.model.specs import check_specs

__all__: list[str] = []

Loss = Callable[..., torch.Tensor] | None  # called as `loss_fn(output, target, **loss_kwargs)`; None: nothing is trained
ArgsSpec = tuple[Any, ...] | None  # of how positional arguments are cut, one for each
KwargsSpec = dict[str, Any] | None


class Call(NamedTuple):
    """The arguments that a user gave to `step` or `eval`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    losses: list[torch.Tensor] | None = None
    return_outputs: bool = True
    loss_kwargs: dict[str, Any] | None = None
    arg_mbs: list[Any] | None = None
    kwarg_mbs: list[Any] | None = None
    target_mbs: list[Any] | None = None
    finalize_gradients: bool = True
    is_step: bool = False


def call_of(*args: Any, **kwargs: Any) -> Call:
    """Sort the arguments of `step` or `eval` into a `Call`."""
    options = {name: kwargs.pop(name) for name in Call._fields[2:-1] if name in kwargs}
    return Call(args, kwargs, **options)


class Specs(NamedTuple):
    """The dimensions along which tensors are cut and merged; None: dimension 0."""

    args: Any = None
    kwargs: Any = None
    output: Any = None
    target: Any = None

    @classmethod
    def checked(cls, args: Any, kwargs: Any, output: Any, target: Any = None) -> Specs:
        """Check the specs that a schedule is given, and return them."""
        check_specs(args, "args_chunk_spec")
        check_specs(kwargs, "kwargs_chunk_spec")
        check_specs(output, "output_merge_spec", may_reduce=True)
        check_specs(target, "target_chunk_spec")
        return cls(args, kwargs, output, target)


class CutBatch(NamedTuple):
    """A call's inputs, by microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any] | None
    are_alike: bool  # cut here, into equal parts
    records: tuple[RoomRecord, ...] = ()  # of how microbatches were cut further, on which ranks agree
    sizes: Sequence[int] = ()  # of the batch as args, kwargs and target show it; 0 if they do not

    def descriptions(self) -> list[mb.Description]:
        """Describe what each microbatch looks like."""
        each = zip(self.args, self.kwargs, self.targets or [None] * len(self.args))
        if self.are_alike:
            return [mb.describe(next(each))] * len(self.args)
        known: mb.Known = {}  # objects that all of them share are described once
        return [mb.describe(one, known) for one in each]


def microbatches_of(call: Call, num_microbatches: int, specs: Specs, *, is_training: bool) -> CutBatch:
    """Cut a call's whole batches, or take the microbatches that the user cut; raise a ConfigurationError for what cannot be cut."""
    m = num_microbatches
    if call.losses is not None and not isinstance(call.losses, list):
        raise ConfigurationError(f"losses= must be a list, which bpipe fills in place, got {type(call.losses).__qualname__}")
    for what, value in (("an argument", call.args), ("a keyword argument", call.kwargs), ("the target", call.target)):
        if is_training and any(tensor.requires_grad and not tensor.is_leaf for tensor in mb.tensors_in(value)):
            raise ConfigurationError(
                f"{what} is part of an autograd graph, which the backward of the first microbatch would free: give the pipeline "
                "x.detach().requires_grad_(), and run x.backward(detached.grad) after the step"
            )
    args = _presplit(call.arg_mbs, call.args, m, "arg_mbs", tuple)
    kwargs = _presplit(call.kwarg_mbs, call.kwargs, m, "kwarg_mbs", dict)
    targets = _presplit(call.target_mbs, () if call.target is None else (call.target,), m, "target_mbs", object)
    cutting = Cutting(m, specs.args)
    if args is None:
        args = cutting.split(call.args, specs.args, "args") if call.args else [()] * m
    if kwargs is None:
        kwargs = cutting.split(call.kwargs, specs.kwargs, "kwargs") if call.kwargs else [{}] * m
    if targets is None and call.target is not None:
        targets = cutting.split(call.target, specs.target, "the target")
    cutting.check()
    are_alike = call.arg_mbs is None and call.kwarg_mbs is None and call.target_mbs is None and cutting.are_alike
    return CutBatch(args, kwargs, targets, are_alike, sizes=[*map(cutting.size_of, INPUTS)])


def _presplit(given: list[Any] | None, whole: Any, m: int, name: str, entry: type) -> list[Any] | None:
    """Check the microbatches that the user cut and return them; None if there are none."""
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or len(given) != m:
        size = f"{len(given)} entries" if isinstance(given, (list, tuple)) else type(given).__qualname__
        raise ConfigurationError(f"{name} must be a list with one entry for each of {m} microbatches, got {size}")
    if whole:
        raise ConfigurationError(f"{name} and the whole batch were both given: choose one")
    odd = next((one for one in given if not isinstance(one, entry)), None)
    if odd is not None:
        example = "(x,)" if entry is tuple else "{'x': x}"
        raise ConfigurationError(
            f"{name} needs one {entry.__name__} for each microbatch, such as {example}; got {type(odd).__qualname__}"
        )
    return list(given)
