"""One process pretends to be a rank of many: plans, shapes and memory are that rank's, and what cannot be known is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard

import bpipe
from bpipe.errors import ConfigurationError
from tests.dry_run.fake_group import CLASSES, EXAMPLE, RANKS, WIDTH, M, fake_group, make, module_of, stages_on, step_of
from tests.models import directions_of, mse

ALL = sorted(CLASSES)
FEW = 4  # ranks that a loopback runs quickly
MEMORY = ("peak_bytes", "device_peak_bytes", "static_bytes", "evicted_bytes", "loaded_bytes", "peak_slots")


@pytest.mark.parametrize("ranks", [range(RANKS), [0, RANKS - 1]], ids=["all", "ends"])
@pytest.mark.parametrize("name", ALL)
def test_every_schedule_is_made_on_every_rank(name: str, ranks: Sequence[int]) -> None:
    """Without an example of any input: nothing is sent before the first step."""
    schedule = getattr(bpipe, name)
    for rank in ranks:
        with fake_group(rank):
            stages = stages_on(rank, schedule)
            made = make(schedule, stages, m=2 * RANKS)
            assert {action.stage for action in made.plan.actions[rank]} == {one.stage_index for one in stages}
            made.close()


def memory_of(stats: dict[str, float]) -> dict[str, float]:
    """Without the buffers for other ranks' microbatches, which a fake group counts as large as this rank's own."""
    return {key: stats[key] - stats["remote_buffer_bytes"] * key.endswith("peak_bytes") for key in MEMORY}


@cache
def in_loopback(schedule: type[bpipe.Schedule]) -> list[dict[str, float]]:
    """The stats of all ranks after two steps of a loopback."""
    loopback = bpipe.Loopback(FEW)
    stages = [stages_on(rank, schedule, loopback.rank(rank), ranks=FEW) for rank in range(FEW)]
    schedules = [make(schedule, of_rank) for of_rank in stages]
    batch = torch.ones(2 * M, WIDTH)
    for _ in range(2):
        loopback.step(schedules, batch, target=batch)
    return [one.stats for one in schedules]


@pytest.mark.parametrize("rank", range(FEW))
@pytest.mark.parametrize("name", [name for name in ALL if name != "LocalLearning"])
def test_a_step_has_the_shapes_and_the_memory_of_that_rank(name: str, rank: int) -> None:
    """As a loopback of all ranks shows it, in bytes. (Local learning needs stages of another kind.)"""
    schedule = getattr(bpipe, name)
    expected = in_loopback(schedule)[rank]
    with fake_group(rank, size=FEW):
        stages = stages_on(rank, schedule, ranks=FEW, input_args=EXAMPLE)
        made = make(schedule, stages)
        outputs = [step_of(made, stages) for _ in range(2)]
        stats = made.stats
        made.close()
    assert memory_of(stats) == memory_of(expected)
    assert bool(stats["remote_buffer_bytes"]) == bool(expected["remote_buffer_bytes"])
    for stage in stages:
        assert all(parameter.grad.shape == parameter.shape for parameter in stage.submod.parameters())
    shape = (2 * M // directions_of(schedule), WIDTH)  # with two directions, a rank returns what came out of its own last stage
    has_last = any(stage.is_last for stage in stages)
    assert [None if output is None else tuple(output.shape) for output in outputs] == [shape if has_last else None] * 2


@pytest.mark.parametrize("name", ["OneFOneB", "Interleaved1F1B", "ZBV"])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_the_first_the_middle_and_the_last_of_eight_ranks(name: str, rank: int) -> None:
    schedule = getattr(bpipe, name)
    with fake_group(rank):
        stages = stages_on(rank, schedule, input_args=EXAMPLE)
        made = make(schedule, stages)
        output = step_of(made, stages)
        assert (output is not None) == any(stage.is_last for stage in stages)
        made.close()


@pytest.mark.parametrize("rank", [0, FEW - 1])
def test_a_budget_in_bytes(rank: int) -> None:
    """As if every rank's stages took what this rank's take; what is evicted is gone, and zeros come back."""
    with fake_group(rank, size=FEW):
        stages = stages_on(rank, bpipe.OneFOneB, ranks=FEW, input_args=EXAMPLE)
        made = bpipe.Balanced(make(bpipe.OneFOneB, stages), budget="lowest")
        for _ in range(3):
            step_of(made, stages)
        assert made.plan.sizes is not None and made.stats["device_peak_bytes"] == made.plan.device_peak_bytes[rank]
        assert made.stats["evicted_bytes" if rank == 0 else "remote_buffer_bytes"] > 0
        made.close()


class Two(nn.Module):
    """Takes and returns numbers and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.requires_grad and not indices.requires_grad
        return x + self.embedding(indices), indices


def test_several_inputs_of_several_dtypes() -> None:
    """Zeros arrive, which are valid indices and make no NaN."""
    module = Two()
    example = (torch.empty(2, WIDTH, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64))
    with fake_group(3):
        stage = bpipe.PipelineStage(module.bfloat16(), 3, RANKS, "cpu", input_args=example)
        schedule = bpipe.OneFOneB(stage, M, loss_fn=mse)
        schedule.step()
        assert module.embedding.weight.grad.dtype is torch.bfloat16 and not module.embedding.weight.grad.any()
        schedule.close()


