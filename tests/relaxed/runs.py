"""Processes of a routed pipeline, which are started again in place of those that end, and the same training in one process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.relaxed import Routes
from tests.patience import too_late, until
from tests.ranks import fork_server

WIDTH, BATCH, M = 6, 24, 12
TIMEOUT_S = 60.0
KILLED = 9  # the exit code of a process that ends itself


class Block(nn.Module):
    """A stage, which calls a function before each forward and in each backward."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.then: Callable[[str], None] = lambda where: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.then("forward")
        output = torch.tanh(self.linear(x))
        if output.requires_grad:
            output.register_hook(lambda gradient: self.then("backward"))
        return output


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=made) for _ in range(2))  # type: ignore[return-value]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def alone(num_steps: int, num_stages: int = 2) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The loss of each step, and the last gradients of each stage, in one process."""
    model = nn.Sequential(*[Block(stage) for stage in range(num_stages)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    curve = []
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve, [[one.grad for one in block.parameters()] for block in model]  # type: ignore[misc]


Then = Callable[[Routes, str], None]  # what a rank does at some place of a step


def train(seat: int, store: Any, num_steps: int, then: Then | None = None, num_replicas: int = 3) -> dict[str, Any]:
    """Train as one rank of two stages, and return what it has seen."""
    block = Block(seat % 2)
    optimizer = torch.optim.Adam(block.parameters(), lr=0.01)
    stage, how = bpipe.PipelineStage(block, seat % 2, 2), {"options": bpipe.Options(timeout_s=TIMEOUT_S), "state": [optimizer]}
    routes = Routes(stage, M, loss_fn, replica=seat // 2, num_replicas=num_replicas, store=store, **how)
    if then is not None:
        block.then = lambda where: then(routes, where)
    curve, attempts, seats = {}, {}, {}
    for step in range(first := routes.join(), num_steps):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        inputs, targets = batch(step)
        routes.step(inputs, target=targets, losses=losses)
        block.then("between steps")
        optimizer.step()
        curve[step], attempts[step], seats[step] = sum(map(float, losses)) / M, routes.stats["attempts"], routes.seats
    gradients = [one.grad for one in block.parameters()]
    routes.close()
    return {"first": first, "curve": curve, "gradients": gradients, "attempts": attempts, "seats": seats}


def wait_for_newcomers(routes: Routes, have_begun: Callable[[], object] = lambda: True) -> None:
    """Wait between steps until processes that were started again have announced themselves: they take part in the next step."""
    until(have_begun, "a process is started again")
    until(routes._attendance.has_newcomers, "a process that was started again announces itself")


def _process(end: Any, seat: int, port: int, function: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    end.send_bytes(pickle.dumps(function(seat, dist.TCPStore("127.0.0.1", port, is_master=False))))


def run(function: Callable[..., Any], num_seats: int, *, restarts: bool = False, timeout_s: float = 200.0) -> dict[int, Any]:
    """Call `function(seat, store)` in a process for each seat; those that kill themselves are started again, or missing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, results = fork_server(), {}
    running: dict[Any, tuple[int, Any]] = {}

    def start(seat: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(theirs, seat, store.port, function), daemon=True)
        process.start()
        theirs.close()
        running[ours] = seat, process

    for seat in range(num_seats):
        start(seat)
    try:
        while running:
            ready = wait(list(running), timeout_s)
            assert ready, too_late(f"the end of seats {[seat for seat, _ in running.values()]}", timeout_s)
            for end in ready:
                seat, process = running.pop(end)
                try:
                    results[seat] = pickle.loads(end.recv_bytes())
                except EOFError:
                    process.join()
                    assert process.exitcode == KILLED, f"seat {seat} ended with {process.exitcode}"
                    if restarts:
                        start(seat)
    finally:
        for _, process in running.values():
            process.kill()
    return results
