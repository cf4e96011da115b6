"""Ranks that are given different batches hear of it in their second step; those that may differ do not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import bpipe
from bpipe.model.call import call_of
from bpipe.session.batches import Drawn, difference
from tests.ranks import run_ranks

X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def drawn(*args: object, **options: object) -> Drawn:
    return Drawn.of(call_of(*args, **options))


@pytest.mark.parametrize(
    "second, what",
    [
        (drawn(X, target=Y), ""),
        (drawn(X.clone().T.contiguous().T, target=Y.clone()), ""),  # the same values in another layout
        (drawn(X + 1, target=Y), "inputs"),
        (drawn(X, target=Y + 1), "targets"),
        (drawn(arg_mbs=[(X[:2],), (X[2:],)], target=Y), ""),  # it looks different, and cannot be compared
        (drawn(X, target=Y, mask=X), ""),  # keyword arguments are of a rank's own stages
        (drawn(), ""),
        (drawn(target=Y), ""),
        (drawn(torch.zeros(4, 3), target=Y), ""),  # a placeholder
        (drawn(X.double(), target=Y), ""),
        (drawn(X.to("meta"), target=torch.empty(0)), ""),
        (drawn("x", 3, target=None), ""),
    ],
)
def test_what_differs(second: Drawn, what: str) -> None:
    found = difference([drawn(X, target=Y), second])
    assert f"ranks 0 and 1 were given different {what} in step 1" in found if what else not found
    assert bool(difference([drawn(), drawn(X, target=Y), second])) == bool(what)


def test_values_of_long_tensors_differ_somewhere() -> None:
    one, other = (torch.randn(2**16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert difference([drawn(one), drawn(one)]) == ""
    assert "inputs" in difference([drawn(one), drawn(other)])


def warnings_of(rank: int, seed_of_batches: int | None) -> list[str]:
    """Train as a newcomer would: one seed for all ranks, and a stage that draws numbers."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bpipe").addHandler(handler)
    torch.manual_seed(0)
    generator = None if seed_of_batches is None else torch.Generator().manual_seed(seed_of_batches)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()) if rank == 0 else nn.Linear(4, 4)
    stage = bpipe.PipelineStage(module, rank, 2, "cpu")
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=nn.functional.mse_loss)
    for _ in range(4):
        x = torch.randn(4, 4, generator=generator)
        schedule.step(x, target=x)
    schedule.close()
    return said


@pytest.mark.parametrize("seed_of_batches", [1, None])
def test_batches_drawn_from_the_generator_of_a_stage(seed_of_batches: int | None) -> None:
    first, second = run_ranks(warnings_of, 2, seed_of_batches)
    assert not second
    expected = ["rank 0: 1f1b: ranks 0 and 1 were given different inputs in step 1."] if seed_of_batches is None else []
    assert [text.partition(" The first")[0] for text in first] == expected
