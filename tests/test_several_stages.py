"""Several stages on a rank: what they are given, what they hand over without a copy, and what is refused."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.flow.shaping import shaped
from bpipe.schedules import Action, Op, Plan, finish
from tests.models import held_by, mse
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, M = 8, 4


def on_one_rank(*modules: nn.Module, schedule: type[bpipe.Schedule] = bpipe.Interleaved1F1B, m: int = M) -> bpipe.Schedule:
    group = bpipe.Loopback(1).rank(0)
    stages = [bpipe.PipelineStage(module, i, len(modules), "cpu", group) for i, module in enumerate(modules)]
    return schedule(stages, m, loss_fn=mse)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2 * M, WIDTH, generator=generator), torch.randn(2 * M, WIDTH, generator=generator)


def expected_gradients(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Of one process."""
    for module in modules:
        module.zero_grad()
    for x, y in zip(*(part.chunk(M) for part in batch())):
        (mse(nn.Sequential(*modules)(x.clone()), y) / M).backward()
    return [p.grad for module in modules for p in module.parameters()]


# What they are given.


class Adds(nn.Module):
    """Adds a keyword argument, and remembers which it got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.got = nn.Linear(WIDTH, WIDTH), set()

    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        self.got |= kwargs.keys()
        return self.linear(x) + kwargs["bias"]


def test_every_stage_of_a_rank_gets_all_keyword_arguments():
    modules = [Adds(), Adds()]
    schedule = on_one_rank(*modules)
    x, y = batch()
    bias = torch.ones(2 * M, WIDTH).requires_grad_()
    schedule.step(x, target=y, bias=bias, other=torch.zeros(2 * M))
    assert [module.got for module in modules] == [{"bias", "other"}] * 2
    for module in modules:
        module.zero_grad()
    reference = torch.ones(2 * M, WIDTH).requires_grad_()
    for xi, yi, bi in zip(x.chunk(M), y.chunk(M), reference.chunk(M)):
        (mse(modules[1](modules[0](xi, bias=bi), bias=bi), yi) / M).backward()
    assert torch.equal(bias.grad, reference.grad)


def only_what_is_used(rank: int) -> tuple[bool, int]:
    """In a V, rank 0 holds the first and the last stage: it alone needs the batch and the target, and returns all there is."""
    torch.manual_seed(rank)
    stages = [bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), i, 4, "cpu") for i in held_by(bpipe.ZBV, 2, 4)[rank]]
    schedule = bpipe.ZBV(stages, M, loss_fn=mse)
    x, y = batch()
    losses: list[torch.Tensor] = []
    for _ in range(2):  # the first step learns what the messages look like, from headers in the order of their channels
        outputs = schedule.step(x, target=y, losses=losses) if rank == 0 else schedule.step(losses=losses)
    schedule.close()
    return outputs is not None, len(losses)


def test_outputs_and_losses_are_where_the_last_stage_is():
    assert run_ranks(only_what_is_used, 2) == [(True, M), (False, 0)]


def test_a_loopback_returns_them_too():
    loopback = bpipe.Loopback(2)
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    stages = [
        [bpipe.PipelineStage(modules[i], i, 4, "cpu", loopback.rank(r)) for i in held] for r, held in enumerate(((0, 3), (1, 2)))
    ]
    schedules = [bpipe.VMin(of_rank, M, loss_fn=mse) for of_rank in stages]
    x, y = batch()
    losses: list[torch.Tensor] = []
    outputs = loopback.step(schedules, x, target=y, losses=losses)
    assert torch.equal(outputs, torch.cat([nn.Sequential(*modules)(xi) for xi in x.chunk(M)]))
    assert len(losses) == M
    assert torch.equal(loopback.eval(schedules, x), outputs)


def test_a_target_is_asked_for_where_the_last_stage_is():
    schedule = on_one_rank(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigurationError, match="the last stage has a loss_fn but step"):
        schedule.step(batch()[0])


class OutOfTurn(bpipe.Interleaved1F1B):
    """Rank 0 sends microbatch 1 of stage 0 before microbatch 0 of stage 2, on one channel; rank 1 uses them the other way round."""

    def _make_plan(self, *_: Any) -> Plan:
        lanes = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1")
        computations = tuple(tuple(map(Action.parse, lane.split())) for lane in lanes)
        empty, none = ((),) * 2, (None,) * 2
        return finish(
            Plan(name="by_hand", flow=shaped(None, "chain", (0, 1, 0, 1), 2), actions=computations, served=empty, slots=none)
        )


def test_messages_are_learned_in_the_order_of_their_channel():
    loopback = bpipe.Loopback(2)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH + i), nn.Linear(WIDTH + i, WIDTH)) for i in range(4)]
    stages = [[bpipe.PipelineStage(modules[i], i, 4, "cpu", loopback.rank(r)) for i in (r, r + 2)] for r in range(2)]
    schedules = [OutOfTurn(of_rank, 2, loss_fn=mse) for of_rank in stages]
    sent, used = (
        [str(a) for a in schedules[0].plan.actions[rank] if a.op is op] for rank, op in ((0, Op.SEND_F), (1, Op.WAIT_RECV_F))
    )
    assert sent == ["0SEND_F0", "0SEND_F1", "2SEND_F0", "2SEND_F1"]
    assert used == ["1WAIT_RECV_F0", "3WAIT_RECV_F0", "1WAIT_RECV_F1", "3WAIT_RECV_F1"]
    x, y = batch()
    for _ in range(2):
        outputs = loopback.step(schedules, x, target=y)
    assert torch.equal(outputs, torch.cat([nn.Sequential(*modules)(xi) for xi in x.chunk(2)]))


# What they hand over.


class Storages:
    """Where each forward's output lies, and each input."""

    def __init__(self) -> None:
        self.outputs: set[int] = set()
        self.inputs: set[int] = set()

    def watch(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: self.inputs.add(args[0].untyped_storage()._cdata))
        module.register_forward_hook(lambda _, args, output: self.outputs.add(output.untyped_storage()._cdata))


