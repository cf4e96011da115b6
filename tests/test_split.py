"""Backwards in two halves: the same bits as one backward, each product once, every hook once, nothing left behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bpipe.backward.autograd import InputGrads, edges_of, enter, run_backward
from bpipe.backward.split import DeferredWeightGrad, run_backward_input
from bpipe.errors import SavedTensorError
from bpipe.memory.saved.stash import Stash
from tests.models import KINDS, TOKENS, WIDTH, Block
from tests.operations import Count
from tests.storages import StorageCount

pytestmark = pytest.mark.usefixtures("one_thread")

T = torch.Tensor


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def image_or_text(module: nn.Module) -> T:
    is_image = any(isinstance(one, nn.Conv2d) for one in module.modules())
    return torch.randn(*((2, 4, 8, 8) if is_image else (2, TOKENS, WIDTH)), generator=torch.Generator().manual_seed(1))


def tensors(value: Any) -> list[T]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, T)]


class Graph:
    """A forward's outputs that need a gradient, as edges with gradients, and the box of its inputs."""

    def __init__(self, module: nn.Module, inputs: list[T] | None = None, **kwargs: Any) -> None:
        arrived = [tensor.clone() for tensor in inputs or [image_or_text(module)]]
        entered, self.input_grads = enter(arrived, [tensor.is_floating_point() for tensor in arrived])
        outputs = [output for output in tensors(module(*entered, **kwargs)) if output.requires_grad]
        generator = torch.Generator().manual_seed(2)
        self.gradients = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
        self.edges = edges_of(outputs)

    def backward_input(self) -> DeferredWeightGrad:
        return run_backward_input(self.edges, self.gradients, self.input_grads, before=lambda leaves: None)

    def whole(self) -> None:
        run_backward(self.edges, self.gradients)


def names_with_gradient(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None}


def left_behind(make: Callable[[], nn.Module], halves: bool, inputs: list[T] | None, context: T | None) -> list[T | None]:
    """All gradients and buffers after two microbatches."""
    module = made(make)
    torch.manual_seed(3)
    leaf = {} if context is None else {"context": context.clone().requires_grad_()}
    results: list[T | None] = []
    for _ in range(2):
        graph = Graph(module, inputs, **leaf)
        if halves:
            graph.backward_input().run()
        else:
            graph.whole()
        results += graph.input_grads.gradients
    return [*results, *(t.grad for t in (*module.parameters(), *leaf.values())), *module.buffers()]


def assert_equal_halves(make: Callable[[], nn.Module], inputs: list[T] | None = None, context: T | None = None) -> None:
    whole, halves = (left_behind(make, kind, inputs, context) for kind in (False, True))
    assert [t is None for t in whole] == [t is None for t in halves]
    assert all(torch.equal(s, t) for s, t in zip(whole, halves, strict=True) if s is not None and t is not None)


# Stages of many kinds.


class Lambda(nn.Module):
    """A forward given as a function of the parts and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: T, **kwargs: T) -> Any:
        return self.function(self, *inputs, **kwargs)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Scale(torch.autograd.Function):
    """A product that computes both of its gradients at once, and counts how often."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: T, weight: T) -> T:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: T) -> tuple[T, T]:
        Scale.count += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum_to_size(weight.shape)


def in_autocast(stage: Any, x: T) -> T:
    with torch.autocast("cpu", torch.bfloat16):
        return stage.b(stage.a(stage.a(x).relu())) + x


def unrolled(stage: Any, x: T) -> T:
    state = None
    for i in range(TOKENS):
        state = stage.cell(x[:, i], state)
    assert state is not None
    return state[0]


def in_place(stage: Any, x: T) -> T:
    y = stage.a(x.mul_(2).relu_())
    y += x
    return y.sin_()


def vector() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, WIDTH))


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH))


