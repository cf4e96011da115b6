"""Slices in the schedules of several stages and in given plans: their options, and what does not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import FromPlan, Interleaved1F1B, Loopback, PipelineStage, Seq1F1B
from bpipe.errors import ConfigurationError
from bpipe.schedules import Plan, build
from bpipe.slices import UpTo
from tests.ranks import run_ranks
from tests.slices.models import WIDTH, Whole, batch_of, stages_of
from tests.slices.test_run import by_themselves, furthest, run, taken

mse = nn.functional.mse_loss


def looped(modules: list[Any], p: int, batch: Any, m: int, steps: int = 1, make: Any = Interleaved1F1B, **options: Any) -> Any:
    """Run stages in a loop over p ranks; return the schedules, and the outputs of the last step."""
    loopback, count = Loopback(p), len(modules)
    of_ranks = [[PipelineStage(modules[s], s, count, "cpu", loopback.rank(r)) for s in range(r, count, p)] for r in range(p)]
    schedules = [make(stages, m, loss_fn=mse, **options) for stages in of_ranks]
    for step in range(steps):
        if step:
            taken(modules)
        outputs = loopback.step(schedules, batch[0], target=batch[1])
    return schedules, outputs


@pytest.mark.parametrize(
    "options",
    [{"slices": 2}, {"slices": 4, "options": bpipe.Options(slice_lengths=[5, 4, 2, 1])}, {"slices": 3}],
    ids=["k = 2", "lengths", "k = 3"],
)
@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_interleaved(kind: str, options: dict[str, Any]) -> None:
    modules, batch = stages_of(kind, 4), batch_of(4)
    expected = by_themselves(modules, 4, batch)
    _, outputs = looped(modules, 2, batch, 4, **options)
    assert furthest(taken(modules), expected) < 1e-12
    assert outputs.shape == batch[1].shape


def test_interleaved_with_one_slice_is_interleaved_to_the_bit() -> None:
    modules, batch = stages_of("attention", 4), batch_of(4)
    _, expected = looped([Whole(module) for module in modules], 2, batch, 4)
    gradients = taken(modules)
    _, outputs = looped(modules, 2, batch, 4, slices=1)
    assert torch.equal(outputs, expected)
    assert all(map(torch.equal, taken(modules), gradients))


def in_bytes(*args: Any, **options: Any) -> Any:
    return bpipe.Balanced(Interleaved1F1B(*args, **options))


@pytest.mark.parametrize(
    "make, options", [(Interleaved1F1B, {"options": bpipe.Options(slots=10)}), (in_bytes, {})], ids=["slots", "bytes"]
)
def test_balanced_is_interleaved_to_the_bit(make: Any, options: dict[str, Any]) -> None:
    modules, batch = stages_of("attention", 8), batch_of(8)
    looped(modules, 4, batch, 8, slices=2)
    expected = taken(modules)
    schedules, _ = looped(modules, 4, batch, 8, steps=3, make=make, slices=2, **options)
    assert all(map(torch.equal, taken(modules), expected))
    assert any(schedule.stats["evicted_bytes"] for schedule in schedules)


def on_rank(rank: int) -> list[torch.Tensor]:
    modules, batch = stages_of("attention", 4), batch_of(4)
    stages = [PipelineStage(modules[s], s, 4, "cpu") for s in (rank, rank + 2)]
    Interleaved1F1B(stages, 4, loss_fn=mse, slices=3).step(batch[0], target=batch[1])
    return taken([modules[rank], modules[rank + 2]])


def test_interleaved_over_processes() -> None:
    modules, batch = stages_of("attention", 4), batch_of(4)
    by_themselves_ = by_themselves(modules, 4, batch)
    each = len(by_themselves_) // 4
    expected = [by_themselves_[s * each : (s + 1) * each] for s in range(4)]
    for rank, found in enumerate(run_ranks(on_rank, 2)):
        assert furthest(found, [*expected[rank], *expected[rank + 2]]) < 1e-12


class Argument(nn.Module):
    """A stage of whole microbatches whose own argument is called `past`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
        assert past is None
        return self.linear(x)


def test_stages_of_whole_microbatches_are_left_alone() -> None:
    batch, modules = batch_of(2, dtype=torch.float32), [Argument(), Argument()]
    _, outputs = looped(modules, 1, batch, 2)
    assert torch.equal(outputs, nn.Sequential(*modules)(batch[0]))
    _, outputs = run(modules[:1], lambda stage, m, **how: FromPlan(stage, build("1f1b", 1, m), **how), 2, batch)
    assert torch.equal(outputs, modules[0](batch[0]))


@pytest.mark.parametrize("name, slots", [("seq_1f1b", None), ("tera_pipe", None), ("seq_1f1b", 5)])
def test_given_plans(name: str, slots: int | None) -> None:
    modules, batch = stages_of("attention", 3), batch_of(3)
    expected = by_themselves(modules, 3, batch)
    plan = Plan.from_text(build(name, 3, 3, slices=3, slots=slots).to_text())

    def given(stage: Any, m: int, **how: Any) -> Any:
        return FromPlan(stage, plan, **how)

    run(modules, given, 3, batch, options=bpipe.Options(slice_lengths=[0.5, 0.3, 0.2]))
    assert furthest(taken(modules), expected) < 1e-12


