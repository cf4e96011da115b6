"""Measure one stage alone: its saved bytes, counted as the runtime counts them, and the seconds of its forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from bpipe.backward.autograd import InputGrads, edges_of, enter, run_backward
from bpipe.cleanup import note
from bpipe.comm.wire.message import dense, flatten_message, unflatten_message
from bpipe.device import name_of, synchronize
from bpipe.errors import ConfigurationError, StageError
from bpipe.estimate.checks import check_count
from bpipe.estimate.measurement import Measurement, Profile
from bpipe.memory.saved.footprint import Footprint, footprint_of
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import element_bytes, keys_of, storages_of
from bpipe.model.microbatch import tensors_in
from bpipe.model.preserve_state import preserved_state

__all__ = ["profile"]

Loss = Callable[[Any, Any], torch.Tensor]


def profile(
    stage_module: torch.nn.Module,
    example: Any,
    microbatch_sizes: Sequence[int] = (1,),
    *,
    loss_fn: Loss | None = None,
    target: Any = None,
    is_first: bool | None = None,
    backward: bool = True,
    repeats: int = 5,
) -> Profile:
    """Run a stage alone, count what it saves for the backward, and time it.

    Bytes are counted with the code that a pipeline uses, so that they equal what a run's ledger shows for the same stage. The
    module is left as it was: gradients, buffers, random numbers and modes; only what else it does to itself (attributes that its
    forward sets) stays. Blocks the host; runs in the caller's modes and autocast.

    Args:
        stage_module: the partition, where it will run: parameters on the device, in the precision, trainable and in train mode
            as in training.
        example: its input, or a tuple of positional arguments: a pytree with tensors [rows, ...] whose rows are repeated to each
            size, for any number of rows, and anything else.
        microbatch_sizes: rows of a microbatch.
        loss_fn: for the last stage: `loss_fn(output, target)`, counted and timed with the stage.
        target: what `loss_fn` gets, with rows repeated likewise.
        is_first: whether it is the first stage, whose input needs no gradient and is the user's own; default: if no tensor of the
            example has floating point numbers.
        backward: False to run forwards only; their times are not those of a step, so `advise` refuses them.
        repeats: timed runs of each size, after one that is not timed; the median counts.

    Returns:
        A `Profile`, which `bpipe.advise` takes, alone or as one for each stage.

    Raises:
        ConfigurationError: not a module, an example without tensors or rows, sizes that make no microbatch, parameters that are not
            there yet, or hooks that would change the parameters during a backward.
        StageError: nothing in the output needs a gradient; or the module returned something that cannot be sent.

    What the module itself raises is passed on, with a note that names the microbatch size.

    Example:
        >>> from torch import nn
        >>> measured = profile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(1, 8), microbatch_sizes=[1, 2])
        >>> [one.own_bytes for one in measured.measurements]  # the input and the output, 8 floats each
        [64, 128]
    """
    sizes = _check(stage_module, example, microbatch_sizes, repeats)
    args = example if isinstance(example, tuple) else (example,)
    device = next((tensor.device for tensor in (*stage_module.parameters(), *tensors_in(args))), torch.device("cpu"))
    if is_first is None:
        is_first = not any(map(_is_differentiable, tensors_in(args)))
    bench = _Bench(stage_module, args, target, loss_fn, device, is_first, backward)
    with preserved_state([stage_module], device), torch.enable_grad():
        measurements = tuple(_measured(bench, size, repeats) for size in sizes)
        gradient_bytes = sum(element_bytes(parameter.grad) for parameter in stage_module.parameters() if parameter.grad is not None)
    parameters = list(stage_module.parameters())
    return Profile(
        name=type(stage_module).__name__,
        device=name_of(device),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(map(element_bytes, parameters)),
        trainable_bytes=sum(element_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        gradient_bytes=gradient_bytes,
        buffer_bytes=sum(map(element_bytes, stage_module.buffers())),
        measurements=measurements,
    )


def _check(module: Any, example: Any, sizes: Any, repeats: Any) -> list[int]:
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"profile measures an nn.Module, got {type(module).__qualname__}")
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable) or not (listed := list(sizes)):
        raise ConfigurationError(f"microbatch_sizes={sizes!r}: give a list of whole numbers, such as [1, 2, 4]")
    for size in listed:
        check_count("microbatch size", size)
    check_count("repeats", repeats)
    if not tensors_in(example):
        raise ConfigurationError("the example has no tensor: give the stage's input, or a tuple of its arguments")
    for parameter in module.parameters():
        if is_lazy(parameter) or parameter.device.type == "meta":
            raise ConfigurationError("parameters are not there yet (lazy, or on the meta device): initialise the module first")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                "a parameter has a post-accumulate-grad hook, such as an optimizer's, that a backward would run: take it off first"
            )
    return sorted(set(listed))


def _measured(bench: _Bench, size: int, repeats: int) -> Measurement:
    try:
        footprint, output_bytes, input_gradient_bytes = bench.counted(size)
        times = [bench.timed(size) for _ in range(repeats)]
    except Exception as error:
        note(error, f"while bpipe.profile ran {type(bench.module).__name__} on a microbatch of {size}")
        raise
    return Measurement(
        microbatch_size=size,
        own_bytes=footprint.own_bytes,
        movable_bytes=footprint.movable_bytes,
        shared_bytes=footprint.shared_bytes,
        output_bytes=output_bytes,
        input_gradient_bytes=input_gradient_bytes,
        forward_s=median(forward_s for forward_s, _ in times),
        backward_s=median(backward_s for _, backward_s in times),
    )


@dataclass
class _Forward:
    """The rest of a forward, as in the runtime: where gradients enter, and the tensors that were handed on."""

    edges: list[GradientEdge]
    gradients: list[torch.Tensor]
    box: InputGrads
    sent: list[torch.Tensor]  # to the next stage
    kept: list[torch.Tensor]  # for the user: the last stage's outputs and loss


@dataclass
class _Bench:
    """One stage, run as `bpipe.engine.compute` runs it."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    target: Any
    loss_fn: Loss | None
    device: torch.device
    is_first: bool
    has_backward: bool

    def counted(self, size: int) -> tuple[Footprint, int, int]:
        """Return the footprint of a microbatch, and the bytes of its output and of its inputs' gradients."""
        args, target, box = self._inputs(size)
        non_activations = self._non_activations(args if self.is_first else (), target)
        stash = Stash(f"a microbatch of {size}", non_activations, self.device) if self.has_backward else None
        ran = self._forward(args, target, box, non_activations, stash)
        del args
        footprint = Footprint(0, 0, 0) if stash is None else footprint_of(stash.contents(ran.kept, ran.sent))
        output_bytes = sum(map(element_bytes, ran.sent))
        self._backward(ran)
        return footprint, output_bytes, sum(element_bytes(gradient) for gradient in ran.box.gradients if gradient is not None)

    def timed(self, size: int) -> tuple[float, float]:
        """Return the seconds of a forward and of its backward."""
        args, target, box = self._inputs(size)
        non_activations = self._non_activations((), None)
        start = self._now()
        ran = self._forward(args, target, box, non_activations, None)
        del args
        middle = self._now()
        self._backward(ran)
        return middle - start, self._now() - middle if self.has_backward else 0.0

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def _inputs(self, size: int) -> tuple[tuple[Any, ...], Any, InputGrads]:
        """Make the arguments in memory of their own and, except on the first stage, as if they had come from another stage."""
        target = _resized(self.target, size)
        if self.is_first:
            return tuple(_resized(self.args, size)), target, InputGrads(0)
        tree, tensors = flatten_message(_resized(self.args, size), "the example")
        needed = [self.has_backward and _is_differentiable(tensor) for tensor in tensors]
        entered, box = enter(tensors, needed)
        del tensors
        return tuple(unflatten_message(tree, entered)), target, box

    def _non_activations(self, args: Any, target: Any) -> dict[int, str]:
        """Return the storages that are not activations, by kind; buffers among them stay alive while the module is measured."""
        kinds: list[tuple[str, Iterable[torch.Tensor]]] = [
            ("the step's batch", tensors_in([args, target])),
            ("a buffer", self.module.buffers()),
            ("a parameter", self.module.parameters()),
        ]
        return {storage._cdata: kind for kind, tensors in kinds for tensor in tensors for storage in storages_of(tensor)}

    def _forward(
        self, args: tuple[Any, ...], target: Any, box: InputGrads, non_activations: dict[int, str], stash: Stash | None
    ) -> _Forward:
        with torch.set_grad_enabled(self.has_backward), stash.capture() if stash is not None else nullcontext():
            output = self.module(*args)
            loss = None if self.loss_fn is None else self.loss_fn(output, target)
        if loss is not None:
            return self._lost(output, loss, box)
        _, tensors = flatten_message(output, type(self.module).__name__)
        self._check_trainable(tensors)
        sent = [dense(tensor.clone() if keys_of([tensor]) & non_activations.keys() else tensor) for tensor in tensors]
        gradients = [torch.ones_like(one) for one, tensor in zip(sent, tensors) if tensor.requires_grad]
        return _Forward(edges_of(tensors), gradients, box, sent, [])

    def _lost(self, output: Any, loss: Any, box: InputGrads) -> _Forward:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StageError("loss_fn returned something else than one number: return a tensor, such as loss.mean()")
        self._check_trainable([loss])
        outputs = tensors_in(tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        return _Forward(edges_of([loss]), [torch.ones_like(loss)], box, [], [*outputs, loss.detach()])

    def _check_trainable(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.has_backward and not any(tensor.requires_grad for tensor in tensors):
            raise StageError(
                f"nothing that {type(self.module).__name__} returned needs a gradient, so it has no backward to measure: keep "
                "something trainable, say is_first=False if its input needs a gradient, or profile with backward=False"
            )

    def _backward(self, ran: _Forward) -> None:
        if self.has_backward:
            run_backward(ran.edges, ran.gradients)
        ran.edges.clear()


def _resized(value: Any, size: int) -> Any:
    """Copy a pytree, with rows repeated or cut to a size."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or not len(tensor):
            raise ConfigurationError(f"the example has a tensor of shape {list(tensor.shape)}: dimension 0 must be rows, 1 or more")
        return tensor.detach()[torch.arange(size, device=tensor.device) % len(tensor)]

    return tree_map_only(torch.Tensor, rows, value)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
