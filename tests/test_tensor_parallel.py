"""Tensor and sequence parallel stages: shards cross stage boundaries and are evicted, each from tensor rank to tensor rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import RankFailedError, StageError
from bpipe.schedules import Destinations
from tests.ranks import run_ranks

WIDTH, TOKENS, HEADS, M = 16, 8, 4, 5  # so many microbatches, because the first of four ranks then evicts


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (  # a tensor rank has some of the heads
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def block(stage: int) -> Block:
    torch.manual_seed(stage)
    return Block()


def sharded(stage: int, mesh: Any, *, as_dtensors: bool) -> Block:
    """A stage over the tensor ranks of a mesh; activations between blocks are sharded along the sequence."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    along, wide = Shard(1), ColwiseParallel(input_layouts=Shard(1))
    narrow = RowwiseParallel(output_layouts=along, use_local_output=not as_dtensors)
    plan: dict[str, Any] = {
        "norm1": SequenceParallel(use_local_output=not as_dtensors),
        "norm2": SequenceParallel(use_local_output=not as_dtensors),
        **{f"attention.{name}": wide for name in ("query", "key", "value")},
        **{"attention.out": narrow, "up": wide, "down": narrow},
    }
    module = parallelize_module(block(stage), mesh, plan)
    if stage == 0 and as_dtensors:
        parallelize_module(module, mesh, PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(along,)))
    return module


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(2 * M, TOKENS, WIDTH)


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.to_local() if hasattr(output, "to_local") else output, target) / 2  # the mean over two shards


class Pipeline:
    """One rank's stage of a pipeline over `mesh["pp"]`, whose stages are sharded over `mesh["tp"]`.

    Args:
        mesh: with dimensions pp and tp.
        schedule: makes the schedule of a stage, m and a loss.
        as_dtensors: whether what crosses the boundary between two stages is a DTensor, or its shard.
        fully: the mesh of data-parallel ranks, over which the weights are sharded too.
    """

    def __init__(self, mesh: Any, schedule: Any, *, as_dtensors: bool, fully: Any = None) -> None:
        self.mesh = mesh
        place = bpipe.place(mesh["pp"])
        (self.stage,) = place.stages
        self.module = sharded(self.stage, mesh["tp"], as_dtensors=as_dtensors)
        if fully is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.module, mesh=fully)
        stage = bpipe.PipelineStage(self.module, self.stage, place.num_stages, "cpu", place.group)
        self.schedule = schedule(stage, M, loss_fn=loss_fn)

    def train(self, x: torch.Tensor) -> None:
        """One step on a batch; each tensor rank has its part of the sequence."""
        shard = x.chunk(2, dim=1)[self.mesh.get_local_rank("tp")]
        self.schedule.step(shard, target=shard)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the whole weights; the loss of each tensor rank is a term of the whole loss, and so is its gradient."""
        return {name: _whole(p.grad, self.mesh["tp"]) for name, p in self.module.named_parameters()}


def _whole(gradient: Any, mesh: Any) -> torch.Tensor:
    return gradient.full_tensor().clone()


def single_process(num_stages: int, batches: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The gradients of each stage, in one process and without shards."""
    modules = [block(stage) for stage in range(num_stages)]
    for x in batches:
        for part in x.chunk(M):
            (F.mse_loss(nn.Sequential(*modules)(part), part) / M).backward()
    return [{name: p.grad for name, p in module.named_parameters()} for module in modules]


def balanced_shards(rank: int, *, as_dtensors: bool) -> dict[str, Any]:
    """Four stages of two tensor ranks, plain and balanced."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
    found: dict[str, Any] = {}
    for name in ("OneFOneB", "BalancedOneFOneB"):
        pipeline = Pipeline(mesh, getattr(bpipe, name), as_dtensors=as_dtensors)
        for step in range(2):
            pipeline.train(batch(step))
        found[name] = pipeline.gradients()
        found["stage"], found["stats"] = pipeline.stage, dict(pipeline.schedule.stats)
        found["held"] = pipeline.schedule.ledger.held
        pipeline.schedule.close()
    return found


def three_dimensions(rank: int) -> dict[str, Any]:
    """Data, pipeline and tensor ranks from one mesh; weights sharded over both of the others; parts move to the host."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))

    def balanced(*args: Any, **options: Any) -> bpipe.Balanced:
        return bpipe.Balanced(
            bpipe.GPipe(*args, **options), budget="lowest", options=bpipe.Options(parts=4), to=Destinations(host="only")
        )

    found: dict[str, Any] = {}
    for name, schedule in (("plain", bpipe.OneFOneB), ("balanced", balanced)):
        pipeline = Pipeline(mesh, schedule, as_dtensors=True, fully=mesh["dp"])
        for step in range(2):
            pipeline.train(batch(2 * step + mesh.get_local_rank("dp")))
        found[name] = pipeline.gradients()
        found["stage"], found["stats"] = pipeline.stage, dict(pipeline.schedule.stats)
        pipeline.schedule.close()
    return found