def test_given_plans_of_several_stages() -> None:
    modules, batch = stages_of("lstm", 4), batch_of(2)
    expected = by_themselves(modules, 2, batch)
    plan = build("interleaved_1f1b", 4, 2, num_ranks=2, slices=2)
    looped(modules, 2, batch, 2, make=lambda stages, m, **how: FromPlan(stages, plan, **how))
    assert furthest(taken(modules), expected) < 1e-12


class Padded(nn.Module):
    """It adds up what its mask lets through, of all positions up to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, past: Any = ()) -> Any:
        y = self.linear(x)
        so_far = torch.cat([*past, y], 1)
        assert so_far.shape[1] == mask.shape[1], "the mask ends where the slice does"
        counted = (so_far * mask.unsqueeze(-1)).cumsum(1)
        return counted[:, -y.shape[1] :], y


def padded_gradients(make: Any, p: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(4)
    modules = [Padded().double() for _ in range(p)]
    x, target = batch_of(2)
    mask = torch.ones(4, 12, dtype=torch.float64)
    mask[1, 7:] = mask[2, 3:] = 0
    loopback = Loopback(1)
    stages = [PipelineStage(module, i, p, "cpu", loopback.rank(0)) for i, module in enumerate(modules)]
    make(stages, **options).step(x, target=target, mask=mask)
    return taken(modules)


def test_a_mask_of_padding() -> None:
    def whole(stages: Any) -> Any:
        return Interleaved1F1B(stages, 2, loss_fn=mse, slices=1, options=bpipe.Options(kwargs_slice_spec={"mask": UpTo()}))

    def in_slices(stages: Any) -> Any:
        return Interleaved1F1B(stages, 2, loss_fn=mse, slices=3, options=bpipe.Options(kwargs_slice_spec={"mask": UpTo()}))

    def given(stages: Any) -> Any:
        plan = build("interleaved_1f1b", 2, 2, num_ranks=1, slices=4)
        return FromPlan(stages, plan, loss_fn=mse, options=bpipe.Options(kwargs_slice_spec={"mask": UpTo()}))

    expected = padded_gradients(whole, 2)
    for make in (in_slices, given):
        assert furthest(padded_gradients(make, 2), expected) < 1e-12


def one_stage(module: nn.Module) -> PipelineStage:
    return PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0))


@pytest.mark.parametrize(
    "plan, options, told",
    [
        (
            build("seq_1f1b", 1, 2, slices=4),
            {"options": bpipe.Options(slice_lengths=[6, 4, 2])},
            r"plan 'seq_1f1b' cuts each microbatch into 4 slices, but slice_lengths=\[6, 4, 2\] has 3: .* a plan with slices=3",
        ),
        (
            build("1f1b", 1, 2),
            {"options": bpipe.Options(slice_lengths=[6, 6])},
            "1f1b takes whole microbatches here, but slice_lengths, a slice spec or loss_of_slices",
        ),
        (
            build("1f1b", 1, 2),
            {"options": bpipe.Options(kwargs_slice_spec={"mask": UpTo()})},
            "or, for FromPlan, by a plan that was built with it",
        ),
        (build("seq_1f1b", 1, 2, slices=2), {"options": bpipe.Options(args_slice_spec=("x",))}, "args_slice_spec contains a str"),
    ],
)
def test_options_that_disagree_with_the_plan(plan: Plan, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        FromPlan(one_stage(stages_of("lstm", 1)[0]), plan, loss_fn=mse, **options)


def test_a_plan_of_slices_for_stages_that_take_none() -> None:
    with pytest.raises(ConfigurationError, match="stage 0 does not take slices: the forward of its Linear has no argument `past`"):
        FromPlan(one_stage(nn.Linear(WIDTH, WIDTH)), build("seq_1f1b", 1, 2, slices=4), loss_fn=mse)


def test_a_plan_whose_slices_are_more_than_the_positions() -> None:
    schedule = FromPlan(one_stage(stages_of("lstm", 1)[0]), build("seq_1f1b", 1, 2, slices=5), loss_fn=mse)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="a sequence of 4 positions cannot be cut into 5 slices"):
        schedule.step(x, target=x)


def test_options_without_slices() -> None:
    rank = Loopback(1).rank(0)
    stages = [PipelineStage(module, i, 2, "cpu", rank) for i, module in enumerate(stages_of("lstm", 2))]
    with pytest.raises(ConfigurationError, match=r"interleaved_1f1b takes whole microbatches here.*by slices=k"):
        Interleaved1F1B(stages, 2, loss_fn=mse, options=bpipe.Options(slice_lengths=[1.0]))


def test_seq_1f1b_of_the_plan_is_the_class() -> None:
    modules, batch = stages_of("attention", 2), batch_of(2)
    run(modules, Seq1F1B, 2, batch, slices=3)
    expected = taken(modules)
    run(modules, lambda stage, m, **how: FromPlan(stage, build("seq_1f1b", 2, m, slices=3), **how), 2, batch)
    assert all(map(torch.equal, taken(modules), expected))
