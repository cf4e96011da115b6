"""Twins of a schedule of two directions that do not compute the same: refused, or warned of, before they have trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import bpipe
from bpipe.errors import BPipeError

W, B, M = 4, 8, 4


class Block(nn.Module):
    """A block with many settings, of torch's modules and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(W, W), nn.LayerNorm(W), nn.GELU()
        self.attention = nn.MultiheadAttention(W, 2, batch_first=True)
        self.drop, self.scale, self.residual = nn.Dropout(0.0), 1.0, True
        self.config = SimpleNamespace(eps=1e-5, kind="sdpa")
        self.function: Callable[..., torch.Tensor] = torch.tanh
        self.many = {"alpha": 0.5}
        self.register_buffer("table", torch.ones(W))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.linear(x)))
        y = y + self.attention(y[:, None], y[:, None], y[:, None], need_weights=False)[0][:, 0]
        y = self.function(self.drop(y)) * self.scale * self.table * self.many["alpha"]
        return x + y if self.residual else y


LOG: list[str] = []


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


def _pipeline(blocks: list[nn.Module]) -> tuple[bpipe.Loopback, list[bpipe.Chimera]]:
    loopback = bpipe.Loopback(2)
    held = enumerate(([0, 3], [1, 2]))  # two ranks: stages 0 and 1 are the model, and 2 and 3 their twins
    stages = [[bpipe.PipelineStage(blocks[s], s, 4, "cpu", loopback.rank(r), directions=2) for s in some] for r, some in held]
    return loopback, [bpipe.Chimera(some, M, loss_fn=F.mse_loss) for some in stages]


def _blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    first = [Block(), Block()]
    twins = [Block(), Block()]
    for ours, theirs in zip(first, twins):
        theirs.load_state_dict(ours.state_dict())
    return [*first, *twins]


def _said(change: Callable[[Any], Any], *, in_between: bool, num_steps: int = 1) -> str:
    """What is raised or logged where one twin is changed, before the first step or behind it; empty if nothing is."""
    blocks = _blocks()
    loopback, ranks = _pipeline(blocks)
    x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
    handler = Handler()
    LOG.clear()
    logging.getLogger("bpipe").addHandler(handler)
    try:
        if in_between:
            loopback.step(ranks, x, target=x)
            LOG.clear()
        blocks[2] = change(blocks[2]) or blocks[2]
        if isinstance(blocks[2], nn.Module) and ranks[1].stages[1].submod is not blocks[2]:
            ranks[1].stages[1].submod = blocks[2]
        for _ in range(num_steps):
            loopback.step(ranks, x, target=x)
        return "; ".join(LOG)
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("bpipe").removeHandler(handler)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        owner, _, name = path.rpartition(".")
        target = block
        for part in owner.split(".") if owner else ():
            target = getattr(target, part)
        setattr(target, name, value)

    return change


def _hook(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, args, output: output * 2)


def _pre_hook(block: Any) -> None:
    block.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _backward_hook(block: Any) -> None:
    block.norm.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))


def _parameter_hook(block: Any) -> None:
    block.linear.weight.register_hook(lambda gradient: gradient * 2)


def _parametrized(block: Any) -> None:
    weight = block.linear.weight.detach().clone()
    parametrize.register_parametrization(block.linear, "weight", nn.Tanh())
    with torch.no_grad():
        block.linear.parametrizations.weight.original.copy_(weight)


def _pruned(block: Any) -> None:
    prune.l1_unstructured(block.linear, "weight", amount=0.5)


def _own_forward(block: Any) -> None:
    block.linear.forward = lambda x: F.linear(x, block.linear.weight)


def _order(block: Any) -> None:
    block._modules = {name: block._modules[name] for name in reversed(block._modules)}


