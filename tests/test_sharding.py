"""Stages under FSDP2: gathered and reduced where the plan says, as often as it says, to the gradients of a single process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.runtime.sharding import Sharding
from bpipe.schedules import Action, Op, Plan
from tests.models import batch_of, held_by, modules_of, mse
from tests.operations import Count
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

P, V, M, REPLICAS = 2, 2, 4, 2
NUM_STAGES = P * V


def framed(plan: Plan) -> Plan:
    """The plan, with every stage gathered before the first computation, and reduced and freed after the last one."""
    return replace(plan, actions=tuple(tuple(_framed(lane)) for lane in plan.actions))


def _framed(lane: Sequence[Action]) -> Iterator[Action]:
    stages = sorted({action.stage for action in lane})
    yield from (Action(Op.UNSHARD, stage, 0) for stage in stages)
    yield from lane
    for stage in stages:
        yield from (Action(Op.REDUCE_GRAD, stage, 0), Action(Op.RESHARD, stage, 0))


class Halves(bpipe.ZBV):
    """Backwards in halves, and sharding in the plan."""

    def _make_plan(self, *args: Any) -> Plan:
        return framed(super()._make_plan(*args))


class Wholes(bpipe.Interleaved1F1B):
    """Whole backwards, and sharding in the plan."""

    def _make_plan(self, *args: Any) -> Plan:
        return framed(super()._make_plan(*args))


class Replica:
    """One rank of one of two pipelines whose stages are sharded over both.

    Args:
        rank: in the world: two pipelines of two ranks.
        schedule: the class to run.
        nested: whether parts of a stage are sharded by themselves.
        policy: of mixed precision: keywords, or None.
    """

    def __init__(self, rank: int, schedule: type[bpipe.Schedule], *, nested: bool, policy: dict[str, Any] | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (REPLICAS, P), mesh_dim_names=("replica", "rank"))
        self.replica, own = mesh.get_local_rank("replica"), mesh.get_local_rank("rank")
        options = {"mesh": mesh["replica"]} | ({} if policy is None else {"mp_policy": MixedPrecisionPolicy(**policy)})
        modules = modules_of("quiet", NUM_STAGES)
        self.modules = {index: modules[index] for index in held_by(schedule, P, NUM_STAGES)[own]}
        for module in self.modules.values():
            for part in (module.qkv, module.mlp) if nested else ():
                fully_shard(part, **options)
            fully_shard(module, **options)
        group = mesh.get_group("rank")
        stages = [bpipe.PipelineStage(module, index, NUM_STAGES, "cpu", group) for index, module in self.modules.items()]
        self.schedule = schedule(stages, M, loss_fn=mse)

    def step(self, step: int) -> tuple[int, int]:
        """Train on this replica's share of a batch; how often weights were gathered, and gradients reduced."""
        x, y = (part.chunk(REPLICAS)[self.replica] for part in batch_of("quiet", REPLICAS * 2 * M, step))
        with Count() as count:
            self.schedule.step(x, target=y)
        return count.of["_allgather_base_"], count.of["_reduce_scatter_base_"]

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        return {index: [p.grad.full_tensor().clone() for p in module.parameters()] for index, module in self.modules.items()}


def single_process(steps: int) -> list[list[torch.Tensor]]:
    """Each replica's gradients of each step, averaged over the replicas and added up over the steps, by stage."""
    total: list[list[torch.Tensor]] = []
    for step in range(steps):
        x, y = batch_of("quiet", REPLICAS * 2 * M, step)
        of_replicas = [_of_replica(*pair) for pair in zip(x.chunk(REPLICAS), y.chunk(REPLICAS))]
        mean = [[sum(parts) / REPLICAS for parts in zip(*stages)] for stages in zip(*of_replicas)]
        total = mean if not total else [[a + b for a, b in zip(*pair)] for pair in zip(total, mean)]
    return total


