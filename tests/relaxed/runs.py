"""Processes of a routed pipeline, which are started again in place of those that end, and the same training in one process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.relaxed import Routes
from tests.ranks import fork_server

WIDTH, BATCH = 6, 24
TIMEOUT_S = 20.0
KILLED = 9  # the exit code of a process that ends itself


class Block(nn.Module):
    """A stage, which does something at a forward of its choice."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.num_forwards, self.before = 0, lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(self.num_forwards)
        self.num_forwards += 1
        return torch.tanh(self.linear(x))


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


def train(
    seat: int, store: Any, num_steps: int, before: Callable[[Routes, int], None] = lambda routes, number: None, *, num_replicas: int = 3, m: int = 12
) -> dict[str, Any]:
    """Train as one rank, and return what it has seen."""
    block = Block(seat % 2)
    optimizer = torch.optim.Adam(block.parameters(), lr=0.01)
    stage, how = bpipe.PipelineStage(block, seat % 2, 2), {"timeout_s": TIMEOUT_S, "state": [optimizer]}
    routes = Routes(stage, m, loss_fn, replica=seat // 2, num_replicas=num_replicas, store=store, **how)
    block.before = lambda number: before(routes, number)
    curve, attempts = {}, []
    for step in range(first := routes.join(), num_steps):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        inputs, targets = batch(step)
        routes.step(inputs, target=targets, losses=losses)
        optimizer.step()
        curve[step] = sum(map(float, losses)) / m
        attempts.append(routes.stats["attempts"])
    gradients = [one.grad for one in block.parameters()]
    routes.close()
    return {"first": first, "curve": curve, "gradients": gradients, "attempts": attempts}


def _process(end: Any, seat: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    end.send_bytes(pickle.dumps(function(seat, dist.TCPStore("127.0.0.1", port, is_master=False), *args)))


def run(function: Callable[..., Any], num_seats: int, *args: Any, restarts: bool = False, timeout_s: float = 120.0) -> dict[int, Any]:
    """Call `function(seat, store, *args)` in a process for each seat; those that kill themselves are started again, or missing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, results = fork_server(), {}
    running: dict[Any, tuple[int, Any, Any]] = {}

    def start(seat: int, args: tuple[Any, ...]) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(theirs, seat, store.port, function, args), daemon=True)
        process.start()
        theirs.close()
        running[ours] = seat, process, args

    for seat in range(num_seats):
        start(seat, args)
    try:
        while running:
            ready = wait(list(running), timeout_s)
            assert ready, f"seats {[seat for seat, _, _ in running.values()]} do not end"
            for end in ready:
                seat, process, given = running.pop(end)
                try:
                    results[seat] = pickle.loads(end.recv_bytes())
                except EOFError:
                    process.join()
                    assert process.exitcode == KILLED, f"seat {seat} ended with {process.exitcode}"
                    if restarts:
                        start(seat, given)
    finally:
        for _, process, _ in running.values():
            process.kill()
    return results
