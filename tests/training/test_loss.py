"""The loss on every rank, losses that weigh tokens, and losses that a stage in the middle adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError
from tests.ranks import run_ranks
from tests.training.language import LanguageModel, M, Pipeline, assert_equal, cross_entropy, words_of

pytestmark = pytest.mark.usefixtures("one_thread")

P = 4
SCHEDULES = [bpipe.BalancedOneFOneB, bpipe.ZBH1]


class Expert(nn.Module):
    """A mixture of two small experts with a router, before a stage; it adds to the auxiliary loss that it is given."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.language = LanguageModel(stage, num_stages)
        generator = torch.Generator().manual_seed(stage)
        self.router = nn.Parameter(torch.randn(32, 2, generator=generator)) if 0 < stage < num_stages - 1 else None

    def forward(self, x: torch.Tensor, auxiliary: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        auxiliary = torch.zeros(()) if auxiliary is None else auxiliary
        if self.router is not None:
            shares = (x @ self.router).softmax(-1)
            x = x * shares[..., :1] + x.tanh() * shares[..., 1:]
            auxiliary = auxiliary + (shares.mean((0, 1)) ** 2).sum()
        return self.language(x), auxiliary


def with_auxiliary(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    logits, auxiliary = output
    return cross_entropy(logits, target) + 0.01 * auxiliary


def weighed(logits: torch.Tensor, target: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum") / num_tokens


def uneven(step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A batch in which sequences have other lengths: what is behind their end has no target."""
    x, target = words_of(step)
    for row, sequence in enumerate(target):
        sequence[3 + row % 11 :] = -1
    return x, target, int((target != -1).sum())


def of_experts(rank: int, schedule: type[bpipe.Schedule]) -> tuple[float, dict[str, torch.Tensor]]:
    pipeline = Pipeline(rank, P, schedule=schedule, model=Expert, loss_fn=with_auxiliary)
    loss = pipeline.backward(0)
    stats = pipeline.schedule.stats
    assert stats["peak_bytes"] == stats["predicted_peak_bytes"]
    return loss, {f"{rank}.{name}": gradient for name, gradient in pipeline.gradients().items()}


def of_tokens(rank: int, schedule: type[bpipe.Schedule]) -> tuple[float, dict[str, torch.Tensor]]:
    module = LanguageModel(rank, P)
    pipeline = schedule(bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=weighed, scale_grads=False)
    x, target, num_tokens = uneven(0)
    losses: list[torch.Tensor] = []
    pipeline.step(x, target=target, losses=losses, loss_kwargs={"num_tokens": num_tokens})
    loss = bpipe.share_loss(losses, reduction="sum")
    return loss, {name: p.grad for name, p in module.named_parameters()}


def refused(rank: int, losses: list[torch.Tensor], **options: Any) -> str:
    try:
        return str(bpipe.share_loss(losses, **options))
    except ConfigurationError as error:
        return str(error)


def everything(rank: int) -> dict[str, Any]:
    one = [torch.tensor(0.1), torch.tensor(0.2)]
    return {
        "experts": [of_experts(rank, schedule) for schedule in SCHEDULES],
        "tokens": [of_tokens(rank, schedule) for schedule in SCHEDULES],
        "none": refused(rank, []),
        "several": refused(rank, one if rank in (1, 2) else []),
        "on rank 1": refused(rank, one if rank == 1 else [], reduction="sum"),
        "bfloat16": refused(rank, [value.bfloat16() for value in one] if rank == 3 else []),
        "not a number": refused(rank, [torch.tensor(float("nan"))] if rank == 3 else []),
        "unknown": refused(rank, one, reduction="median"),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    ranks = run_ranks(everything, P)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


def test_an_auxiliary_loss_of_stages_in_the_middle(seen: dict[str, list[Any]]) -> None:
    stages = [Expert(stage, P) for stage in range(P)]
    x, target = words_of(0)
    losses = []
    for xi, yi in zip(x.chunk(M), target.chunk(M)):
        value: Any = (xi,)
        for stage in stages:
            value = stage(*value)
        losses.append(with_auxiliary(value, yi))
        (losses[-1] / M).backward()
    gradients = {f"{i}.{name}": p.grad for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    assert gradients["1.router"].abs().sum() > 0 and gradients["2.router"].abs().sum() > 0
    _check(seen["experts"], torch.stack(losses).mean().item(), gradients)


def test_a_loss_that_weighs_tokens(seen: dict[str, list[Any]]) -> None:
    """Each token of a step counts alike, in whatever microbatch it is."""
    whole = LanguageModel()
    x, target, num_tokens = uneven(0)
    losses = []
    for xi, yi in zip(x.chunk(M), target.chunk(M)):
        losses.append(weighed(whole(xi), yi, num_tokens=num_tokens))
        losses[-1].backward()
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters()}
    _check(seen["tokens"], torch.stack(losses).sum().item(), gradients)
    whole.zero_grad()
    loss = F.cross_entropy(whole(x).flatten(0, 1), target.flatten(), ignore_index=-1)
    loss.backward()  # the whole batch at once: its sums have another order
    assert all(torch.allclose(p.grad, gradients[name], rtol=1e-4, atol=1e-6) for name, p in whole.named_parameters())


def _check(ranks: list[Any], loss: float, gradients: dict[str, torch.Tensor]) -> None:
    for of_schedule in zip(*ranks, strict=True):
        assert {seen for seen, _ in of_schedule} == {loss}
        assert_equal({name: value for _, part in of_schedule for name, value in part.items()}, gradients)


def test_every_rank_gets_the_loss_or_the_refusal(seen: dict[str, list[Any]]) -> None:
    one = torch.stack([torch.tensor(0.1), torch.tensor(0.2)])
    assert seen["on rank 1"] == [str(float(one.sum()))] * P
    assert seen["bfloat16"] == [str(float(one.bfloat16().mean()))] * P
    assert seen["not a number"] == ["nan"] * P
    assert all(text.startswith("of the 4 ranks of the group none have losses: pass losses=[]") for text in seen["none"])
    assert all(text.startswith("of the 4 ranks of the group [1, 2] have losses") for text in seen["several"])
    assert set(seen["unknown"]) == {"reduction='median': choose 'mean' or 'sum'"}
