"""The loss of a microbatch is that of its whole sequence, whatever its slices hold."""

from __future__ import annotations

from array import array
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bpipe import FromPlan, Loopback, PipelineStage, Seq1F1B
from bpipe.api.options import Options
from bpipe.schedules import build
from bpipe.slices.slicing import Slicing
from tests.slices.models import WIDTH, Stage, batch_of
from tests.slices.test_run import furthest, taken


class Head(nn.Module):
    """A stage, and a head over words."""

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.head = Stage("attention"), nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        x, state = self.stage(x, past)
        return self.head(x), state


def cross_entropy(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())


@pytest.mark.parametrize("num_padded", [0, 3, 4, 9])
def test_words_that_do_not_count(num_padded: int) -> None:
    """With 9 of 12 positions padded, two slices of four positions have no word that counts."""
    torch.manual_seed(0)
    modules = [Stage("attention").double(), Head().double()]
    x, _ = batch_of(2)
    words = torch.randint(0, 7, (4, 12))
    words[:, 12 - num_padded :] = -100
    words[0, 2] = -100
    expected_losses = []
    for part, target in zip(x.chunk(2), words.chunk(2)):
        loss = cross_entropy(modules[1](modules[0](part)[0])[0], target)
        expected_losses.append(loss.detach())
        (loss / 2).backward()
    expected = taken(modules)
    loopback, losses = Loopback(2), list[torch.Tensor]()
    schedules = [
        Seq1F1B(PipelineStage(one, i, 2, "cpu", loopback.rank(i)), 2, loss_fn=cross_entropy, slices=3)
        for i, one in enumerate(modules)
    ]
    loopback.step(schedules, x, target=words, losses=losses)
    assert furthest(taken(modules), expected) < 1e-12
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)


def test_sums_are_added() -> None:
    """With scale_grads=False the loss is the user's own part of a sum."""
    torch.manual_seed(0)
    modules, (x, target) = [Stage("lstm").double()], batch_of(2)
    nn.functional.mse_loss(modules[0](x)[0], target, reduction="sum").backward()
    expected, losses, loopback = taken(modules), list[torch.Tensor](), Loopback(1)
    stage = PipelineStage(modules[0], 0, 1, "cpu", loopback.rank(0))
    schedule = Seq1F1B(stage, 2, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False, slices=4)
    loopback.step([schedule], x, target=target, losses=losses)
    assert furthest(taken(modules), expected) < 1e-12
    whole = [
        nn.functional.mse_loss(modules[0](part)[0], of_part, reduction="sum") for part, of_part in zip(x.chunk(2), target.chunk(2))
    ]
    torch.testing.assert_close(losses, [loss.detach() for loss in whole], rtol=1e-12, atol=0)


def test_lengths_in_positions_and_shares() -> None:
    assert Slicing(3)._lengths_of(10) == [4, 3, 3]
    assert Slicing(3, [5, 3, 2])._lengths_of(10) == [5, 3, 2]
    assert Slicing(4, [0.366, 0.252, 0.205, 0.177])._lengths_of(1000) == [366, 252, 205, 177]


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        (torch.tensor([5, 3, 2]), [5, 3, 2]),
        (torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), [5, 3, 2]),
        (np.array([5, 3, 2]), [5, 3, 2]),
        (list(np.array([5, 3, 2])), [5, 3, 2]),  # numpy's own numbers
        ([torch.tensor(5), torch.tensor(3), 2], [5, 3, 2]),
        (iter([5, 3, 2]), [5, 3, 2]),
        ({5: "a", 3: "b", 2: "c"}.keys(), [5, 3, 2]),
        (array("q", [5, 3, 2]), [5, 3, 2]),
        ([Fraction(1, 2), Fraction(1, 4), 0.25], [5, 3, 2]),
    ],
)
def test_lengths_are_numbers_wherever_they_are(lengths: Any, cut: list[int]) -> None:
    assert Slicing(3, lengths)._lengths_of(10) == cut


def test_lengths_in_a_tensor_of_a_schedule_and_of_a_plan() -> None:
    torch.manual_seed(0)
    module, (x, target) = Stage("lstm").double(), batch_of(2)
    plan, mse, found = build("seq_1f1b", 1, 2, slices=2), nn.functional.mse_loss, []
    for lengths in ([8, 4], torch.tensor([8, 4])):
        for make in (
            lambda stage, lengths: Seq1F1B(stage, 2, mse, slices=2, options=Options(slice_lengths=lengths)),
            lambda stage, lengths: FromPlan(stage, plan, mse, options=Options(slice_lengths=lengths)),
        ):
            make(PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0)), lengths).step(x, target=target)
            found.append(taken([module]))
    assert all(furthest(found[0], other) == 0 for other in found)


class Limited(Head):
    """A head that leaves words out, as for a vocabulary that is filled up."""

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        logits, state = super().forward(x, past)
        return logits.masked_fill(torch.arange(7) > 4, -torch.inf), state


def test_slices_of_padding_with_infinite_logits() -> None:
    """Before, 0 times minus infinity was the loss of a slice in which nothing counts."""
    torch.manual_seed(0)
    module, (x, _), losses = Limited().double(), batch_of(2), list[torch.Tensor]()
    words = torch.randint(0, 5, (4, 12))
    words[:, 8:] = -100
    whole = [cross_entropy(module(part)[0], target) for part, target in zip(x.chunk(2), words.chunk(2))]
    (sum(whole) / 2).backward()
    expected = taken([module])
    stage = PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0))
    Seq1F1B(stage, 2, loss_fn=cross_entropy, slices=3).step(x, target=words, losses=losses)
    assert furthest(taken([module]), expected) < 1e-12
    torch.testing.assert_close(losses, [loss.detach() for loss in whole], rtol=1e-12, atol=0)
