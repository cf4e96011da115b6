"""What a stash sees, what it lets move, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import SavedTensorError
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import keys_of, owners
from tests.memory.captured import NAME, Captured, equal
from tests.models import WIDTH, Block, ConvNorm, Recurrent, Views

T = torch.Tensor
TOKENS = 8


def tokens(*leading: int) -> Callable[[], T]:
    return lambda: torch.randn(*leading, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: T) -> T:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v)


class CrossEntropy(nn.Module):
    def forward(self, x: T) -> T:
        return F.cross_entropy(x.flatten(0, 1), torch.arange(2 * TOKENS) % WIDTH)


class Half(nn.Module):
    """Half of the precision: autograd saves copies of input and weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: T) -> T:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(self.linear(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: T) -> T:
        return checkpoint(self.block, x, use_reentrant=False)


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh())


INPUT = 4 * 2 * TOKENS * WIDTH  # bytes

# module, input, the least bytes it must save, what else it saves
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], T], int, set[str]]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), tokens(2), INPUT, {"a parameter"}),
    "layer norm": (lambda: nn.LayerNorm(WIDTH), tokens(2), INPUT + 2 * INPUT // WIDTH, {"a parameter"}),
    "attention": (Attention, tokens(2), 5 * INPUT, {"a parameter"}),
    "dropout": (lambda: nn.Dropout(0.3), tokens(2), 1, set()),
    "conv and batch norm": (
        ConvNorm,
        lambda: tokens(2)().view(2, 4, 8, 8)[:1].clone(),
        2 * INPUT // 2,
        {"a parameter", "a buffer"},
    ),
    "lstm": (Recurrent, tokens(2), 4 * INPUT, {"a parameter"}),
    "embedding": (lambda: nn.Embedding(9, WIDTH), lambda: torch.arange(9).repeat(2), 8 * 18, set()),
    "cross entropy": (CrossEntropy, tokens(2), INPUT, set()),
    "block": (Block, tokens(2), 10 * INPUT, {"a parameter"}),
    "views": (Views, tokens(2), INPUT, {"a parameter"}),
    "autocast": (Half, tokens(2), INPUT, set()),
    "checkpoint": (Checkpointed, tokens(2), INPUT, set()),
    "frozen": (Frozen, tokens(2), INPUT, {"a parameter"}),
}


def captured(name: str, follows: bool = True) -> Captured:
    make, make_input, _, _ = ZOO[name]
    torch.manual_seed(0)
    return Captured(make(), make_input, follows=follows)


@pytest.mark.parametrize("name", ZOO)
def test_everything_that_is_saved_may_move_and_is_counted(name: str) -> None:
    _, _, least, others = ZOO[name]
    forward = captured(name)
    contents = forward.contents()
    assert contents.own_bytes == contents.movable_bytes == forward.live_bytes() >= least
    assert {held.reason for held in contents.held} == others
    assert not contents.shared
    assert len(keys_of_movable(contents)) == len(contents.movable)
    assert not keys_of_movable(contents) & keys_of(forward.tensors)


def keys_of_movable(contents: Any) -> set[int]:
    return {entry.storage._cdata for entry in contents.movable}


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_the_same_after_a_journey_and_nothing_stays(name: str) -> None:
    plain = captured(name, follows=False).backward()
    watched = captured(name)
    moved = captured(name)
    bundle = Bundle(moved.stash.send_away(moved.contents(), 0), NAME)
    messages = [message.clone() for message in bundle.messages()]
    bundle.empty()
    assert moved.live_bytes() == 0
    assert moved.alive
    for target, message in zip(bundle.refill(), messages, strict=True):
        target.copy_(message)
    bundle.scatter(messages)
    moved.stash.take_back(0)
    del bundle, target
    for forward in (watched, moved):
        assert equal(forward.backward(), plain)
        assert forward.alive == 0
        assert not forward.contents().movable


def test_checkpoint_saves_its_input_alone() -> None:
    assert captured("checkpoint").contents().own_bytes == INPUT


def test_views_and_shared_storages_move_once() -> None:
    forward = Captured(lambda x: torch.stack([part * part for part in (x * 1).chunk(4)]), lambda: torch.ones(8))
    assert forward.alive == 8
    assert [(entry.storage.nbytes(), len(entry.saved)) for entry in forward.contents().movable] == [(32, 8)]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> TwoTensor:
        return TwoTensor(x.clone(), x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: TwoTensor) -> T:  # type: ignore[override]
        return gradient.a


def test_storages_inside_a_wrapper_are_seen() -> None:
    forward = Captured(lambda x: Doubled.apply(x).exp(), lambda: torch.ones(4))
    assert [(entry.storage.nbytes(), len(entry.saved)) for entry in forward.contents().movable] == [(16, 1), (16, 1)]


