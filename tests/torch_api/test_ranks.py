"""What PyTorch's tests of pipelining say of schedules over processes: written as for torch, with the import changed.

Each rank gets only what torch asks of it: the first one the batch, the last one the target.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.testing import assert_close

import bpipe
from tests.ranks import run_ranks
from tests.torch_api.models import BATCH, WIDTH, Cut, batch, blocks, gradients_of, in_one_process, sum_of_squares

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
ALL = (*SINGLE, *LOOPED, *V)
OF_TORCH = (*SINGLE, *LOOPED) if torch.__version__.startswith("2.11.") else ALL  # its V sends to its own rank
M, STEPS = 8, 2


def ranks() -> int:
    return dist.get_world_size()


def held(name: str, rank: int) -> list[int]:
    """The stages of a rank, as torch places them."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks() - 1 - rank] if name in V else [rank, ranks() + rank]


class Seen(NamedTuple):
    output: torch.Tensor | None
    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def train(library: Any, name: str, rank: int, modules: list[nn.Module], steps: int = STEPS, **hints: Any) -> Seen:
    """Train as a program for torch does; only `library` differs."""
    stages = [library.PipelineStage(modules[i], i, len(modules), torch.device("cpu"), **hints) for i in held(name, rank)]
    kind = getattr(library, name)
    schedule = kind(stages[0] if issubclass(kind, single_of(library)) else stages, M, loss_fn=sum_of_squares, scale_grads=False)
    own = [modules[i] for i in held(name, rank)]
    seen = run(schedule, stages, own, steps)
    if library is bpipe:
        schedule.close()
    return seen


def single_of(library: Any) -> type:
    return library.PipelineScheduleSingle if library is bpipe else library.schedules.PipelineScheduleSingle


def run(schedule: Any, stages: list[Any], modules: list[nn.Module], steps: int = STEPS, **kwargs: Any) -> Seen:
    x, target = batch()
    output, losses = None, []
    for _ in range(steps):
        for module in modules:
            module.zero_grad()
        losses = []
        args = (x,) if any(stage.is_first for stage in stages) else ()
        if any(stage.is_last for stage in stages):
            output = schedule.step(*args, target=target, losses=losses, **kwargs)
        else:
            output = schedule.step(*args, **kwargs)
    return Seen(output, losses, [None if one is None else one.clone() for one in gradients_of(modules)])


def check(seen: Seen, rank: int, name: str) -> None:
    """Against the whole batch in one process, with the tolerances of PyTorch's tests: it sums in another order."""
    whole = blocks(ranks() * len(held(name, rank)))
    output, loss, *_ = in_one_process(whole)
    expected = gradients_of([whole[i] for i in held(name, rank)])
    for one, other in zip(seen.gradients, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=4e-5)
    if seen.losses:
        assert_close(seen.output, output)
        assert_close(sum(seen.losses), loss)


# Each of the following runs on all ranks of one group of processes.


def trains_as_one_process(rank: int) -> None:
    for name in ALL:
        check(train(bpipe, name, rank, blocks(ranks() * len(held(name, rank)))), rank, name)


