"""What a plan says that a rank holds is what it holds: around evaluations in two directions, and with skips that are recomputed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
import bpipe.errors

W, B, M = 16, 16, 4


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def _blocks(depth: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model, twins = [Part() for _ in range(depth)], [Part() for _ in range(depth)]
    for ours, theirs in zip(model, twins):
        theirs.load_state_dict(ours.state_dict())
    return [*model, *twins]


def _two_directions(wrap: Callable[[Any], Any] = lambda one: one) -> tuple[bpipe.Loopback, list[Any], list[nn.Module]]:
    blocks, loopback = _blocks(2), bpipe.Loopback(2)
    held = enumerate(([0, 3], [1, 2]))
    stages = [[bpipe.PipelineStage(blocks[s], s, 4, "cpu", loopback.rank(r), directions=2) for s in some] for r, some in held]
    return loopback, [wrap(bpipe.Chimera(some, M, loss_fn=F.mse_loss)) for some in stages], blocks


def _x(seed: int = 1) -> torch.Tensor:
    return torch.randn(B, W, generator=torch.Generator().manual_seed(seed))


def _alive() -> list[torch.Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]


OF_OTHERS: list[torch.Tensor] = []  # what other tests have left in this process


@pytest.fixture(autouse=True)
def of_others() -> Iterator[None]:
    OF_OTHERS.extend(_alive())
    yield
    OF_OTHERS.clear()


def _gradient_bytes(blocks: list[nn.Module]) -> int:
    """The bytes of all tensors alive that are as large as a gradient of a weight, and are neither weights nor their gradients."""
    known = {id(t) for block in blocks for p in block.parameters() for t in (p, p.grad) if t is not None} | {*map(id, OF_OTHERS)}
    sizes = {tuple(p.shape) for block in blocks for p in block.parameters() if p.dim() == 2}
    storages = {t.untyped_storage()._cdata for block in blocks for p in block.parameters() for t in (p, p.grad) if t is not None}
    found = [t for t in _alive() if id(t) not in known and tuple(t.shape) in sizes]
    return sum(t.nbytes for t in found if t.untyped_storage()._cdata not in storages)


ORDERS: dict[str, str] = {
    "an evaluation between step and zero_grad": "s e z s e z s z",
    "two evaluations in a row": "s e e z s z",
    "an evaluation between steps that accumulate": "s e s e z s z",
    "an evaluation before all": "e s z e s z",
    "an evaluation that raises": "s r z s z",
    "gradients set to zero in place": "s e 0 s e 0 s z",
    "an evaluation without outputs": "s n z s n z",
    "gradients dropped before the evaluation": "s z e s z",
}


def _run(order: str, loopback: bpipe.Loopback, ranks: list[Any], blocks: list[nn.Module]) -> list[list[torch.Tensor]]:
    """Run a loop's calls; return the gradients behind each step."""
    found = []
    for number, call in enumerate(order.split()):
        if call == "s":
            loopback.step(ranks, _x(number), target=1 - _x(number), return_outputs=False)
            found.append([p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None])
        elif call in "en":
            with torch.no_grad():
                loopback.eval(ranks, _x(), return_outputs=call == "e")
        elif call == "r":
            with pytest.raises(Exception, match=r".+"), torch.no_grad():
                loopback.eval(ranks, _x()[:3])  # three samples are no four microbatches
        else:
            for block in blocks:
                block.zero_grad(set_to_none=call == "z")
    return found


def _plain(order: str) -> list[list[torch.Tensor]]:
    model, found = _blocks(2)[:2], []
    for number, call in enumerate(order.split()):
        if call == "s":
            for rows in _x(number).chunk(M):
                (F.mse_loss(nn.Sequential(*model)(rows), 1 - rows) / M).backward()
            once = [p.grad.clone() for block in model for p in block.parameters() if p.grad is not None]
            found.append(once + once)
        elif call in "z0":
            for block in model:
                block.zero_grad(set_to_none=call == "z")
    return found


