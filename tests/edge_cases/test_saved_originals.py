"""Custom Functions find in their backward the tensors that they saved, also where bpipe follows them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M, pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS = 6, 3
SOME = ["1f1b", "bytes"]
T = torch.Tensor


def batch(step: int) -> Batch:
    x, y = torch.randn(2, M * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return Batch((x,), y)


def product(gradient: T, x: T) -> T:
    return gradient.t() @ x


class WritesGrad(torch.autograd.Function):
    """Adds the weight's gradient up by itself."""

    @staticmethod
    def forward(ctx: Any, x: T, weight: T) -> T:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            weight.grad = product(gradient, x) if weight.grad is None else weight.grad + product(gradient, x)
        return gradient @ weight, None


class AddsToMainGrad(WritesGrad):
    """As Megatron's fusion does: into a buffer that the weight has, and says so there."""

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad += product(gradient, x)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, None


class MayHaveMainGrad(WritesGrad):
    """It silently does something else where it finds none."""

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, weight = ctx.saved_tensors
        if not hasattr(weight, "main_grad"):
            return gradient @ weight, product(gradient, x)
        weight.main_grad = weight.main_grad + product(gradient, x)
        return gradient @ weight, None


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: T, weight: T) -> T:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        output, x, weight = ctx.saved_tensors
        weight.largest = torch.maximum(getattr(weight, "largest", torch.zeros(())), output.abs().max())
        return gradient @ weight, product(gradient, x)


class Deprecated(WritesGrad):
    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        with pytest.warns(DeprecationWarning, match="saved_variables"):
            x, weight = ctx.saved_variables
        weight.seen = getattr(weight, "seen", 0) + 1
        return gradient @ weight, product(gradient, x)


class ReadsScale(WritesGrad):
    """What was set on an activation that nobody keeps."""

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight * getattr(x, "scale", 1.0), product(gradient, x)


class Stage(nn.Module):
    function: type[torch.autograd.Function] = WritesGrad

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.prepare()

    def prepare(self) -> None:
        """Set what the Function finds."""

    def found(self) -> list[T]:
        """What there is to compare besides gradients, after a step."""
        return [torch.as_tensor(value) for name, value in sorted(vars(self.second.weight).items()) if name != "_is_param"]

    def call(self, x: T) -> T:
        return self.function.apply(x, self.second.weight)

    def forward(self, x: T) -> T:
        return torch.tanh(self.call(torch.tanh(self.first(x))))


class Grad(Stage):
    """The issue's own."""


class MainGrad(Stage):
    function = AddsToMainGrad

    def prepare(self) -> None:
        self.second.weight.main_grad = torch.zeros(WIDTH, WIDTH)


class MaybeMainGrad(MainGrad):
    function = MayHaveMainGrad


class Attribute(Stage):
    function = SetUp


class Variables(Stage):
    function = Deprecated


class Leaf(Stage):
    """Trained, and no registered parameter."""

    def prepare(self) -> None:
        self.__dict__["leaf"] = torch.randn(WIDTH, WIDTH).requires_grad_()

    def found(self) -> list[T]:
        return [self.leaf.grad]

    def call(self, x: T) -> T:
        return WritesGrad.apply(self.second(x), self.leaf)


class Subclass(nn.Parameter):
    """A kind of parameter of a library's own."""


class OfASubclass(MainGrad):
    def prepare(self) -> None:
        self.second.weight = Subclass(self.second.weight.detach())
        super().prepare()


class Shared(MainGrad):
    """Twice in a graph, and in another operation."""

    def call(self, x: T) -> T:
        return self.function.apply(self.function.apply(x, self.second.weight), self.second.weight) + self.second(x)


class Activation(Stage):
    """Set on activations: one that the module keeps, one that nobody does."""

    function = ReadsScale

    def prepare(self) -> None:
        self.kept: list[T] = []

    def call(self, x: T) -> T:
        kept, dropped = x * 1, x * 2
        dropped.scale = 3.0
        self.kept.append(kept)
        return self.function.apply(dropped, self.second.weight) + Marks.apply(kept)

    def found(self) -> list[T]:
        marks = [one.mark for one in self.kept]
        self.kept.clear()
        return marks


class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        (x,) = ctx.saved_tensors
        x.mark = gradient.sum()
        return gradient


@torch.library.custom_op("bpipe_tests::product", mutates_args=())
def registered(x: T, weight: T) -> T:
    return x @ weight.t()


def registered_backward(ctx: Any, gradient: T) -> Any:
    x, weight = ctx.saved_tensors
    weight.main_grad += product(gradient, x)
    return gradient @ weight, None


registered.register_autograd(registered_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Registered(MainGrad):
    """An operation of a library's own."""

    def call(self, x: T) -> T:
        return registered(x, self.second.weight)


KINDS = [Grad, MainGrad, MaybeMainGrad, Attribute, Variables, Leaf, OfASubclass, Shared, Activation, Registered]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_sets_on_what_it_saved(kind: type[Stage]) -> None:
    runs: list[list[T]] = []
    case = Case(
        lambda: [kind() for _ in range(NUM_STAGES)],
        batch,
        F.mse_loss,
        steps=2,
        after=lambda modules, step: runs.append([one.clone() for module in modules for one in module.found()]),
    )
    names = list(SCHEDULES) if kind is MainGrad else SOME
    case.check(names)
    alone, rest = runs[:2], runs[2:]
    assert alone[0] or kind is Grad
    for name, found in zip(names, (rest[i : i + 2] for i in range(0, len(rest), 2)), strict=True):
        for ours, theirs in zip(found, alone, strict=True):
            assert all(map(torch.equal, ours, theirs)), name


class MadeInTheForward(Stage):
    """A Function that nobody keeps, as libraries make for each call."""

    def prepare(self) -> None:
        self.classes: list[weakref.ref[Any]] = []

    def call(self, x: T) -> T:
        made = type("Made", (SetUp,), {})
        self.classes.append(weakref.ref(made))
        return made.apply(x, self.second.weight)


@pytest.mark.parametrize("name", ["1f1b", "balanced_1f1b"])
def test_functions_made_in_a_forward_are_freed(name: str) -> None:
    modules = [MadeInTheForward() for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES[name], modules, F.mse_loss)
    for step in range(2):
        loopback.step(schedules, *batch(step).args, target=batch(step).target)
    gc.collect()
    classes = [one for module in modules for one in module.classes]
    assert len(classes) == 2 * M * NUM_STAGES and all(one() is None for one in classes)