# By name: the stage, and the parameters, by the starts of their names, that get their gradients in the input half already.
ALL = {""}
NORMS = {"transformer": {"0.norm", "1.norm"}, "conv": {"0.norm", "1.norm"}, "autocast": {"inner.norm"}}
NORMS |= {"quiet": {"norm"}, "frozen": {"norm"}}
STAGES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    **{kind: (lambda make=make: make(1), NORMS.get(kind, set())) for kind, make in KINDS.items() if kind != "tied"},
    "used three times": (lambda: KINDS["tied"](1), {"first.", "second."}),
    "used in many ways": (
        lambda: Lambda(lambda s, x: ((s.a(x * s.w) + (s.w * 3).exp()) * s.w).sin() * s.w + s.a(x), a=linear(), w=matrix()),
        ALL,
    ),
    "weight norm": (lambda: nn.Sequential(weight_norm(linear()), nn.Tanh(), spectral_norm(linear())), set()),
    "cast twice": (lambda: Lambda(in_autocast, a=linear(), b=linear()), {"a.weight", "a.bias"}),
    "unrolled": (lambda: Lambda(unrolled, cell=nn.LSTMCell(WIDTH, WIDTH)), ALL),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.PReLU(8), nn.ConvTranspose2d(8, 4, 2), nn.BatchNorm2d(4).eval()
        ),
        {"1.", "2.", "4."},
    ),
    "attention": (
        lambda: Lambda(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(WIDTH, 4, batch_first=True)),
        {"a.in_proj_bias"},
    ),
    "vectors": (lambda: Lambda(lambda s, x: (x * s.v).sin() + s.w + s.m, v=vector(), w=vector(), m=matrix()), {"v", "w"}),
    "frozen in part": (lambda: nn.Sequential(linear().requires_grad_(False), linear()), set()),
    "in place": (lambda: Lambda(in_place, a=linear()), set()),
    "custom Function": (lambda: Lambda(lambda s, x: Scale.apply(s.a(x), s.m), a=linear(), m=matrix()), {"m"}),
    "custom Function of a weight": (
        lambda: Lambda(lambda s, x: x + Scale.apply(s.a.weight[:TOKENS].expand(2, -1, -1), s.v), a=linear(), v=vector()),
        set(),
    ),
    "regularised loss": (
        lambda: Lambda(
            lambda s, x: s.a(x).square().mean() + s.a.weight.square().sum() + s.b.weight.sum(), a=linear(), b=linear(), v=vector()
        ),
        {"a."},
    ),
    "outputs beside": (
        lambda: Lambda(lambda s, x: (s.a(x), x, s.v, s.b.weight.exp(), s.b.weight.sin()), a=linear(), b=linear(), v=vector()),
        set(),
    ),
    "outputs beside, shared": (lambda: Lambda(lambda s, x: (s.a(x), s.a.weight.exp(), s.b.weight), a=linear(), b=linear()), ALL),
    "only beside": (lambda: Lambda(lambda s, x: s.a.weight.exp(), a=linear()), set()),
    "recomputed": (
        lambda: Lambda(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False)), a=Block(dropout=0.1), b=linear()),
        {"a."},
    ),
    "recomputed beside": (
        lambda: Lambda(lambda s, x: checkpoint(lambda x: s.a(x) + s.m.sin(), x, use_reentrant=False), a=linear(), m=matrix()),
        ALL,
    ),
    "recomputed, reentrant": (
        lambda: Lambda(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=True)), a=Block(dropout=0.1), b=linear()),
        ALL,
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_both_halves_equal_one_backward(name: str) -> None:
    make, early = STAGES[name]
    assert_equal_halves(make)
    module = made(make)
    rest = Graph(module).backward_input()
    at_once = names_with_gradient(module)
    rest.run()
    assert at_once == {name for name in names_with_gradient(module) if name.startswith(tuple(early))}


