"""Forwards and backwards in pieces at run time: parts leave and come back inside them, and the memory is what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.engine.piecewise import PiecesOf
from bpipe.engine.run import Observer
from bpipe.plan.action import COMPUTE
from bpipe.schedules import Action, Op, Plan
from tests.models import Block
from tests.ranks import run_ranks

WIDTH, TOKENS = 32, 16

pytestmark = pytest.mark.usefixtures("one_thread")


def stage_module(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(Block(WIDTH, 4, 0.0), Block(WIDTH, 4, 0.0))


def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(m, TOKENS, WIDTH, generator=generator), torch.randn(m, TOKENS, WIDTH, generator=generator)


class Live(Observer):
    """What the ledger has live after each action of the compute lane."""

    def started(self, run: Any) -> None:
        self.live: dict[Action, int] = {}

    def after(self, run: Any, action: Action) -> None:
        if action.op in COMPUTE:
            self.live[action] = run.evictions.ledger.live_bytes


def in_loopback(p: int, m: int, *, inside: bool, parts: int, steps: int = 3) -> tuple[list[Any], list[torch.Tensor]]:
    loopback = bpipe.Loopback(p)
    modules = [stage_module(rank) for rank in range(p)]
    stages = [bpipe.PipelineStage(module, rank, p, "cpu", group=loopback.rank(rank)) for rank, module in enumerate(modules)]
    schedules: list[Any] = [bpipe.OneFOneB(stage, m, loss_fn=nn.functional.mse_loss) for stage in stages]
    if parts:
        schedules = [bpipe.Balanced(schedule, budget="lowest", parts=parts, inside=inside) for schedule in schedules]
    for schedule in schedules:
        schedule.session.observer = Live()
    x, target = batch(m)
    for _ in range(steps):
        loopback.step(schedules, x, target=target)
    return schedules, [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]


def does_something_inside(plan: Plan) -> bool:
    return any(plan.interrupted(rank) for rank in range(plan.num_ranks))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 12)])
def test_gradients_and_memory(p: int, m: int) -> None:
    _, plain = in_loopback(p, m, inside=False, parts=0)
    schedules, gradients = in_loopback(p, m, inside=True, parts=4)
    assert does_something_inside(schedules[0].plan)
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients, strict=True))
    for schedule in schedules:
        assert schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"]


def test_lower_than_whole_forwards_allow() -> None:
    """Blocks alone are alike on all ranks: in pieces the highest peak comes near to the mean, (p+1)/2 microbatches."""
    whole, _ = in_loopback(4, 12, inside=False, parts=1, steps=2)
    inside, _ = in_loopback(4, 12, inside=True, parts=8, steps=2)
    plain, _ = in_loopback(4, 12, inside=False, parts=0, steps=2)
    microbatch = plain[2].stats["peak_bytes"] / 2  # the last stage has the loss besides
    highest = {name: max(s.stats["peak_bytes"] for s in run) / microbatch for name, run in (("whole", whole), ("inside", inside))}
    assert highest["whole"] == pytest.approx(3)
    assert 2.5 <= highest["inside"] < 2.75


def test_pieces_take_and_give_back_one_after_the_other() -> None:
    schedules, _ = in_loopback(4, 8, inside=True, parts=4, steps=2)
    plan, live = schedules[0].plan, schedules[0].session.observer.live
    pieces = [action for action in plan.actions[0] if action.op in COMPUTE and action.microbatch == 0]
    forward = [live[piece] for piece in pieces if piece.op is Op.F]
    assert forward == sorted(forward) and len(set(forward)) == 4
    assert set(live) == {action for action in plan.actions[0] if action.op in COMPUTE}


def over_processes(rank: int, p: int, m: int) -> tuple[list[torch.Tensor], dict[str, float], bool]:
    module = stage_module(rank)
    plain = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, p, "cpu"), m, loss_fn=nn.functional.mse_loss)
    schedule = bpipe.Balanced(plain, budget="lowest", parts=4, inside=True)
    x, target = batch(m)
    for _ in range(3):
        schedule.step(x, target=target)
    return [parameter.grad for parameter in module.parameters()], schedule.stats, does_something_inside(schedule.plan)


def test_over_processes() -> None:
    _, plain = in_loopback(4, 8, inside=False, parts=0)
    results = run_ranks(over_processes, 4, 4, 8)
    assert all(torch.equal(*pair) for pair in zip(plain, [g for gradients, *_ in results for g in gradients], strict=True))
    assert any(stats["evicted_bytes"] for _, stats, _ in results) and all(inside for *_, inside in results)
    assert all(stats["peak_bytes"] == stats["predicted_peak_bytes"] for _, stats, _ in results)


class Twice(nn.Module):
    """Saves its input at its beginning and at its end: a storage across all pieces, which stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * x


def test_a_tensor_saved_in_two_pieces() -> None:
    def train(parts: int) -> tuple[list[Any], list[torch.Tensor]]:
        loopback = bpipe.Loopback(4)
        torch.manual_seed(0)
        modules = [Twice() for _ in range(4)]
        stages = [bpipe.PipelineStage(module, rank, 4, "cpu", group=loopback.rank(rank)) for rank, module in enumerate(modules)]
        schedules: list[Any] = [bpipe.OneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
        if parts:
            schedules = [bpipe.Balanced(schedule, budget="lowest", parts=parts, inside=True) for schedule in schedules]
        x, target = batch(8)
        for _ in range(3):
            loopback.step(schedules, x, target=target)
        return schedules, [p.grad for module in modules for p in module.parameters() if p.grad is not None]

    _, plain = train(0)
    schedules, gradients = train(3)
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients, strict=True))
    assert does_something_inside(schedules[0].plan)
    assert all(sizes.fixed > 0 for sizes in schedules[0].plan.sizes.stages[1:])


def test_what_fails_between_pieces_is_raised_again_if_the_module_catches_it() -> None:
    """As a fallback around an attention kernel may."""
    error = RuntimeError("the acceptor is gone")

    def advance(piece: Action) -> None:
        raise error

    pieces = PiecesOf(Action(Op.F, 0, 0, part=1), 3, advance)
    for go_on in (lambda: pieces.reach(2), lambda: pieces.reach(3), pieces.finish):
        with pytest.raises(RuntimeError) as raised:
            go_on()
        assert raised.value is error
