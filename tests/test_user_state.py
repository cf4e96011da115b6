"""What is the user's stays as it is: random numbers, modes, hooks, statistics, counts of calls, signals, threads."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpipe
from tests.models import mse
from tests.over import Over
from tests.ranks import run_ranks

P, M, WIDTH = 4, 8, 8
SCHEDULES = [
    bpipe.OneFOneB,
    bpipe.BalancedOneFOneB,
    bpipe.ZBH1,
    Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=2)}),
]


class Stage(nn.Module):
    """Counts its forwards, keeps statistics, and has hooks of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.calls: Counter[str] = Counter()
        self.register_forward_hook(lambda *_: self.calls.update(["hook"]))
        self.register_full_backward_hook(lambda *_: self.calls.update(["backward hook"]))
        self.linear.weight.register_hook(lambda gradient: self.calls.update(["gradient hook"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.update(["forward"])
        return self.dropout(torch.tanh(self.frozen(self.norm(self.linear(x)))))


def of_the_process() -> dict[str, Any]:
    """What a process has one of."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "numpy's": str(np.random.get_state()),
        "Python's": random.getstate(),
        "gradients on": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "threads of torch": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "signals": [signal.getsignal(one) for one in signal.valid_signals()],
        "wakeup": wakeup,
        "loggers": (logging.root.level, list(logging.root.handlers), list(logging.getLogger("bpipe").handlers)),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "excepthook": (sys.excepthook, threading.excepthook),
        "folder": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
    }


def of_the_module(module: Stage) -> dict[str, Any]:
    """What a module has that no step changes."""
    kinds = [name for name in vars(module) if "hooks" in name]
    return {
        "modes": [one.training for one in module.modules()],
        "hooks": [{kind: dict(getattr(one, kind)) for kind in kinds if getattr(one, kind)} for one in module.modules()],
        "parameters": [(id(p), p.data_ptr(), p.requires_grad, p._backward_hooks is not None) for p in module.parameters()],
        "attributes": [sorted(vars(one)) for one in module.modules()],
        "forward": module.forward.__func__,
        "class": type(module),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [what for what in before if before[what] != after[what]]


def step_and_look(rank: int, index: int) -> list[str]:
    """What two steps, an eval and closing have changed on a rank."""
    torch.manual_seed(0)
    module = Stage()
    module.dropout.eval()
    x = torch.randn(2 * M, WIDTH, requires_grad=True)
    schedule = SCHEDULES[index](bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=mse)
    before, threads, own = of_the_process(), threading.active_count(), of_the_module(module)
    for _ in range(2):
        schedule.step(x, target=x.detach())
    schedule.eval(x)
    found = changed(before, of_the_process()) + changed(own, of_the_module(module))
    schedule.close()
    assert not (rank == 0 and x.grad is None)
    assert x.requires_grad and x.is_leaf and x._version == 0
    assert threading.active_count() <= threads
    expected = {"forward": 3 * M, "hook": 3 * M, "backward hook": 2 * M, "gradient hook": 2 * M}
    assert module.norm.num_batches_tracked == 3 * M
    return found + [f"{what}: {module.calls[what]}" for what in expected if module.calls[what] != expected[what]]


@pytest.mark.parametrize("index", range(len(SCHEDULES)), ids=lambda index: f"{SCHEDULES[index].rule}-{index}")
def test_steps_change_nothing_of_the_user_s(index):
    assert run_ranks(step_and_look, P, index) == [[]] * P


def break_and_look(rank: int) -> list[str]:
    """What a step that failed has left behind."""
    module = Stage()

    def fail(*_: object) -> None:
        if rank == 1 and module.calls["forward"] == 3:
            raise ValueError("boom")

    module.linear.register_forward_pre_hook(fail)
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=mse)
    before, threads, own = of_the_process(), threading.active_count(), of_the_module(module)
    with suppress(ValueError, bpipe.errors.RankFailedError):
        schedule.step(torch.ones(2 * M, WIDTH), target=torch.ones(2 * M, WIDTH))
    schedule.close()
    assert threading.active_count() <= threads
    return changed(before, of_the_process()) + changed(own, of_the_module(module))


def test_a_step_that_fails_leaves_nothing_behind():
    assert run_ranks(break_and_look, P) == [[]] * P


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.rule)
def test_random_numbers_are_drawn_as_by_one_process(schedule):
    """Dropout alone draws: a rank's stream stands where m forwards of its stage leave it."""

    def stage(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))

    torch.manual_seed(3)
    loopback = bpipe.Loopback(P)
    modules = [stage(0.5) for _ in range(P)]
    schedules = [schedule(bpipe.PipelineStage(m, i, P, "cpu", loopback.rank(i)), M, loss_fn=mse) for i, m in enumerate(modules)]
    loopback.manual_seed(5)
    outside = torch.get_rng_state()
    x = torch.ones(2 * M, WIDTH)
    loopback.step(schedules, x, target=x)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(5)
    for part in x.chunk(M):
        modules[0](part)
    assert all(torch.equal(state._cpu, torch.get_rng_state()) for state in loopback._random)


def inputs(kind: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(P)]
    x = torch.randn(2 * M, WIDTH, requires_grad=True)
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    loopback.step([kind(stage, M, loss_fn=mse) for stage in stages], x, target=x.detach())
    assert x.grad is not None
    return x.grad, torch.cat([p.grad.flatten() for module in modules for p in module.parameters()])


def test_gradients_of_inputs_are_the_same_under_all_schedules():
    plain, *others = [inputs(kind) for kind in SCHEDULES]
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(plain, other, strict=True))