def takes_examples(rank: int) -> None:
    example = torch.empty(batch()[0].shape[0] // M, WIDTH)
    for name in SINGLE:
        check(train(bpipe, name, rank, blocks(ranks()), input_args=(example,), output_args=example), rank, name)


def evaluates(rank: int) -> None:
    x, target = batch()
    for name in (*SINGLE, *LOOPED):
        modules = blocks(ranks() * len(held(name, rank)))
        stages = [bpipe.PipelineStage(modules[i], i, len(modules), "cpu") for i in held(name, rank)]
        schedule = getattr(bpipe, name)(stages if len(stages) > 1 else stages[0], M, loss_fn=sum_of_squares, scale_grads=False)
        losses: list[torch.Tensor] = []
        if rank == 0:
            with torch.no_grad():
                schedule.eval(x)
        elif rank == ranks() - 1:
            schedule.eval(target=target, losses=losses)
        else:
            schedule.eval()
        assert not any(parameter.grad is not None for module in modules for parameter in module.parameters())
        assert len(losses) == M * (rank == ranks() - 1)
        schedule.close()


def returns_nothing_if_asked(rank: int) -> None:
    for name in (*SINGLE, *LOOPED):
        modules = blocks(ranks() * len(held(name, rank)))
        stages = [bpipe.PipelineStage(modules[i], i, len(modules), "cpu") for i in held(name, rank)]
        schedule = getattr(bpipe, name)(stages if len(stages) > 1 else stages[0], M, loss_fn=sum_of_squares, scale_grads=False)
        seen = run(schedule, stages, modules, steps=1, return_outputs=False)
        assert seen.output is None
        schedule.close()


def only_forward(rank: int) -> None:
    """Its output goes around, and is the next batch. A schedule without a loss runs no backward."""
    module, (x, _) = blocks(ranks())[rank], batch()
    schedule = bpipe.ScheduleGPipe(bpipe.PipelineStage(module, rank, ranks(), "cpu"), M)
    output = x
    for _ in range(3):
        if rank == 0:
            schedule.step(output)
            output = torch.empty_like(x)
            dist.recv(output, src=ranks() - 1)
        elif rank == ranks() - 1:
            dist.send(output := schedule.step(), dst=0)
        else:
            schedule.step()
    schedule.close()
    if rank == ranks() - 1:
        expected = x
        for _ in range(3):
            expected = nn.Sequential(*blocks(ranks()))(expected)
        assert_close(output, expected)


def cut_by_torchs_tracer(rank: int) -> None:
    """With a keyword argument that only the first rank gives."""
    torch.manual_seed(0)
    whole, (x, target), y = Cut(ranks()), batch(), torch.ones(batch()[0].shape)
    pipe = bpipe.pipeline(copy.deepcopy(whole), mb_args=(x.chunk(M)[0],), mb_kwargs={"y": y.chunk(M)[0]})
    module, device = pipe.get_stage_module(rank), torch.device("cpu")
    expected = whole(x, y=y)
    sum_of_squares(expected, target).backward()
    for name, stage in zip(SINGLE, (pipe.build_stage(rank, device), bpipe.build_stage(module, rank, pipe.info(), device))):
        module.zero_grad()
        schedule, losses = getattr(bpipe, name)(stage, M, loss_fn=sum_of_squares, scale_grads=False), []
        if rank == 0:
            schedule.step(x, y=y)
        elif rank == ranks() - 1:
            assert_close(schedule.step(target=target, losses=losses), expected)
        else:
            schedule.step()
        own = dict(module.named_parameters())
        assert own and module.state_dict().keys() <= whole.state_dict().keys()
        for path, parameter in own.items():
            assert_close(parameter.grad, whole.get_parameter(path).grad, rtol=1e-5, atol=4e-5)
        schedule.close()


def keyword_arguments_that_no_stage_uses(rank: int) -> None:
    for name in ("ScheduleInterleavedZeroBubble", "ScheduleInterleaved1F1B"):
        modules = blocks(2 * ranks())
        stages = [bpipe.PipelineStage(modules[i], i, 2 * ranks(), "cpu") for i in held(name, rank)]
        schedule = getattr(bpipe, name)(stages, M, loss_fn=sum_of_squares, scale_grads=False)
        own = [modules[i] for i in held(name, rank)]
        given = {"unused": torch.ones(BATCH, 1)} if rank == 0 else {}
        check(run(schedule, stages, own, **given), rank, name)
        schedule.close()


class Counts:
    """Counts what `dw_builder` of a stage has made, and what of it was called."""

    def __init__(self) -> None:
        self.num_called = 0

    def build(self) -> Any:
        def call() -> None:
            self.num_called += 1

        return call


def builders_of_weight_gradients(rank: int) -> None:
    """They are called once for each microbatch, by a schedule that knows of weight halves and by one that does not."""
    for name in ("ScheduleGPipe", "ScheduleInterleavedZeroBubble"):
        modules, counts = blocks(ranks() * len(held(name, rank))), Counts()
        stages = [bpipe.PipelineStage(modules[i], i, len(modules), "cpu", dw_builder=counts.build) for i in held(name, rank)]
        schedule = getattr(bpipe, name)(stages if len(stages) > 1 else stages[0], M, loss_fn=sum_of_squares, scale_grads=False)
        check(run(schedule, stages, [modules[i] for i in held(name, rank)]), rank, name)
        assert counts.num_called == STEPS * M * len(stages)
        schedule.close()


def equals_torchs_own(rank: int) -> dict[str, list[bool]]:
    """Whether each gradient equals that of torch's own schedule to the bit; close they are in any case."""
    found = {}
    for name in OF_TORCH:
        ours = train(bpipe, name, rank, blocks(ranks() * len(held(name, rank))), steps=1)
        theirs = train(pipelining, name, rank, blocks(ranks() * len(held(name, rank))), steps=1)
        for one, other in zip([*ours.gradients, *ours.losses], [*theirs.gradients, *theirs.losses], strict=True):
            assert_close(one, other)
        found[name] = [torch.equal(one, other) for one, other in zip(ours.gradients, theirs.gradients, strict=True)]
    return found


STATEMENTS = (
    *(trains_as_one_process, takes_examples, evaluates, returns_nothing_if_asked, only_forward, cut_by_torchs_tracer),
    *(keyword_arguments_that_no_stage_uses, builders_of_weight_gradients),
)


def all_of(rank: int) -> list[str]:
    """Run all statements in one group of processes, and return what failed, so that none hides another."""
    failed = []
    for statement in STATEMENTS:
        try:
            statement(rank)
        except Exception as error:
            failed.append(f"{statement.__name__}: {type(error).__name__}: {error}"[:600])
        dist.barrier()
    return failed


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_statements_over_processes(num_ranks: int) -> None:
    assert run_ranks(all_of, num_ranks) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_equal_those_of_torchs_own_schedules(num_ranks: int) -> None:
    """To the bit, where the order of the backwards is the same: torch's LoopedBFS runs them from the last microbatch on."""
    found = run_ranks(equals_torchs_own, num_ranks)
    equal = {name: all(all(of_rank[name]) for of_rank in found) for name in OF_TORCH}
    assert equal == {name: name != "ScheduleLoopedBFS" for name in OF_TORCH}