@pytest.mark.parametrize("name", ORDERS)
def test_gradients_around_an_evaluation_are_those_of_a_loop_and_nothing_stays(name: str) -> None:
    """In two directions: every step's gradients are right, and once they are dropped no other copy of them is alive."""
    loopback, ranks, blocks = _two_directions()
    got, right = _run(ORDERS[name], loopback, ranks, blocks), _plain(ORDERS[name])
    for ours, theirs in zip(got, right, strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    del got, right, ours, theirs
    assert _gradient_bytes(blocks) == 0


@pytest.mark.parametrize("name", [one for one in ORDERS if "raises" not in one])
def test_a_budget_that_a_loop_without_evaluations_keeps_is_kept_with_them(name: str) -> None:
    """An evaluation takes no gradients, so that the budget of the same loop without it has room."""
    order = ORDERS[name]
    without = " ".join(call for call in order.split() if call not in "en")
    loopback, ranks, blocks = _two_directions(lambda one: bpipe.Balanced(one, budget=10**9))
    peaks = [0.0, 0.0]
    for call in without.split():
        _run(call, loopback, ranks, blocks)
        if call == "s":
            peaks = [max(peak, one.stats["device_peak_bytes"]) for peak, one in zip(peaks, ranks)]
    budget = [int(peak) + 4096 for peak in peaks]
    loopback, ranks, blocks = _two_directions(lambda one: bpipe.Balanced(one, budget=budget))
    for call in order.split():
        _run(call, loopback, ranks, blocks)
        if call == "s":
            assert all(one.stats["device_peak_bytes"] <= most for one, most in zip(ranks, budget))


class Handler(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


class Skipping(nn.Module):
    """A stage that makes some skips and uses others, in one of several shapes."""

    def __init__(self, makes: list[str], sizes: dict[str, int]) -> None:
        super().__init__()
        self.part, self.makes, self.sizes = Part(), makes, sizes

    def forward(self, x: torch.Tensor, **used: torch.Tensor) -> Any:
        y = self.part(x)
        for value in used.values():
            y = y + value.reshape(len(y), -1, W).sum(1)
        made = {name: torch.tanh(y.repeat(1, self.sizes[name])) for name in self.makes}
        return (y, made) if made else y


SKIPS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int]]] = {
    "one over two stages": ({"a": (0, 2)}, {"a": 1}),
    "a large one to the last": ({"a": (0, 3)}, {"a": 8}),
    "one with two users": ({"a": (0, 2, 3)}, {"a": 2}),
    "two that cross": ({"a": (0, 2), "b": (1, 3)}, {"a": 2, "b": 4}),
    "two from one stage": ({"a": (0, 2), "b": (0, 3)}, {"a": 1, "b": 4}),
    "one from the next to the last": ({"a": (2, 3)}, {"a": 4}),
    "one within another": ({"a": (0, 3), "b": (1, 2)}, {"a": 2, "b": 2}),
}


def _with_skips(name: str, **options: Any) -> tuple[list[Any], list[nn.Module], str]:
    skips, sizes = SKIPS[name]
    torch.manual_seed(0)
    modules = [Skipping([one for one, (maker, *_) in skips.items() if maker == i], sizes) for i in range(4)]
    loopback = bpipe.Loopback(4)
    stages = [bpipe.PipelineStage(module, i, 4, "cpu", loopback.rank(i), skips=skips) for i, module in enumerate(modules)]
    ranks: list[Any] = [bpipe.OneFOneB(stage, 8, loss_fn=F.mse_loss) for stage in stages]
    handler = Handler()
    logging.getLogger("bpipe").addHandler(handler)
    try:
        if options:
            ranks = [bpipe.Balanced(one, **options) for one in ranks]
        for number in range(3):
            for module in modules:
                module.zero_grad()
            loopback.step(ranks, _x(number), target=1 - _x(number), return_outputs=False)
    finally:
        logging.getLogger("bpipe").removeHandler(handler)
    return ranks, list(modules), handler.text


@pytest.mark.parametrize("budget", [None, "lowest"])
@pytest.mark.parametrize("name", SKIPS)
def test_skips_with_recomputation_train_alike_and_their_bytes_are_right(name: str, budget: str | None) -> None:
    """Gradients are plain 1F1B's to the bit, and what a rank holds is what was predicted."""
    ranks, modules, _ = _with_skips(name, budget=budget, by="recompute")
    _, plain, _ = _with_skips(name)
    for ours, theirs in zip(modules, plain):
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters()))  # type: ignore[arg-type]
    for rank in ranks:
        assert rank.stats["device_peak_bytes"] == rank.stats["predicted_device_peak_bytes"]


def test_what_counts_gradients_that_stay_finds_one() -> None:
    """A copy of one gradient is found where nothing else is."""
    blocks = _blocks(2)
    assert _gradient_bytes(blocks) == 0
    kept = torch.zeros_like(blocks[0].get_parameter("inner.0.weight"))
    assert _gradient_bytes(blocks) == kept.nbytes
