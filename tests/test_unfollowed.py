"""What a stage does that saved-tensor hooks do not see: gradients are right, the ledger says what stays; or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import StageError
from bpipe.memory.saved.attributes import tensors_kept_in
from bpipe.memory.saved.shown import shown_by

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, WIDTH = 4, 8, 16
BYTES = 2 * WIDTH * 4  # of an activation


class Remember(torch.autograd.Function):
    """Keeps what its backward needs as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.parts = {"sigmoid": [torch.sigmoid(x)], "count": 1}
        return ctx.parts["sigmoid"][0] * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.parts["sigmoid"][0]


class Save(Remember):
    """The same, kept as torch asks for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        part = torch.sigmoid(x)
        ctx.save_for_backward(part)
        return part * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Both(Remember):
    """Both ways at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.part = torch.sigmoid(x)
        ctx.save_for_backward(ctx.part)
        return ctx.part * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.part


class Holder:
    """An object that holds a tensor, and itself."""

    def __init__(self, value: Any) -> None:
        self.value, self.me = value, self


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def cyclic_list(value: Any) -> list[Any]:
    found = [value]
    found.append(found)
    return found


# How a Function may hold a tensor, and how its backward gets it.
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an object": (Holder, lambda held: held.value),
    "slots": (Slots, lambda held: held.value),
    "objects in a pytree": (lambda value: {"a": [Holder(Slots(value))]}, lambda held: held["a"][0].value.value),
    "a namespace": (lambda value: SimpleNamespace(value=value), lambda held: held.value),
    "a list that holds itself": (cyclic_list, lambda held: held[0]),
    "a function": (lambda value: lambda: value, lambda held: held()),
    "a partial": (lambda value: partial(torch.mul, value, 1), lambda held: held()),
    "packed sequences": (lambda value: PackedSequence(value, torch.tensor([2])), lambda held: held.data),
}


def held_in(way: str) -> type[Remember]:
    put, get = WAYS[way]

    class Hold(Remember):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            part = torch.sigmoid(x)
            ctx.held = put(part)
            return part * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * get(ctx.held)

    return Hold


class Stage(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(torch.tanh(self.first(x))))


def modules_with(between: Callable[[torch.Tensor], torch.Tensor]) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(between) for _ in range(P)]


def train(modules: list[Stage], schedule: Any = bpipe.BalancedOneFOneB) -> list[bpipe.Schedule]:
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [schedule(stage, M, loss_fn=F.mse_loss) for stage in stages]
    x = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        loopback.step(schedules, x, target=x)
    return schedules


def assert_equal_to_one_process(modules: list[Stage], alone: list[Stage]) -> None:
    x = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    for part in [*x.chunk(M), *x.chunk(M)]:
        (F.mse_loss(nn.Sequential(*alone)(part), part) / M).backward()
    for module, other in zip(modules, alone, strict=True):
        for parameter, expected in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize("function", [Remember, Both])
def test_attributes_of_a_ctx_are_counted_and_stay(function: type[Remember]) -> None:
    modules = modules_with(function.apply)
    first, *_ = train(modules)
    assert_equal_to_one_process(modules, modules_with(function.apply))
    saving, *_ = train(modules_with(Save.apply))
    assert first.stats["peak_bytes"] == first.stats["predicted_peak_bytes"]
    assert first.stats["evicted_bytes"] == saving.stats["evicted_bytes"] * 2 // 3  # input, tanh and sigmoid; but not this one
    assert [(held.num_bytes, held.reason) for held in first.ledger.held] == [
        (BYTES, f"kept by {function.__name__} as an attribute of its ctx; with ctx.save_for_backward it could move")
    ]
    plain, *_ = train(modules_with(function.apply), bpipe.OneFOneB)
    assert plain.stats["peak_bytes"] == train(modules_with(Save.apply), bpipe.OneFOneB)[0].stats["peak_bytes"]


@pytest.mark.parametrize("way", WAYS)
def test_tensors_inside_what_a_ctx_holds_are_counted(way: str) -> None:
    modules = modules_with(held_in(way).apply)
    holding = train(modules, bpipe.OneFOneB)
    assert_equal_to_one_process(modules, modules_with(held_in(way).apply))
    saving = train(modules_with(Save.apply), bpipe.OneFOneB)
    more = 8 * (way == "packed sequences")  # their lengths
    for one, other in zip(holding, saving, strict=True):
        assert one.stats["peak_bytes"] == other.stats["peak_bytes"] + more * one.stats["peak_slots"]