# What may not move


class Keeps(torch.autograd.Function):
    """Saves its input, and keeps it in an attribute of its node too."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.kept = x
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


KEEPERS: dict[str, Callable[[T], Any]] = {
    "the tensor": lambda hidden: hidden,
    "an alias": lambda hidden: hidden.detach(),
    "its storage": lambda hidden: hidden.untyped_storage(),
    "an array": lambda hidden: hidden.detach().numpy(),
    "an attribute of a node": lambda hidden: Keeps.apply(hidden).grad_fn,
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_storage_of_somebody_else_is_held_with_shape_and_reason(keeper: str) -> None:
    kept: list[Any] = []

    def module(x: T) -> T:
        hidden = x * 2
        kept.append(KEEPERS[keeper](hidden))
        return hidden * hidden.exp()

    forward = Captured(module, lambda: torch.ones(3, 4))
    contents = forward.contents()
    assert contents.held == [((3, 4), torch.float32, 48, "owned 1 more time outside the graph")]
    assert contents.own_bytes == forward.live_bytes() - 48
    kept.clear()
    del contents  # it holds the storages that may move, and whoever holds one keeps it here
    assert not forward.contents().shared
    assert forward.contents().own_bytes == forward.live_bytes()


def test_an_output_that_the_user_keeps_is_held() -> None:
    kept: list[T] = []

    def module(x: T) -> T:
        kept.append(x.tanh())
        return kept[0]

    forward = Captured(module, lambda: torch.ones(3, 4))
    assert [held.shape for held in forward.contents().held] == [(3, 4)]
    kept.clear()
    assert not forward.contents().held


def test_what_another_graph_saved_without_a_stash_is_held() -> None:
    kept = []

    def module(x: T) -> T:
        hidden = x * 2
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            kept.append(hidden.sin())
        return hidden * hidden

    forward = Captured(module, lambda: torch.ones(5))
    assert [held.num_bytes for held in forward.contents().held] == [20]


def test_several_owners_are_counted() -> None:
    kept = []

    def module(x: T) -> T:
        hidden = x * 2
        kept.extend([hidden, hidden[:1], hidden.detach()])
        return hidden * hidden

    (held,) = Captured(module, lambda: torch.ones(5)).contents().held
    assert held.reason == "owned 3 more times outside the graph"


def test_batch_is_foreign() -> None:
    target = torch.arange(6) % 3
    forward = Captured(
        lambda x: F.cross_entropy(x, target), lambda: torch.ones(6, 3), dict.fromkeys(keys_of([target]), "the step's batch")
    )
    assert [(held.shape, held.reason) for held in forward.contents().held] == [((6,), "the step's batch")]
    assert not forward.contents().shared


@pytest.mark.parametrize(
    "use", [lambda x, w: x @ w, lambda x, w: (x @ w) @ w, lambda x, w: (x @ w.t()) @ w, lambda x, w: x @ w[:, :2]]
)
def test_parameters_and_their_views_never_move(use: Callable[[T, T], T]) -> None:
    """Not even those that no module of the stage knows of, such as a loss function's: nothing else may own them just now."""
    registered, stray = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))
    registered.forward = lambda x: use(x, registered.weight)  # type: ignore[method-assign]
    for module, weight in ((registered, registered.weight), (lambda x: use(x, stray), stray)):
        forward = Captured(module, lambda: torch.ones(2, 4))
        contents = forward.contents()
        assert not keys_of_movable(contents) & keys_of([weight])
        assert [held.num_bytes for held in contents.held] == [64]


def test_what_the_pipeline_holds() -> None:
    """For the user (`ours`), it stays, and is still this microbatch's; for a send (`leaving`), it may move once that is over."""
    outputs: list[T] = []

    def module(x: T) -> T:
        output = x.exp()
        outputs.append(output.detach())
        return output

    forward = Captured(module, lambda: torch.ones(6))
    contents = forward.contents(ours=outputs)
    assert (contents.movable, contents.fixed_bytes, contents.own_bytes, contents.held) == ([], 24, 24, [])
    contents = forward.contents(leaving=outputs)
    assert [(entry.storage.nbytes(), len(entry.saved)) for entry in contents.movable] == [(24, 1)]
    assert len(forward.contents().shared) == 1


def test_memory_that_torch_did_not_allocate_stays() -> None:
    forward = Captured(lambda x: x * torch.from_numpy(np.ones(6, np.float32)), lambda: torch.ones(6))
    contents = forward.contents()
    assert (contents.fixed_bytes, contents.own_bytes) == (24, 24 + contents.movable_bytes)


def test_empty_tensors_do_not_count() -> None:
    contents = Captured(lambda x: x.exp(), lambda: torch.ones(0, 4)).contents()
    assert (contents.movable, contents.held) == ([], [])


