"""Stages under activation checkpointing: the same gradients to the bit, fewer bytes to evict, and a count that is right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bpipe
from bpipe.errors import SavedTensorError
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.memory.saved.recomputed import kept_by_checkpoints
from tests.memory.captured import Captured
from tests.models import KINDS, TOKENS, WIDTH, Block, Result, assert_same, batch_of, in_loopback, modules_of, mse, single_process
from tests.over import Over
from tests.ranks import run_ranks
from tests.test_memory_use import Watched

pytestmark = pytest.mark.usefixtures("one_thread")

P, M = 4, 8
INPUT_BYTES = 2 * TOKENS * WIDTH * 4  # of a block, for a microbatch of two
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that keeps matrix products."""
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(kept: Any) -> dict[str, Any]:
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, kept)}


WAYS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "a policy": selectively(products),
    "a list": selectively(PRODUCTS),
}


class Recomputed(nn.Module):
    """A module under `checkpoint`; its input goes by name where that is asked for."""

    def __init__(self, inner: nn.Module, *, by_name: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner, self.by_name, self.options = inner, by_name, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_name:
            return checkpoint(lambda value: self.inner(value), value=x, **self.options)
        return checkpoint(self.inner, x, **self.options)


def pair(index: int, **options: Any) -> nn.Module:
    """Two blocks with dropout; reentrant checkpointing trains nothing of a block whose input needs no gradient."""
    first, second = Block(), Block()
    is_batch = index == 0 and options.get("use_reentrant", False)
    return nn.Sequential(first if is_batch else Recomputed(first, **options), Recomputed(second, **options))


def some(index: int) -> nn.Module:
    return pair(index, use_reentrant=False) if index % 2 else KINDS["transformer"](index)


def kinds() -> dict[str, Callable[[int], nn.Module]]:
    ways = {name: partial(pair, **options) for name, options in WAYS.items()}
    return ways | {"by name": partial(pair, by_name=True, use_reentrant=False), "some stages": some}


SCHEDULES = {
    "balanced": bpipe.BalancedOneFOneB,
    "lowest": Over(bpipe.OneFOneB, {"budget": "lowest"}),
    "parts": Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=3)}),
    "halves": bpipe.ZBH1,
}


@pytest.fixture(scope="module")
def reference() -> Result:
    """The same blocks without checkpointing, in a single process."""
    torch.set_num_threads(1)
    return single_process("transformer", P, M)


CASES = [(name, title) for name in kinds() for title in SCHEDULES if title in ("balanced", "halves") or name == "a policy"]


