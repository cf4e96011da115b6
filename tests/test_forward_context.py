"""A context manager around each forward of a stage: torch's stages have it since 2.15, and bpipe's with every torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import bpipe
from bpipe.errors import ConfigurationError, StageError
from tests.ranks import run_ranks

M, WIDTH = 4, 6
mse = nn.functional.mse_loss
X = torch.ones(2 * M, WIDTH)


class Seen:
    """A context that notes what it is told, and where modules run."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.inside: tuple[int, int] | None = None

    @contextmanager
    def __call__(self, info: bpipe.PipelineStageInfo) -> Iterator[None]:
        assert isinstance(info, bpipe.PipelineStageInfo) and not info.is_metadata_inference
        self.inside = info.stage_index, info.microbatch_index
        self.told.append(self.inside)
        yield
        self.inside = None

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self.inside is None
        return mse(output, target)


class Inside(nn.Linear):
    """A layer of some stage that runs in contexts alone; it takes whole microbatches and slices."""

    def __init__(self, stage: int, seen: Seen) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stage, self.seen = stage, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.seen.inside is not None and self.seen.inside[0] == self.stage
        return super().forward(x)


class InSlices(Inside):
    def forward(self, x: torch.Tensor, past: object = None) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def stages_in(
    seen: Seen, p: int, per_rank: int, make: Callable[[int, Seen], nn.Module] = Inside
) -> tuple[bpipe.Loopback, list[Any], list[Any]]:
    """The stages of each rank, and the handles of their contexts."""
    loopback, n = bpipe.Loopback(p), p * per_rank
    made = [bpipe.PipelineStage(make(i, seen), i, n, "cpu", group=loopback.rank(i % p)) for i in range(n)]
    handles = [one.register_forward_context(seen) for one in made]
    return loopback, [made[rank::p] if per_rank > 1 else made[rank] for rank in range(p)], handles


def each(num_stages: int, times: int = 1) -> list[tuple[int, int]]:
    return [(stage, i) for stage in range(num_stages) for i in range(M) for _ in range(times)]


def test_each_forward_has_one() -> None:
    seen = Seen()
    loopback, stages, handles = stages_in(seen, 2, 2)
    schedules = [bpipe.Interleaved1F1B(of_rank, M, seen.loss) for of_rank in stages]
    for run in (loopback.step, loopback.eval):
        run(schedules, X, target=X)
        assert sorted(seen.told) == each(4)
        seen.told.clear()
    for handle in handles:
        handle.remove()
    seen.inside = None
    with pytest.raises(AssertionError):
        loopback.step(schedules, X, target=X)
    assert not seen.told


def test_recomputations_and_slices_have_their_own() -> None:
    seen = Seen()
    loopback, stages, _ = stages_in(seen, 4, 1, lambda stage, seen: nn.Linear(WIDTH, WIDTH))  # what it refers to is restored
    schedules = [bpipe.Balanced(bpipe.OneFOneB(one, M, mse), None, by="recompute") for one in stages]
    loopback.step(schedules, X, target=X)
    again = [key for rank, one in enumerate(schedules) for key in one.plan.recomputed(rank)]
    assert again and sorted(seen.told) == sorted([*each(4), *again])

    seen, sequences = Seen(), torch.ones(2 * M, 4, WIDTH)
    loopback, stages, _ = stages_in(seen, 2, 1, InSlices)
    loopback.step([bpipe.Seq1F1B(one, M, mse, slices=2) for one in stages], sequences, target=sequences)
    assert sorted(seen.told) == each(2, times=2)


def test_samples_of_a_stream_are_counted() -> None:
    seen = Seen()
    stage = bpipe.PipelineStage(Inside(0, seen), 0, 1, "cpu")
    stage.register_forward_context(seen)
    stream = bpipe.Stream(stage, seen.loss)
    for _ in range(3):
        stream.push(X, target=X)
    stream.close()
    assert seen.told == [(0, 0), (0, 1), (0, 2)]


def alone(module: nn.Module) -> tuple[bpipe.PipelineStage, bpipe.Schedule]:
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
    return stage, bpipe.OneFOneB(stage, M, mse)


def test_one_at_a_time() -> None:
    stage, _ = alone(nn.Identity())
    handle = stage.register_forward_context(lambda info: nullcontext())
    with pytest.raises(ConfigurationError, match=r"stage 0 has a forward context already: call remove\(\) of its handle first"):
        stage.register_forward_context(lambda info: nullcontext())
    handle.remove()
    stage.register_forward_context(lambda info: nullcontext())


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (nullcontext(), ZeroDivisionError, "division by zero"),
        (suppress(ZeroDivisionError), StageError, "stage 0, microbatch 0: the forward context hides an error of the module"),
    ],
)
def test_errors_pass(context: Any, error: type[Exception], message: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> float:
            return 1 / 0

    stage, schedule = alone(Fails())
    stage.register_forward_context(lambda info: context)
    with pytest.raises(error, match=message):
        schedule.step(X, target=X)


def test_what_a_context_changes_is_learned_again() -> None:
    """Messages have another type from the step on in which an autocast is registered."""
    loopback = bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), i, 2, "cpu", group=loopback.rank(i)) for i in range(2)]
    schedules = [bpipe.BalancedOneFOneB(one, M, lambda output, target: mse(output.float(), target)) for one in stages]
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        low = stages if dtype == torch.bfloat16 else []
        handles = [one.register_forward_context(lambda info: torch.autocast("cpu", torch.bfloat16)) for one in low]
        assert loopback.step(schedules, X, target=X).dtype == dtype
        for handle in handles:
            handle.remove()


def registered_with_torch(rank: int) -> list[tuple[int, int]]:
    seen = Seen()
    stage = pipelining.PipelineStage(Inside(0, seen), 0, 1, torch.device("cpu"), group=dist.group.WORLD)
    stage.register_forward_context(seen)
    bpipe.OneFOneB(stage, M, mse).step(X, target=X)
    return seen.told


@pytest.mark.skipif(not hasattr(pipelining.PipelineStage, "register_forward_context"), reason="torch has none before 2.15")
def test_a_context_of_torch_s_stage_is_entered() -> None:
    assert bpipe.PipelineStageInfo is pipelining.PipelineStageInfo
    assert run_ranks(registered_with_torch, 1) == [each(1)]


def test_the_description_is_torch_s() -> None:
    info = bpipe.PipelineStageInfo(stage_index=2, microbatch_index=3)
    assert repr(info) == "PipelineStageInfo(stage_index=2, microbatch_index=3, is_metadata_inference=False)"
    with pytest.raises(TypeError):
        bpipe.PipelineStageInfo(2, 3)  # type: ignore[misc]


def test_another_context_of_the_same_name_is_another_one() -> None:
    """What the first one has shown of messages does not hold for it."""

    def registered(stage: bpipe.PipelineStage, dtype: torch.dtype | None) -> Any:
        return stage.register_forward_context(lambda info: torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None))

    loopback = bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), i, 2, "cpu", group=loopback.rank(i)) for i in range(2)]
    schedules = [bpipe.OneFOneB(stage, M, loss_fn=lambda output, target: mse(output.float(), target)) for stage in stages]
    dtypes = []
    for dtype in (None, torch.bfloat16, None):
        handles = [registered(stage, dtype) for stage in stages]
        dtypes.append(loopback.step(schedules, X, target=X).dtype)
        for handle in handles:
            handle.remove()
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]
