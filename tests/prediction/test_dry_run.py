"""What a dry run says before the first step is what that step takes, to the byte, and nothing of the modules has changed."""

from __future__ import annotations

import copy
import gc
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import bpipe
from bpipe.api.measured_plans import MeasuredPlans
from bpipe.model.state.side_effects import States, changed, look_at
from tests.models import KINDS, batch_of, directions_of, modules_of, mse
from tests.over import Over, pipeline
from tests.prediction.kinds import MEASURED, PREDICTED, WIDTH, T
from tests.ranks import run_ranks
from tests.torch_private.without import hidden

M = 4
# by schedule: the stages of a rank
SCHEDULES: dict[type[bpipe.Schedule], int] = {
    bpipe.OneFOneB: 1,
    bpipe.GPipe: 1,
    bpipe.ZBH1: 1,
    bpipe.Interleaved1F1B: 2,
    bpipe.ZBV: 2,
    bpipe.DualPipeV: 2,
    bpipe.Chimera: 2,
    bpipe.BitPipe: 4,
}


def balanced(kind: str, schedule: type[bpipe.Schedule], **options: Any) -> tuple[bpipe.Loopback, list[Any], list[nn.Module]]:
    num_ranks = 2 if SCHEDULES[schedule] > 1 else 4
    num_stages = num_ranks * SCHEDULES[schedule]
    modules = modules_of(kind, num_stages // directions_of(schedule))
    modules = [*modules, *copy.deepcopy(modules)][:num_stages]
    loopback, schedules = pipeline(Over(schedule, {"budget": "lowest", **options}), modules, M, mse, num_ranks)
    return loopback, schedules, modules


def is_proven(schedule: bpipe.Schedule) -> bool:
    """Whether the latest step took what was predicted for it."""
    (shapes,) = schedule.session.source._shapes.values()
    return not (shapes.is_predicted or shapes.must_measure or schedule.session.source._num_wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_the_first_step_takes_what_was_predicted(kind: str, schedule: type[bpipe.Schedule]) -> None:
    loopback, schedules, _ = balanced(kind, schedule)
    x, y = batch_of(kind, 2 * M)
    loopback.step(schedules, x, target=y)
    assert [one.session.source._dry_run.failure for one in schedules] == [""] * len(schedules)
    assert all(len(one.session.source._dry_run._count) <= 2 for one in schedules)  # of M microbatches
    assert all(map(is_proven, schedules))
    for rank, one in enumerate(schedules):
        assert one.stats["device_peak_bytes"] == one.plan.device_peak_bytes[rank]


def of_kind(make: Callable[[], nn.Module]) -> tuple[bpipe.Loopback, list[Any], list[nn.Module]]:
    modules = [make() for _ in range(2)]
    return *pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules, M, mse), modules


def step(loopback: bpipe.Loopback, schedules: list[Any]) -> None:
    x = torch.randn(5 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    loopback.step(schedules, x, target=x)


def looks(modules: list[nn.Module]) -> States:
    named = [(f"{i}.{name}", one) for i, module in enumerate(modules) for name, one in module.named_modules()]
    return look_at(torch.device("cpu"), named, [])


def num_fakes() -> int:
    gc.collect()
    return sum(type(one) is FakeTensor for one in gc.get_objects())


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", PREDICTED)
def test_modules_are_predicted_and_stay_as_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback, schedules, modules = of_kind(PREDICTED[kind])
    before, predict, fakes = looks(modules), MeasuredPlans._predict, num_fakes()
    differences: list[str | None] = []

    def and_look(source: MeasuredPlans, *arguments: Any) -> None:
        predict(source, *arguments)
        differences.extend(map(changed, before, looks(modules)))
        assert num_fakes() == fakes

    monkeypatch.setattr(MeasuredPlans, "_predict", and_look)
    step(loopback, schedules)
    assert differences[:3] == [None] * 3
    assert [one.session.source._dry_run.failure for one in schedules] == ["", ""]
    assert all(map(is_proven, schedules))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("kind", MEASURED)
def test_what_activations_decide_is_measured_and_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bpipe")
    make, why = MEASURED[kind]
    loopback, schedules, modules = of_kind(make)
    step(loopback, schedules)
    assert schedules[0].plan.sizes is None and not any(type(p.grad) is FakeTensor for m in modules for p in m.parameters())
    said = [one.message for one in caplog.records if "this step measures, because sizes cannot be known before it" in one.message]
    assert len(said) == 1 and why in said[0]
    for _ in range(2):
        step(loopback, schedules)
    assert schedules[0].plan.sizes is not None


def test_no_hook_of_the_users_is_called() -> None:
    """Those of a forward may change what is saved, so that the step measures."""
    loopback, schedules, modules = of_kind(PREDICTED["plain"])
    calls: list[str] = []
    modules[0].down.register_full_backward_hook(lambda *_: calls.append("backward"))
    modules[1].up.weight.register_hook(lambda _: calls.append("gradient"))
    modules[1].up.weight.register_post_accumulate_grad_hook(lambda _: calls.append("added"))
    step(loopback, schedules)
    assert schedules[0].session.source._dry_run.failure == ""
    assert Counter(calls) == dict.fromkeys(["backward", "gradient", "added"], M)
    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        loopback, schedules, modules = of_kind(PREDICTED["plain"])
        calls.clear()
        register(modules[1].up, lambda *_: calls.append("forward"))
        step(loopback, schedules)
        assert schedules[0].session.source._dry_run.failure == "rank 1: modules have hooks of their forward"
        assert calls == ["forward"] * M


def over_processes(rank: int, asks: bool) -> tuple[str, bool, list[T], T]:
    """Steps of one rank, of which the second one's module may ask for its activations."""
    torch.manual_seed(rank)
    module = MEASURED["asking"][0]() if asks and rank == 1 else PREDICTED["plain"]()
    schedule = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 3, "cpu"), M, loss_fn=mse), "lowest")
    x = torch.randn(5 * M, WIDTH, generator=torch.Generator().manual_seed(1))
    schedule.step(x, target=x)
    first = schedule.session.source._dry_run.failure, schedule.plan.sizes is not None
    schedule.step(x, target=x)
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    schedule.close()
    return *first, gradients, torch.get_rng_state()


