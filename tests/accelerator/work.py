"""What is run on the simulated device and on CPU, to be compared to the bit."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from copy import deepcopy
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.device import POOL, on_stream
from bpipe.errors import RankFailedError
from bpipe.schedules import Destinations
from tests.accelerator.build import make
from tests.edge_cases.case import SCHEDULES, TWO_STAGES
from tests.models import directions_of, held_by
from tests.over import Over, pipeline

WIDTH, TOKENS, BATCH = 16, 8, 2
KIND = make()  # of device; the module that says so is for processes that have one
RULES: dict[str, Any] = {
    **SCHEDULES,
    "host": Over(bpipe.OneFOneB, {"budget": "lowest", "to": Destinations(host="only")}),
    "breadth_first": bpipe.BreadthFirst,
    "v_min": bpipe.VMin,
    "bitpipe_zb": bpipe.BitPipeZB,
    "chimera": bpipe.Chimera,
}
STAGES = dict.fromkeys((*TWO_STAGES, "breadth_first", "v_min", "chimera"), 2) | {"bitpipe_zb": 4}  # on a rank; default: one


def lends(name: str) -> bool:
    """Whether tests of transfers let a schedule's evictions go to lent memory: not those of slots, so that both ways are run."""
    return name != "balanced_1f1b"


def linked(rank: int) -> LocalLink:
    """A link between two ranks."""
    store, connection = dist.distributed_c10d._get_default_store(), socket.socket(socket.AF_UNIX)
    if rank:
        connection.connect(store.get("link"))
        return LocalLink(connection)
    with connection:
        connection.bind(b"")  # a name that the kernel chooses
        connection.listen()
        store.set("link", connection.getsockname())
        return LocalLink(connection.accept()[0])


class Block(nn.Module):
    """A normalised block of two linear layers, with what saved activations come from: a view, an in-place operation, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([nn.functional.gelu(a).mul_(0.5), b.tanh()], -1))


def modules_of(num_stages: int, directions: int = 1) -> list[nn.Module]:
    torch.manual_seed(0)
    once = [nn.Sequential(Block(), Block()) for _ in range(num_stages // directions)]
    return [*once, *(deepcopy(once) * (directions - 1))]


def batch_of(step: int, num_microbatches: int) -> torch.Tensor:
    return torch.randn(num_microbatches * BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def results_of(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Gradients and buffers, on the CPU."""
    tensors = [p.grad for module in modules for p in module.parameters()]
    return [tensor.cpu() for tensor in tensors if tensor is not None] + [b.cpu() for module in modules for b in module.buffers()]


def in_loopback(name: str, device: str, *, num_ranks: int = 4, num_microbatches: int = 8, steps: int = 3) -> list[torch.Tensor]:
    """Train under a schedule, all ranks in this process: what `results_of` says, and the outputs of each step."""
    all_stages = modules_of(num_ranks * STAGES.get(name, 1), directions_of(RULES[name]))
    modules = [module.to(device) for module in all_stages]
    loopback, schedules = pipeline(RULES[name], modules, num_microbatches, nn.functional.mse_loss, num_ranks, device)
    outputs = []
    for step in range(steps):
        x = batch_of(step, num_microbatches).to(device) * 1  # made on the device, by the caller
        outputs.append(loopback.step(schedules, x, target=x).cpu())
    for schedule in schedules:
        schedule.close()
    return [*results_of(modules), *outputs]


def as_rank(
    rank: int, name: str, device: str, *, num_ranks: int, num_microbatches: int = 8, steps: int = 3, **how: Any
) -> list[torch.Tensor]:
    """Train under a schedule as one of several processes: what `results_of` says of this rank."""
    num_stages, directions = num_ranks * STAGES.get(name, 1), directions_of(RULES[name])
    held = held_by(RULES[name], num_ranks, num_stages)[rank]
    modules = modules_of(num_stages, directions)
    stages = [bpipe.PipelineStage(modules[i].to(device), i, num_stages, device, directions=directions) for i in held]
    schedule = RULES[name](
        stages, num_microbatches, loss_fn=nn.functional.mse_loss, options=bpipe.Options(**{"timeout_s": 60, **how})
    )
    for step in range(steps):
        x = batch_of(step, num_microbatches).to(device) * 1  # made on the device, by the caller
        schedule.step(x, target=x, return_outputs=False)
    found = results_of([modules[i] for i in held])
    schedule.close()
    return found


class StruckError(Exception):
    """What a hook raises."""


def strike(module: nn.Module, where: str) -> None:
    """Let a module raise in its fourth forward or backward from now on."""
    calls = count(1)

    def hook(*_: object) -> None:
        if next(calls) == 4:
            time.sleep(0.05)  # until what was received ahead has come
            raise StruckError

    module.register_forward_pre_hook(hook) if where == "forward" else module.register_full_backward_pre_hook(hook)


def use_memory() -> None:
    """What a user does next: allocate on their own stream, and on those of torch's pool, of which the next pipeline gets some."""
    for size in (64, 256, 1024, 4096, 16384) * 4:
        torch.ones(size, device=KIND)
    for _ in range(POOL):
        with on_stream(torch.get_device_module(KIND).Stream()):
            torch.ones(64, device=KIND)


def failing_in_loopback(name: str, where: str = "forward", *, num_ranks: int = 4, num_microbatches: int = 8) -> None:
    """Two steps, and one that fails; then what it used is freed, and allocated again."""
    modules = [module.to(KIND) for module in modules_of(num_ranks)]
    loopback, schedules = pipeline(RULES[name], modules, num_microbatches, nn.functional.mse_loss, num_ranks, KIND)
    for step in range(2):
        x = batch_of(step, num_microbatches).to(KIND)
        loopback.step(schedules, x, target=x)
    strike(modules[1], where)
    try:
        loopback.step(schedules, x, target=x)
        raise AssertionError("the step did not fail")
    except StruckError:
        del x
    _free(modules, schedules)


def failing_as_rank(rank: int, name: str, where: str = "forward", *, num_ranks: int, num_microbatches: int = 8) -> None:
    """Likewise, as one of several processes."""
    module = modules_of(num_ranks)[rank].to(KIND)
    stage = bpipe.PipelineStage(module, rank, num_ranks, KIND)
    schedule = RULES[name](stage, num_microbatches, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=20))
    for step in range(2):
        x = batch_of(step, num_microbatches).to(KIND)
        schedule.step(x, target=x, return_outputs=False)
    if rank == 1:
        strike(module, where)
    try:
        schedule.step(x, target=x, return_outputs=False)
        raise AssertionError("the step did not fail")
    except (StruckError, RankFailedError):
        del x
    _free([module], [schedule])


def _free(modules: list[nn.Module], schedules: Sequence[Any]) -> None:
    for module in modules:
        module.zero_grad()
    use_memory()
    for schedule in schedules:
        schedule.close()
    use_memory()
