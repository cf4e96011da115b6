"""`bpipe.auto` over processes: the same plan on all ranks, 1F1B's gradients, another plan if the first was chosen wrongly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bpipe
from bpipe.chooser.together import Together, communicate_inside
from bpipe.errors import AgreementError, BudgetError, ConfigurationError
from bpipe.schedules import Sizes, StageSizes
from tests.clock import Clock
from tests.ranks import run_ranks
from tests.sleepers import Sleeper, SlicedSleeper
from tests.tries import holds_in_one_try

P, M, WIDTH, STEPS = 4, 8, 16, 8


class Ran(NamedTuple):
    """What a rank saw."""

    plans: list[str]  # fingerprints, by step
    names: list[str]  # of the choices, by step
    said: list[str]
    gradients: list[torch.Tensor]


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        logger = logging.getLogger("bpipe")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Block(nn.Sequential):
    """What a stage or a layer computes."""

    def __init__(self, width: int, times: int = 2) -> None:
        super().__init__(nn.Linear(width, times * width), nn.Tanh(), nn.Linear(times * width, width))


class Slow(nn.Module):
    """A stage that computes something, and takes its time, which changes after the first step."""

    def __init__(self, rank: int, first_s: float, later_s: float) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.block, self.num_forwards = Block(WIDTH), 0
        self.first, self.later = Sleeper(first_s, 4096), Sleeper(later_s, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return (self.first if self.num_forwards <= M else self.later)(self.block(x))


def trained(rank: int, how: str, first_s: Sequence[float], later_s: Sequence[float], **wishes: Any) -> Ran:
    kept, module = Kept(), Slow(rank, first_s[rank], later_s[rank])
    stage = bpipe.PipelineStage(module, rank, P, "cpu")
    if how == "auto":
        schedule = bpipe.auto(stage, M, nn.functional.mse_loss, **wishes)
    else:
        schedule = bpipe.OneFOneB(stage, M, nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters())
    torch.manual_seed(7)
    plans, names, gradients = [], [], []
    for _ in range(STEPS):
        x = torch.randn(2 * M, WIDTH)
        optimizer.zero_grad()
        schedule.step(x, target=x, return_outputs=False)
        gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        optimizer.step()
        plans.append(schedule.plan.fingerprint())
        names.append(getattr(getattr(schedule, "choice", None), "name", ""))
    schedule.close()
    return Ran(plans, names, kept.texts, gradients)


def test_gradients_are_1f1bs() -> None:
    times = [0.0] * P
    chosen = run_ranks(as_auto, P, times, times, 100_000)
    plain = run_ranks(as_plain, P, times, times)
    for one, other in zip(chosen, plain):
        assert one.plans == chosen[0].plans
        assert len(one.gradients) == len(other.gradients) > 0
        assert all(map(torch.equal, one.gradients, other.gradients))
    assert len(set(chosen[0].plans)) > 1  # the first step measured


def as_auto(rank: int, first_s: Sequence[float], later_s: Sequence[float], effort: int) -> Ran:
    return trained(rank, "auto", first_s, later_s, options=bpipe.Options(effort=effort))


def as_plain(rank: int, first_s: Sequence[float], later_s: Sequence[float]) -> Ran:
    return trained(rank, "plain", first_s, later_s)


def by_a_clock(rank: int, *how: Any) -> Ran:
    """As by `as_auto`, where nothing takes time on a rank but what sleeps."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.sleepers.time", clock)
        patch.setattr("bpipe.engine.recorder.time", clock)
        return as_auto(rank, *how)


WRONG_COSTS = [0.02, 0.004, 0.004, 0.004], [0.004, 0.004, 0.012, 0.02]


def is_replaced(ran: list[Ran]) -> bool:
    """Whether another plan takes the place of the one that was made from the costs of the first step."""
    assert all(one.plans == ran[0].plans and one.names == ran[0].names for one in ran)
    assert any("than expected" in text for text in ran[0].said)
    return len(set(ran[0].plans)) >= 3 and any("takes its place" in text for text in ran[0].said)


def test_another_plan_takes_its_place_if_costs_were_wrong_by_a_clock() -> None:
    ran = run_ranks(by_a_clock, P, *WRONG_COSTS, 200_000)
    assert is_replaced(ran), ran


