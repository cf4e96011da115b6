"""Which part of a value belongs to which microbatch: as a single process cuts it by hand, or refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.nn import functional as F

import bpipe
from bpipe.errors import AgreementError, ConfigurationError
from tests.models import state_of
from tests.over import nested
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, TIME, WIDTH = 2, 4, 8, 4
ALONG_TIME = {"args_chunk_spec": (TensorChunkSpec(1),), "output_merge_spec": TensorChunkSpec(1)}

Parts = list[tuple[tuple[Any, ...], dict[str, Any], Any]]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Layer(nn.Linear):
    """Adds the mean of whatever it gets beside its input, so that a wrong part of it is another result."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        beside = [torch.as_tensor(other).float().std() for other in (*others, *named.values())]
        return torch.tanh(super().forward(x)) + sum(beside)


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(P)]


@dataclass
class Case:
    """A call, how a single process cuts it by hand, and the specs that a schedule needs for that."""

    call: dict[str, Any]
    cut: Callable[[int], Any]  # the target of a microbatch
    specs: dict[str, Any]
    loss: Callable[[torch.Tensor, Any], torch.Tensor] = F.mse_loss
    args: tuple[Any, ...] = ()
    cut_args: Callable[[int], tuple[Any, ...]] = lambda i: ()
    cut_kwargs: Callable[[int], dict[str, Any]] = lambda i: {}

    def alone(self) -> list[Any]:
        stages = modules()
        for i in range(M):
            value, named = self.cut_args(i), self.cut_kwargs(i)
            for stage in stages:
                value = (stage(*value, **named),)
            (self.loss(value[0], self.cut(i)) / M).backward()
        return [state_of(stage)[0] for stage in stages]

    def piped(self, stages: list[nn.Module]) -> None:
        loopback = bpipe.Loopback(P)
        made = [bpipe.PipelineStage(stages[i], i, P, "cpu", loopback.rank(i)) for i in range(P)]
        schedules = [bpipe.OneFOneB(stage, M, loss_fn=self.loss, **nested(self.specs)) for stage in made]
        loopback.step(schedules, *self.args, **self.call, return_outputs=False)

    def check(self) -> None:
        stages = modules()
        self.piped(stages)
        for stage, expected in zip(stages, self.alone(), strict=True):
            assert all(map(torch.equal, state_of(stage)[0], expected))

    def refused(self, match: str) -> None:
        stages = modules()
        with pytest.raises(ConfigurationError, match=match):
            self.piped(stages)
        assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())


def along_time(target: Any, cut: Callable[[int], Any], loss: Any = F.mse_loss, size: int = M, **specs: Any) -> Case:
    """A batch [time, batch, width] of `size` positions, with a sample for each microbatch."""
    x = numbers(size, M, WIDTH)
    return Case({"target": target}, cut, ALONG_TIME | specs, loss, (x,), lambda i: (x[:, i : i + 1],))