def test_an_evaluation_returns_outputs_and_losses() -> None:
    with fake_group(7):
        stages = stages_on(7, bpipe.OneFOneB, input_args=EXAMPLE)
        schedule, losses = make(bpipe.OneFOneB, stages), []
        output = schedule.eval(target=torch.ones(2 * M, WIDTH), losses=losses)
        assert output.shape == (2 * M, WIDTH) and len(losses) == M
        assert not any(parameter.grad is not None for parameter in stages[0].submod.parameters())
        schedule.close()


# What cannot be known


def test_a_stage_without_an_example_is_refused_and_says_what_to_give() -> None:
    """And the schedule goes on once there is one."""
    with fake_group(3):
        schedule = make(bpipe.OneFOneB, stages_on(3, bpipe.OneFOneB))
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"stage 3 is on a fake process group.*PipelineStage\(input_args=\.\.\.\)"):
                schedule.step()
        schedule.close()


def test_stages_that_follow_on_their_own_rank_need_no_example() -> None:
    """Rank 7 of a V holds stages 7 and 8: the second gets what the first returns."""
    with fake_group(7):
        stages = stages_on(7, bpipe.ZBV)
        stages[0] = bpipe.PipelineStage(module_of(7), 7, 2 * RANKS, "cpu", input_args=EXAMPLE)
        schedule = make(bpipe.ZBV, stages)
        assert step_of(schedule, stages) is None
        schedule.close()


def test_an_example_that_the_module_cannot_take_fails_in_the_module() -> None:
    with fake_group(3):
        schedule = make(bpipe.OneFOneB, stages_on(3, bpipe.OneFOneB, input_args=torch.empty(2, WIDTH + 1)))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            schedule.step()


def test_slices_are_refused() -> None:
    class Sliced(nn.Linear):
        def forward(self, x: torch.Tensor, past: Any = None, position: int = 0) -> tuple[torch.Tensor, Any]:
            return super().forward(x), past

    with fake_group(3):
        stage = bpipe.PipelineStage(Sliced(WIDTH, WIDTH), 3, RANKS, "cpu", input_args=EXAMPLE)
        schedule = bpipe.TeraPipe(stage, M, loss_fn=mse, slices=2)
        with pytest.raises(ConfigurationError, match=r"cannot step .* with slices of sequences.*bpipe\.Loopback"):
            schedule.step()
        schedule.close()


def test_skips_are_refused() -> None:
    with fake_group(3):
        stage = bpipe.PipelineStage(module_of(3), 3, RANKS, "cpu", input_args=EXAMPLE, skips={"early": (0, 5)})
        schedule = bpipe.OneFOneB(stage, M, loss_fn=mse)
        with pytest.raises(ConfigurationError, match=r"with skips between stages.*bpipe\.Loopback"):
            schedule.step()
        schedule.close()


def test_tied_weights_are_refused() -> None:
    """Whether this stage waits for another one's gradients is known when both have said what they share."""

    class Head(nn.Linear):
        _tied_weights_keys: ClassVar = {"weight": "embedding.weight"}

    with fake_group(3):
        stage = bpipe.PipelineStage(Head(WIDTH, WIDTH), 3, RANKS, "cpu", input_args=EXAMPLE)
        schedule = bpipe.OneFOneB(stage, M, loss_fn=mse)
        with pytest.raises(ConfigurationError, match=r"with weights that its stages may share with others: .*bpipe\.Loopback"):
            schedule.step()
        schedule.eval()  # where nothing is exchanged, nothing is refused
        stage.submod.weight.requires_grad_(False)
        schedule.step()
        stage.submod.weight.requires_grad_()
        tied = bpipe.TiedWeights({"embedding.weight": stage.submod.weight}, group=None)
        schedule.step()
        del tied
        schedule.close()


def test_a_trace_is_refused() -> None:
    with fake_group(0):
        schedule = make(bpipe.OneFOneB, stages_on(0, bpipe.OneFOneB))
        refused = pytest.raises(ConfigurationError, match="cannot trace over a fake process group: it needs the other 7 ranks")
        with refused, bpipe.trace(schedule):
            pass
        schedule.close()


def test_tensors_without_memory_are_refused() -> None:
    """All that they take would be counted as one storage."""
    with fake_group(3), FakeTensorMode():
        schedule = make(bpipe.OneFOneB, stages_on(3, bpipe.OneFOneB, input_args=torch.empty(2, WIDTH)))
        with pytest.raises(ConfigurationError, match=r"FakeTensorMode cannot be counted.*use real tensors"):
            schedule.step()
        schedule.close()


def test_real_tensors_in_a_step_under_the_mode_are_refused_too() -> None:
    with fake_group(3):
        schedule = make(bpipe.OneFOneB, stages_on(3, bpipe.OneFOneB, input_args=torch.empty(2, WIDTH)))
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ConfigurationError, match="FakeTensorMode cannot be"):
            schedule.step()
        schedule.close()