def test_another_plan_takes_its_place_if_costs_were_wrong() -> None:
    """In the first step the first stage is the slow one, so that the order that is made suits that; then the last one is."""
    holds_in_one_try(lambda: run_ranks(as_auto, P, *WRONG_COSTS, 200_000), is_replaced)


def sharded(rank: int, how: str) -> tuple[list[str], list[torch.Tensor]]:
    """Two pipelines of two ranks with two stages each in a V, whose weights are sharded over the pipelines."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place, pipeline = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages = []
    for index in (place, 3 - place):
        torch.manual_seed(index)
        module = nn.Sequential(Block(WIDTH), Sleeper(0.01 if index % 2 == pipeline and how == "auto" else 0.001, 64))
        fully_shard(module, mesh=mesh["dp"])
        stages.append(bpipe.PipelineStage(module, index, 4, "cpu", group=mesh["pp"].get_group()))
    replicas = mesh["dp"].get_group()
    if how == "plain":
        schedule: Any = bpipe.ZBV(stages, M, nn.functional.mse_loss)
    else:
        wishes = {"options": bpipe.Options(effort=20_000, seed=pipeline), "replicas": replicas if how == "auto" else None}
        schedule = bpipe.auto(stages, M, nn.functional.mse_loss, start="zbv", **wishes)
    plans, torch_generator = [], torch.Generator().manual_seed(pipeline)
    for _ in range(STEPS):
        x = torch.randn(2 * M, WIDTH, generator=torch_generator)
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
    gradients = [one.grad.to_local().clone() for stage in stages for one in stage.submod.parameters()]
    schedule.close()
    return plans, gradients


def test_replicas_run_the_same_plan() -> None:
    """Other stages are slow in one pipeline than in the other, so that each would choose another order by itself."""
    chosen, plain = (run_ranks(sharded, 4, how) for how in ("auto", "plain"))
    assert all(plans == chosen[0][0] for plans, _ in chosen)
    assert len(set(chosen[0][0])) > 1
    for (_, gradients), (_, expected) in zip(chosen, plain):
        assert all(map(torch.equal, gradients, expected))


def test_sharded_stages_need_replicas() -> None:
    for error in run_ranks(sharded, 4, "alone", expect_errors=True):
        assert isinstance(error, ConfigurationError)
        assert "give bpipe.auto(replicas=)" in str(error)


def sharded_over_all(rank: int) -> bool:
    module = nn.Sequential(nn.Linear(2, 2))
    fully_shard(module)
    module.unshard()  # then its parameters no longer show the mesh
    return communicate_inside([module])


def test_a_stage_that_fsdp2_shards_over_one_rank_waits_for_nobody() -> None:
    """As torchtitan's where there is one pipeline: it needs no replicas."""
    assert [run_ranks(sharded_over_all, size) for size in (1, 2)] == [[False], [True, True]]


class Growing(nn.Module):
    """A stage whose microbatches save more from some forward on."""

    def __init__(self, grows_at: int) -> None:
        super().__init__()
        self.block, self.grows_at, self.num_forwards = Block(WIDTH), grows_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        y = self.block(x)
        return y.exp().log() if self.num_forwards > self.grows_at else y


