"""Slices over processes joined by gloo, and in a loopback of eight: whole sequences' gradients, and balanced ones to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import PipelineStage, Seq1F1B
from tests.ranks import run_ranks
from tests.slices.models import batch_of, stages_of
from tests.slices.test_run import Gradients, by_themselves, furthest, run, taken

M, K = 4, 4


def llama() -> Any:
    """A Transformers Llama of four layers, its loss, and four sequences; it is imported late, because that takes seconds."""
    from tests.slices.test_transformers import loss_of, model_of, words_of

    return model_of("Llama"), loss_of, words_of(M)


def of_kind(kind: str, rank: int, p: int) -> tuple[nn.Module, Any, Any]:
    """A rank's module, the loss, and the batch."""
    if kind != "llama":
        return stages_of(kind, p)[rank], nn.functional.mse_loss, batch_of(M)
    model, loss_fn, batch = llama()
    return bpipe.slices.sliced_transformer(bpipe.split_transformer(model, p)[rank], prove=False), loss_fn, batch


def whole(kind: str, p: int) -> dict[str, torch.Tensor] | Gradients:
    """The gradients of whole sequences in a single process, in the order of ranks; a Llama's by name."""
    if kind != "llama":
        return by_themselves(stages_of(kind, p), M, batch_of(M))
    pytest.importorskip("transformers")
    from tests.slices.test_transformers import by_itself

    model, _, batch = llama()
    return dict(zip((path for path, _ in model.named_parameters()), by_itself(model, *batch, M), strict=True))


def on_rank(rank: int, kind: str, p: int) -> tuple[list[str], list[Gradients], list[float]]:
    """The names of a rank's parameters, their gradients of each schedule, plain first, and the bytes that each evicted."""
    module, loss_fn, (x, target) = of_kind(kind, rank, p)
    stage = PipelineStage(module, rank, p, "cpu")
    plain = Seq1F1B(stage, M, loss_fn=loss_fn, slices=K)
    schedules = [
        plain,
        Seq1F1B(stage, M, loss_fn=loss_fn, slices=K, options=bpipe.Options(slots=K + -(-p // 2))),
        bpipe.Balanced(Seq1F1B(stage, M, loss_fn=loss_fn, slices=K), budget="lowest"),
        bpipe.Balanced(Seq1F1B(stage, M, loss_fn=loss_fn, slices=K), budget="lowest", options=bpipe.Options(parts=3)),
    ]
    gradients, evicted = [], []
    for schedule in schedules:
        for _ in range(1 if schedule is plain else 3):  # the first measures, and the last follows a plan that is known
            module.zero_grad()
            schedule.step(x, target=target, return_outputs=False)
        gradients.append(taken([module]))
        evicted.append(schedule.stats["evicted_bytes"])
    return [name for name, _ in module.named_parameters()], gradients, evicted


CASES = [("attention", 2), ("lstm", 3), *product(["attention", "state space", "lstm", "llama"], [4])]


@pytest.mark.parametrize("kind, p", CASES)
def test_processes(kind: str, p: int) -> None:
    expected, found = whole(kind, p), run_ranks(on_rank, p, kind, p)
    for names, (plain, *balanced), _ in found:
        assert all(all(map(torch.equal, one, plain)) for one in balanced), names
    plain = [gradient for _, (of_rank, *_), _ in found for gradient in of_rank]
    if isinstance(expected, dict):
        names = [name.removeprefix("stage.") for of_rank, _, _ in found for name in of_rank]
        assert sorted(names) == sorted(expected)
        expected = [expected[name] for name in names]
    assert furthest(plain, expected) < 1e-12
    evicted = [sum(of_rank) for of_rank in zip(*(one for _, _, one in found))]
    assert [bool(number) for number in evicted] == [False, p > 3, p > 2, True], evicted


@pytest.mark.parametrize("kind", ["attention", "state space", "lstm"])
def test_eight_stages(kind: str) -> None:
    modules, batch = stages_of(kind, 8), batch_of(8)
    expected = by_themselves(modules, 8, batch)
    schedules, _ = run(modules, Seq1F1B, 8, batch, slices=K, options=bpipe.Options(slots=8))
    assert furthest(taken(modules), expected) < 1e-12
    assert any(schedule.stats["evicted_bytes"] for schedule in schedules)