def test_a_stream_is_refused() -> None:
    module = module_of(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with fake_group(0), pytest.raises(ConfigurationError, match="a fake process group has no other ranks"):
        bpipe.Stream(bpipe.PipelineStage(module, 0, RANKS, "cpu"), mse, optimizer)


@pytest.mark.parametrize("what", ["a stage", "two stages", "a model", "a model that cannot run"])
def test_an_automatic_choice_is_refused_before_anything_is_measured(what: str) -> None:
    """It needs the times of all ranks; a first step without them would be in vain."""
    with fake_group(0, size=2):
        stages: Any = [bpipe.PipelineStage(module_of(i), i, 4, "cpu") for i in (0, 2)]
        models = nn.Sequential(module_of(0), module_of(1)), nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 3))
        given = {
            "a stage": bpipe.PipelineStage(module_of(0), 0, 2, "cpu"),
            "two stages": stages,
            "a model": models[0],
            "a model that cannot run": models[1],
        }[what]
        batch: Any = M if isinstance(given, (list, bpipe.PipelineStage)) else torch.ones(2 * M, WIDTH)
        with pytest.raises(ConfigurationError, match=r"auto chooses by the times of all ranks.*bpipe.choose_plan.*bpipe.Loopback"):
            bpipe.auto(given, batch, mse)


def test_a_group_of_another_size_is_refused() -> None:
    with fake_group(0, size=4), pytest.raises(ConfigurationError, match="needs 8 ranks, but the group has 4"):
        make(bpipe.OneFOneB, stages_on(0, bpipe.OneFOneB))


# Other groups, other stages


def test_a_dimension_of_a_mesh_of_a_fake_group() -> None:
    """As torchtitan makes it: no store is given, and the pipeline is one dimension of several."""
    dist.init_process_group("fake", rank=9, world_size=16)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "pp"))
        stages = stages_on(1, bpipe.OneFOneB, mesh["pp"].get_group(), input_args=EXAMPLE)
        schedule = make(bpipe.OneFOneB, stages)
        assert schedule.step() is None and schedule.stats["peak_slots"] == 7
        schedule.close()
    finally:
        dist.destroy_process_group()


def test_fsdp2_and_clipping_over_other_dimensions() -> None:
    """Shards are this rank's, and helpers of training find a device for the collectives that do nothing."""
    with fake_group(6, size=16):
        mesh = dist.device_mesh.init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "pp"))
        module = fully_shard(module_of(2), mesh=mesh["dp"])
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, 2, 4, "cpu", EXAMPLE, group=mesh["pp"]), M, loss_fn=mse)
        schedule.step()
        shapes = [tuple(parameter.grad.to_local().shape) for parameter in module.parameters()]
        assert shapes == [(4, WIDTH), (4,), (2, 2 * WIDTH), (2,)]
        norm = bpipe.clip_grad_norm_(module.parameters(), 1.0, group=mesh["pp"].get_group())
        assert norm.shape == ()  # torch 2.11 leaves what a fake collective returns as it is in memory
        schedule.close()


def test_a_rank_of_the_group_that_holds_another_rank_of_the_plan() -> None:
    with fake_group(2):
        schedule = make(bpipe.OneFOneB, stages_on(5, bpipe.OneFOneB, input_args=EXAMPLE))
        assert schedule.step() is None and schedule.stats["peak_slots"] == 3
        schedule.close()


def test_one_rank_alone_is_exact() -> None:
    """PyTorch's own tests run so: there is nobody to talk to."""
    torch.manual_seed(0)
    module, x = module_of(0), torch.randn(2 * M, WIDTH)
    with fake_group(0, size=1):
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=mse)
        output = schedule.step(x, target=x)
        schedule.close()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    halves = [module(half) for half in x.chunk(2)]
    for half, target in zip(halves, x.chunk(2), strict=True):
        (mse(half, target) / 2).backward()
    assert torch.equal(output, torch.cat(halves))
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in module.parameters()]))


def test_a_dry_run_says_that_it_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """A launcher whose backend was left at "fake" would train on zeros."""
    with fake_group(1):
        made = make(bpipe.OneFOneB, stages_on(1, bpipe.OneFOneB, input_args=EXAMPLE))
        assert "a dry run" in repr(made) and "rank 1: the process group is a fake one, so this is a dry run" in caplog.text
        made.close()


def test_torchs_own_stage_brings_its_example() -> None:
    """torch's own schedule reads what it takes for another rank's answer, up to 2.13; here its stage works."""
    with fake_group(3):
        stage = pipelining.PipelineStage(module_of(3), 3, RANKS, torch.device("cpu"), input_args=EXAMPLE, output_args=EXAMPLE)
        schedule = bpipe.OneFOneB(stage, M, loss_fn=mse)
        assert schedule.step() is None
        assert all(parameter.grad.shape == parameter.shape for parameter in stage.submod.parameters())
        schedule.close()
