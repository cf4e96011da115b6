"""Different batches on the ranks of the first and the last stage are warned of; ranks that may differ are not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bpipe
from bpipe.comm.health.agreement import StepRecord
from bpipe.model.call import call_of
from bpipe.schedules import build
from bpipe.session.batches import NOTHING, BatchRecord, BatchSample
from bpipe.session.prepare import compares_batches
from tests.ranks import run_ranks

X, Y = torch.arange(12.0).reshape(4, 3), torch.arange(4)


def sample(*args: object, **options: object) -> BatchSample:
    return BatchSample.of(call_of(*args, **options))


@pytest.mark.parametrize(
    "other, what",
    [
        (sample(X, target=Y), ""),
        (sample(X.clone().T.contiguous().T, target=Y.clone()), ""),  # the same values in another layout
        (sample(X + 1, target=Y), "inputs"),
        (sample(X, target=Y + 1), "targets"),
        (sample(X, torch.zeros(2), target=Y), ""),
        (sample(arg_mbs=[(X[:2],), (X[2:],)], target=Y), ""),  # it looks different, and cannot be compared
        (sample(X, target=Y, mask=X), ""),  # keyword arguments are of a rank's own stages
        (NOTHING, ""),
        (sample(target=Y), ""),
        (sample(torch.zeros(4, 3), target=Y), ""),  # a placeholder
        (sample(torch.full((4, 3), torch.nan), target=Y), ""),  # what torch.empty gives under deterministic algorithms
        (sample(X.double(), target=Y), ""),
        (sample(X.to("meta"), target=torch.empty(0)), ""),
        (sample("x", 3, target=None), ""),
    ],
)
def test_what_differs(other: BatchSample, what: str) -> None:
    assert sample(X, target=Y).difference(other) == other.difference(sample(X, target=Y)) == what


def test_a_placeholder_beside_others() -> None:
    """Of two inputs, one is left out on each rank: there is nothing to compare."""
    assert not sample(X, torch.zeros(5), target=Y).difference(sample(torch.zeros(4, 3), torch.arange(5), target=Y))


@pytest.mark.parametrize("shape", [(2**16,), (64, 512), (64, 1, 28, 28), (3, 61)])
def test_values_of_large_tensors_differ_somewhere(shape: tuple[int, ...]) -> None:
    """The first value of each row is the same, such as a token that begins a text, or the corner of a picture."""
    one, other = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for tensor in (one, other):
        tensor[..., 0] = 1
    assert sample(one).difference(sample(one.clone())) == ""
    assert sample(one).difference(sample(other)) == "inputs"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_read_is_not_compared() -> None:
    assert sample(torch.nested.nested_tensor([X, X[:2]]), X.to_sparse(), nn.Parameter(X)) == NOTHING
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert sample(X) == NOTHING


def test_steps() -> None:
    assert [step for step in range(40) if compares_batches(step)] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "name, per_rank, pairs",
    [
        ("1f1b", 1, [(0, 3)]),
        ("interleaved_1f1b", 2, [(0, 3)]),
        ("zbv", 2, []),
        ("bitpipe", 4, []),
        ("chimera", 2, [(0, 3), (3, 0)]),
    ],
)
def test_only_the_first_and_the_last_stage_of_each_direction_count(name: str, per_rank: int, pairs: list[tuple[int, int]]) -> None:
    plan = build(name, num_stages=4 * per_rank, num_microbatches=8, num_ranks=4)
    given = [sample(X + rank, target=Y) for rank in range(4)]
    same = BatchRecord(4, sample(X, target=Y))
    first = StepRecord("", "", "00" * 16, True, 1, plan.num_stages, 4, 8, 0, bytes(16), (), rooms=(same,))
    records = [first._replace(stages=tuple(plan.stages_of(rank))) for rank in range(4)]
    for rank in range(4):
        changed = [one._replace(rooms=(BatchRecord(4, given[1]),)) if i == rank else one for i, one in enumerate(records)]
        assert any(BatchRecord.doubts(changed, plan.depth)) == any(rank in pair for pair in pairs)
    assert not any(BatchRecord.doubts(records, plan.depth))


@pytest.mark.parametrize("kind", [bpipe.OneFOneB, bpipe.LocalLearning])
def test_batches_of_stages_with_losses_of_their_own_are_not_compared(kind: type[bpipe.OneFOneB]) -> None:
    loopback, is_local = bpipe.Loopback(2), kind is bpipe.LocalLearning
    modules = [bpipe.LocalBlock(nn.Linear(3, 3), nn.Linear(3, 3)) if is_local else nn.Linear(3, 3), nn.Linear(3, 3)]
    stages = [bpipe.PipelineStage(module, i, 2, "cpu", group=loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [kind(stage, 2, loss_fn=nn.functional.mse_loss) for stage in stages]
    for _ in range(2):
        loopback.step(schedules, X, target=X)
    records = schedules[0].session._latest[1]
    assert {one.sample for one in BatchRecord.of(records)} == {NOTHING if is_local else sample(X, target=X)}


def warnings_of(rank: int, has_own_generator: bool, is_shuffled: bool) -> list[str]:
    """Train as a newcomer would: one seed for all ranks, and a stage that draws numbers."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bpipe").addHandler(handler)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if has_own_generator else None
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), 4, shuffle=True, generator=generator) if is_shuffled else None
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()) if rank == 0 else nn.Linear(4, 4)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        for x in loader if loader is not None else [torch.randn(4, 4, generator=generator) for _ in range(3)]:
            schedule.step(x, target=x)
    schedule.close()
    return said


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("has_own_generator", [True, False])
def test_batches_drawn_from_the_generator_of_a_stage(has_own_generator: bool, is_shuffled: bool) -> None:
    first, second = run_ranks(warnings_of, 2, has_own_generator, is_shuffled)
    assert not second
    ends = "rank 0, which has the first stage, and rank 1, which has the last one, were given different inputs in step 4"
    assert [text.partition(". Give")[0] for text in first] == ([] if has_own_generator else [f"rank 0: 1f1b: {ends}"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_go_through_compared_steps() -> None:
    loopback = bpipe.Loopback(1)
    module = nn.Linear(3, 3)
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", group=loopback.rank(0))
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=lambda output, target: sum(one.sum() for one in output.unbind()) * target.sum())
    x = torch.nested.nested_tensor([X, X[:2]])
    for step in range(3):
        loopback.step([schedule], x, target=torch.ones(2))
        assert torch.equal(module.weight.grad, (step + 1) * (X.sum(0) + X[:2].sum(0)).expand(3, 3) / 2)