def test_parameters_have_no_gradient_before_the_weight_half_and_inputs_have() -> None:
    module = made(lambda: nn.Sequential(linear(), nn.GELU(), linear()))
    whole, graph = Graph(module), Graph(module)
    whole.whole()
    module.zero_grad()
    rest = graph.backward_input()
    assert not names_with_gradient(module)
    given = graph.input_grads.gradients[0]
    assert given is not None and torch.equal(given, whole.input_grads.gradients[0])
    rest.run()
    assert len(names_with_gradient(module)) == 4
    assert graph.input_grads.gradients[0] is given


def test_several_inputs() -> None:
    """One used, one passed on, one unused, one of whole numbers, one that needs no gradient."""

    def forward(stage: Any, used: T, passed: T, unused: T, indices: T) -> Any:
        return stage.a(used) + stage.table(indices), passed

    inputs = [torch.randn(2, 3, WIDTH), torch.randn(2), torch.randn(3), torch.tensor([[0, 1, 2], [2, 1, 0]])]
    assert_equal_halves(lambda: Lambda(forward, a=linear(), table=nn.Embedding(3, WIDTH)), inputs)


def test_outputs_without_a_gradient() -> None:
    module = made(lambda: Lambda(lambda s, x: (s.a(x), s.b(x)), a=linear(), b=linear()))
    graph = Graph(module)
    graph.gradients[1] = None
    graph.backward_input().run()
    assert names_with_gradient(module) == {"a.weight", "a.bias"}
    nothing = Graph(module)
    nothing.gradients = [None, None]
    nothing.backward_input().run()
    assert nothing.input_grads.gradients == [None]


@pytest.mark.parametrize("forward", [lambda s, x, context: s.a(x) * s.b(context), lambda s, x, context: s.a(x + context) * context])
def test_keyword_tensors_get_their_gradients(forward: Callable[..., T]) -> None:
    assert_equal_halves(lambda: Lambda(forward, a=linear(), b=linear()), context=torch.randn(TOKENS, WIDTH))


def test_without_inputs_that_need_a_gradient_everything_waits() -> None:
    module = made(lambda: nn.Sequential(nn.Embedding(8, WIDTH), checkpointed(linear(), reentrant=True)))
    ids = torch.randint(8, (2, TOKENS))
    Graph(module, [ids]).whole()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    rest = Graph(module, [ids]).backward_input()
    assert not names_with_gradient(module)
    rest.run()
    assert all(map(torch.equal, expected, (parameter.grad for parameter in module.parameters())))


def checkpointed(module: nn.Module, *, reentrant: bool) -> nn.Module:
    return Lambda(lambda s, x: checkpoint(s.inner, x, use_reentrant=reentrant), inner=module)


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_regions_run_in_the_input_half(backend: str) -> None:
    torch.compiler.reset()
    assert_equal_halves(lambda: nn.Sequential(linear(), torch.compile(Block(dropout=0.0), backend=backend)))


# What is done, and how often.


def counted(call: Callable[[], Any]) -> Counter[str]:
    with Count() as count:
        call()
    return count.of


def test_each_half_has_half_of_the_products() -> None:
    module = made(lambda: Block(dropout=0.0))
    whole = counted(Graph(module).whole)
    graph = Graph(module)
    halves: list[DeferredWeightGrad] = []
    first = counted(lambda: halves.append(graph.backward_input()))
    second = counted(halves[0].run)
    assert whole["mm"] == 8 and first["mm"] == second["mm"] == 4
    costly = ("gelu_backward", "_scaled_dot_product_flash_attention_for_cpu_backward", "sum")
    assert [first[name] + second[name] for name in costly] == [whole[name] for name in costly]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_region_is_recomputed_once(reentrant: bool) -> None:
    module = made(lambda: nn.Sequential(linear(), checkpointed(Block(dropout=0.0), reentrant=reentrant)))
    graph = Graph(module)
    done = counted(lambda: graph.backward_input().run())
    assert done["_scaled_dot_product_flash_attention_for_cpu"] == 1


