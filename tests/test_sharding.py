"""Stages under FSDP2: gathered and reduced where the plan says, or once a step, to the gradients of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
import bpipe.engine.compute
from bpipe.parallel.fsdp import Sharding
from bpipe.schedules import Action, Op, Plan, build
from bpipe.torch_private.fsdp_states import groups_of
from bpipe.torch_private.release import release
from tests.models import Block, batch_of, held_by, modules_of, mse
from tests.operations import Count
from tests.over import Over
from tests.ranks import run_ranks
from tests.replicas import Gradients, assert_gradients, averaged, of_replica

pytestmark = pytest.mark.usefixtures("one_thread")

P, V, M, REPLICAS = 2, 2, 4, 2
NUM_STAGES = P * V
WIDE = 4  # ranks in a pipeline that evicts


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


def singles(num_stages: int) -> list[nn.Module]:
    return modules_of("quiet", num_stages)


def pairs(num_stages: int) -> list[nn.Module]:
    """Two blocks a stage, each of them sharded by itself."""
    torch.manual_seed(0)
    return [nn.Sequential(Block(dropout=0.0), Block(dropout=0.0)) for _ in range(num_stages)]


def parts_of(module: Any) -> Sequence[nn.Module]:
    return list(module) if isinstance(module, nn.Sequential) else (module.qkv, module.mlp)


class Replica:
    """One rank of one of several pipelines whose stages are sharded over all.

    Args:
        rank: in the world: `replicas` pipelines of p ranks.
        schedule: the class to run.
        num_stages: of each pipeline.
        make: makes the modules of all stages.
        nested: whether parts of a stage are sharded by themselves.
        policy: of mixed precision: keywords.
        options: of `fully_shard`; None not to shard.
    """

    def __init__(
        self,
        rank: int,
        schedule: Any,
        *,
        num_stages: int = NUM_STAGES,
        make: Callable[[int], list[nn.Module]] = singles,
        nested: bool = True,
        p: int = P,
        replicas: int = REPLICAS,
        policy: dict[str, Any] | None = None,
        options: dict[str, Any] | None = {},  # noqa: B006  never changed
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (replicas, p), mesh_dim_names=("replica", "rank"))
        self.replica, self.replicas, own = mesh.get_local_rank("replica"), replicas, mesh.get_local_rank("rank")
        modules = make(num_stages)
        self.modules = {index: modules[index] for index in held_by(schedule, p, num_stages)[own]}
        if options is not None:
            given = {"mesh": mesh["replica"], "mp_policy": MixedPrecisionPolicy(**policy or {}), **options}
            for module in self.modules.values():
                for part in parts_of(module) if nested else ():
                    fully_shard(part, **given)
                fully_shard(module, **given)
        group = mesh.get_group("rank")
        stages = [bpipe.PipelineStage(module, index, num_stages, "cpu", group) for index, module in self.modules.items()]
        self.schedule = schedule(stages, M, loss_fn=mse)

    def step(self, step: int, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[int, int]:
        """Train on this replica's share of a batch; how often weights were gathered, and gradients reduced."""
        x, y = (part.chunk(self.replicas)[self.replica] for part in batch_of("quiet", self.replicas * 2 * M, step))
        with Count() as count:
            self.schedule.step(x.to(dtype), target=y, **more)
        return count.of["_allgather_base_"], count.of["_reduce_scatter_base_"]

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        return {index: [p.grad.full_tensor().clone() for p in module.parameters()] for index, module in self.modules.items()}


def single_process(steps: int) -> Gradients:
    return averaged(partial(singles, NUM_STAGES), M, range(steps))


Trained = tuple[list[tuple[int, int]], dict[int, list[torch.Tensor]]]


def train(rank: int, schedule: Any, nested: bool, **more: Any) -> Trained:
    replica = Replica(rank, schedule, nested=nested, **more)
    return [replica.step(step) for step in range(2)], replica.gradients()


def accumulate(rank: int, schedule: type[bpipe.Schedule]) -> Trained:
    """Two steps of which the user lets only the second one reduce."""
    replica, counts = Replica(rank, schedule), []
    for step, is_last in enumerate((False, True)):
        for module in replica.modules.values():
            module.set_requires_gradient_sync(is_last)
        counts.append(replica.step(step))
    return counts, replica.gradients()