def test_what_is_handed_over_is_not_copied():
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    first, second = Storages(), Storages()
    first.watch(modules[0])
    second.watch(modules[1])
    on_one_rank(*modules).eval(batch()[0])
    assert second.inputs == first.outputs


class Starts(nn.Module):
    """Changes its input in place before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2))


@pytest.mark.parametrize("schedule", [bpipe.Interleaved1F1B, bpipe.ZBV])
def test_an_input_may_be_changed_in_place(schedule):
    """The stage before has not saved its output."""
    modules = [nn.Linear(WIDTH, WIDTH), Starts()]
    on_one_rank(*modules, schedule=schedule).step(batch()[0], target=batch()[1])
    found = [p.grad for module in modules for p in module.parameters()]
    assert all(map(torch.equal, found, expected_gradients(modules)))


@pytest.mark.parametrize("schedule", [bpipe.Interleaved1F1B, bpipe.ZBV])
def test_changing_what_the_stage_before_has_saved_is_an_error_as_in_one_process(schedule):
    """On ranks of their own, each stage has its own copy; on one rank, they share it."""
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Starts()]
    for _ in range(2):  # the first microbatch of the first step is followed by a stash, those of another pipeline again
        with pytest.raises(RuntimeError, match="modified"):
            on_one_rank(*modules, schedule=schedule).step(batch()[0], target=batch()[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        expected_gradients(modules)


# Memory.


@pytest.mark.parametrize("schedule", [bpipe.Interleaved1F1B, bpipe.ZBV, bpipe.DualPipeV])
def test_nothing_of_a_step_is_left_to_the_cycle_collector(schedule):
    schedule = on_one_rank(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), schedule=schedule)
    x, y = batch()
    for _ in range(2):
        schedule.step(x, target=y, return_outputs=False)
    gc.collect()
    gc.disable()
    try:
        before = live_bytes()
        schedule.step(x, target=y, return_outputs=False)
        assert live_bytes() == before
    finally:
        gc.enable()


def live_bytes() -> int:
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not is_lazy(o)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}.values())


# What is refused.


def stages(*indices: int, size: int = 4) -> list[bpipe.PipelineStage]:
    group = bpipe.Loopback(2).rank(0)
    return [bpipe.PipelineStage(nn.Linear(2, 2), index, size, "cpu", group) for index in indices]


def unlike(**options: Any) -> list[bpipe.PipelineStage]:
    (first,) = stages(0)
    arguments = {"stage_index": 2, "num_stages": 4, "device": "cpu", "group": first.group, **options}
    return [first, bpipe.PipelineStage(nn.Linear(2, 2), **arguments)]


@pytest.mark.parametrize(
    "schedule, of_rank, message",
    [
        (bpipe.Interleaved1F1B, [], "a rank holds 1 to 64 stages, got 0"),
        (bpipe.Interleaved1F1B, stages(0), "interleaved_1f1b"),
        (bpipe.OneFOneB, stages(0, 2), "1f1b"),
        (bpipe.ZBV, stages(0, 1), "zbv puts stages [0, 3] on one rank, got [0, 1]: of 4 stages, ranks 0 to 1 hold [0, 3], [1, 2]"),
        (bpipe.BreadthFirst, stages(0, 3), "breadth_first puts stages [0, 2] on one rank, got [0, 3]"),
        (
            bpipe.BreadthFirst,
            stages(0, 0),
            "a rank got stages [0, 0] of 4: put each stage on one rank, and equally many on every rank",
        ),
        (bpipe.BreadthFirst, stages(0, 1, 2), "a rank got stages [0, 1, 2] of 4: put each stage on one rank"),
        (bpipe.BreadthFirst, unlike(num_stages=6), "the stages of a rank must have the same num_stages, got 4, 6"),
        (bpipe.BreadthFirst, unlike(device="meta"), "the stages of a rank must have the same device, got cpu, meta"),
        (bpipe.BreadthFirst, unlike(group=None), "the stages of a rank must have the same group, got "),
        (bpipe.DualPipeV, stages(0, 3), "dualpipe_v"),
    ],
)
def test_what_is_refused(schedule, of_rank, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        schedule(of_rank, 3)
