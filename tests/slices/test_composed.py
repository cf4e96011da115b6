"""Slices with FSDP2 and with tensor parallelism inside the stages, 2 x 2 processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bpipe import PipelineStage, Seq1F1B
from bpipe.api.options import Options
from tests.ranks import run_ranks
from tests.slices.models import WIDTH, Stage, batch_of, stages_of
from tests.slices.test_losses import Head, cross_entropy
from tests.slices.test_run import by_themselves, furthest

mse = nn.functional.mse_loss


def full(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found if one is not None]


def sharded(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    module = stages_of("attention", 2)[stage]
    for layer in module.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    x, target = (one.chunk(2)[mesh.get_local_rank("dp")] for one in batch_of(4))
    schedule = Seq1F1B(PipelineStage(module, stage, 2, "cpu", mesh.get_group("pp")), 2, loss_fn=mse, slices=4)
    schedule.step(x, target=target)
    return full(module)


def test_fsdp2() -> None:
    modules = stages_of("attention", 2)
    expected = by_themselves(modules, 4, batch_of(4))
    found = run_ranks(sharded, 4)
    assert furthest([*found[0], *found[2]], expected) < 1e-12


def padded(rank: int) -> list[torch.Tensor]:
    """On one replica, the last slices have no word that counts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = heads()[stage]
    layers: Any = module.stage if stage else module
    for layer in layers.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    x, words = (one.chunk(2)[replica] for one in (batch_of(4)[0], padded_words()))
    schedule = Seq1F1B(
        PipelineStage(module, stage, 2, "cpu", mesh.get_group("pp")),
        2,
        loss_fn=cross_entropy,
        slices=3,
        options=Options(timeout_s=30.0),
    )
    schedule.step(x, target=words)
    return full(module)


def heads() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stage("attention").double(), Head().double()]


def padded_words() -> torch.Tensor:
    words = torch.randint(0, 7, (8, 12), generator=torch.Generator().manual_seed(2))
    words[:4, 4:] = -100
    return words


def test_slices_of_padding_on_one_replica_keep_the_others_company() -> None:
    """Before, their backwards were left out, and those of the other replica waited for them in FSDP2's gatherings."""
    modules, (x, _) = heads(), batch_of(4)
    for part, words in zip(x.chunk(4), padded_words().chunk(4)):
        (cross_entropy(modules[1](modules[0](part)[0])[0], words) / 4).backward()
    expected = [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]
    found = run_ranks(padded, 4)
    assert furthest([*found[0], *found[2]], expected) < 1e-12


class Parallel(nn.Module):
    """A feed-forward layer whose width is divided, with a running sum as its state: a DTensor's local part."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        hidden = torch.tanh(self.into(x))
        hidden = hidden + (past[-1] if past else 0.0)
        return x + self.out_of(hidden), hidden.sum(1, keepdim=True)


def parallel(rank: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(3)
    module: nn.Module = [Parallel().double() for _ in range(2)][stage]
    parallelize_module(module, mesh["tp"], {"into": ColwiseParallel(), "out_of": RowwiseParallel()})
    schedule = Seq1F1B(PipelineStage(module, stage, 2, "cpu", mesh.get_group("pp")), 2, loss_fn=mse, slices=3)
    schedule.step(batch_of(2)[0], target=batch_of(2)[1])
    return full(module)


def in_slices(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The same in one process: each slice gets the sum of the one before it alone."""
    pasts: list[tuple[Any, ...]] = [() for _ in modules]
    found = []
    for part in x.chunk(3, 1):
        for i, module in enumerate(modules):
            part, state = module(part, pasts[i])
            pasts[i] = (*pasts[i], state)
        found.append(part)
    return torch.cat(found, 1)


def test_tensor_parallelism() -> None:
    torch.manual_seed(3)
    modules: list[nn.Module] = [Parallel().double() for _ in range(2)]
    x, target = batch_of(2)
    for part, of_part in zip(x.chunk(2), target.chunk(2)):
        (mse(in_slices(modules, part), of_part) / 2).backward()
    expected = [parameter.grad for module in modules for parameter in module.parameters() if parameter.grad is not None]
    found = run_ranks(parallel, 4)
    assert furthest([*found[0], *found[2]], expected) < 1e-12