class Late(nn.Module):
    """Saves the result of a collective operation that nobody has waited for; the other ranks are slow to join it."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gathered)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.saved_tensors[0].mean(), None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as collectives

        x = torch.tanh(self.linear(x))
        time.sleep(0.02 * (dist.get_rank() > 0))
        gathered = collectives.all_reduce(x.detach(), "sum", dist.group.WORLD)
        assert type(gathered).__name__ == "AsyncCollectiveTensor"
        return self.Keep.apply(x, gathered)


def late(rank: int) -> dict[str, Any]:
    """In each process a pipeline of four stages, whose collectives join the processes."""
    found = {}
    for schedule in (bpipe.OneFOneB, bpipe.BalancedOneFOneB):
        torch.manual_seed(0)
        modules, loopback = [Late() for _ in range(4)], bpipe.Loopback(4)
        stages = [bpipe.PipelineStage(module, i, 4, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
        schedules = [schedule(stage, M, loss_fn=F.mse_loss) for stage in stages]
        x, held = torch.randn(2 * M, WIDTH), []
        for _ in range(4):
            loopback.step(schedules, x, target=x)
            held.append(schedules[0].ledger.held)
        found[schedule.__name__] = [p.grad for module in modules for p in module.parameters()]
        found["held"], found["stats"] = held, dict(schedules[0].stats)
    return found


class Ends(nn.Module):
    """Returns a DTensor of some placement."""

    def __init__(self, mesh: Any, placement: Any) -> None:
        super().__init__()
        self.linear, self.mesh, self.placement = nn.Linear(WIDTH, WIDTH), mesh, placement

    def forward(self, x: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(self.linear(x), self.mesh, [self.placement], run_check=False)


class Starts(nn.Linear):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x.to_local())


def refused(rank: int) -> list[str]:
    """What cannot cross: sums that are pending, and shards on a mesh that the receiver does not know. Then one it is told of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard

    mesh, texts = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "tp")), []
    x = torch.randn(2 * M, WIDTH)
    for placement, options in (
        (Partial(), {}),
        (Shard(0), {}),
        (Shard(0), {"get_mesh": lambda names, layout: mesh[names[0]]}),
    ):
        index = mesh.get_local_rank("pp")
        module = Ends(mesh["tp"], placement) if index == 0 else Starts(WIDTH, WIDTH)
        stage = bpipe.PipelineStage(module, index, 2, "cpu", mesh["pp"], **options)
        schedule = bpipe.OneFOneB(stage, M, loss_fn=F.mse_loss)
        try:
            schedule.step(x, target=x)
            texts.append("trained" if module.linear.weight.grad is not None else "") if index == 0 else texts.append("trained")
        except (StageError, RankFailedError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        schedule.close()
        dist.barrier()
    return texts


def everything(rank: int) -> dict[str, Any]:
    """In one start of the processes: what DTensors import takes each of them seconds."""
    return {
        "shards": balanced_shards(rank, as_dtensors=False),
        "dtensors": balanced_shards(rank, as_dtensors=True),
        "three": three_dimensions(rank),
        "late": late(rank),
        "refused": refused(rank),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    ranks = run_ranks(everything, 8)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", ["shards", "dtensors"])
def test_each_tensor_rank_evicts_its_own_shard(seen: dict[str, list[Any]], name: str) -> None:
    expected = single_process(4, [batch(0), batch(1)])
    for found in seen[name]:
        plain, balanced = found["OneFOneB"], found["BalancedOneFOneB"]
        assert all(torch.equal(plain[key], balanced[key]) for key in plain)
        for key, gradient in expected[found["stage"]].items():
            torch.testing.assert_close(plain[key], gradient, msg=key)  # sums over shards have another order
        assert found["stats"]["peak_bytes"] == found["stats"]["predicted_peak_bytes"]
        assert not found["held"]
    evicted = {found["stage"]: [] for found in seen[name]}
    for found in seen[name]:
        evicted[found["stage"]].append(found["stats"]["evicted_bytes"])
    assert all(len(set(of_stage)) == 1 for of_stage in evicted.values())
    assert evicted[0][0] > 0


def test_data_pipeline_and_tensor_ranks_of_one_mesh(seen: dict[str, list[Any]]) -> None:
    first, second = (single_process(2, [batch(replica), batch(2 + replica)]) for replica in range(2))
    for found in seen["three"]:
        assert all(torch.equal(found["plain"][key], found["balanced"][key]) for key in found["plain"])
        for key in found["plain"]:
            mean = (first[found["stage"]][key] + second[found["stage"]][key]) / 2
            torch.testing.assert_close(found["plain"][key], mean, msg=key)  # likewise
        assert found["stats"]["peak_bytes"] == found["stats"]["predicted_peak_bytes"]
    assert max(found["stats"]["evicted_bytes"] for found in seen["three"]) > 0


def test_what_a_collective_still_writes_is_waited_for_and_moves(seen: dict[str, list[Any]]) -> None:
    for found in seen["late"]:
        assert all(map(torch.equal, found["OneFOneB"], found["BalancedOneFOneB"]))
        assert found["stats"]["evicted_bytes"] > 0
        assert not min(found["held"], key=len)  # now and then gloo's thread owns what it wrote for a moment longer


def test_what_cannot_cross_is_refused_with_the_way_out(seen: dict[str, list[Any]]) -> None:
    for rank, (pending, unknown, told) in enumerate(seen["refused"]):
        assert pending.startswith("StageError" if rank < 4 else "RankFailedError")
        assert "Partial" in pending and "redistribute it to Shard or Replicate" in pending
        assert unknown.startswith("RankFailedError" if rank < 4 else "StageError")
        assert "a DTensor on a mesh ('tp',) of shape (4,)" in unknown and "get_mesh" in unknown
        assert told == "trained"