class Other(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _subclass(block: Any) -> None:
    block.__class__ = Other


def _wrapped(block: nn.Module) -> nn.Module:
    return nn.Sequential(block, nn.Dropout(0.5))


def _frozen(block: Any) -> None:
    block.linear.weight.requires_grad_(False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "how a GELU approximates": _set("act.approximate", "tanh"),
    "the epsilon of a norm": _set("norm.eps", 0.1),
    "the number of heads": _set("attention.num_heads", 1),
    "an activation by a function": _set("function", torch.sigmoid),
    "a partial": _set("function", partial(F.leaky_relu, negative_slope=0.5)),
    "a plain number": _set("scale", 2.0),
    "a flag": _set("residual", False),
    "a text in a configuration object": _set("config.kind", "eager"),
    "a number in a dict": lambda block: block.many.update(alpha=0.25),
    "one submodule in eval mode": lambda block: block.drop.eval() and None,
    "a forward hook": _hook,
    "a hook before a forward": _pre_hook,
    "a backward hook": _backward_hook,
    "a hook on a parameter": _parameter_hook,
    "a forward of the instance": _own_forward,
    "a subclass": _subclass,
    "a parametrization": _parametrized,
    "a mask of pruning": _pruned,
    "a wrapper": _wrapped,
    "a frozen weight": _frozen,
    "a conversion": lambda block: block.to(torch.float64) and None,
    "a norm replaced": lambda block: setattr(block, "norm", nn.RMSNorm(W)),
    "a module that is another function": lambda block: setattr(block, "act", nn.SiLU()),
}


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_twin_that_computes_something_else_is_refused_or_warned_of(name: str, in_between: bool) -> None:
    """Gradients of two different functions would be added up: said in the step that would do it, with the twins' stage."""
    said = _said(CHANGES[name], in_between=in_between)
    assert "twin" in said or "stage" in said, said


class Counting(Block):
    """A block with buffers that its forward changes: in place, and as new tensors; and with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(W)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(W))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += float(x.detach().sum())
        self.latest = x.detach().mean(0)
        return super().forward(x) + self.batch_norm(x)


TABLES: dict[str, Callable[[Any], Any]] = {
    "of factors": lambda block: setattr(block, "table", block.table * 2),
    "that one twin alone has": lambda block: block.register_buffer("mask", torch.ones(W)),
    "that is loaded": lambda block: block.load_state_dict({**block.state_dict(), "table": torch.full((W,), 3.0)}) and None,
    "of whole numbers": lambda block: block.register_buffer("table", torch.ones(W, dtype=torch.int64)),
    "that no state dict has": lambda block: block.register_buffer("table", 2 * torch.ones(W), persistent=False),
    "with NaN": lambda block: block.table.__setitem__(0, float("nan")),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_a_buffer_that_one_twin_alone_has_is_said(name: str) -> None:
    """Positions, masks, slopes: a buffer that no forward writes decides what a twin computes."""
    assert "buffers" in _said(TABLES[name], in_between=False)


def test_a_table_of_a_module_that_is_put_in_later_is_said() -> None:
    def change(block: Any) -> Any:
        new = Block()
        new.load_state_dict(block.state_dict())
        new.table *= 2
        return new

    assert "buffers" in _said(change, in_between=True, num_steps=2)


def test_buffers_that_forwards_change_are_each_twin_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step that compares values again, after a module has got a hook on both twins."""
    monkeypatch.setattr("tests.foreign.test_twins.Block", Counting)
    blocks: list[Any] = []

    def change(block: Any) -> None:
        for one in (blocks[0], block):
            one.register_forward_hook(_nothing)

    def made(original: Callable[[], list[nn.Module]] = _blocks) -> list[nn.Module]:
        blocks[:] = original()
        return blocks

    monkeypatch.setattr("tests.foreign.test_twins._blocks", made)
    assert _said(change, in_between=True, num_steps=2) == ""


def _nothing(module: nn.Module, inputs: Any, output: Any) -> None:
    return None


def test_twins_that_differ_in_what_changes_nothing_train_without_a_word() -> None:
    """The order of registration, and an equal object in another place, are no difference; gradients are those of a loop."""

    def change(block: Any) -> None:
        block.config = SimpleNamespace(eps=1e-5, kind="sdpa")
        block.many = {"alpha": 0.5}

    assert _said(change, in_between=False) == ""


def test_two_directions_that_are_alike_have_the_gradients_of_a_loop() -> None:
    """What all of these are compared with."""
    blocks, right = _blocks(), _blocks()[:2]
    loopback, ranks = _pipeline(blocks)
    x = torch.randn(B, W, generator=torch.Generator().manual_seed(1))
    loopback.step(ranks, x, target=x)
    for rows in x.chunk(M):
        (F.mse_loss(right[1](right[0](rows)), rows) / M).backward()
    for i, block in enumerate(right):
        for name, parameter in block.named_parameters():
            for twin in (blocks[i], blocks[i + 2]):
                assert torch.allclose(dict(twin.named_parameters())[name].grad, parameter.grad, atol=1e-6), name  # type: ignore[arg-type]
