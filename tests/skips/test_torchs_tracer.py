"""Stages of torch's tracer that need values of others than the stage before: these become skips, and train as one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.model.stage import PipelineStage
from tests.dry_run.fake_group import fake_group
from tests.partition.models import cross_entropy, taken_gradients
from tests.skips.test_equality import assert_close

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*LeafSpec")]

C, M = 6, 4
mse = nn.functional.mse_loss


class Skips(nn.Module):
    """Two values for the next stage and a later one, and one and two for the next stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.parts
        early = first(x)
        mask, early = early > 0, early.sin()
        pipelining.pipe_split()
        x = second(early) * mask
        pipelining.pipe_split()
        x, other = third(x), x.cos()
        pipelining.pipe_split()
        return last(x * mask) - other + early


class Late(Skips):
    """No stage hands on anything to the next one alone; the tracer calls the third one before the second one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        first, second, third, last = self.parts
        early = first(x)
        pipelining.pipe_split()
        x = second(early)
        pipelining.pipe_split()
        z = third(early if y is None else y)
        pipelining.pipe_split()
        return last(z) * x + early


def stages_of(model: nn.Module, *args: torch.Tensor) -> list[Any]:
    with fake_group(0, size=4):
        pipe = pipelining.pipeline(model, mb_args=args)
        return [pipe.build_stage(i, torch.device("cpu")) for i in range(4)]


def schedules_of(kind: Any, stages: Sequence[Any], loss_fn: Any = mse) -> tuple[bpipe.Loopback, list[bpipe.Schedule]]:
    """Schedules of one stage on each of four ranks, or of two in a V."""
    num_ranks = 4 if issubclass(kind, bpipe.PipelineScheduleSingle) else 2
    loopback, held = bpipe.Loopback(num_ranks), [[stages[rank], *stages[num_ranks:][::-1][rank:][:1]] for rank in range(num_ranks)]
    for rank, of_rank in enumerate(held):
        for stage in of_rank:
            stage.group = loopback.rank(rank)
    return loopback, [kind(of_rank if num_ranks == 2 else of_rank[0], M, loss_fn=loss_fn) for of_rank in held]


@pytest.mark.parametrize("kind", [bpipe.ScheduleGPipe, bpipe.BalancedOneFOneB, bpipe.ZBH1, bpipe.ScheduleZBVZeroBubble])
@pytest.mark.parametrize("make", [Skips, Late])
def test_stages_train_as_the_model(make: type[Skips], kind: Any) -> None:
    torch.manual_seed(0)
    model, (x, target) = make().double(), torch.randn(2, 2 * M, C, dtype=torch.float64)
    stages = stages_of(model, x[:2])
    loopback, schedules = schedules_of(kind, stages)
    output = loopback.step(schedules, x, target=target)
    found = taken_gradients([model])  # the stages have its own parameters
    expected = model(x)
    mse(expected, target).backward()
    assert_close([output, *found.values()], [expected.detach(), *taken_gradients([model]).values()])


def test_every_stage_knows_all_skips_and_what_goes_to_the_next_stage_is_none() -> None:
    of_each = [PipelineStage.adopt(stage).skips for stage in stages_of(Skips(), torch.ones(2, C))]
    assert sorted(of_each[0].values()) == [(0, 1, 3), (0, 1, 3)]
    assert of_each == [of_each[0]] * 4


def test_an_argument_of_the_model_that_a_later_stage_needs() -> None:
    """torch runs no such stage; here its own rank gives it."""
    value = torch.ones(2, C)
    stage = PipelineStage.adopt(stages_of(Late(), value, value)[2])
    assert torch.equal(stage.adapter(None, y=value)[0], stage.submod(value))
    with pytest.raises(StageError, match="stage 2 needs y of the model's arguments: give them to step there"):
        stage.adapter(None)


def test_gpt2() -> None:
    """Its first stage makes the mask that all of them use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "vocab_size": 31, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False, tie_word_embeddings=False)).eval()
        words = torch.randint(0, 31, (2 * M, 6))
        cuts = {f"transformer.h.{i}": pipelining.SplitPoint.BEGINNING for i in range(1, 4)}
        with fake_group(0, size=4):
            pipe = pipelining.pipeline(model, mb_args=(), mb_kwargs={"input_ids": words[:2]}, split_spec=cuts)
            stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(4)]
    loopback, schedules = schedules_of(bpipe.OneFOneB, stages, cross_entropy)
    loopback.step(schedules, words, target=words)
    found = taken_gradients([stage.submod for stage in stages])
    cross_entropy(model(words).logits, words).backward()
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


class Early(Skips):
    """It returns what its first stage makes, too."""

    def forward(self, x: torch.Tensor) -> Any:
        first, second, third, last = self.parts
        early = first(x)
        pipelining.pipe_split()
        x = second(early)
        pipelining.pipe_split()
        x = third(x)
        pipelining.pipe_split()
        return last(x), early


def test_a_model_that_returns_what_an_earlier_stage_makes_is_refused() -> None:
    """torch leaves that output out."""
    with pytest.raises(ConfigurationError, match="returns a value of stage 0 of 4"):
        PipelineStage.adopt(stages_of(Early(), torch.ones(2, C))[0])