def _of_replica(x: torch.Tensor, y: torch.Tensor) -> list[list[torch.Tensor]]:
    modules = modules_of("quiet", NUM_STAGES)
    for xi, yi in zip(x.chunk(M), y.chunk(M)):
        (mse(nn.Sequential(*modules)(xi), yi) / M).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


def assert_gradients(ranks: Sequence[dict[int, list[torch.Tensor]]], expected: list[list[torch.Tensor]]) -> None:
    """To the bit: two replicas' gradients have one sum whatever the order, and their mean is exact."""
    assert sorted(stage for gradients in ranks for stage in gradients) == sorted([*range(NUM_STAGES)] * REPLICAS)
    for gradients in ranks:
        for stage, found in gradients.items():
            assert all(map(torch.equal, found, expected[stage]))


def train(rank: int, schedule: type[bpipe.Schedule], nested: bool) -> tuple[list[tuple[int, int]], dict[int, list[torch.Tensor]]]:
    replica = Replica(rank, schedule, nested=nested)
    return [replica.step(step) for step in range(2)], replica.gradients()


def accumulate(rank: int) -> tuple[list[tuple[int, int]], dict[int, list[torch.Tensor]]]:
    """Two steps of which the user lets only the second one reduce."""
    replica, counts = Replica(rank, bpipe.BreadthFirst, nested=True), []
    for step, is_last in enumerate((False, True)):
        for module in replica.modules.values():
            module.set_requires_gradient_sync(is_last)
        counts.append(replica.step(step))
    return counts, replica.gradients()