def by_label(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def summed(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A loss [time, batch, width] -> [batch, width], so that targets without positions have a meaning."""
    return (output.sum(0) * torch.as_tensor(target).float().reshape(1, -1).T).square().mean()


def of_dict(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    return (by_label(output, target["labels"]) * target["weights"]).sum() + (output[..., 0] @ target["table"]).square().mean()


LABELS = torch.arange(TIME * M).reshape(TIME, M) % WIDTH
SQUARE = torch.arange(M * M).reshape(M, M) % 3
WHOLE = numbers(2 * TIME, WIDTH)
TARGETS: dict[str, Case] = {
    "[time, batch], of which one dimension has the batch's size": along_time(LABELS, lambda i: LABELS[:, i], by_label, TIME),
    "[batch, time], of which one dimension has the batch's size": along_time(
        LABELS.T, lambda i: LABELS.T[i], lambda o, t: by_label(o.transpose(0, 1), t), TIME
    ),
    "one number for each sample": along_time(torch.arange(M), lambda i: torch.tensor([i]), summed, TIME),
    "an array": along_time(LABELS.numpy(), lambda i: LABELS[:, i], lambda o, t: by_label(o, torch.as_tensor(t)), TIME),
    "a square with a spec": along_time(SQUARE, lambda i: SQUARE[:, i], by_label, target_chunk_spec=TensorChunkSpec(1)),
    "a square whose rows are samples": along_time(
        SQUARE, lambda i: SQUARE[i], lambda o, t: by_label(o.transpose(0, 1), t), target_chunk_spec=TensorChunkSpec(0)
    ),
    "a square with a spec from the end": along_time(
        SQUARE, lambda i: SQUARE[:, i], by_label, target_chunk_spec=TensorChunkSpec(-1)
    ),
    "a dict with a spec for each value": along_time(
        {"labels": LABELS, "weights": WHOLE[:M, 0], "table": numbers(1, TIME)[0, :1]},
        lambda i: {"labels": LABELS[:, i], "weights": WHOLE[i : i + 1, 0], "table": numbers(1, TIME)[0, :1]},
        of_dict,
        TIME,
        target_chunk_spec={"labels": TensorChunkSpec(1), "weights": TensorChunkSpec(0), "table": None},
    ),
    "one for all microbatches": along_time(
        WHOLE, lambda i: WHOLE, lambda o, t: (o.mean((0, 1)) - t).square().mean(), target_chunk_spec=_Replicate()
    ),
    "flattened, with a spec": Case(
        {"target": LABELS.T.flatten()},
        lambda i: LABELS.T[i],
        {"target_chunk_spec": TensorChunkSpec(0)},
        by_label,
        (numbers(M, TIME, WIDTH),),
        lambda i: (numbers(M, TIME, WIDTH)[i : i + 1],),
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_a_spec_of_its_own_or_one_right_reading(name: str) -> None:
    """Gradients have the bits of a single process that cuts the target by hand."""
    TARGETS[name].check()


def test_inputs_by_keyword_say_where_the_samples_are() -> None:
    """Without positional arguments, the keyword inputs are the batch."""

    class Named(nn.Linear):
        def forward(self, received: Any = None, *, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if received is None else received)

    loopback, x = bpipe.Loopback(1), numbers(TIME, M, WIDTH)
    piped, alone = (Named(WIDTH, WIDTH) for _ in range(2))
    alone.load_state_dict(piped.state_dict())
    stage = bpipe.PipelineStage(piped, 0, 1, "cpu", loopback.rank(0))
    schedule = bpipe.OneFOneB(stage, M, loss_fn=by_label, kwargs_chunk_spec={"x": TensorChunkSpec(1)})
    schedule.step(x=x, target=LABELS, return_outputs=False)
    for i in range(M):
        (by_label(alone(x=x[:, i : i + 1]), LABELS[:, i]) / M).backward()
    assert torch.equal(piped.weight.grad, alone.weight.grad)


AMBIGUOUS: dict[str, Case] = {
    "a square": along_time(SQUARE, lambda i: SQUARE[:, i], by_label),
    "a square array": along_time(SQUARE.numpy(), lambda i: SQUARE[:, i], by_label),
    "a square in a dict": along_time({"labels": SQUARE}, lambda i: SQUARE[:, i], by_label),
    "a cube": along_time(numbers(M, M, WIDTH), lambda i: numbers(M, M, WIDTH)[:, i : i + 1]),
    "the dimension from the end": along_time(SQUARE, lambda i: SQUARE[:, i], by_label, args_chunk_spec=(TensorChunkSpec(-2),)),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_target_with_two_readings_is_refused(name: str) -> None:
    """Its samples may be along the dimension of the inputs' or along dimension 0, and both have the batch's size."""
    AMBIGUOUS[name].refused(r"the target.* may have its samples along dimension 0 or 1, .*Give Options\(target_chunk_spec=\)")


def test_a_keyword_input_with_two_readings_is_refused() -> None:
    case = along_time(LABELS, lambda i: LABELS[:, i], by_label)
    case.call["mask"] = numbers(M, M)
    case.refused(r"kwargs\['mask'\].* may have its samples along dimension 0 or 1.*Give kwargs_chunk_spec=")


# Sizes that are multiples of the batch's

X, Y = numbers(M, WIDTH), numbers(M, WIDTH)


def beside(*others: Any, target: Any = Y, specs: Any = None, cut: Any = None, loss: Any = F.mse_loss, **named: Any) -> Case:
    """A batch of a sample for each microbatch, and values beside it, which are repeated whole."""
    given = {"args_chunk_spec": (TensorChunkSpec(0), *(None for _ in others))} if others else {}
    given |= {"kwargs_chunk_spec": dict.fromkeys(named)} if named else {}
    return Case(
        {"target": target, **named},
        cut or (lambda i: Y[i : i + 1]),
        given if specs is None else specs,
        loss,
        (X, *others),
        lambda i: (X[i : i + 1], *others),
        lambda i: named,
    )


PATCHES = numbers(3 * M, WIDTH)
SIZES: dict[str, tuple[Case, str]] = {
    "offsets of documents": (beside(torch.arange(2 * M)), r"args\[1\] has 8 rows but args\[0\] has 4"),
    "rotary positions": (beside(rotary=numbers(16 * M, 2)), r"kwargs\['rotary'\] has 64 rows but args\[0\] has 4"),
    "a mask of queries and keys": (beside(mask=numbers(TIME, TIME) > 0), r"kwargs\['mask'\] has 8 rows"),
    "an array": (beside(table=np.arange(2.0 * M)), r"kwargs\['table'\] has 8 rows"),
    "patches that belong to samples": (
        Case(
            {"target": Y},
            lambda i: Y[i : i + 1],
            {"args_chunk_spec": (TensorChunkSpec(0), TensorChunkSpec(0))},
            F.mse_loss,
            (X, PATCHES),
            lambda i: (X[i : i + 1], PATCHES[3 * i : 3 * i + 3]),
        ),
        r"args\[1\] has 12 rows but args\[0\] has 4: a microbatch would get 3 and 1 of them",
    ),
    "a flattened target": (
        beside(
            target=numbers(M * WIDTH),
            specs={"target_chunk_spec": TensorChunkSpec(0)},
            cut=lambda i: numbers(M * WIDTH)[i * WIDTH : (i + 1) * WIDTH],
            loss=lambda o, t: F.mse_loss(o.flatten(), t),
        ),
        "the target has 16 rows but .* has 4",
    ),
    "one value in a target's dict": (
        beside(
            target={"y": Y, "prototypes": WHOLE},
            specs={"target_chunk_spec": {"y": TensorChunkSpec(0), "prototypes": None}},
            cut=lambda i: {"y": Y[i : i + 1], "prototypes": WHOLE},
            loss=lambda o, t: F.mse_loss(o, t["y"]) + torch.cdist(o, t["prototypes"]).mean(),
        ),
        r"the target\['prototypes'\] has 16 rows but .* has 4",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_not_of_the_batch_s_size_needs_a_spec(name: str) -> None:
    """Without a spec it is refused, although its size divides by m; with one, gradients are those of a single process."""
    case, match = SIZES[name]
    case.check()
    case.specs = {}
    case.refused(match)


# Ranks that get different inputs


def on_rank(rank: int, name: str) -> str:
    specs, first, last = ACROSS[name]
    stage = bpipe.PipelineStage(Layer(), rank, P, torch.device("cpu"))
    schedule = bpipe.OneFOneB(stage, M, loss_fn=lambda o, t: o.square().mean(), **nested(specs))
    with pytest.raises(AgreementError) as error:
        schedule.step(*first[0], **first[1]) if rank == 0 else schedule.step(**last)
    assert stage.submod.weight.grad is None
    schedule.step(*([X] if rank == 0 else []), **({} if rank == 0 else {"target": Y}))  # it goes on working
    assert stage.submod.weight.grad is not None
    return str(error.value)


ACROSS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "a flattened target": ({}, ((X,), {}), {"target": numbers(M * WIDTH)}),
    "a keyword of the last stage": ({}, ((X,), {}), {"target_mbs": [*Y.split(1)], "rotary": numbers(2 * M, 2)}),
    "a batch by keyword": ({}, ((), {"x": X}), {"target": numbers(2 * M)}),
}


@pytest.mark.parametrize("name", ACROSS)
def test_ranks_compare_the_sizes_of_what_they_cut(name: str) -> None:
    """A rank that does not get the batch cannot know its size; nothing was sent, and the next step runs."""
    for said in run_ranks(on_rank, P, name):
        assert "ranks 0 and 1 have cut batches of 4 and" in said
        assert "Options(target_chunk_spec=TensorChunkSpec(1))" in said


def test_a_rank_without_inputs_knows_from_their_spec_where_samples_are() -> None:
    """So it does not take a square target for one that has its samples along dimension 0."""
    from bpipe.model.call import Specs, call_of, microbatches_of

    specs = Specs.checked((TensorChunkSpec(1),), None, None)
    with pytest.raises(ConfigurationError, match=r"dimension 0 or 1, because those of the first argument are along dimension 1"):
        microbatches_of(call_of(target=SQUARE), M, specs, is_training=True)
    targets = microbatches_of(call_of(target=torch.arange(M)), M, specs, is_training=True).targets
    assert targets is not None
    assert [one.tolist() for one in targets] == [[i] for i in range(M)]