def test_a_custom_function_runs_once() -> None:
    module = made(STAGES["custom Function"][0])
    graph = Graph(module)
    before = Scale.count
    graph.backward_input().run()
    assert Scale.count == before + 1


def test_hooks_of_parameters_run_once_when_the_gradient_is_there() -> None:
    module = made(STAGES["used three times"][0])
    seen: list[tuple[str, float]] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, float(gradient.sum()))))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, float(p.grad.sum()))))
    Graph(module).whole()
    expected = sorted(seen)
    seen.clear()
    module.zero_grad()
    Graph(module).backward_input().run()
    assert sorted(seen) == expected and len(seen) == 2 * len(list(module.parameters()))


def test_hooks_on_activations_count_once() -> None:
    def forward(stage: Any, x: T) -> T:
        inner = stage.a(x)
        inner.register_hook(lambda gradient: gradient * 2)
        assert inner.grad_fn.name() == "AddmmBackward0"  # a product: here a branch begins
        inner.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        return stage.b(inner)

    assert_equal_halves(lambda: Lambda(forward, a=linear(), b=linear()), [torch.randn(3, WIDTH)])


def test_a_module_s_full_backward_hook_runs_once() -> None:
    module = made(lambda: nn.Sequential(linear(), linear()))
    calls: list[str] = []
    module[0].register_full_backward_hook(lambda *_: calls.append("hook"))
    module[1].register_full_backward_pre_hook(lambda *_: calls.append("pre-hook"))
    graph = Graph(module)
    graph.backward_input().run()
    assert sorted(calls) == ["hook", "pre-hook"]


# Memory.


def test_the_graph_lives_until_the_weight_half_and_no_longer() -> None:
    gc.collect()
    gc.disable()
    try:
        saved: list[StorageWeakRef] = []
        gradients: list[StorageWeakRef] = []

        def forward(stage: Any, x: T) -> T:
            output = stage.a(kept(saved, x.exp()))
            output.register_hook(lambda gradient: gradients.append(StorageWeakRef(gradient.untyped_storage())))
            return kept(saved, output)

        graph = Graph(made(lambda: Lambda(forward, a=linear())))
        rest, input_grads = graph.backward_input(), graph.input_grads
        del graph
        assert [ref.expired() for ref in saved] == [False, True]  # the product's input is still needed, its output never was
        assert [ref.expired() for ref in gradients] == [False]
        rest.run()
        assert all(ref.expired() for ref in saved + gradients)
        assert input_grads.gradients[0] is not None
    finally:
        gc.enable()


def kept(saved: list[StorageWeakRef], tensor: T) -> T:
    saved.append(StorageWeakRef(tensor.untyped_storage()))
    return tensor


def test_what_only_the_input_half_needs_is_freed_behind_it() -> None:
    """An activation between two products, whose gradient needs it and whose product does not."""
    saved: list[StorageWeakRef] = []
    module = made(
        lambda: Lambda(lambda s, x: s.b(s.a(kept(saved, x.exp())).sin() + kept(saved, x.exp()) ** 2), a=linear(), b=linear())
    )
    for is_followed in (False, True):
        saved.clear()
        with Stash("microbatch 0 of stage 1", {}).capture() if is_followed else nullcontext():
            graph = Graph(module)
        rest = graph.backward_input()
        assert [ref.expired() for ref in saved] == [False, True]
        rest.run()


class Exp(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:
        (result,) = ctx.saved_tensors
        return gradient * result


def test_what_a_custom_function_saved_is_freed_too() -> None:
    saved: list[StorageWeakRef] = []
    module = made(lambda: Lambda(lambda s, x: s.b(kept(saved, Exp.apply(s.a(x))).sin()), a=linear(), b=linear()))
    graph = Graph(module)
    rest = graph.backward_input()
    assert [ref.expired() for ref in saved] == [True]
    rest.run()


def test_saved_tensors_under_hooks_of_the_user_are_left_to_them() -> None:
    def forward(stage: Any, x: T) -> T:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda copy: copy):
            return stage.b(stage.a(x).tanh())

    assert_equal_halves(lambda: Lambda(forward, a=linear(), b=linear()))


