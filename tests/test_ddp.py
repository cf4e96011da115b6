"""Stages under DistributedDataParallel: reduced once a step, to the gradients of a single process, or refused."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bpipe
from bpipe.errors import BPipeError
from bpipe.schedules import Plan, build
from tests.models import ConvNorm, batch_of, held_by, modules_of, mse
from tests.over import Over
from tests.ranks import run_ranks
from tests.replicas import assert_gradients, averaged

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, REPLICAS = 2, 4, 2


class Few(bpipe.GPipe):
    """Within three slots on the first rank, which evicts."""

    def _make_plan(self, num_stages: int, num_ranks: int, n_microbatches: int) -> Plan:
        return build(self.rule, num_stages, n_microbatches, num_ranks=num_ranks, slots=(3, 6))


SCHEDULES: dict[str, tuple[Any, int]] = {
    "1f1b": (bpipe.OneFOneB, P),
    "evicting": (Few, P),
    "lowest": (Over(bpipe.OneFOneB, {"budget": "lowest"}), P),
    "halves": (bpipe.ZBH1, P),
    "several stages": (bpipe.Interleaved1F1B, 2 * P),
    "several stages in halves": (bpipe.ZBV, 2 * P),
}


class Replica:
    """One rank of one of two pipelines whose stages are replicas of each other; counts how often gradients are reduced."""

    def __init__(self, rank: int, schedule: Any, modules: list[nn.Module], **options: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (REPLICAS, P), mesh_dim_names=("replica", "rank"))
        self.replica, held = mesh.get_local_rank("replica"), held_by(schedule, P, len(modules))[mesh.get_local_rank("rank")]
        group, replicas = mesh.get_group("rank"), mesh.get_group("replica")
        self.modules = {i: DistributedDataParallel(modules[i], process_group=replicas, **options) for i in held}
        self.reductions = 0

        def counted(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and knows none that are text
            self.reductions += 1
            return default_hooks.allreduce_hook(state, bucket)

        for module in self.modules.values():
            module.register_comm_hook(replicas, counted)
        stages = [bpipe.PipelineStage(module, i, len(modules), "cpu", group) for i, module in self.modules.items()]
        self.schedule = schedule(stages, M, loss_fn=mse)

    def step(self, step: int, kind: str = "quiet") -> int:
        """Train on this replica's share of a batch; how often gradients were reduced."""
        x, y = (part.chunk(REPLICAS)[self.replica] for part in batch_of(kind, REPLICAS * 2 * M, step))
        self.reductions = 0
        self.schedule.step(x, target=y)
        return self.reductions

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        return {index: [p.grad for p in module.parameters()] for index, module in self.modules.items()}


def train(rank: int, name: str, **options: Any) -> tuple[list[int], dict[int, list[torch.Tensor]], dict[str, float]]:
    """Three steps, because DDP arranges its buckets again after the first, and the gradients of the last."""
    schedule, num_stages = SCHEDULES[name]
    replica, counts = Replica(rank, schedule, modules_of("quiet", num_stages), **options), []
    for step in range(3):
        for module in replica.modules.values():
            module.zero_grad()
        counts.append(replica.step(step))
    return counts, replica.gradients(), replica.schedule.stats


def accumulate(rank: int) -> tuple[list[int], dict[int, list[torch.Tensor]], list[bool]]:
    """Two steps of which the user lets only the second one reduce."""
    replica = Replica(rank, bpipe.OneFOneB, modules_of("quiet", P))
    (module,) = replica.modules.values()
    with module.no_sync():
        counts = [replica.step(0)]
    counts.append(replica.step(1))
    return counts, replica.gradients(), [module.require_backward_grad_sync]


def convolutions() -> list[nn.Module]:
    torch.manual_seed(0)
    return [ConvNorm() for _ in range(P)]


def with_buffers(rank: int) -> tuple[int, dict[int, list[torch.Tensor]]]:
    """The running statistics of two steps; before the first forward of each, DDP makes them those of its first replica."""
    replica = Replica(rank, bpipe.OneFOneB, convolutions())
    for step in range(2):
        replica.step(step, "conv")
    return replica.replica, {i: [buffer.clone() for buffer in module.buffers()] for i, module in replica.modules.items()}


class Unused(nn.Module):
    """Has a part that the last microbatch of a step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(32, 32), nn.Linear(32, 32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) if self.calls % M == 0 else self.second(self.first(x))


def refused(rank: int, options: dict[str, Any], make: Any) -> str:
    replica = Replica(rank, bpipe.OneFOneB, [make() for _ in range(P)], **options)
    with pytest.raises(BPipeError) as error:
        replica.step(0)
    dist.barrier()
    return str(error.value)


def everything(rank: int) -> dict[str, Any]:
    return {
        **{name: train(rank, name) for name in SCHEDULES},
        "views": train(rank, "1f1b", gradient_as_bucket_view=True),
        "accumulated": accumulate(rank),
        "buffers": with_buffers(rank),
        "find_unused_parameters": refused(rank, {"find_unused_parameters": True}, Unused),
        "static_graph": refused(rank, {"static_graph": True}, Unused),
        "unused": refused(rank, {}, Unused),
    }


Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    ranks = run_ranks(everything, P * REPLICAS)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", [*SCHEDULES, "views"])
def test_gradients_are_reduced_once_a_step(seen: Seen, name: str) -> None:
    counts, gradients, _ = zip(*seen[name])
    _, num_stages = SCHEDULES.get(name, (None, P))
    assert all(step == num_stages // P for of_rank in counts for step in of_rank)
    assert_gradients(gradients, averaged(partial(modules_of, "quiet", num_stages), M, [2]))


def test_saved_tensors_are_evicted(seen: Seen) -> None:
    assert sum(stats["evicted_bytes"] for _, _, stats in seen["evicting"]) > 0
    assert all(stats["peak_bytes"] == stats["predicted_peak_bytes"] for _, _, stats in seen["evicting"])


def test_the_user_decides_whether_a_step_reduces(seen: Seen) -> None:
    expected = averaged(partial(modules_of, "quiet", P), M, range(2))
    for counts, gradients, syncs in seen["accumulated"]:
        assert counts == [0, 1] and syncs == [True]
        for stage, found in gradients.items():
            torch.testing.assert_close(found, expected[stage])  # another order: the mean of sums, not the sum of means


def test_buffers_are_those_of_the_first_replica_at_the_start_of_a_step(seen: Seen) -> None:
    replicas = [nn.Sequential(*convolutions()) for _ in range(REPLICAS)]
    for step in range(2):
        x, _ = batch_of("conv", REPLICAS * 2 * M, step)
        at_start = deepcopy(replicas[0].state_dict())
        for model, part in zip(replicas, x.chunk(REPLICAS)):
            model.load_state_dict(at_start)
            for microbatch in part.chunk(M):
                model(microbatch)
    for replica, buffers in seen["buffers"]:
        for stage, found in buffers.items():
            assert all(map(torch.equal, found, replicas[replica][stage].buffers()))


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_options_that_cannot_work_are_refused(seen: Seen, name: str) -> None:
    assert all(f"DistributedDataParallel with {name}=True" in message for message in seen[name])


def test_parameters_that_the_last_microbatch_does_not_use_are_noticed(seen: Seen) -> None:
    assert all("got no gradient in the last microbatch's backward" in message for message in seen["unused"])
