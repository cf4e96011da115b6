"""Losses, random numbers and norms over slices: as for whole sequences, or refused by name in the step that would differ."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import BPipeError

W, T, B, M, K = 4, 8, 4, 2, 2


class Layer(nn.Module):
    """A layer of positions of their own, with more behind it."""

    def __init__(self, more: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.more, self.num_calls = nn.Linear(W, W), more, 0

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        self.num_calls += 1
        y = self.linear(x)
        return (self.more(y) if self.more else y), None


def _schedule(module: nn.Module, loss_fn: Any, **options: Any) -> bpipe.Seq1F1B:
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    return bpipe.Seq1F1B(stage, M, loss_fn=loss_fn, slices=K, **options)


def _as_whole(module: Layer, loss_fn: Any, x: torch.Tensor, target: torch.Tensor, scale: float = 1 / M) -> list[torch.Tensor]:
    for rows, goal in zip(x.chunk(M), target.chunk(M)):
        (loss_fn(module(rows)[0], goal) * scale).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def _tokens(padded: float = 0.3, ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(1, W, (B, T), generator=generator)
    target[torch.rand(B, T, generator=generator) < padded] = ignored
    target[:, :2] = 1  # each sequence has words
    return target


def _flat(function: Callable[..., torch.Tensor], **options: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda y, t: function(y.flatten(0, 1), t.flatten(), **options)


def _perplexity(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten()).exp()


def _total_variation(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten()) + 0.1 * y.diff(dim=1).abs().mean()


def _normalised_by_batch(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / len(t)


def _last_position(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y[:, -1], t[:, -1])


def _pooled(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.mean(1), t[:, 0])


def _root(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (F.one_hot(t, W) - y).square().mean().sqrt()


def _hard_examples(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none")
    return losses.topk(max(1, losses.numel() // 2)).values.mean()


def _balanced_classes(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(t.flatten(), minlength=W).clamp(min=1)
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=1.0 / counts)


def _by_position(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    decay = torch.linspace(1, 2, y.shape[1]).expand(len(t), -1).flatten()
    return (F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none") * decay).mean()


def _focal(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def _spread(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten()) - 0.1 * y.var()


def _contrastive(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    flat = F.normalize(y.flatten(0, 1), dim=-1)
    return F.cross_entropy(flat @ flat.t(), torch.arange(len(flat)))


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "label smoothing": (_flat(F.cross_entropy, label_smoothing=0.1), _tokens(0.0)),
    "label smoothing with padding": (_flat(F.cross_entropy, label_smoothing=0.1), _tokens()),
    "a focal loss": (_focal, _tokens(0.0)),
    "a perplexity": (_perplexity, _tokens(0.0)),
    "differences of neighbours": (_total_variation, _tokens(0.0)),
    "a sum by the number of sequences": (_normalised_by_batch, _tokens(0.0)),
    "the last position alone": (_last_position, _tokens(0.0)),
    "the mean of the outputs": (_pooled, _tokens(0.0)),
    "a root of a mean": (_root, _tokens(0.0)),
    "the hardest half": (_hard_examples, _tokens(0.0)),
    "weights by the counts of classes": (_balanced_classes, _tokens(0.0)),
    "weights by position": (_by_position, _tokens(0.0)),
    "a variance of the outputs": (_spread, _tokens(0.0)),
    "each position against all others": (_contrastive, _tokens(0.0)),
    "an entry of the vocabulary that does not count": (_flat(F.cross_entropy, ignore_index=1), _tokens(0.0)),
    "a likelihood of logarithms": (lambda y, t: F.nll_loss(y.flatten(0, 1).log_softmax(-1), t.flatten()), _tokens()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_slices_is_that_of_whole_sequences(name: str) -> None:
    """Gradients of a whole step are those of a loop over whole sequences."""
    loss_fn, target = LOSSES[name]
    torch.manual_seed(0)
    module, right = Layer(), Layer()
    right.load_state_dict(module.state_dict())
    x = torch.randn(B, T, W)
    _schedule(module, loss_fn).step(x, target=target)
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _as_whole(right, loss_fn, x, target), strict=True))


def test_a_loss_that_shows_what_it_is_in_a_later_step() -> None:
    """A loss that ignores an entry, whose first batches do not have it."""
    loss_fn = _flat(F.cross_entropy, ignore_index=3)
    torch.manual_seed(0)
    module, right = Layer(), Layer()
    right.load_state_dict(module.state_dict())
    x, plain = torch.randn(B, T, W), torch.randint(0, 3, (B, T))
    later = plain.clone()
    later[:, 5:] = 3
    schedule = _schedule(module, loss_fn)
    schedule.step(x, target=plain)
    module.zero_grad()
    schedule.step(x, target=later)
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _as_whole(right, loss_fn, x, later), strict=True))


def test_a_loss_that_changes_with_training() -> None:
    """A weight of a regulariser that begins in the third step (KL annealing)."""
    steps = [0]

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        weight = 0.0 if steps[0] < 2 else 1.0
        return F.cross_entropy(y.flatten(0, 1), t.flatten()) + weight * y.mean(1).square().mean()

    torch.manual_seed(0)
    module, right = Layer(), Layer()
    right.load_state_dict(module.state_dict())
    x, target = torch.randn(B, T, W), _tokens(0.0)
    schedule = _schedule(module, loss_fn)
    for _ in range(4):
        module.zero_grad()
        schedule.step(x, target=target)
        steps[0] += 1
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _as_whole(right, loss_fn, x, target), strict=True))


class Draws(Layer):
    """Draws random numbers from some step on, in one of many ways."""

    def __init__(self, how: str, start: int) -> None:
        super().__init__()
        self.how, self.start, self.step = how, start, 0
        self.dropout, self.generator = nn.Dropout(0.0), torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        y = self.linear(x)
        if self.step < self.start:
            return y, None
        if self.how == "a rate of dropout that is raised":
            self.dropout.p = 0.5
            y = self.dropout(y)
        elif self.how == "noise of a generator":
            y = y + torch.randn(y.shape, generator=self.generator)
        elif self.how == "numpy's generator":
            y = y * float(self.numpy.random())
        elif self.how == "a coin of Python's":
            y = y if random.random() < 0.5 else 2 * y
        elif self.how == "noise in place":
            y = y.clone().normal_()
        elif self.how == "a stochastic depth by samples":
            y = y * torch.bernoulli(torch.full((len(y), 1, 1), 0.5))
        elif self.how == "attention's dropout":
            y = y + F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        elif self.how == "a leaky slope that is drawn":
            y = F.rrelu(y, training=True)
        elif self.how == "a permutation of features":
            y = y[..., torch.randperm(W)]
        return y, None


DRAWN = [
    "a rate of dropout that is raised",
    "noise of a generator",
    "numpy's generator",
    "a coin of Python's",
    "noise in place",
    "a stochastic depth by samples",
    "attention's dropout",
    "a leaky slope that is drawn",
    "a permutation of features",
]


@pytest.mark.usefixtures("no_other_threads")
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("how", DRAWN)
def test_a_layer_that_draws_is_refused_in_the_step_in_which_it_begins(how: str, start: int) -> None:
    """Slices would draw other numbers than the whole sequence: refused, also if the first steps drew none."""
    module = Draws(how, start)
    schedule = _schedule(module, _flat(F.cross_entropy))
    x = torch.randn(B, T, W)
    for step in range(start):
        module.step = step
        schedule.step(x, target=_tokens(0.0))
    module.step = start
    with pytest.raises(BPipeError, match=r"(?i)random|drop"):
        schedule.step(x, target=_tokens(0.0))


def _swapped(how: str, module: Layer) -> None:
    channels = nn.Sequential(Transposed(nn.BatchNorm1d(W)))
    if how == "a norm in place of nothing":
        module.more = channels
    elif how == "a norm inside of the layer":
        module.linear = nn.Sequential(module.linear, channels)  # type: ignore[assignment]
    elif how == "a group norm":
        module.more = Transposed(nn.GroupNorm(2, W))
    elif how == "a norm by a hook":
        norm = nn.BatchNorm1d(W)
        module.linear.register_forward_hook(lambda m, i, o: norm(o.transpose(1, 2)).transpose(1, 2))
    elif how == "torch's function":
        module.more = lambda y: F.batch_norm(y.transpose(1, 2), None, None, training=True).transpose(1, 2)
    elif how == "torch's function of instances":
        module.more = lambda y: F.instance_norm(y.transpose(1, 2)).transpose(1, 2)
    elif how == "torch's function with statistics of its own":
        module.more = lambda y: F.batch_norm(y.mT, torch.zeros(W), torch.ones(W), training=True).mT
    elif how == "torch's function behind a flag":
        module.more = lambda y: y if module.num_calls <= 3 * M * K else F.instance_norm(y.mT).mT
    elif how == "torch's function in a checkpoint":
        module.more = lambda y: checkpoint(lambda z: F.instance_norm(z.mT).mT, y, use_reentrant=False)
    elif how == "a class of one's own":
        module.more = type("Mine", (Transposed,), {})(type("MyNorm", (nn.BatchNorm1d,), {})(W))


class Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.inner(y.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


SWAPPED = [
    "a norm in place of nothing",
    "a norm inside of the layer",
    "a group norm",
    "a norm by a hook",
    "a class of one's own",
    "torch's function",
    "torch's function of instances",
    "torch's function with statistics of its own",
    "torch's function behind a flag",
    "torch's function in a checkpoint",
]


@pytest.mark.parametrize("how", SWAPPED)
def test_a_norm_over_positions_is_refused_when_it_is_put_in(how: str) -> None:
    """Its statistics would be those of a slice: refused in the first step that has it, whichever way it came in."""
    module = Layer()
    schedule = _schedule(module, _flat(F.cross_entropy))
    x = torch.randn(B, T, W)
    for _ in range(2):
        schedule.step(x, target=_tokens(0.0))
    _swapped(how, module)
    if how == "torch's function behind a flag":
        schedule.step(x, target=_tokens(0.0))
    with pytest.raises(BPipeError, match=r"(?i)norm|statistics"):
        schedule.step(x, target=_tokens(0.0))


BY_POSITION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by collected statistics": lambda y: F.batch_norm(y.mT, torch.full((W,), 0.1), torch.full((W,), 4.0), training=False).mT,
    "of groups of features": lambda y: F.group_norm(y.flatten(0, 1), 2).view(y.shape),
    "of heads": lambda y: F.group_norm(y.reshape(-1, 2, W // 2), 2).view(y.shape),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_a_norm_of_each_position_is_as_for_whole_sequences(name: str) -> None:
    module, right = Layer(BY_POSITION[name]), Layer(BY_POSITION[name])
    right.load_state_dict(module.state_dict())
    x, target = torch.randn(B, T, W), _tokens(0.0)
    _schedule(module, _flat(F.cross_entropy)).step(x, target=target)
    got = [p.grad for p in module.parameters()]
    for one, other in zip(got, _as_whole(right, _flat(F.cross_entropy), x, target), strict=True):
        torch.testing.assert_close(one, other)


def test_a_sum_over_a_count_of_ones_own_is_as_for_whole_sequences() -> None:
    """With `scale_grads=False`: each token of a step counts alike."""
    target = _tokens(0.4, ignored=0)
    count = int((target != 0).sum())
    assert math.isfinite(count)

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0, reduction="sum") / count

    torch.manual_seed(0)
    module, right = Layer(), Layer()
    right.load_state_dict(module.state_dict())
    x = torch.randn(B, T, W)
    _schedule(module, loss_fn, scale_grads=False).step(x, target=target)
    got = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _as_whole(right, loss_fn, x, target, 1.0), strict=True))


def test_a_whole_sequence_may_have_any_norm() -> None:
    """One slice is all of it."""
    module, right = (Layer(lambda y: F.instance_norm(y.mT).mT) for _ in range(2))
    right.load_state_dict(module.state_dict())
    x, target = torch.randn(B, T, W), _tokens(0.0)
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    bpipe.Seq1F1B(stage, M, loss_fn=_flat(F.cross_entropy), slices=1).step(x, target=target)
    got = [p.grad for p in module.parameters()]
    for one, other in zip(got, _as_whole(right, _flat(F.cross_entropy), x, target), strict=True):
        torch.testing.assert_close(one, other)