def test_a_graph_is_used_once() -> None:
    """What a module computes once, for all its microbatches, is freed by the first backward: as in one backward."""
    module = made(lambda: Lambda(lambda s, x: s.a(x) * s.shared, a=linear(), m=matrix()))
    module.shared = (module.m * 2).sin()
    module.shared.grad_fn.next_functions[0][0].register_hook(lambda *_: None)
    first, second = Graph(module), Graph(module)
    first.backward_input().run()
    with pytest.raises(RuntimeError, match="second time"):
        second.backward_input().run()


def test_nothing_is_left_to_the_cycle_collector() -> None:
    module = made(lambda: nn.Sequential(Block(dropout=0.0), linear()))
    Graph(module).backward_input().run()
    gc.collect()
    gc.disable()
    try:
        Graph(module).backward_input().run()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_transformer_keeps_no_more_between_its_halves_than_before() -> None:
    """Inputs of products and gradients of their outputs take the place of all that was saved."""
    module, count = made(lambda: nn.Sequential(Block(dropout=0.0), Block(dropout=0.0))), StorageCount()
    with count.mode():
        graph = Graph(module)
        edges, gradients, input_grads = graph.edges, graph.gradients, graph.input_grads
        del graph

        def live() -> int:
            received = [gradient for gradient in input_grads.gradients if gradient is not None]
            of_parameters = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            return count.live_bytes(without=[*module.parameters(), *of_parameters, *received, *gradients])

        before = live()
        rest = run_backward_input(edges, gradients, input_grads, before=lambda leaves: None)
        edges.clear()
        between = live()
        rest.run()
        assert 0.5 * before < between < 1.02 * before
        assert live() == 0


def test_it_frees_branch_by_branch() -> None:
    """The products nearest to the outputs come first, and what each has saved goes with it."""
    saved: list[StorageWeakRef] = []
    module = made(lambda: Lambda(lambda s, x: s.b(kept(saved, s.a(kept(saved, x.exp())).exp())), a=linear(), b=linear()))
    graph = Graph(module)
    rest = graph.backward_input()
    del graph
    found: list[list[bool]] = []
    for part in (module.a, module.b):
        part.weight.register_hook(lambda _: found.append([ref.expired() for ref in saved]))
    rest.run()
    assert found == [[False, True], [True, True]]


# Together with a stash, which looks on at what is saved.


def test_saved_tensors_leave_before_the_input_half_and_come_back() -> None:
    module = made(lambda: Block(dropout=0.0))
    Graph(module).whole()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    stash = Stash("microbatch 0 of stage 1", {})
    with stash.capture():
        graph = Graph(module)
    storages = [entry[0] for entry in stash.contents().movable]
    assert storages
    bytes_of = [(storage, storage.nbytes(), storage.clone()) for storage in storages]
    for storage in storages:
        storage.resize_(0)
    for storage, size, copy in bytes_of:
        storage.resize_(size)
        storage.copy_(copy)
    graph.backward_input().run()
    assert all(map(torch.equal, expected, (parameter.grad for parameter in module.parameters())))


def test_a_change_between_the_halves_is_noticed() -> None:
    module = made(lambda: Lambda(lambda s, x: s.a(kept_alive.setdefault("x", x.exp())), a=linear()))
    kept_alive: dict[str, T] = {}
    stash = Stash("microbatch 0 of stage 1", {})
    with stash.capture():
        graph = Graph(module)
    rest = graph.backward_input()
    with torch.no_grad():
        kept_alive["x"].add_(1)
    with pytest.raises(SavedTensorError, match="was modified in place"):
        rest.run()


def test_an_empty_box() -> None:
    assert InputGrads().gradients == [] and InputGrads().anchor is None