def in_mixed_precision(rank: int, schedule: type[bpipe.Schedule]) -> dict[tuple[int, int], list[torch.Tensor]]:
    replica = Replica(rank, schedule, nested=False, policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    replica.step(0)
    return {(replica.replica, stage): gradients for stage, gradients in replica.gradients().items()}


def before_and_after(rank: int) -> tuple[list[int], bool, list[Any]]:
    """How often an evaluation gathers before and after a step with planned sharding; what that step leaves behind."""
    from torch.distributed.tensor import DTensor

    replica, counts = Replica(rank, bpipe.BreadthFirst, nested=True), []
    x, _ = batch_of("quiet", 2 * M)
    for step in range(2):
        with Count() as count:
            replica.schedule.eval(x)
        counts.append(count.of["_allgather_base_"])
        replica.step(step)
    is_sharded = all(isinstance(p, DTensor) for module in replica.modules.values() for p in module.parameters())
    return counts, is_sharded, [module._get_fsdp_state()._comm_ctx.post_forward_order for module in replica.modules.values()]


def everything(rank: int) -> dict[str, Any]:
    """In one start of the processes: what FSDP2 imports takes each of them seconds."""
    return {
        "breadth first": train(rank, bpipe.BreadthFirst, nested=False),
        "halves": train(rank, Halves, nested=True),
        "not in the plan": train(rank, bpipe.ZBV, nested=True),
        "accumulated": accumulate(rank),
        "mixed halves": in_mixed_precision(rank, Halves),
        "mixed wholes": in_mixed_precision(rank, Wholes),
        "before and after": before_and_after(rank),
    }


Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen() -> Seen:
    """What was seen on each rank, by what was done."""
    ranks = run_ranks(everything, P * REPLICAS)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name, nested, gathers", [("breadth first", False, 2 * V - 1), ("halves", True, 3 * V)])
def test_gathers_reductions_and_gradients(seen: Seen, name: str, nested: bool, gathers: int) -> None:
    counts, gradients = zip(*seen[name])
    reductions = (3 if nested else 1) * V
    assert all(step == (gathers, reductions) for of_rank in counts for step in of_rank)
    assert_gradients(gradients, single_process(2))


def test_the_user_decides_whether_a_step_reduces(seen: Seen) -> None:
    counts, gradients = zip(*seen["accumulated"])
    assert [[reductions for _, reductions in of_rank] for of_rank in counts] == [[0, 3 * V]] * P * REPLICAS
    for of_rank in gradients:
        for stage, found in of_rank.items():
            torch.testing.assert_close(found, single_process(2)[stage])  # another order: the mean of sums, not the sum of means


def test_halves_add_up_in_the_precision_of_the_reduction(seen: Seen) -> None:
    """As whole backwards do, although some weight halves follow one another."""
    halves, wholes = (
        {key: gradients for part in seen[name] for key, gradients in part.items()} for name in ("mixed halves", "mixed wholes")
    )
    assert halves.keys() == wholes.keys() and len(halves) == NUM_STAGES * REPLICAS
    assert all(torch.equal(a, b) for key in halves for a, b in zip(halves[key], wholes[key], strict=True))


def test_after_a_step_everything_is_as_fsdp_leaves_it(seen: Seen) -> None:
    for counts, is_sharded, forwards_under_way in seen["before and after"]:
        assert counts[0] == counts[1] > 3 * V  # an evaluation's plan says nothing of sharding: FSDP gathers in each forward
        assert is_sharded
        assert not any(forwards_under_way)


def gathered_in_vain(rank: int) -> bool:
    """Weights are gathered and freed without a forward; then they change."""
    from torch.distributed.fsdp import fully_shard

    stage = bpipe.PipelineStage(fully_shard(nn.Linear(4, 4)), 0, 1, "cpu")
    gather, free = Action(Op.UNSHARD, 0, 0), Action(Op.RESHARD, 0, 0)
    sharding = Sharding({0: stage}, [gather, free])
    with sharding.in_charge(), torch.no_grad():
        sharding.unshard(gather)
        sharding.reshard(free)
        for parameter in stage.submod.parameters():
            parameter.to_local().fill_(2.0)
        sharding.unshard(gather)
        output = stage.submod(torch.ones(1, 4))
        sharding.reshard(free)
    return torch.equal(output, torch.full((1, 4), 10.0))


def test_weights_are_never_stale() -> None:
    assert run_ranks(gathered_in_vain, 2) == [True, True]


def test_halves_without_sharding_in_the_plan_are_one_backward(seen: Seen) -> None:
    """FSDP frees weights and reduces gradients when a backward has passed a module: a weight half would come too late."""
    counts, gradients = zip(*seen["not in the plan"])
    assert all(reductions == 3 * V * M for of_rank in counts for _, reductions in of_rank)
    for of_rank in gradients:
        for stage, found in of_rank.items():
            torch.testing.assert_close(found, single_process(2)[stage])  # another order: each microbatch is reduced by itself


def settings_after_an_error(rank: int) -> bool:
    from torch.distributed.fsdp import fully_shard

    stage = bpipe.PipelineStage(fully_shard(nn.Linear(4, 4)), 0, 1, "cpu")
    sharding = Sharding({0: stage}, [Action(Op.UNSHARD, 0, 0)])
    state = stage.submod._get_fsdp_state()
    state._lazy_init()
    groups = [vars(group).copy() for group in state._fsdp_param_groups]
    with suppress(KeyError), sharding.in_charge():
        is_passive = not state._fsdp_param_groups[0].reduce_grads and not state._state_ctx.is_last_backward
        raise KeyError
    return is_passive and state._state_ctx.is_last_backward and groups == [vars(group) for group in state._fsdp_param_groups]


def test_an_error_gives_fsdp_its_settings_back() -> None:
    assert run_ranks(settings_after_an_error, 1) == [True]


def test_other_modules_are_none_of_its_business() -> None:
    """Sharding actions on plain modules do nothing."""
    stages = {0: bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")}
    lane = [Action(op, 0, 0) for op in (Op.UNSHARD, Op.REDUCE_GRAD, Op.RESHARD)]
    sharding = Sharding(stages, lane)
    with sharding.in_charge():
        for do, action in zip((sharding.unshard, sharding.reduce, sharding.reshard), lane, strict=True):
            do(action)
        sharding.after_weight_half(lane[0])
    assert sharding.unplanned == set()
