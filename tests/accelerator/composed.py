"""Two pipelines of two ranks, whose stages are each other's replicas or shards: FSDP2, DDP, tensor parallelism; on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import bpipe
from bpipe.schedules import Destinations, Plan, build
from tests.accelerator.work import batch_of, modules_of
from tests.models import held_by
from tests.over import Over

P, REPLICAS, M = 2, 2, 4


class Few(bpipe.GPipe):
    """Within three slots on the first rank, which evicts."""

    def _make_plan(self, num_stages: int, num_ranks: int, n_microbatches: int) -> Plan:
        return build(self.rule, num_stages, n_microbatches, num_ranks=num_ranks, slots=(3, 6))


SCHEDULES: dict[str, tuple[Any, int]] = {
    "1f1b": (bpipe.OneFOneB, P),
    "slots": (Few, P),
    "bytes": (Over(bpipe.GPipe, {"budget": "lowest", "to": Destinations(host="only")}), P),
    "breadth_first": (bpipe.BreadthFirst, 2 * P),
}


def mesh_of(device: str) -> Any:
    """Replicas of pipelines; on the simulated device over its collectives."""
    from torch.distributed.device_mesh import init_device_mesh

    from tests.accelerator.collectives import BACKENDS

    names = ("replica", "rank")
    override = None if device == "cpu" else dict.fromkeys(names, BACKENDS)
    return init_device_mesh(device, (REPLICAS, P), mesh_dim_names=names, backend_override=override)


def fully_sharded(module: Any, mesh: Any) -> nn.Module:
    """Each block by itself, and the stage."""
    from torch.distributed.fsdp import fully_shard

    for block in module:
        fully_shard(block, mesh=mesh["replica"])
    return fully_shard(module, mesh=mesh["replica"])


def replicated(module: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("replica"), bucket_cap_mb=0.001)


def tensor_parallel(module: Any, mesh: Any) -> nn.Module:
    """Each block's linear layers over both replicas, which get the same batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in module:
        parallelize_module(block, mesh["replica"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


PARALLEL = {"fsdp": fully_sharded, "ddp": replicated, "tp": tensor_parallel}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def tied_weight(modules: dict[int, Any], last: int) -> nn.Parameter | None:
    """One of the first block of the first stage, and of the last one; None on ranks that have neither."""
    weights = [getattr(modules[i], "module", modules[i])[0].up.weight for i in (0, last) if i in modules]
    return next(iter(weights), None)


class Rank:
    """One rank of one of the pipelines.

    Args:
        parallel: of `PARALLEL`.
        name: of `SCHEDULES`.
        device: where.
        hook: DDP's, of communication.
    """

    def __init__(self, parallel: str, name: str, device: str, hook: Any) -> None:
        self.device, self.mesh = device, mesh_of(device)
        schedule_class, num_stages = SCHEDULES[name]
        held = held_by(schedule_class, P, num_stages)[self.mesh.get_local_rank("rank")]
        self.modules = {i: PARALLEL[parallel](modules_of(num_stages)[i].to(device), self.mesh) for i in held}
        for module in self.modules.values() if hook is not None else ():
            module.register_comm_hook(self.mesh.get_group("replica"), hook)
        self.parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.share = 0 if parallel == "tp" else self.mesh.get_local_rank("replica")
        is_alike = parallel != "tp"  # or some parameters are DTensors, which torch's foreach operations do not take beside others
        self.group = self.mesh["rank"]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1, foreach=is_alike)
        self.scaler = bpipe.GradScaler(device, init_scale=8.0, growth_interval=1, enabled=is_alike, group=self.group)
        stages = [bpipe.PipelineStage(module, i, num_stages, device, self.group) for i, module in self.modules.items()]
        self.schedule = schedule_class(
            stages, M, loss_fn=lambda y, target: self.scaler.scale(mse_loss(y, target)), options=bpipe.Options(timeout_s=60)
        )
        self.tied = bpipe.TiedWeights({"up.weight": tied_weight(self.modules, num_stages - 1)}, group=self.group)
        self.tied.broadcast()

    def step(self, step: int) -> list[Any]:
        """Train on this rank's share of a batch: the norm, the loss and the gradients."""
        x = batch_of(step, REPLICAS * M).chunk(REPLICAS)[self.share].to(self.device) * 1
        losses: list[torch.Tensor] = []
        self.schedule.step(x, target=x, losses=losses, return_outputs=False)
        self.scaler.unscale_(self.optimizer)
        self.tied.sum_grads()
        norm = bpipe.clip_grad_norm_(self.parameters, 0.1, copies=self.tied.copies, group=self.group)
        loss = torch.tensor(bpipe.share_loss(losses, group=self.group))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        gradients = [p.grad for p in self.parameters]
        self.optimizer.zero_grad()
        return [norm, loss, *gradients]


def train(parallel: str, name: str, device: str, *, steps: int = 2, hook: Any = None) -> tuple[list[torch.Tensor], float]:
    """Train with all of bpipe.training: norms, losses, gradients, weights and buffers of this rank; and the bytes it evicted."""
    rank = Rank(parallel, name, device, hook)
    found = [tensor for step in range(steps) for tensor in rank.step(step)]
    found += [tensor for module in rank.modules.values() for tensor in (*module.parameters(), *module.buffers())]
    evicted = float(rank.schedule.stats["evicted_bytes"])
    rank.schedule.close()
    return [whole(tensor) for tensor in found], evicted