def test_what_torchs_own_objects_hold_is_not_the_microbatchs() -> None:
    """A DeviceMesh has a tensor of the ranks' numbers, which all microbatches share."""
    mesh = type("Mesh", (Holder,), {"__module__": "torch.distributed.device_mesh"})
    assert tensors_kept_in({"mesh": mesh(torch.zeros(3))}) == []
    assert len(tensors_kept_in({"mesh": Holder(torch.zeros(3))})) == 1


@pytest.mark.parametrize("wrap", [lambda value: (value,), Holder])
def test_what_the_users_hooks_and_checkpoints_keep_in_objects_is_counted(wrap: Callable[[Any], Any]) -> None:
    def peaks(between: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        return [one.stats["peak_bytes"] for one in train(modules_with(between), bpipe.OneFOneB)]

    def read(held: Any) -> torch.Tensor:
        return held.value if isinstance(held, Holder) else held[0]

    def in_a_region(x: torch.Tensor) -> torch.Tensor:
        held = wrap(torch.sigmoid(x.detach()))
        return checkpoint(lambda y, held: torch.sin(y) * read(held), x, held=held, use_reentrant=False)

    def direct(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y, held: torch.sin(y) * held, x, held=torch.sigmoid(x.detach()), use_reentrant=False)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: wrap(tensor.clone()), read):
        packed = peaks(torch.sin)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        assert packed == peaks(torch.sin)
    assert peaks(in_a_region) == peaks(direct)


def test_activations_that_a_hook_keeps_stay() -> None:
    modules, kept = modules_with(torch.sin), []
    for module in modules:
        module.first.register_forward_hook(lambda _module, _args, output: kept.append(output))
    first, *_ = train(modules)
    assert_equal_to_one_process(modules, modules_with(torch.sin))
    plain, *_ = train(modules_with(torch.sin))
    assert len(kept) == 2 * P * M
    assert not plain.ledger.held
    assert first.stats["evicted_bytes"] == plain.stats["evicted_bytes"]  # tanh saves its result, not what the hook keeps


def test_saved_activations_that_a_hook_keeps_are_held() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return torch.sin(x)

    kept: list[torch.Tensor] = []
    modules = modules_with(between)
    first, *_ = train(modules)
    plain, *_ = train(modules_with(torch.sin))
    assert_equal_to_one_process(modules, modules_with(torch.sin))
    assert first.stats["evicted_bytes"] < plain.stats["evicted_bytes"]
    assert [held.reason for held in first.ledger.held] == ["owned 1 more time outside the graph"]


def test_what_the_users_own_hooks_take_is_theirs() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.sin(x)

    modules = modules_with(between)
    first, *_ = train(modules)
    assert_equal_to_one_process(modules, modules_with(between))
    plain, *_ = train(modules_with(torch.sin))
    assert 0 < first.stats["evicted_bytes"] <= plain.stats["evicted_bytes"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_that_refuse_hooks_are_refused_with_the_way_out(transform: Any) -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x + transform(lambda part: part.sin().sum())(x).sum()

    with pytest.raises(StageError, match=r"^microbatch 0 of stage 0 uses a transform of torch\.func .*torch\.autograd\.grad"):
        train(modules_with(between))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for forward mode
@pytest.mark.parametrize(
    "between",
    [
        lambda x: torch.func.vmap(torch.sin)(x),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0] * x,
    ],
    ids=["vmap", "jvp", "autograd.grad"],
)
def test_transforms_that_work(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    modules = modules_with(between)
    schedules = train(modules)
    assert_equal_to_one_process(modules, modules_with(between))
    assert schedules[0].stats["evicted_bytes"] > 0


@pytest.mark.parametrize("make", ["cuda", "xpu"])
def test_a_replayed_graph_is_refused(make: str) -> None:
    """By the name of its Function: torch.cuda.make_graphed_callables itself runs in tests/gpu."""

    class Graphed(Save):
        pass

    Graphed.__module__ = f"torch.{make}.graphs"
    with pytest.raises(StageError, match=rf"^microbatch 0 of stage 0: .*graph of its device \(torch.{make}.make_graphed"):
        train(modules_with(Graphed.apply))


@pytest.mark.parametrize("is_view", [False, True])
def test_a_view_of_one_number_shows_the_storage_that_it_keeps(is_view):
    numbers = torch.ones(32, dtype=torch.float64)
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = x * (numbers[0] if is_view else numbers[0].clone())
    assert shown_by([y.grad_fn], set(), "here").num_bytes == is_view * numbers.nbytes
