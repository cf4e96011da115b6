"""Sequences in slices: the gradients of the whole sequence's, on any schedule of slices, with any state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B, TeraPipe
from tests.ranks import run_ranks
from tests.slices.models import KINDS, Whole, batch_of, stages_of

mse = nn.functional.mse_loss
Gradients = list[torch.Tensor]


def taken(modules: Sequence[nn.Module]) -> Gradients:
    """Return the gradients of modules, and leave them without."""
    found = [parameter.grad for module in modules for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    for module in modules:
        module.zero_grad()
    return found  # type: ignore[return-value]


def by_themselves(modules: Sequence[nn.Module], m: int, batch: Any, loss_fn: Any = mse) -> Gradients:
    """Return the gradients of whole sequences in a single process."""
    for x, target in zip(batch[0].chunk(m), batch[1].chunk(m)):
        for module in modules:
            x, _ = module(x)
        (loss_fn(x, target) / m).backward()
    return taken(modules)


def furthest(found: Gradients, expected: Gradients) -> float:
    """Return the largest difference over the largest gradient of the same parameter."""
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, expected, strict=True))


def run(modules: Sequence[nn.Module], rule: Any, m: int, batch: Any, steps: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """Run a schedule in a loopback; return the schedules, and the outputs of the last step."""
    loopback = Loopback(len(modules))
    stages = [PipelineStage(module, i, len(modules), "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [rule(stage, m, loss_fn=mse, **options) for stage in stages]
    for step in range(steps):
        if step:
            taken(modules)
        outputs = loopback.step(schedules, batch[0], target=batch[1])
    return schedules, outputs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule, options",
    [
        (Seq1F1B, {"slices": 2}),
        (Seq1F1B, {"slices": 4}),
        (Seq1F1B, {"slices": 4, "options": bpipe.Options(slice_lengths=[5, 4, 2, 1])}),
        (Seq1F1B, {"slices": 4, "options": bpipe.Options(slots=6)}),
        (TeraPipe, {"slices": 3}),
    ],
    ids=["k = 2", "k = 4", "lengths", "balanced", "TeraPipe"],
)
def test_gradients_are_those_of_whole_sequences(kind: str, rule: Any, options: Any) -> None:
    modules, batch = stages_of(kind, 4), batch_of(4)
    expected = by_themselves(modules, 4, batch)
    schedules, _ = run(modules, rule, 4, batch, **options)
    assert furthest(taken(modules), expected) < 1e-12
    has_budget = options.get("options", bpipe.Options()).slots is not None
    assert any(schedule.stats["evicted_bytes"] for schedule in schedules) == has_budget


@pytest.mark.parametrize("kind", ["attention", "lstm", "state space"])
def test_single_precision(kind: str) -> None:
    modules, batch = stages_of(kind, 2, torch.float32), batch_of(2, dtype=torch.float32)
    expected = by_themselves(modules, 2, batch)
    run(modules, Seq1F1B, 2, batch, slices=4)
    assert furthest(taken(modules), expected) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_one_slice_is_1f1b_to_the_bit(kind: str) -> None:
    modules, batch = stages_of(kind, 3), batch_of(4)
    _, expected = run([Whole(module) for module in modules], bpipe.OneFOneB, 4, batch)
    gradients = taken(modules)
    _, outputs = run(modules, Seq1F1B, 4, batch, slices=1)
    assert torch.equal(outputs, expected)
    assert all(map(torch.equal, taken(modules), gradients))


@pytest.mark.parametrize("p", [4, 8])
def test_balanced_is_plain_to_the_bit(p: int) -> None:
    modules, batch = stages_of("attention", p), batch_of(p)
    plain, expected = run(modules, Seq1F1B, p, batch, steps=2, slices=4)
    gradients = taken(modules)
    for rule, options in (
        (Seq1F1B, {"options": bpipe.Options(slots=4 + -(-p // 2))}),
        (lambda *args, **how: bpipe.Balanced(Seq1F1B(*args, **how)), {}),
        (lambda *args, **how: bpipe.Balanced(Seq1F1B(*args, **how), options=bpipe.Options(parts=3)), {}),
    ):
        schedules, outputs = run(modules, rule, p, batch, steps=3, slices=4, **options)
        assert torch.equal(outputs, expected)
        assert all(map(torch.equal, taken(modules), gradients))
        assert any(schedule.stats["evicted_bytes"] for schedule in schedules)
        assert highest(schedules) < highest(plain)


def test_forwards_that_run_twice() -> None:
    modules, batch = stages_of("attention", 4), batch_of(4)
    run(modules, Seq1F1B, 4, batch, steps=2, slices=4)
    expected = taken(modules)
    schedules, _ = run(
        modules, lambda *args, **how: bpipe.Balanced(Seq1F1B(*args, **how), by="recompute"), 4, batch, steps=3, slices=4
    )
    assert any(schedules[0].plan.recomputed(rank) for rank in range(4))
    assert all(map(torch.equal, taken(modules), expected))


def highest(schedules: Sequence[Any]) -> float:
    """Return the highest peak of all ranks, without what stays between steps."""
    return max(one.stats["peak_bytes"] - one.stats["static_bytes"] for one in schedules)


def saved_bytes(module: nn.Module, slices: int) -> int:
    """Return the bytes that all slices of a sequence save together on a stage."""
    (schedule,), _ = run([module], Seq1F1B, 2, batch_of(2, positions=32), steps=2, slices=slices)
    assert schedule.stats["predicted_peak_bytes"] == schedule.stats["peak_bytes"]
    taken([module])
    return sum(known.footprint.own_bytes for known in schedule.session.context.memory.kinds.values())


@pytest.mark.parametrize("kind", ["attention", "joined"])
def test_slices_save_no_more_than_the_whole(kind: str) -> None:
    """What is joined is saved in pieces; the weights of attention in "joined" are fewer, because no slice looks ahead."""
    (module,) = stages_of(kind, 1)
    assert saved_bytes(module, 8) <= 1.02 * saved_bytes(module, 1)


def test_evaluation_takes_slices_too() -> None:
    modules, batch = stages_of("attention", 3), batch_of(4)
    schedules, outputs = run(modules, Seq1F1B, 4, batch, slices=4)
    losses: list[torch.Tensor] = []
    found = schedules[0].group.loopback.eval(schedules, batch[0], target=batch[1], losses=losses)
    assert torch.equal(found, outputs) and len(losses) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_in_inference_mode(kind: str) -> None:
    modules, (x, _) = stages_of(kind, 2), batch_of(4)
    loopback = Loopback(2)
    stages = [PipelineStage(module, i, 2, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [Seq1F1B(stage, 4, slices=3) for stage in stages]
    with torch.inference_mode():
        expected = modules[1](modules[0](x)[0])[0]
        torch.testing.assert_close(loopback.eval(schedules, x), expected, rtol=1e-12, atol=1e-12)


def on_rank(rank: int, p: int, kind: str, options: dict[str, Any]) -> Gradients:
    modules, batch = stages_of(kind, p), batch_of(4)
    schedule = Seq1F1B(PipelineStage(modules[rank], rank, p, "cpu"), 4, loss_fn=mse, **options)
    schedule.step(batch[0], target=batch[1])
    return taken(modules[rank : rank + 1])


@pytest.mark.parametrize(
    "p, kind, options", [(2, "lstm", {"slices": 3}), (4, "attention", {"slices": 4, "options": bpipe.Options(slots=6)})]
)
def test_processes(p: int, kind: str, options: dict[str, Any]) -> None:
    modules, batch = stages_of(kind, p), batch_of(4)
    expected = by_themselves(modules, 4, batch)
    found = [gradient for of_rank in run_ranks(on_rank, p, p, kind, options) for gradient in of_rank]
    assert furthest(found, expected) < 1e-12