def test_all_ranks_measure_if_one_of_them_has_to() -> None:
    predicted, measured = (run_ranks(over_processes, 3, asks) for asks in (False, True))
    assert [one[:2] for one in predicted] == [("", True)] * 3
    assert all(is_planned is False and why.startswith("rank 1: UnpredictableError: ") for why, is_planned, *_ in measured)
    for one, other in zip(predicted, measured):
        assert one[2] and all(map(torch.equal, one[2], other[2])) and torch.equal(one[3], other[3])


def test_integers_without_values_of_their_own_decide_nothing() -> None:
    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = PREDICTED["plain"]()

        def forward(self, x: T, mask: T) -> T:
            assert mask.shape == (3, 3)
            return self.layer(x)

    for mask in (torch.eye(3, dtype=torch.int64).to_sparse(), torch.ones(3, 3, dtype=torch.int64, device="meta")):
        loopback, schedules, _ = of_kind(Ignoring)
        xs = torch.randn(5 * M, WIDTH).chunk(M)
        given = {"arg_mbs": [(x,) for x in xs], "kwarg_mbs": [{"mask": mask}] * M, "target_mbs": list(xs)}
        loopback.step(schedules, **given, return_outputs=False)
        assert not any(one.session.source._num_wrong for one in schedules)


@pytest.mark.parametrize("name", ["FakeTensorMode", "_disable_current_modes", "_get_current_dispatch_mode_stack"])
def test_without_a_private_name_of_torch_a_step_measures(name: str) -> None:
    loopback, schedules, _ = of_kind(PREDICTED["plain"])
    with hidden(name):
        step(loopback, schedules)
    assert f"UnsupportedTorchError: bpipe needs {name}" in schedules[0].session.source._dry_run.failure
    assert schedules[0].plan.sizes is None