# In-place changes


def spoiled() -> tuple[Captured, T]:
    results: list[T] = []

    def module(x: T) -> T:
        results.append(x.exp())
        return results[0] * 1

    return Captured(module, lambda: torch.ones(2, 3)), results.pop()


MODIFIED = rf"{NAME} was modified in place: shape \(2, 3\), torch.float32, version 1, expected 0"


def test_in_place_change_is_noticed_after_the_memory_was_away() -> None:
    forward, saved = spoiled()
    with torch.no_grad():
        saved.add_(1)
    changed = saved.clone()
    assert forward.contents().movable_bytes == 0  # the user holds it, and may never use it again
    del saved
    bundle = Bundle(forward.stash.send_away(forward.contents(), 0), NAME)
    messages = [message.clone() for message in bundle.messages()]
    assert torch.equal(messages[0].view(torch.float32), changed.flatten())
    bundle.empty()
    bundle.scatter([landing.copy_(message) for landing, message in zip(bundle.refill(), messages, strict=True)])
    forward.stash.take_back(0)
    with pytest.raises(SavedTensorError, match=MODIFIED):
        forward.backward()


def test_in_place_change_is_noticed_in_the_backward() -> None:
    forward, saved = spoiled()
    with torch.no_grad():
        saved[0].zero_()  # a view of it
    with pytest.raises(SavedTensorError, match=MODIFIED):
        forward.backward()


def test_in_place_change_before_the_saving_is_fine() -> None:
    forward = Captured(lambda x: x.mul_(2).exp(), lambda: torch.ones(3))
    forward.contents()
    assert equal(forward.backward()[:1], captured_gradient(lambda x: x.mul(2).exp()))


def captured_gradient(module: Callable[[T], T]) -> list[T | None]:
    return Captured(module, lambda: torch.ones(3), follows=False).backward()


def test_use_while_away() -> None:
    forward = captured("linear")
    forward.stash.send_away(forward.contents(), 0)
    with pytest.raises(SavedTensorError, match=f"{NAME} was used while its bytes were on another rank"):
        forward.backward()
    forward = captured("linear")
    forward.stash.send_away(forward.contents(), 0)
    forward.stash.take_back(0)
    forward.backward()


# Lifetimes: the graph owns, the stash looks on


@pytest.mark.parametrize("name", ZOO)
def test_a_dropped_graph_leaves_nothing(name: str) -> None:
    """Without the cycle collector: outputs that are saved too, such as tanh's, must make no circle."""
    forward = captured(name)
    assert forward.alive
    forward.edges = []
    assert (forward.alive, forward.live_bytes()) == (0, 0)


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T, call: Callable[[], None]) -> T:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:  # type: ignore[override]
        ctx.call()
        return gradient, None


@pytest.mark.parametrize("follows", [True, False])
def test_a_backward_frees_memory_as_it_goes(follows: bool) -> None:
    live: list[int] = []

    def module(x: T) -> T:
        for _ in range(6):
            x = Probe.apply(torch.tanh(x), lambda: live.append(forward.live_bytes()))
        return x

    forward = Captured(module, lambda: torch.ones(100), follows=follows)
    forward.backward()
    assert live == [2400, 2000, 1600, 1200, 800, 400]


def test_owners() -> None:
    tensor = torch.empty(3)
    storage = tensor.untyped_storage()
    assert owners(storage) == 1
    alias, view = tensor.detach(), tensor[1:]
    assert owners(storage) == 3
    del alias, view, tensor
    assert owners(storage) == 0


class Replaces(nn.Module):
    """Puts new buffers in place of old ones in each forward, as running statistics may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        for i in range(50):
            self.register_buffer(f"count{i}", torch.zeros(1))

    def forward(self, x: T) -> T:
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, buffer + 1)
        y = torch.tanh(self.first(x))
        return torch.tanh(self.second(y)) * torch.sigmoid(y)


def test_no_activation_is_taken_for_a_buffer_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of a storage is not given to another one while the pipeline remembers it."""
    held = list[str]()
    contents = Stash.contents

    def noting(self: Stash, *args: Any) -> Any:
        found = contents(self, *args)
        held.extend(one.reason for one in found.non_activations)
        return found

    monkeypatch.setattr(Stash, "contents", noting)
    loopback = bpipe.Loopback(4)
    stages = [bpipe.PipelineStage(Replaces(), rank, 4, "cpu", group=loopback.rank(rank)) for rank in range(4)]
    schedules = [bpipe.BalancedOneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
    for _ in range(3):
        loopback.step(schedules, torch.ones(64, 64), target=torch.ones(64, 64))
    assert held and "a buffer" not in held