def accumulate_as_torch(rank: int, schedule: type[bpipe.Schedule]) -> Trained:
    """The same by the argument that torch has for it since 2.15; then the user's switch is off, and stays so."""
    replica = Replica(rank, schedule)
    counts, gradients = [replica.step(0, finalize_gradients=False), replica.step(1)], replica.gradients()
    for module in replica.modules.values():
        module.set_requires_gradient_sync(False)
    return [*counts, replica.step(2, finalize_gradients=False), replica.step(3)], gradients


# With float32 outputs and sums of gradients; and with everything in bfloat16, inputs and outputs as they come.
CASTING = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}
PLAIN = {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}


def in_mixed_precision(rank: int, schedule: type[bpipe.Schedule], **more: Any) -> dict[int, list[torch.Tensor]]:
    replica = Replica(rank, schedule, **more)
    replica.step(0, torch.bfloat16 if more["policy"] is PLAIN else torch.float32)
    return replica.gradients()


class Cast(nn.Module):
    """What FSDP makes of a module in mixed precision."""

    def __init__(self, module: nn.Module, policy: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.dtype = deepcopy(module).to(torch.bfloat16), policy.get("output_dtype", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(torch.bfloat16)).to(self.dtype)


def in_bfloat16(policy: dict[str, Any], modules: Sequence[Any], x: torch.Tensor, y: torch.Tensor, m: int) -> Gradients:
    """One replica's gradients: of each microbatch in bfloat16, added up in the precision of the reduction.

    That is the parameters' own since torch 2.15, and that of the computation before, if the policy does not say.
    """
    precision = policy.get("reduce_dtype", torch.float32 if release() >= (2, 15) else torch.bfloat16)
    cast = [nn.Sequential(*(Cast(block, policy) for block in module)) for module in modules]
    totals: list[list[Any]] = [[0.0 for _ in module.parameters()] for module in cast]
    for xi, yi in zip(x.chunk(m), y.chunk(m)):
        (mse(nn.Sequential(*cast)(xi), yi) / m).backward()
        for total, module in zip(totals, cast):
            total[:] = [t + p.grad.to(precision) for t, p in zip(total, module.parameters())]
            module.zero_grad()
    return totals


def before_and_after(rank: int) -> tuple[list[int], bool, list[Any]]:
    """How often an evaluation gathers before and after a step with planned sharding; what that step leaves behind."""
    from torch.distributed.tensor import DTensor

    replica, counts = Replica(rank, bpipe.BreadthFirst), []
    x, _ = batch_of("quiet", 2 * M)
    for step in range(2):
        with Count() as count:
            replica.schedule.eval(x)
        counts.append(count.of["_allgather_base_"])
        replica.step(step)
    is_sharded = all(isinstance(p, DTensor) for module in replica.modules.values() for p in module.parameters())
    return counts, is_sharded, [module._get_fsdp_state()._comm_ctx.post_forward_order for module in replica.modules.values()]


def with_halves_counted(rank: int, options: dict[str, Any]) -> tuple[Trained, int, bool]:
    """ZB-H1, how many backwards it ran in halves, and whether weights are sharded again after it."""
    from torch.distributed.tensor import DTensor

    original, calls = bpipe.backward.divided.run_backward_input, []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    bpipe.backward.divided.run_backward_input = counted
    replica = Replica(rank, bpipe.ZBH1, num_stages=P, make=pairs, options=options)
    trained = [replica.step(step) for step in range(2)], replica.gradients()
    bpipe.backward.divided.run_backward_input = original
    return trained, len(calls), all(isinstance(p, DTensor) for module in replica.modules.values() for p in module.parameters())


def among_four(rank: int, reshard: bool | int) -> Trained:
    """Two stages on each of four ranks, which are replicas: torch makes the groups of an int only where a mesh has all ranks."""
    options = {"reshard_after_forward": reshard}
    return train(rank, bpipe.Interleaved1F1B, True, num_stages=P, make=pairs, p=1, replicas=4, options=options)


def everything(rank: int) -> dict[str, Any]:
    """In one start of the processes: what FSDP2 imports takes each of them seconds."""
    casting: dict[str, Any] = {"make": pairs, "policy": CASTING}
    return {
        "breadth first": train(rank, bpipe.BreadthFirst, False),
        "halves": train(rank, Halves, True),
        "not in the plan": train(rank, bpipe.ZBV, True, options={"reshard_after_forward": True}),
        "freed": train(rank, bpipe.OneFOneB, True, num_stages=P, make=pairs, options={"reshard_after_forward": True}),
        "kept": train(rank, bpipe.OneFOneB, True, num_stages=P, make=pairs, options={"reshard_after_forward": False}),
        "in halves": with_halves_counted(rank, {"reshard_after_forward": False}),
        "undivided": with_halves_counted(rank, {"reshard_after_forward": True}),
        "accumulated": accumulate(rank, bpipe.BreadthFirst),
        "accumulated by itself": accumulate(rank, bpipe.Interleaved1F1B),
        "not finalized": accumulate_as_torch(rank, bpipe.BreadthFirst),
        "not finalized by itself": accumulate_as_torch(rank, bpipe.Interleaved1F1B),
        "mixed halves": in_mixed_precision(rank, Halves, **casting),
        "mixed wholes": in_mixed_precision(rank, Wholes, **casting),
        "mixed by itself": in_mixed_precision(rank, bpipe.Interleaved1F1B, **casting),
        "plain bfloat16": in_mixed_precision(rank, bpipe.Interleaved1F1B, make=pairs, policy=PLAIN),
        "groups": among_four(rank, 2),  # weights stay sharded over two of the four replicas
        "no groups": among_four(rank, True),
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


@pytest.mark.parametrize("name", ["freed", "kept"])
def test_what_the_plan_says_nothing_of_reduces_once_a_step(seen: Seen, name: str) -> None:
    """Two blocks: what FSDP keeps after a forward is gathered once a step, the rest for each forward and backward."""
    counts, gradients = zip(*seen[name])
    assert all(reductions == 2 for of_rank in counts for _, reductions in of_rank)
    gathers = {gathers for of_rank in counts for gathers, _ in of_rank}
    assert gathers == {2} if name == "kept" else min(gathers) >= 2 * 2 * M - 1
    assert_gradients(gradients, averaged(partial(pairs, P), M, range(2)))


@pytest.mark.parametrize("name", ["in halves", "undivided"])
def test_halves_of_weights_that_stay(seen: Seen, name: str) -> None:
    """FSDP frees weights when a backward has passed a module: a weight half would come too late, if they do not stay."""
    trained, num_halves, is_sharded = zip(*seen[name])
    counts, gradients = zip(*trained)
    assert num_halves == ((2 * M,) * P * REPLICAS if name == "in halves" else (0,) * P * REPLICAS)
    assert all(reductions == 2 for of_rank in counts for _, reductions in of_rank)
    assert all(is_sharded)
    assert_gradients(gradients, averaged(partial(pairs, P), M, range(2)))


@pytest.mark.parametrize("name", ["accumulated", "accumulated by itself", "not finalized", "not finalized by itself"])
def test_the_user_decides_whether_a_step_reduces(seen: Seen, name: str) -> None:
    counts, gradients = zip(*seen[name])
    expected = [0, 3 * V, 0, 0][: len(counts[0])]
    assert [[reductions for _, reductions in of_rank] for of_rank in counts] == [expected] * P * REPLICAS
    for of_rank in gradients:
        for stage, found in of_rank.items():
            torch.testing.assert_close(found, single_process(2)[stage])  # another order: the mean of sums, not the sum of means


@pytest.mark.parametrize("name", ["mixed halves", "mixed wholes", "mixed by itself"])
def test_gradients_add_up_in_the_precision_of_the_reduction(seen: Seen, name: str) -> None:
    """In halves too, although some weight halves follow one another."""
    assert_gradients(seen[name], averaged(partial(pairs, NUM_STAGES), M, backward=partial(in_bfloat16, CASTING)))


def test_bfloat16_throughout(seen: Seen) -> None:
    expected = averaged(partial(pairs, NUM_STAGES), M, backward=partial(in_bfloat16, PLAIN))
    assert_gradients(seen["plain bfloat16"], [[gradient.float() for gradient in of_stage] for of_stage in expected])


def test_after_a_step_everything_is_as_fsdp_leaves_it(seen: Seen) -> None:
    for counts, is_sharded, forwards_under_way in seen["before and after"]:
        assert counts[0] == counts[1] > 3 * V  # an evaluation's plan says nothing of sharding: FSDP gathers in each forward
        assert is_sharded
        assert not any(forwards_under_way)


def test_halves_without_sharding_in_the_plan_are_one_backward(seen: Seen) -> None:
    counts, gradients = zip(*seen["not in the plan"])
    assert all(reductions == 3 * V for of_rank in counts for _, reductions in of_rank)
    assert_gradients(gradients, single_process(2))


class Seven(bpipe.Interleaved1F1B):
    """Within seven slots, so that early ranks evict."""

    def _make_plan(self, num_stages: int, num_ranks: int, n_microbatches: int) -> Plan:
        return build(self.rule, num_stages, n_microbatches, num_ranks=num_ranks, slots=7)


EVICTING: dict[str, tuple[Any, int]] = {
    "balanced": (bpipe.BalancedOneFOneB, WIDE),
    "lowest": (Over(bpipe.OneFOneB, {"budget": "lowest"}), WIDE),
    "interleaved": (Seven, 2 * WIDE),
}


def evictions(rank: int, name: str) -> dict[bool | None, Any]:
    """Pipelines of four ranks: what they evict without sharding, and with weights that are freed or stay."""
    found: dict[bool | None, Any] = {}
    schedule, num_stages = EVICTING[name]
    for reshard in (None, True, False):
        options = None if reshard is None else {"reshard_after_forward": reshard}
        replica = Replica(rank, schedule, num_stages=num_stages, make=pairs, p=WIDE, options=options)
        counts = [replica.step(step)[1] for step in range(2)]
        found[reshard] = counts, replica.schedule.stats, {} if reshard is None else replica.gradients()
    return found


@pytest.mark.parametrize("name", EVICTING)
def test_gathered_weights_never_move(name: str) -> None:
    """With and without sharding the same bytes leave, a plan's peak is the one that is used, and gradients are the same."""
    expected = averaged(partial(pairs, EVICTING[name][1]), M, range(2))
    evicted = run_ranks(evictions, REPLICAS * WIDE, name)
    assert sum(of_rank[None][1]["evicted_bytes"] for of_rank in evicted) > 0
    for reshard in (True, False):
        for of_rank in evicted:
            reductions, stats, _ = of_rank[reshard]
            assert stats["evicted_bytes"] == of_rank[None][1]["evicted_bytes"] == stats["loaded_bytes"]
            assert stats["peak_bytes"] == stats["predicted_peak_bytes"]
            assert stats["peak_bytes"] - stats["held_bytes"] == of_rank[None][1]["peak_bytes"]
            assert bool(stats["held_bytes"]) == (not reshard)  # weights that stay are counted
            assert reductions == [2 * EVICTING[name][1] // WIDE] * 2
        assert_gradients([of_rank[reshard][2] for of_rank in evicted], expected)


def test_resharding_to_groups(seen: Seen) -> None:
    expected = averaged(partial(pairs, P), M, range(2), replicas=4)
    for (in_groups, found), (_, freed) in zip(seen["groups"], seen["no groups"]):
        assert [reductions for _, reductions in in_groups] == [2 * P] * 2
        for stage in range(P):
            assert all(map(torch.equal, found[stage], freed[stage]))
            torch.testing.assert_close(found[stage], expected[stage])  # of four numbers there are several sums


def gathered_in_vain(rank: int) -> bool:
    """Weights are gathered and freed without a forward; then they change."""
    from torch.distributed.fsdp import fully_shard

    stage = bpipe.PipelineStage(fully_shard(nn.Linear(4, 4)), 0, 1, "cpu")
    gather, free = Action(Op.UNSHARD, 0, 0), Action(Op.RESHARD, 0, 0)
    sharding = Sharding({0: stage.parts()}, [gather, free])
    with sharding.in_charge(), torch.no_grad():
        sharding.stages[0].unshard()
        sharding.stages[0].reshard()
        for parameter in stage.submod.parameters():
            parameter.to_local().fill_(2.0)
        sharding.stages[0].unshard()
        output = stage.submod(torch.ones(1, 4))
        sharding.stages[0].reshard()
    return torch.equal(output, torch.full((1, 4), 10.0))


def test_weights_are_never_stale() -> None:
    assert run_ranks(gathered_in_vain, 2) == [True, True]


def settings_after_an_error(rank: int) -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    return [_are_given_back(bpipe.PipelineStage(fully_shard(nn.Linear(4, 4)), 0, 1, "cpu"), op) for op in (Op.UNSHARD, Op.B)]


def _are_given_back(stage: Any, op: Op) -> bool:
    sharding = Sharding({0: stage.parts()}, [Action(op, 0, 0)])
    state = stage.submod._get_fsdp_state()
    state._lazy_init()
    groups = [vars(group).copy() for group in groups_of(stage.submod)]
    with suppress(KeyError), sharding.in_charge():
        group, is_last = groups_of(stage.submod)[0], state._state_ctx.is_last_backward
        is_passive = not group.reduce_grads and not group.reshard_after_backward and is_last == (op is Op.B)
        raise KeyError
    return is_passive and state._state_ctx.is_last_backward and groups == [vars(group) for group in groups_of(stage.submod)]


def test_an_error_gives_fsdp_its_settings_back() -> None:
    assert run_ranks(settings_after_an_error, 1) == [[True, True]]


class Fails(nn.Module):
    """Raises in the third forward or backward since it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(32, 32), "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._pass("forward")
        x.register_hook(lambda _: self._pass("backward"))
        return torch.tanh(self.linear(x))

    def _pass(self, where: str) -> None:
        self.calls += where == self.where
        if self.calls == 3:
            self.where, self.calls = "", 0
            raise KeyError(where)


def failing() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(dropout=0.0), Fails(), Block(dropout=0.0))]


def after_failures(rank: int, reshard: bool) -> tuple[list[dict[int, list[torch.Tensor]]], bool]:
    """The gradients of the first step after each failure, by what a broken pipeline tells its user to do."""
    from torch.distributed.tensor import DTensor

    made = {"make": lambda _: failing(), "num_stages": 1, "p": 1, "options": {"reshard_after_forward": reshard}}
    replica, found = Replica(rank, bpipe.OneFOneB, **made), []
    (module,) = replica.modules.values()
    optimizer = torch.optim.SGD(module.parameters())
    for where in ("forward", "backward"):
        optimizer.zero_grad()
        module[1].where = where
        with pytest.raises(KeyError):
            replica.step(0)
        optimizer.zero_grad()
        replica.schedule.close()
        replica.schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, 0, 1, "cpu", replica.schedule.group), M, loss_fn=mse)
        replica.step(0)
        found.append(replica.gradients())
    return found, all(isinstance(p, DTensor) for p in module.parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_what_a_failed_step_added_up_does_not_enter_the_next_one(reshard: bool) -> None:
    found, are_sharded = zip(*run_ranks(after_failures, REPLICAS, reshard))
    for gradients in zip(*found):
        assert_gradients(gradients, averaged(failing, M))
    assert all(are_sharded)


class Shifted(nn.Module):
    """The gradient of its shift is a view of that of its input, where a microbatch is one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.rand(16, 32)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x + self.shift.unsqueeze(0)))


def shifted(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Shifted() for _ in range(num_stages)]


def one_by_one(rank: int) -> dict[int, list[torch.Tensor]]:
    replica = Replica(rank, bpipe.OneFOneB, num_stages=P, make=shifted, nested=False)
    x, y = (part.chunk(REPLICAS)[replica.replica] for part in batch_of("quiet", REPLICAS * M))
    replica.schedule.step(x, target=y)
    return replica.gradients()


def test_gradients_that_add_up_share_no_memory_with_what_is_sent() -> None:
    modules, (x, y) = shifted(P), batch_of("quiet", REPLICAS * M)
    each = []
    for xs, ys in zip(x.chunk(REPLICAS), y.chunk(REPLICAS)):
        nn.Sequential(*modules).zero_grad()
        each.append([[p.clone() for p in of_stage] for of_stage in of_replica(modules, xs, ys, M)])
    expected = [[(a + b) / 2 for a, b in zip(*stages)] for stages in zip(*each)]
    assert_gradients(run_ranks(one_by_one, P * REPLICAS), expected)


def test_other_modules_are_none_of_its_business() -> None:
    """Sharding actions on plain modules do nothing."""
    stages = {0: bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu").parts()}
    lane = [Action(op, 0, 0) for op in (Op.UNSHARD, Op.W, Op.REDUCE_GRAD, Op.RESHARD)]
    sharding = Sharding(stages, lane)
    with sharding.in_charge():
        sharding.stages[0].unshard()
        with sharding.around(lane[1]):
            pass
        sharding.stages[0].reduce()
        sharding.stages[0].reshard()
    assert sharding.undivided == set()
