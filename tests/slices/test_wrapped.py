"""Slices of stages that are compiled, checkpointed or in mixed precision, and gradients that several steps add up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.errors import StageError
from bpipe.slices import causal_attention, join
from tests.slices.models import KINDS, WIDTH, Stage, batch_of, stages_of
from tests.slices.test_run import by_themselves, furthest, run, taken

mse = nn.functional.mse_loss


def balanced(*args: Any, **options: Any) -> Any:
    return bpipe.Balanced(Seq1F1B(*args, **options))


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler: about LSTMs, about what its own code uses
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "kind, make",
    [*((kind, Seq1F1B) for kind in KINDS), ("attention", balanced)],
)
def test_compiled_stages(kind: str, make: Any) -> None:
    modules, batch = stages_of(kind, 2), batch_of(2)
    expected = by_themselves(modules, 2, batch)
    schedules, _ = run([torch.compile(module, backend="aot_eager") for module in modules], make, 2, batch, steps=3, slices=2)  # type: ignore[misc]
    assert furthest(taken(modules), expected) < 1e-12
    assert all(schedule.stats["predicted_peak_bytes"] == schedule.stats["peak_bytes"] for schedule in schedules)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-1)])
def test_attention_and_joins_are_compiled_in_one_graph(dtype: torch.dtype, close: float) -> None:
    def last_of_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        joined = join([k[:, :, :4], k[:, :, 4:]], 2)
        return causal_attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [(k[:, :, :4], v[:, :, :4])]) + joined.sum()

    def with_gradient(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = everything.clone().requires_grad_()
        found = function(*given)
        (found * found.detach()).sum().backward()
        return found, given.grad

    everything = torch.randn(3, 1, 2, 6, 8, dtype=dtype)
    compiled = torch.compile(last_of_two, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_gradient(compiled), with_gradient(last_of_two), rtol=close, atol=close)


class Under(nn.Module):
    """A layer whose activations are computed again in the backward."""

    def __init__(self, layer: nn.Module, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self._use_reentrant = layer, use_reentrant

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        return checkpoint(self.layer, x, past, use_reentrant=self._use_reentrant)


def checkpointed(kind: str, num_stages: int) -> list[Stage]:
    modules = stages_of(kind, num_stages)
    for module in modules:
        module.layers = nn.ModuleList(map(Under, module.layers))
    return modules


@pytest.mark.parametrize("make", [Seq1F1B, balanced])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers(kind: str, make: Any) -> None:
    modules, batch = checkpointed(kind, 4), batch_of(4)
    expected = by_themselves(modules, 4, batch)
    schedules, _ = run(modules, make, 4, batch, steps=3, slices=3)
    assert furthest(taken(modules), expected) < 1e-12
    assert all(schedule.stats["predicted_peak_bytes"] == schedule.stats["peak_bytes"] for schedule in schedules)


def test_checkpointed_layers_save_less() -> None:
    peaks = []
    for modules in (stages_of("attention", 2), checkpointed("attention", 2)):
        schedules, _ = run(modules, Seq1F1B, 2, batch_of(2, positions=48), steps=2, slices=3)
        peaks.append([schedule.stats["peak_bytes"] - schedule.stats["static_bytes"] for schedule in schedules])
    assert all(less < all_ / 2 for all_, less in zip(*peaks))


class Inner(nn.Module):
    """A reentrant checkpoint around a part of a layer that has no state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mlp = layer, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        x, state = self.layer(x, past)
        return x + checkpoint(self.mlp, x, use_reentrant=True), state


def test_a_reentrant_checkpoint_without_a_state() -> None:
    modules, batch = stages_of("attention", 2), batch_of(2)
    for module in modules:
        module.layers = nn.ModuleList(map(Inner, module.layers))
    expected = by_themselves(modules, 2, batch)
    run(modules, Seq1F1B, 2, batch, slices=3)
    assert furthest(taken(modules), expected) < 1e-12


class Flat(nn.Module):
    """A layer under a reentrant checkpoint which gives its state as a tensor, and takes it inside of a tuple or not."""

    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.inner, self._is_inside = nn.Linear(WIDTH, WIDTH), is_inside

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        before = past[-1] if past else x.new_zeros(x.shape[0], 1, WIDTH)
        if self._is_inside:
            return checkpoint(lambda x, held: self._summed(x, held[0]), x, (before,), use_reentrant=True)
        return checkpoint(self._summed, x, before, use_reentrant=True)

    def _summed(self, x: torch.Tensor, before: torch.Tensor) -> Any:
        y = torch.tanh(self.inner(x)) + before
        return y, y.sum(1, keepdim=True)


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("lost", [lambda: Under(Stage("attention"), use_reentrant=True), lambda: Flat(is_inside=True)])
def test_reentrant_checkpoints_that_would_lose_gradients(lost: Any, slices: int) -> None:
    modules = [Inner(Stage("attention", 1).double()), lost().double()]
    with pytest.raises(StageError, match=r"use_reentrant=True.*states get no gradients through it: use use_reentrant=False"):
        run(modules, Seq1F1B, 2, batch_of(2), slices=slices)


def test_a_reentrant_checkpoint_that_loses_nothing() -> None:
    gradients = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        modules = [Inner(Stage("attention", 1).double()), Flat(is_inside=False).double()]
        if not is_checkpointed:
            modules[1].forward = lambda x, past=(), own=modules[1]: own._summed(  # type: ignore[method-assign, misc]
                x, past[-1] if past else x.new_zeros(x.shape[0], 1, WIDTH)
            )
        run(modules, Seq1F1B, 2, batch_of(2), slices=3)
        gradients.append(taken(modules))
    assert furthest(*gradients) < 1e-12


@pytest.mark.parametrize("kind", ["attention", "joined", "state space"])  # oneDNN has no LSTM in bfloat16 everywhere
def test_autocast(kind: str) -> None:
    """Slices are as far from single precision as the whole sequence is."""
    modules, batch = stages_of(kind, 2, torch.float32), batch_of(2, dtype=torch.float32)
    exact = by_themselves(modules, 2, batch)
    with torch.autocast("cpu", torch.bfloat16):
        whole = by_themselves(modules, 2, batch)
        run(modules, Seq1F1B, 2, batch, steps=2, slices=3)
    found = taken(modules)
    assert all(gradient.dtype is torch.float32 for gradient in found)
    assert 1e-4 < furthest(found, exact) < 2 * furthest(whole, exact)


@pytest.mark.parametrize("make", [Seq1F1B, balanced])
def test_sums_that_several_steps_add_up(make: Any) -> None:
    """With `scale_grads=False`, two steps of 2 microbatches give the gradients of one sum over 4."""

    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    modules, (x, target) = stages_of("attention", 2), batch_of(4)
    expected = [4 * gradient for gradient in by_themselves(modules, 4, (x, target), summed)]
    loopback = Loopback(2)
    stages = [PipelineStage(module, i, 2, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [make(stage, 2, loss_fn=summed, slices=3, scale_grads=False) for stage in stages]
    losses: list[torch.Tensor] = []
    for part, of_part in zip(x.chunk(2), target.chunk(2)):
        loopback.step(schedules, part, target=of_part, losses=(found := []))
        losses += found
    assert furthest(taken(modules), expected) < 1e-12
    for module in modules:
        x = module(x)[0]
    torch.testing.assert_close(sum(losses), summed(x, target), rtol=1e-12, atol=0)
