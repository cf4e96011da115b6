"""Random modules: blocks nested in one another, as hypothesis draws them, that keep the shape [batch, length, WIDTH]."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6

Spec = tuple[Any, ...]  # the name of a block, and what it is made of


class _Scale(torch.autograd.Function):
    """A custom Function that saves a tensor, and keeps another one as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight.detach().clone()
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.weight, (gradient * x).sum((0, 1))


class Leaf(nn.Module):
    """A block of operations, by name; what it needs of parameters and buffers is there, used or not."""

    def __init__(self, name: str, log: list[torch.Tensor]) -> None:
        super().__init__()
        self.name = name
        self.note = partial(_note, log)  # not the list: a backward that changes its module is refused
        self.kept: list[torch.Tensor] = []
        self.carried: torch.Tensor | None = None  # state that is no buffer
        self.num_calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=name != "no_bias")
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.extra: nn.Module = EXTRA[name]() if name in EXTRA else nn.Identity()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        if name == "module_hooks":
            self.linear.register_full_backward_hook(lambda module, inputs, outputs: self.note(outputs[0]))
            self.linear.register_forward_hook(lambda module, inputs, output: output * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATIONS[self.name](self, x)


def _note(log: list[torch.Tensor], gradient: torch.Tensor) -> None:
    """Look at a gradient, as hooks do."""
    log.append(gradient.sum().detach())


def _attention(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    heads = leaf.linear(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * leaf.weight[:3], heads, is_causal=True).transpose(1, 2).flatten(2)


def _in_place(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    y = leaf.linear(x)
    y[..., 0].zero_()
    return F.relu(y.add_(x), inplace=True)


def _views(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    a, b = leaf.linear(torch.cat([x, x.flip(-1)], 0)).chunk(2)
    return (a * b.sigmoid()).transpose(0, 1).transpose(0, 1)


def _statistics(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    if leaf.training:
        leaf.count += 1
        leaf.mean = leaf.mean * 0.9 + x.detach().mean((0, 1)) * 0.1
    return leaf.linear(x - leaf.mean) * (1 + 0.1 * (leaf.count % 3))


def _flat(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    """The linear part on two dimensions, where the product with the weight is the very node that hooks are on."""
    return leaf.linear(x.flatten(0, 1))


def _hooked(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    y = _flat(leaf, x)
    if y.requires_grad:
        y.register_hook(leaf.note)
        y.register_hook(lambda gradient: gradient * 0.5)
    return torch.tanh(y).view_as(x)


def _multi_hooked(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    a = _flat(leaf, x)
    b = _flat(leaf, x) * leaf.weight
    if a.requires_grad and b.requires_grad:
        register_multi_grad_hook((a, b), lambda gradients: leaf.note(sum(g for g in gradients if g is not None)))
    return (a + b).view_as(x)


def _retained(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    y = _flat(leaf, x)
    if y.requires_grad:
        y.retain_grad()
        leaf.kept.append(y)
    return torch.sigmoid(y).view_as(x)


def _carried(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    y = leaf.linear(x)
    y = y if leaf.carried is None else y + 0.1 * leaf.carried
    leaf.carried = y.detach().mean((0, 1))
    return y


def _counted(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    leaf.num_calls += 1
    return leaf.linear(x) * (1 + 0.1 * (leaf.num_calls % 3))


def _dropped(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    """LayerDrop, decided by the microbatch, so that all runs decide alike."""
    return leaf.linear(x) if x.detach().sum() > 0 else x


def _uneven(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    """Saves as much as the microbatch wants."""
    for _ in range(int(x.detach().sum() * 10) % 3):
        x = torch.tanh(x * leaf.weight)
    return leaf.linear(x)


def _changed(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    """Saves a tensor for an output that nobody uses, and changes it."""
    y = leaf.linear(x).clone()
    torch.sin(y)
    return y.mul_(0.5)


def _unused(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    aside = torch.exp(leaf.linear(x))
    return x * leaf.weight + 0.0 * aside.detach().mean()


def _sorted(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    values, places = leaf.linear(x).sort(-1)
    return values.gather(-1, places) + torch.where(x > 0, x, x * leaf.weight)


def _double(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    return x + (leaf.linear(x).double() * leaf.weight).float()


def _frequencies(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(leaf.linear(x), dim=-1) * leaf.weight[:4], n=WIDTH, dim=-1)


def _normed(leaf: Leaf, x: torch.Tensor) -> torch.Tensor:
    return leaf.extra(leaf.linear(x).transpose(1, 2)).transpose(1, 2)


OPERATIONS: dict[str, Callable[[Leaf, torch.Tensor], torch.Tensor]] = {
    "linear": lambda leaf, x: leaf.linear(x),
    "no_bias": lambda leaf, x: F.gelu(leaf.linear(x)),
    "outer_bias": lambda leaf, x: x + leaf.weight.unsqueeze(0).unsqueeze(0),
    "layer_norm": lambda leaf, x: leaf.extra(x),
    "batch_norm": _normed,
    "attention": _attention,
    "in_place": _in_place,
    "views": _views,
    "statistics": _statistics,
    "hooked": _hooked,
    "multi_hooked": _multi_hooked,
    "module_hooks": lambda leaf, x: torch.tanh(leaf.linear(x * leaf.weight)),
    "retained": _retained,
    "carried": _carried,
    "counted": _counted,
    "dropped": _dropped,
    "uneven": _uneven,
    "changed": _changed,
    "unused": _unused,
    "sorted": _sorted,
    "double": _double,
    "frequencies": _frequencies,
    "function": lambda leaf, x: _Scale.apply(leaf.linear(x), leaf.weight),
    "lstm": lambda leaf, x: leaf.extra(x)[0],
    "weight_norm": lambda leaf, x: leaf.extra(x),
    "dropout": lambda leaf, x: leaf.extra(leaf.linear(x)),
    "random": lambda leaf, x: leaf.linear(x) + 0.1 * torch.randn_like(x),
    "generator": lambda leaf, x: leaf.linear(x) + 0.1 * torch.randn(x.shape, generator=leaf.generator),
}
EXTRA: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Dropout(0.3),
}
RANDOM = {"dropout", "random"}  # whose stages must have a rank of their own
WRITING = {"batch_norm", "statistics", "retained", "carried", "counted", "generator"}
KEEPING = {"retained"}  # what a second forward makes again
CHECKPOINTS = {"checkpoint", "reentrant"}


class Around(nn.Module):
    """A block around others, by name."""

    def __init__(self, name: str, inner: list[nn.Module]) -> None:
        super().__init__()
        self.name, self.inner = name, nn.ModuleList(inner)
        if name in CHECKPOINTS and any(isinstance(one, Leaf) and one.name in WRITING for one in self.modules()):
            self.name = "sequence"  # their backward writes buffers, in an order that is the schedule's
        if name == "frozen":
            self.requires_grad_(False)
        if name == "shared" and len(inner) > 1 and hasattr(inner[0], "linear") and hasattr(inner[1], "linear"):
            inner[1].linear.weight = inner[0].linear.weight

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.inner:
            x = one(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "residual":
            return x + self._in_order(x)
        if self.name == "sum":
            return sum((one(x) for one in self.inner[1:]), self.inner[0](x))
        if self.name == "twice":
            return self._in_order(self._in_order(x) * 0.5)
        if self.name == "checkpoint":
            return checkpoint(self._in_order, x, use_reentrant=False)
        if self.name == "reentrant" and x.requires_grad:
            return checkpoint(self._in_order, x, use_reentrant=True)
        if self.name == "aside":
            with torch.no_grad():
                y = self._in_order(x)
            return x * torch.tanh(y)
        return self._in_order(x)


AROUND = ["sequence", "residual", "sum", "twice", "checkpoint", "reentrant", "frozen", "shared", "aside"]


def specs(without: Collection[str]) -> st.SearchStrategy[Spec]:
    """Blocks in blocks, of all operations but some."""
    names = [name for name in OPERATIONS if name not in without]
    leaves = st.sampled_from(names).map(lambda name: (name,))

    def around(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
        return st.tuples(st.sampled_from(AROUND), st.lists(inner, min_size=1, max_size=3))

    return st.recursive(leaves, around, max_leaves=5)


def build(spec: Spec, log: list[torch.Tensor]) -> nn.Module:
    """The module of a spec, whose hooks write to a log."""
    return Leaf(spec[0], log) if len(spec) == 1 else Around(spec[0], [build(one, log) for one in spec[1]])