def with_replicas(rank: int, grows_after: int | None) -> tuple[list[str], list[str]]:
    """Two pipelines of two ranks, of which the second one's microbatches grow after some steps, or which has more static bytes."""
    kept, mesh = Kept(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place, pipeline = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    module = Growing(M * grows_after if grows_after is not None and pipeline == 1 else 10**6)
    if grows_after is None and pipeline == 1:
        module.register_buffer("extra", torch.zeros(20_000))
    stage = bpipe.PipelineStage(module, place, 2, "cpu", group=mesh["pp"].get_group())
    limit = 30_000 if grows_after is None else None
    wishes = {"options": bpipe.Options(effort=0, timeout_s=30.0), "memory_bytes": limit}
    schedule = bpipe.auto(stage, M, nn.functional.mse_loss, replicas=mesh["dp"].get_group(), **wishes)
    plans, x = [], torch.ones(2 * M, WIDTH)
    for _ in range(STEPS + 4):
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
    schedule.close()
    return plans, kept.texts


@pytest.mark.parametrize("grows_after", [1, 4, 9])
def test_microbatches_of_one_replica_grow(grows_after: int) -> None:
    """All replicas measure again, whether they wait for a first plan, time one, or have done with that."""
    ran = run_ranks(with_replicas, 4, grows_after)
    assert all(plans == ran[0][0] for plans, _ in ran)
    for pipeline in (0, 1):
        said = [text for rank in (0, 2) for text in ran[rank][1]] if pipeline == 0 else ran[2][1]
        assert sum("making the plan" in text for text in said) >= 2


def test_one_replica_has_too_little_memory() -> None:
    for error in run_ranks(with_replicas, 4, None, expect_errors=True):
        assert isinstance(error, BudgetError)


def in_tensor_parallelism(rank: int, with_group: bool) -> tuple[list[str], list[torch.Tensor]]:
    """A pipeline of two ranks for each of two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    place = mesh["pp"].get_local_rank()
    stages = []
    for index in (place, 3 - place):
        torch.manual_seed(index)
        module = parallelize_module(Block(WIDTH), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        stages.append(bpipe.PipelineStage(module, index, 4, "cpu", group=mesh["pp"].get_group()))
    wishes = {"options": bpipe.Options(effort=20_000), "replicas": mesh["tp"].get_group() if with_group else None}
    schedule = bpipe.auto(stages, M, nn.functional.mse_loss, start="zbv", **wishes)
    plans, x = [], torch.ones(2 * M, WIDTH)
    for _ in range(STEPS):
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
    gradients = [one.grad.full_tensor() for stage in stages for one in stage.submod.parameters()]
    schedule.close()
    return plans, gradients


def test_tensor_parallel_ranks_run_the_same_plan() -> None:
    ran = run_ranks(in_tensor_parallelism, 4, True)
    assert all(plans == ran[0][0] for plans, _ in ran)
    for error in run_ranks(in_tensor_parallelism, 4, False, expect_errors=True):
        assert isinstance(error, ConfigurationError) and "in tensor parallelism" in str(error)


def test_a_second_choice_that_fails_keeps_the_plan() -> None:
    ran = run_ranks(failing_to_choose_again, P)
    assert all(plans == ran[0][0] for plans, _ in ran) and len(set(ran[0][0][1:])) == 1
    assert any("stays: rank 0 cannot choose a plan: ZeroDivisionError" in text for text in ran[0][1])


def failing_to_choose_again(rank: int) -> tuple[list[str], list[str]]:
    kept, num_choices = Kept(), 0

    def progress(done: int, total: int) -> None:
        nonlocal num_choices
        num_choices += done == total
        if num_choices and done == 0:
            raise ZeroDivisionError

    stage = bpipe.PipelineStage(Block(WIDTH), rank, P, "cpu")
    schedule = bpipe.auto(stage, M, nn.functional.mse_loss, options=bpipe.Options(effort=0, progress=progress))
    plans, x = [], torch.ones(M, WIDTH)
    for _ in range(8):
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
    schedule.close()
    return plans, kept.texts


def test_an_optimizer_that_steps_late() -> None:
    """Its states make a new plan at the time at which the first one is due to be chosen again; all goes on."""
    for late in range(4, 8):
        ran = run_ranks(stepping_late, 2, late)
        assert ran[0][0] == ran[1][0]
        assert any("such as the states of optimizers" in text for text in ran[0][1])
        assert any("it stays" in text or "takes its place" in text for text in ran[0][1])
        assert not any("cannot choose" in text for text in ran[0][1])


def stepping_late(rank: int, late: int) -> tuple[list[str], list[str]]:
    kept, module = Kept(), Block(WIDTH)
    schedule = bpipe.auto(bpipe.PipelineStage(module, rank, 2, "cpu"), M, nn.functional.mse_loss, options=bpipe.Options(effort=0))
    optimizer, plans, x = torch.optim.Adam(module.parameters()), [], torch.ones(M, WIDTH)
    for step in range(late + 8):
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
        if step >= late:
            optimizer.step()
    schedule.close()
    return plans, kept.texts


def test_ranks_with_other_arguments() -> None:
    for error in run_ranks(with_other_arguments, P, expect_errors=True):
        assert isinstance(error, AgreementError)


def with_other_arguments(rank: int) -> None:
    stage = bpipe.PipelineStage(Block(WIDTH), rank, P, "cpu")
    schedule = bpipe.auto(stage, M, nn.functional.mse_loss, options=bpipe.Options(effort=1000 if rank == 2 else 2000))
    schedule.step(torch.ones(M, WIDTH), target=torch.ones(M, WIDTH))


def test_too_little_memory() -> None:
    for error in run_ranks(with_a_byte, P, expect_errors=True):
        assert isinstance(error, BudgetError)
        assert "no plan was found that keeps the budgets" in str(error)


def with_a_byte(rank: int) -> None:
    stage = bpipe.PipelineStage(Block(WIDTH), rank, P, "cpu")
    schedule = bpipe.auto(stage, M, nn.functional.mse_loss, options=bpipe.Options(effort=0), memory_bytes=1)
    for _ in range(2):
        schedule.step(torch.ones(M, WIDTH), target=torch.ones(M, WIDTH))


def test_rank_0_cannot_choose() -> None:
    for error in run_ranks(failing_to_choose, P, expect_errors=True):
        assert isinstance(error, AgreementError)
        assert "rank 0 cannot choose a plan: ZeroDivisionError" in str(error)


def failing_to_choose(rank: int) -> None:
    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError

    stage = bpipe.PipelineStage(Block(WIDTH), rank, P, "cpu")
    schedule = bpipe.auto(stage, M, nn.functional.mse_loss, options=bpipe.Options(effort=0, progress=progress))
    for _ in range(2):
        schedule.step(torch.ones(M, WIDTH), target=torch.ones(M, WIDTH))


@pytest.mark.parametrize("by", ["evict", "recompute", "evict_or_recompute"])
def test_within_a_budget(by: str) -> None:
    for most, budget, plans in run_ranks(within_a_budget, P, by):
        assert most <= budget
        assert len(set(plans)) > 1


def within_a_budget(rank: int, by: str) -> tuple[int, int, list[str]]:
    torch.manual_seed(rank)
    stage = bpipe.PipelineStage(Block(WIDTH, 16), rank, P, "cpu")
    x = torch.randn(512 * M, WIDTH)
    peaks = []
    for wanted in ("lowest", [None] * P):
        balanced = bpipe.Balanced(bpipe.OneFOneB(stage, M, nn.functional.mse_loss), budget=wanted)
        for _ in range(2):
            balanced.step(x, target=x, return_outputs=False)
        peaks.append(max(balanced.plan.device_peak_bytes))
        balanced.close()
    budget, plain = peaks
    assert budget < plain
    schedule = bpipe.auto(
        stage, M, nn.functional.mse_loss, options=bpipe.Options(effort=0), memory_bytes=budget, by=by, schedules=["1f1b", "gpipe"]
    )
    plans = []
    for _ in range(4):
        schedule.step(x, target=x, return_outputs=False)
        plans.append(schedule.plan.fingerprint())
    most = int(schedule.stats["device_peak_bytes"])
    schedule.close()
    return most, budget, plans


def test_a_whole_model() -> None:
    ran = run_ranks(whole_model, P)
    alone = whole_model_alone()
    assert len({plan for _, plan in ran}) == 1
    names = [name for gradients, _ in ran for name in gradients]
    assert sorted(names) == sorted(alone)
    for gradients, _ in ran:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH) for _ in range(9)))


def whole_model(rank: int) -> tuple[dict[str, torch.Tensor], str]:
    x = torch.arange(16.0 * WIDTH).reshape(16, WIDTH) / 100
    schedule = bpipe.auto(model(), x, nn.functional.mse_loss, target=x, options=bpipe.Options(effort=20_000))
    for _ in range(3):
        for module in schedule.modules:
            module.zero_grad()
        schedule.step(x, target=x, return_outputs=False)
    found = {name: one.grad for module in schedule.modules for name, one in module.named_parameters() if one.grad is not None}
    plan = schedule.plan.fingerprint()
    schedule.close()
    return found, plan


def whole_model_alone() -> dict[str, torch.Tensor]:
    whole, x = model(), torch.arange(16.0 * WIDTH).reshape(16, WIDTH) / 100
    nn.functional.mse_loss(whole(x), x).backward()
    return {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}


def test_a_whole_model_that_rank_0_cannot_measure() -> None:
    first, *others = run_ranks(model_that_fails_on_rank_0, P, expect_errors=True)
    assert isinstance(first, RuntimeError)
    for error in others:
        assert isinstance(error, AgreementError)
        assert "rank 0 cannot choose how to cut the model" in str(error)


def model_that_fails_on_rank_0(rank: int) -> None:
    x = torch.ones(16, WIDTH if rank else WIDTH + 1)
    bpipe.auto(model(), x, nn.functional.mse_loss, target=x)


def stages_in_a_loopback(places: Sequence[int], p: int) -> list[bpipe.PipelineStage]:
    loopback = bpipe.Loopback(p)
    return [bpipe.PipelineStage(Block(WIDTH), place, p * len(places), "cpu", group=loopback.rank(0)) for place in places]


@pytest.mark.parametrize(
    ("places", "p", "said"),
    [([1, 4], 3, "in a V and in a loop alike"), ([0, 1], 4, "no schedule places stages [0, 1] on one of 4 ranks")],
)
def test_placements_that_tell_nothing(places: list[int], p: int, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        bpipe.auto(stages_in_a_loopback(places, p), M, nn.functional.mse_loss)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("schedules", "said"),
    [
        ("1f1b", r"schedules='1f1b': give a list of names, such as \['1f1b'\]"),
        (["1f1b", "1f2b"], "no schedule is called '1f2b', did you mean '1f1b'"),
        ([], "schedules is empty: give names to choose from"),
        (7, r"schedules=7: give a list of names"),
        ([None], r"schedules=\[None\]: give a list of names"),
        (["local_learning"], "local_learning learns something else"),
        (["1f1b", "chimera"], "chimera needs each stage on two ranks"),
    ],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_schedules_that_cannot_be_chosen_from(schedules: Any, said: str, is_whole: bool) -> None:
    """They are refused before a model is measured, which would raise, or a step has trained."""
    rank = bpipe.Loopback(2).rank(0)
    cannot_run = nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 3))
    given: Any = (cannot_run, torch.ones(8, 4)) if is_whole else (bpipe.PipelineStage(Block(WIDTH), 0, 2, "cpu", group=rank), M)
    with pytest.raises(ConfigurationError, match=said):
        bpipe.auto(*given, nn.functional.mse_loss, group=rank, schedules=schedules)


@pytest.mark.parametrize(
    ("schedules", "places", "start", "m"),
    [
        (["zbv"], [1], None, M),  # two stages on a rank
        (["1f1b", "gpipe"], [1, 3], "interleaved_1f1b", M),  # one stage on a rank
        (["interleaved_1f1b"], [1, 2], "zbv", M),  # in another order
        (["interleaved_1f1b"], [1, 3], "breadth_first", 5),  # as many microbatches as it does not take
        (["seq_1f1b"], [1], None, M),  # slices
    ],
)
def test_schedules_for_other_stages(schedules: list[str], places: list[int], start: str | None, m: int) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"schedules=\['{schedules[0]}'.*none of them runs {m} microbatches of 1 slice over"
    ):
        bpipe.auto(stages_in_a_loopback(places, 2), m, nn.functional.mse_loss, start=start, schedules=schedules)


@pytest.mark.parametrize("schedules", [("Schedule1F1B",), iter(["1f1b"]), {"1f1b": 1}, ["1f1b", "zbv"]])
def test_schedules_are_taken_in_many_forms(schedules: Any) -> None:
    assert bpipe.auto(stages_in_a_loopback([0], 2), M, nn.functional.mse_loss, schedules=schedules).plan.name == "1f1b"


def test_a_model_alone_needs_no_process_group() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(8, 4)
    assert (
        bpipe.auto(model, x, nn.functional.mse_loss, target=x, options=bpipe.Options(effort=0)).step(x, target=x).shape == x.shape
    )


def test_stages_that_take_slices() -> None:
    loopback = bpipe.Loopback(2)
    torch.manual_seed(0)
    stages = [
        bpipe.PipelineStage(SlicedSleeper(Sleeper(0.0, 1000 * (rank + 1))), rank, 2, "cpu", group=loopback.rank(rank))
        for rank in range(2)
    ]
    schedules = [bpipe.auto(stage, 4, nn.functional.mse_loss, slices=2, options=bpipe.Options(effort=20_000)) for stage in stages]
    x = torch.ones(4, 8, 3)
    for _ in range(3):
        loopback.step(schedules, x, target=x, return_outputs=False)
    assert schedules[0].plan.slices == 2 and schedules[0].choice.name.startswith(("seq_1f1b", "tera_pipe", "an order made"))
    assert any("tera_pipe" in one.name or "seq_1f1b" in one.name for one in schedules[0].choice.others)


@pytest.mark.parametrize("per_rank", [1, 2])
def test_a_whole_model_over_an_odd_number_of_ranks(per_rank: int) -> None:
    loopback, x = bpipe.Loopback(3), torch.ones(12, WIDTH)
    whole = nn.Sequential(*(Block(WIDTH) for _ in range(6)))
    wishes: dict[str, Any] = {"target": x, "stages_per_rank": (per_rank,), "options": bpipe.Options(effort=0)}
    schedules = [bpipe.auto(whole, x, nn.functional.mse_loss, group=loopback.rank(rank), **wishes) for rank in range(3)]
    for _ in range(2):
        loopback.step(schedules, x, target=x, return_outputs=False)
    assert schedules[0].plan.num_stages == 3 * per_rank
    larger = torch.ones(24, WIDTH)
    wishes |= {"microbatch_sizes": [1], "target": larger}
    again = bpipe.auto(whole, larger, nn.functional.mse_loss, group=loopback.rank(0), **wishes)
    assert again.plan.num_microbatches == 24


@pytest.mark.parametrize("memory", [[1, 2, 3], 1.5, 0, -5, True, "lowest"])
def test_memory_that_is_none(memory: Any) -> None:
    for stages, batch in ((nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(8, 4)), (None, 8)):
        loopback = bpipe.Loopback(2)
        given = stages if stages is not None else bpipe.PipelineStage(nn.Linear(4, 4), 0, 2, "cpu", group=loopback.rank(0))
        with pytest.raises(ConfigurationError, match="memory_bytes="):
            bpipe.auto(given, batch, nn.functional.mse_loss, group=loopback.rank(0), memory_bytes=memory)


def test_a_model_is_measured_where_it_will_be() -> None:
    with pytest.raises(ConfigurationError, match="the model is on cpu, and its stages will be on meta"):
        bpipe.auto(nn.Linear(4, 4), torch.ones(8, 4), len, device="meta", group=bpipe.Loopback(1).rank(0))


def test_a_model_needs_a_loss_and_a_batch() -> None:
    wrong = (torch.ones(8, 4), None, "give loss_fn="), (4, nn.functional.mse_loss, "give a batch of training")
    for batch, loss_fn, said in wrong:
        with pytest.raises(ConfigurationError, match=said):
            bpipe.auto(nn.Linear(4, 4), batch, loss_fn, group=bpipe.Loopback(1).rank(0))


def test_a_form_of_inputs_has_its_own_plan() -> None:
    loopback = bpipe.Loopback(2)
    torch.manual_seed(0)
    stages = [bpipe.PipelineStage(Block(WIDTH), rank, 2, "cpu", group=loopback.rank(rank)) for rank in range(2)]
    schedules = [bpipe.auto(stage, 4, nn.functional.mse_loss, options=bpipe.Options(effort=0)) for stage in stages]
    choices = []
    for rows in (8, 8, 16, 16, 8):
        x = torch.ones(rows, WIDTH)
        loopback.step(schedules, x, target=x, return_outputs=False)
        choices.append(schedules[1].choice)
    assert choices[0] is None and choices[1] is not None
    assert choices[3] is not choices[1] and choices[3].device_peak_bytes > choices[1].device_peak_bytes
    assert schedules[0].plan.device_peak_bytes == choices[1].device_peak_bytes


def covered(rank: int) -> tuple[Sizes, Sizes]:
    """What two replicas agree on, whichever of them has slices that are all alike."""
    small, large = StageSizes(parts=(10,)), StageSizes(parts=(30,))
    alike = Sizes.of_slices([(small,), (small,), (small,)], static=(0,))
    rising = Sizes.of_slices([(small,), (small,), (large,)], static=(5,))
    together, own = Together(dist.group.WORLD), (alike, rising)
    return together.covering(own[rank], (None,))[0], together.covering(own[1 - rank], (None,))[0]


def test_slices_of_replicas_are_covered_where_those_of_one_are_all_alike() -> None:
    """Which that replica gives once."""
    for found in run_ranks(covered, 2):
        assert [[stage.saved for (stage,) in one.by_unit] for one in found] == [[10, 10, 30]] * 2
        assert all(one.static == (5,) for one in found)
