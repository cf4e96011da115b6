"""Run one stage alone, as the runtime does: the bench of `profile` and `profile_slices`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy

from bpipe.backward.autograd import Graph, InputGrads, edges_of, enter, run_backward
from bpipe.backward.divided import Divided
from bpipe.backward.new_gradients import owned
from bpipe.backward.split import DeferredWeightGrad
from bpipe.backward.user_hooks import Silent, UserHooks
from bpipe.checks import check_count
from bpipe.comm.wire.message import dense, flatten_message, unflatten_message
from bpipe.device import synchronize
from bpipe.errors import ConfigurationError, StageError
from bpipe.memory.saved.footprint import Footprint, footprint_of
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import element_bytes, keys_of, storages_of
from bpipe.model.microbatch import detached, tensors_in
from bpipe.model.pytree import mapped
from bpipe.model.stage import ModuleSnapshot
from bpipe.torch_private.owners_and_versions import address_of, hooks_on

__all__: list[str] = []

Loss = Callable[[Any, Any], torch.Tensor]
Measured = Callable[[Callable[[], Any]], tuple[Any, float]]  # runs something, and returns its result and its seconds


@dataclass
class Forward:
    """The rest of a forward, as in the runtime: where gradients enter, and the tensors that were handed on."""

    edges: list[GradientEdge]
    gradients: list[torch.Tensor]
    box: InputGrads
    sent: list[torch.Tensor]  # to the next stage
    kept: list[torch.Tensor]  # for the user: the last stage's outputs and loss


@dataclass
class Bench:
    """One stage, run as `bpipe.engine.compute` runs it."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    target: Any
    loss_fn: Loss | None
    device: torch.device
    is_first: bool
    has_backward: bool
    silent: Silent = field(default_factory=dict)  # what split backwards have found out about hooks on its parameters

    @classmethod
    def of(
        cls,
        caller: str,
        module: Any,
        example: Any,
        repeats: Any,
        *,
        loss_fn: Loss | None,
        target: Any,
        is_first: bool | None,
        has_backward: bool = True,
    ) -> Bench:
        """Put a stage on the bench, for an example of its input that is one argument or a tuple of them.

        Raises:
            ConfigurationError: it cannot be run alone without a trace that stays: not a module, an example without tensors,
                parameters that are not there yet, or hooks that would change the parameters during a backward.
        """
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(f"{caller} measures an nn.Module, got {type(module).__qualname__}")
        check_count("repeats", repeats)
        args = example if isinstance(example, tuple) else (example,)
        if not (tensors := tensors_in(args)):
            raise ConfigurationError("the example has no tensor: give the stage's input, or a tuple of its arguments")
        for parameter in module.parameters():
            if is_lazy(parameter) or parameter.device.type == "meta":
                raise ConfigurationError("parameters are not there yet (lazy, or on the meta device): initialise the module first")
            if hooks_on(parameter)[1]:
                raise ConfigurationError(
                    "a parameter has a post-accumulate-grad hook, such as an optimizer's, that a backward would run: take it off "
                    "first"
                )
        device = next(tensor.device for tensor in (*module.parameters(), *tensors))
        is_first = not any(map(is_differentiable, tensors)) if is_first is None else is_first
        return cls(module, args, target, loss_fn, device, is_first, has_backward)

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
        ran, forward_s = self.measured(self._ready(size))
        return forward_s, self.measured(lambda: self._backward(ran))[1] if self.has_backward else 0.0

    def timed_halves(self, size: int) -> tuple[float, float]:
        """Return the seconds of both halves of a split backward; the first one of a stage with hooks is not split, as in a step."""
        return halves_s(self.module, lambda: self._ready(size)(), self.measured, self.silent)

    @property
    def measured(self) -> Measured:
        """What runs something, and returns its result and its seconds until all that it queued on the device has run."""
        return clock([self.device])

    def _ready(self, size: int) -> Callable[[], Forward]:
        """Return a forward whose inputs are there."""
        args, target, box = self._inputs(size)
        return partial(self._forward, args, target, box, self._non_activations((), None), None)

    def _inputs(self, size: int) -> tuple[tuple[Any, ...], Any, InputGrads]:
        """Make the arguments in memory of their own and, except on the first stage, as if they had come from another stage."""
        target = _resized(self.target, size)
        if self.is_first:
            return tuple(_resized(self.args, size)), target, InputGrads()
        tree, tensors = flatten_message(_resized(self.args, size), "the example")
        needed = [self.has_backward and is_differentiable(tensor) for tensor in tensors]
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
        return {address_of(storage): kind for kind, tensors in kinds for tensor in tensors for storage in storages_of(tensor)}

    def _forward(
        self, args: tuple[Any, ...], target: Any, box: InputGrads, non_activations: dict[int, str], stash: Stash | None
    ) -> Forward:
        with torch.set_grad_enabled(self.has_backward), stash.capture() if stash is not None else nullcontext():
            output = self.module(*args)
            loss = None if self.loss_fn is None else self.loss_fn(output, target)
        return self.handed_on(output, loss, box, non_activations)

    def handed_on(self, output: Any, loss: Any, box: InputGrads, non_activations: dict[int, str]) -> Forward:
        """Return what stays of a forward, given what the module returned, and the loss if there is one."""
        if loss is not None:
            return self._lost(output, loss, box)
        _, tensors = flatten_message(output, type(self.module).__name__)
        self._check_trainable(tensors)
        sent = [dense(tensor.clone() if keys_of([tensor]) & non_activations.keys() else tensor) for tensor in tensors]
        gradients = [torch.ones_like(one) for one, tensor in zip(sent, tensors) if tensor.requires_grad]
        return Forward(edges_of(tensors), gradients, box, sent, [])

    def _lost(self, output: Any, loss: Any, box: InputGrads) -> Forward:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StageError("loss_fn returned something else than one number: return a tensor, such as loss.mean()")
        self._check_trainable([loss])
        outputs = tensors_in(detached(output))
        return Forward(edges_of([loss]), [torch.ones_like(loss)], box, [], [*outputs, loss.detach()])

    def _check_trainable(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.has_backward and not any(tensor.requires_grad for tensor in tensors):
            raise StageError(
                f"nothing that {type(self.module).__name__} returned needs a gradient, so it has no backward to measure: keep "
                "something trainable, say is_first=False if its input needs a gradient, or profile with backward=False"
            )

    def _backward(self, ran: Forward) -> None:
        if self.has_backward:
            run_backward(ran.edges, ran.gradients)
        ran.edges.clear()


def clock(devices: Iterable[torch.device]) -> Measured:
    """Measure the seconds that work on some devices takes."""

    def now() -> float:
        for device in devices:
            synchronize(device)
        return time.perf_counter()

    def measured(work: Callable[[], Any]) -> tuple[Any, float]:
        start = now()
        result = work()
        return result, now() - start

    return measured


def halves_s(module: torch.nn.Module, run: Callable[[], Forward], measured: Measured, silent: Silent) -> tuple[float, float]:
    """Return the seconds of both halves of a split backward of a module, as a step runs them.

    Args:
        module: whose hooks count.
        run: its forward.
        measured: runs something, and returns its result and its seconds.
        silent: what earlier backwards have found out about hooks on its parameters.
    """
    hooks = UserHooks({0: ModuleSnapshot(list(module.modules()), list(module.parameters()), 0)}, silent)
    divided = Divided(set(), hooks, lambda _: None)

    def backward_input() -> DeferredWeightGrad:
        half = divided.backward_input(0, 0, Graph(ran.edges, ran.box, hooks.num_common > 0), ran.gradients, None)
        half.replace(owned(half.gradients(), beside=ran.box.gradients))
        return half

    with hooks.watched():
        ran = run()
        half, input_s = measured(backward_input)
        return input_s, measured(lambda: divided.backward_weight(0, 0, half))[1]


def _resized(value: Any, size: int) -> Any:
    """Copy a pytree, with rows repeated or cut to a size."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or not len(tensor):
            raise ConfigurationError(f"the example has a tensor of shape {list(tensor.shape)}: dimension 0 must be rows, 1 or more")
        return tensor.detach()[torch.arange(size, device=tensor.device) % len(tensor)]

    return mapped(rows, value)


def is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