@pytest.mark.parametrize("name, title", CASES)
def test_gradients_are_those_without_checkpointing(
    name: str, title: str, reference: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, random numbers of the recomputed dropout included."""
    monkeypatch.setitem(KINDS, name, kinds()[name])
    result = in_loopback(name, P, M, SCHEDULES[title])
    assert_same(result, reference)
    assert all(stats["peak_bytes"] == stats["predicted_peak_bytes"] for stats in result.stats)
    assert bool(sum(stats["evicted_bytes"] for stats in result.stats)) == (title != "halves" and name != "by name")


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As `F.mse_loss`, which returns its number in a larger storage: what is kept of that is a copy, and not counted."""
    return ((output - target) ** 2).mean()


def counted(rank: int) -> dict[str, tuple[int, dict[str, float], list[str]]]:
    """For each way: the bytes counted without bpipe, what it says itself, and what the ledger says of what stays.

    The states of random number generators, which the count cannot see, are not kept here.
    """
    found = {}
    ways = {**WAYS, "by name": {"by_name": True, "use_reentrant": False}}
    del ways["a list"]
    for name, options in [("nothing", None), *ways.items()]:
        torch.manual_seed(rank)
        blocks = [Block(dropout=0.0) for _ in range(2)]
        given = None if options is None else {"preserve_rng_state": False, **options}
        inner = blocks[1:] if given is None else [Recomputed(block, **given) for block in blocks[1:]]
        module = nn.Sequential(blocks[0], *inner)
        watched = Watched(bpipe.BalancedOneFOneB(bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=squares), module)
        x, y = batch_of("quiet", 2 * M)
        for _ in range(2):
            watched.step(x, y)
        found[name] = watched.peak, watched.schedule.stats, [held.reason for held in watched.schedule.ledger.held]
    return found


def test_counted_bytes_are_the_predicted_ones() -> None:
    ranks = run_ranks(counted, P)
    for of_rank in ranks:
        for peak, stats, _ in of_rank.values():
            assert peak == stats["peak_bytes"] == stats["predicted_peak_bytes"]
    evicted = {name: stats["evicted_bytes"] for name, (_, stats, _) in ranks[0].items()}
    assert evicted["nothing"] > evicted["a policy"] > evicted["reentrant"] == evicted["not reentrant"] > 0
    assert "keyword" in ranks[0]["by name"][2][0]
    assert evicted["by name"] < evicted["not reentrant"]


def test_a_checkpointed_block_saves_its_input() -> None:
    whole, recomputed = (footprint_of(make) for make in (KINDS["quiet"], lambda _: Recomputed(Block(dropout=0.0), **NO_STATE)))
    assert recomputed.own_bytes == recomputed.movable_bytes == INPUT_BYTES < whole.movable_bytes / 10


@pytest.mark.parametrize("depth", [2, 3])
def test_regions_in_regions_are_found(depth: int) -> None:
    """No node of the graph is in an outer region alone: what that keeps, such as a state of random numbers, is behind others."""

    def nested(depth: int) -> nn.Module:
        return Recomputed(Block(dropout=0.0) if depth == 1 else nested(depth - 1), use_reentrant=False)

    one, several = (footprint_of(lambda _, d=d: nested(d)) for d in (1, depth))
    assert several.own_bytes - one.own_bytes == (depth - 1) * torch.get_rng_state().nbytes


NO_STATE = {"preserve_rng_state": False, "use_reentrant": False}


def footprint_of(make: Callable[[int], nn.Module]) -> Any:
    """Of the first microbatch of the second stage of three."""
    loopback = bpipe.Loopback(3)
    stages = [bpipe.PipelineStage(make(i), i, 3, "cpu", loopback.rank(i)) for i in range(3)]
    schedules = [bpipe.OneFOneB(stage, 2, loss_fn=mse) for stage in stages]
    x, y = batch_of("quiet", 4)
    loopback.step(schedules, x, target=y)
    return schedules[1].ledger.footprints[1, 0]


def looked_at(module: nn.Module) -> Captured:
    captured = Captured(module, lambda: torch.ones(2, TOKENS, WIDTH))
    captured.stash.cached, captured.stash.kept = kept_by_checkpoints(nodes_behind(captured.edges))
    return captured


def test_outputs_that_are_away_are_guarded_by_the_input() -> None:
    """Even where that cannot move itself."""
    captured = looked_at(Recomputed(Block(dropout=0.0), preserve_rng_state=False, **WAYS["a policy"]))
    contents = captured.contents()
    storages = captured.stash.send_away(contents, 0)
    assert len(storages) == 5  # its input, and the products
    with pytest.raises(SavedTensorError, match="while its bytes were on another rank"):
        captured.backward()
    captured = looked_at(Recomputed(Block(dropout=0.0), preserve_rng_state=False, **WAYS["a policy"]))
    non_activations = captured.contents().movable[0]
    captured.stash._non_activations = {non_activations.storage._cdata: "the step's batch"}
    contents = captured.contents()
    assert len(captured.stash.send_away(contents, 0)) == 4
    with pytest.raises(SavedTensorError, match="while its bytes were on another rank"):
        captured.backward()


def test_without_a_followed_input_outputs_stay() -> None:
    captured = looked_at(Recomputed(Block(dropout=0.0), by_name=True, preserve_rng_state=False, **WAYS["a policy"]))
    contents = captured.contents()
    assert not contents.movable and contents.fixed_bytes > 5 * INPUT_BYTES
    assert len(contents.unmovable) == 5


class Chosen(nn.Module):
    """Keeps the indices that it has chosen, as a router does for its statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, self.indices = x.exp().topk(2)
        return values * x


def test_indices_stay_which_the_stage_may_have_too() -> None:
    """Before torch 2.12 selective checkpointing keeps the very tensor that the operation returned."""
    options = selectively([torch.ops.aten.topk.default])
    module = nn.Sequential(nn.Linear(WIDTH, 2), Recomputed(Chosen(), preserve_rng_state=False, **options))
    captured = looked_at(module)
    moved = [entry.storage for entry in captured.contents().movable]
    assert len(captured.stash.cached) == 1 and len(moved) >= 2  # the values, and their region's input
    assert module[1].inner.indices.untyped_storage()._cdata not in {storage._cdata for storage in moved}
    assert captured.contents().fixed_bytes == 2 * TOKENS * 2 * 8


def test_nothing_is_kept_alive() -> None:
    """What the stash knows of a region ends with the graph."""
    captured = looked_at(Recomputed(Block(dropout=0.0), **WAYS["a policy"]))
    gc.disable()
    assert captured.contents().movable
    captured.backward()
    assert not captured.contents().movable
    assert all(one.tensor() is None for one in [*captured.stash.cached, *captured.stash.kept])
    gc.enable()


def test_over_gloo() -> None:
    reference = modules_of("quiet", 2)
    x, y = batch_of("quiet", 8)
    for xi, yi in zip(x.chunk(4), y.chunk(4)):
        (mse(nn.Sequential(*reference)(xi), yi) / 4).backward()
    for stage, gradients in enumerate(run_ranks(over_gloo, 2)):
        assert all(torch.equal(found, p.grad) for found, p in zip(gradients, reference[stage].parameters(), strict=True))


def over_gloo(rank: int) -> list[Any]:
    """Within three slots on the first rank, which evicts what selective checkpointing keeps."""
    module = Recomputed(modules_of("quiet", 2)[rank], **WAYS["a policy"])
    schedule = bpipe.GPipe(bpipe.PipelineStage(module, rank, 2, "cpu"), 4, loss_fn=mse, options=bpipe.Options(slots=(3, 6)))
    x, y = batch_of("quiet", 8)
    schedule.step(x, target=y)
    assert schedule.stats["evicted_bytes"] > INPUT_BYTES or rank
    return [p.grad for p in module.parameters()]
