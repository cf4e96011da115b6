"""Where gradients come to lie: in buckets of the user's, in leaves that are no parameters, in nested tensors' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M
from tests.operations import Count
from tests.over import pipeline

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
]

WIDTH, ROWS = 6, 4
SOME = ["gpipe", "1f1b", "zb_h1", "dualpipe_v"]
T = torch.Tensor


def batch(step: int) -> Batch:
    """One row in a microbatch: gradients that are added up over the batch are views of activations' gradients."""
    x, y = torch.randn(2, M, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return Batch((x,), y)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(ROWS, WIDTH))
        self.end = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.moved: set[int] = set()
        self.found: dict[str, Any] = {}  # what there is to compare besides the gradients of parameters
        self.prepare()

    def prepare(self) -> None:
        """Register hooks."""

    def finish(self) -> None:
        """Look at what a step has left."""

    def forward(self, x: T) -> T:
        return self.linear(torch.tanh(x + self.positions.unsqueeze(0))) + self.end.unsqueeze(0)


class Bucket(Stage):
    """A hook moves each gradient into a flat buffer when it is new, as reducers do."""

    def prepare(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.zeros(sum(one.numel() for one in parameters))
        for one, view in zip(parameters, self.flat.split([one.numel() for one in parameters]), strict=True):
            one.register_post_accumulate_grad_hook(lambda one, view=view: self.move(one, view.view_as(one)))

    def move(self, parameter: T, view: T) -> None:
        if id(parameter) not in self.moved:
            self.moved.add(id(parameter))
            parameter.grad = view.copy_(parameter.grad)

    def finish(self) -> None:
        self.found["flat"] = self.flat.clone()


class Interleaved(Bucket):
    """The buffer's rows are of several parameters."""

    def prepare(self) -> None:
        self.flat = torch.zeros(ROWS, 2, WIDTH)
        for index, one in enumerate((self.positions, self.end)):
            one.register_post_accumulate_grad_hook(lambda one, index=index: self.move(one, self.flat[:, index]))


class Preset(Stage):
    """Gradients are views of one buffer from the beginning."""

    def prepare(self) -> None:
        parameters = list(self.parameters())
        self.flat = torch.zeros(sum(one.numel() for one in parameters))
        for one, view in zip(parameters, self.flat.split([one.numel() for one in parameters]), strict=True):
            one.grad = view.view_as(one)

    def finish(self) -> None:
        self.found["flat"] = self.flat.clone()


class MainGrad(Stage):
    """A hook takes each gradient away, as optimizers in the backward and Megatron's main gradients do."""

    def prepare(self) -> None:
        self.main = [torch.zeros_like(one) for one in self.parameters()]
        for one, main in zip(self.parameters(), self.main, strict=True):
            one.register_post_accumulate_grad_hook(lambda one, main=main: self.take(one, main))

    @staticmethod
    def take(parameter: T, main: T) -> None:
        assert parameter.grad is not None
        main += parameter.grad
        parameter.grad = None

    def finish(self) -> None:
        self.found["main"] = [main.clone() for main in self.main]


class Listed(Stage):
    """Hooks keep gradients, of leaves and of activations."""

    def prepare(self) -> None:
        self.kept: list[T] = []
        for one in self.parameters():
            one.register_hook(self.kept.append)

    def forward(self, x: T) -> T:
        y = self.linear(torch.tanh(x + self.positions.unsqueeze(0)))
        y.register_hook(self.kept.append)
        return y + self.end.unsqueeze(0)

    def finish(self) -> None:
        self.found["kept"] = sorted((one.tolist() for one in self.kept), key=str)


class Leaves(Stage):
    """Leaves that are no registered parameters: their gradients are views of those that wait, or are sent."""

    def prepare(self) -> None:
        leaves = {"first": (ROWS, WIDTH), "matrix": (WIDTH, WIDTH), "last": (ROWS, WIDTH), "vector": (WIDTH,)}
        self.__dict__["leaves"] = {name: torch.randn(shape, requires_grad=True) for name, shape in leaves.items()}

    def forward(self, x: T) -> T:
        y = self.linear(torch.tanh(x + self.leaves["first"].unsqueeze(0))) @ self.leaves["matrix"]
        y = self.linear(y) * self.leaves["vector"] + self.leaves["last"].unsqueeze(0)
        return y * 2  # else two leaves would get one gradient in a single process

    def finish(self) -> None:
        self.found["leaves"] = {name: leaf.grad.clone() for name, leaf in self.leaves.items()}


class Closure(Leaves):
    """They are known to a function alone."""

    def prepare(self) -> None:
        super().prepare()
        leaves = self.__dict__.pop("leaves")
        self.function = lambda x: torch.tanh(x + leaves["first"].unsqueeze(0)) * leaves["vector"]
        self.look = lambda: {name: leaves[name].grad.clone() for name in ("first", "vector")}

    def forward(self, x: T) -> T:
        return self.function(self.linear(x))

    def finish(self) -> None:
        self.found["leaves"] = self.look()


class Called(Leaves):
    """`functional_call` with leaves in place of the parameters."""

    def forward(self, x: T) -> T:
        leaves = {"weight": self.leaves["matrix"], "bias": self.leaves["vector"]}
        return torch.func.functional_call(self.linear, leaves, (x + self.leaves["first"],)) + self.leaves["last"].unsqueeze(0)


class Jagged(Stage):
    """Rows of several lengths as a nested tensor."""

    layout = torch.jagged

    def forward(self, x: T) -> T:
        rows = torch.nested.as_nested_tensor([x[0, :2], x[0, 1:]], layout=self.layout)
        return torch.nested.to_padded_tensor(self.linear(F.gelu(self.linear(rows))), 0.0)[:1, :1] + x


class Strided(Jagged):
    layout = torch.strided


class NestedWeights(Jagged):
    """The gradient that waits is nested."""

    def forward(self, x: T) -> T:
        rows = torch.nested.as_nested_tensor([x[0, :2], x[0, 1:]], layout=self.layout)
        values = (rows * 2 @ self.linear.weight).sin()
        return torch.stack([row.sum(0) for row in values.unbind()])[:1, None] + x


def look(modules: Sequence[Any]) -> list[Any]:
    for module in modules:
        module.finish()
    return [tree_map(lambda leaf: leaf.clone() if isinstance(leaf, T) else leaf, module.found) for module in modules]


def same(found: Any, expected: Any) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(torch.equal(one, other) if isinstance(one, T) else one == other for one, other in pairs)


def check(kind: Callable[[], Stage], names: Sequence[str]) -> None:
    runs: list[Any] = []
    case = Case(
        lambda: [kind() for _ in range(NUM_STAGES)],
        batch,
        F.mse_loss,
        steps=1,
        after=lambda modules, step: runs.append(look(modules)),
    )
    case.check(names)
    alone, *others = runs
    for name, found in zip(names, others, strict=True):
        assert same(found, alone), name


@pytest.mark.parametrize(
    "kind", [Bucket, Interleaved, Preset, MainGrad, Listed, Leaves, Closure, Called, Jagged, Strided, NestedWeights]
)
def test_gradients_of_a_single_process(kind: type[Stage]) -> None:
    check(kind, list(SCHEDULES) if kind is Bucket else ["zb_h1"] if issubclass(kind, Jagged) else SOME)


class Twice(Stage):
    """The gradients of two parameters are the same memory, if nobody cares: of a single process, too."""

    def forward(self, x: T) -> T:
        return self.linear(x) + self.positions.unsqueeze(0) + self.end.unsqueeze(0)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv"])
def test_gradients_that_are_the_same_memory(name: str) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Twice() for _ in range(NUM_STAGES)]
    (x,), y = batch(0).args, batch(0).target
    schedule = SCHEDULES[name]
    loopback, schedules = pipeline(schedule, modules, M, F.mse_loss, 2 if name == "zbv" else 4)
    loopback.step(schedules, x, target=y)
    for module in modules:
        assert isinstance(module, Twice) and module.positions.grad is not None and module.end.grad is not None
        assert torch.equal(module.positions.grad, module.end.grad)
    parameters = [one for module in modules for one in module.parameters()]
    sums = [torch.zeros_like(one) for one in parameters]
    for xi, yi in zip(x.split(1), y.split(1), strict=True):
        found = torch.autograd.grad(F.mse_loss(nn.Sequential(*modules)(xi), yi) / M, parameters)
        sums = [total + one for total, one in zip(sums, found, strict=True)]
    assert all(map(torch.equal, sums, (one.grad for one in parameters)))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe_v"])
def test_nothing_is_copied_where_nothing_is_shared(name: str) -> None:
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES[name], modules, M, F.mse_loss, 2 if name == "dualpipe_v" else 4)
    x, y = torch.randn(2, 2 * M, WIDTH)
    loopback.step(schedules, x, target=y)
    with Count() as count:
        loopback.step(schedules, x, target=y)
    assert count.of["clone"] == M  # losses
