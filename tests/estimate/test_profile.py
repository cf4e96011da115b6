"""Measuring a stage alone: the bytes of a real run, nothing left behind, and clear words for what cannot be measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.estimate import Measurement, Profile, costs_of
from bpipe.estimate.profile import profile
from bpipe.memory.saved.footprint import Footprint
from bpipe.schedules import Op, simulate
from tests.clock import Clock
from tests.models import KINDS, Block, ConvNorm, batch_of, modules_of, mse

P, M, ROWS = 4, 5, 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products on busy cores: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs_of(modules: list[nn.Module], value: Any) -> list[Any]:
    """What each stage gets."""
    inputs = []
    with torch.no_grad():
        for module in modules:
            inputs.append(value)
            value = module(*value) if isinstance(value, tuple) else module(value)
    return inputs


def footprint(measurement: Measurement) -> Footprint:
    return Footprint(measurement.own_bytes, measurement.movable_bytes, measurement.shared_bytes)


@cache
def stages_alone(kind: str) -> list[Profile]:
    modules = modules_of(kind, P)
    x, y = batch_of(kind, ROWS)
    found = []
    for index, (module, value) in enumerate(zip(modules, inputs_of(deepcopy(modules), x))):
        last = {"loss_fn": mse, "target": y} if index == P - 1 else {}
        found.append(profile(module, value, [ROWS], is_first=index == 0, repeats=1, **last))
    return found


def in_a_run(kind: str, rule: type[bpipe.Schedule]) -> list[bpipe.Schedule]:
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules_of(kind, P))]
    schedules = [rule(stage, M, loss_fn=mse) for stage in stages]
    x, y = batch_of(kind, ROWS * M)
    loopback.step(schedules, x, target=y)
    return schedules


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"frozen"}))
@pytest.mark.parametrize("rule", [bpipe.OneFOneB, bpipe.BalancedOneFOneB])
def test_bytes_are_those_of_a_run(kind: str, rule: type[bpipe.Schedule]) -> None:
    profiles, schedules = stages_alone(kind), in_a_run(kind, rule)
    for index, (one, schedule) in enumerate(zip(profiles, schedules)):
        saved = {(f.own_bytes, f.movable_bytes, f.shared_bytes) for f in schedule.ledger.footprints.values()}
        assert saved == {footprint(one.at(ROWS))[:3]}, f"stage {index}"
    simulated = simulate(schedules[0].plan, costs_of(profiles, ROWS))
    for rank, schedule in enumerate(schedules):
        assert simulated.peak_bytes(rank) == schedule.stats["peak_bytes"]
        assert simulated.actions[rank].static_bytes == profiles[rank].static_bytes()


def test_messages_are_counted() -> None:
    (one,) = profile(Block(), torch.randn(1, 16, 32), [3], repeats=1).measurements
    assert one.output_bytes == one.input_gradient_bytes == 3 * 16 * 32 * 4
    (first,) = profile(Block(), torch.randn(1, 16, 32), [3], is_first=True, repeats=1).measurements
    assert first.input_gradient_bytes == 0 and first.own_bytes < one.own_bytes  # its input is the user's


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.embedding(tokens).tanh() * scale


def test_tokens_mean_the_first_stage() -> None:
    (one,) = profile(Tokens(), (torch.randint(10, (1, 6)), 2.0), [2], repeats=1).measurements
    assert (one.own_bytes, one.input_gradient_bytes, one.output_bytes) == (2 * 6 * 4 * 4, 0, 2 * 6 * 4 * 4)


def test_bytes_grow_with_rows_and_rows_are_repeated() -> None:
    for rows in (1, 3):
        sizes = profile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(rows, 4), [4, 1, 2, 2], repeats=1)
        assert [one.microbatch_size for one in sizes.measurements] == [1, 2, 4]
        assert [one.own_bytes for one in sizes.measurements] == [32, 64, 128]


def test_parameters_are_counted() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.float64)
    module[0].bias.requires_grad_(False)
    one = profile(module, torch.randn(2, 4, dtype=torch.float64), [2], repeats=1)
    assert (one.num_parameters, one.num_trainable) == (28, 24)
    assert (one.parameter_bytes, one.trainable_bytes, one.gradient_bytes) == (28 * 8, 24 * 8, 24 * 8)
    assert one.buffer_bytes == 2 * 4 * 8 + 8
    assert (one.name, one.device) == ("Sequential", "cpu")


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06)
        return gradients[0] * 2


class Slow(nn.Module):
    """Sleeps for 0.02 seconds forward and 0.06 backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock().patch_all(monkeypatch)


@pytest.mark.usefixtures("clock")
def test_times() -> None:
    (one,) = profile(Slow(), torch.randn(1, 2), repeats=3).measurements
    assert (one.forward_s, one.backward_s) == pytest.approx((0.02, 0.06), abs=1e-6)
    (alone,) = profile(Slow(), torch.randn(1, 2), repeats=1, backward=False).measurements
    assert (alone.own_bytes, alone.backward_s, alone.input_s, alone.weight_s) == (0, 0.0, None, None)


class SleepForWeights(torch.autograd.Function):
    """Sleeps for 0.03 seconds where the gradient of a weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return gradients[0]


class Halved(nn.Module):
    """Sleeps for 0.02 seconds forward, 0.06 for the gradient of its input, and 0.03 for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x) @ SleepForWeights.apply(self.weight)


@pytest.mark.usefixtures("clock")
def test_halves_of_a_backward() -> None:
    """As a split backward runs in a step: on the first stage, whose input needs no gradient, all of it waits for W."""
    module = Halved()
    (one,) = profile(module, torch.randn(1, 2), repeats=3).measurements
    assert (one.input_s, one.weight_s, one.backward_s) == pytest.approx((0.06, 0.03, 0.09), abs=1e-6)
    (first,) = profile(module, torch.randn(1, 2), repeats=1, is_first=True).measurements
    assert (first.input_s, first.weight_s) == pytest.approx((0.0, 0.03), abs=1e-6)
    loopback = bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(Halved(), i, 2, "cpu", loopback.rank(i)) for i in range(2)]
    schedules = [bpipe.ZBH1(stage, 2, loss_fn=mse) for stage in stages]
    with bpipe.trace(schedules) as trace:
        loopback.step(schedules, torch.randn(2, 2), target=torch.randn(2, 2))
    spans = [span for rank in range(2) for span in trace.timelines[0].computations(rank)]
    taken = {(span.action.op, span.action.stage): span.seconds for span in spans}
    assert (taken[Op.I, 1], taken[Op.W, 1], taken[Op.I, 0], taken[Op.W, 0]) == pytest.approx((0.06, 0.03, 0.0, 0.03), abs=1e-6)


@pytest.mark.usefixtures("clock")
def test_halves_of_a_stage_with_hooks_are_those_of_its_later_steps() -> None:
    """The first backward runs as a whole, to hear whether hooks queue callbacks; it is not timed."""
    module = Halved()
    module.weight.register_hook(lambda gradient: gradient * 1)
    (one,) = profile(module, torch.randn(1, 2), repeats=1).measurements
    assert (one.input_s, one.weight_s) == pytest.approx((0.06, 0.03), abs=1e-6)


# Left as it was.


class Everything(nn.Module):
    """Dropout, batch statistics, a buffer changed in place, one replaced, and one that appears."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.last = x.detach().sum()
        if "more" not in self._buffers:
            self.register_buffer("more", torch.ones(1))
        return self.dropout(self.norm(self.linear(x)))


class Fails(Everything):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if len(x) > 2:
            raise ValueError("the user's own")
        return y


def state(module: nn.Module) -> tuple[Any, ...]:
    gradients = [parameter.grad for parameter in module.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules()]
    return [module.training for module in module.modules()], gradients, dict(module.named_buffers()), hooks


@pytest.mark.parametrize("mode", ["train", "eval", "no gradients yet", "fails"])
def test_the_module_is_left_as_it_was(mode: str) -> None:
    module = Fails() if mode == "fails" else Everything()
    module.train(mode != "eval")
    module.norm.eval()
    if mode != "no gradients yet":
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
    before, values, grads = state(module), deepcopy(module.state_dict()), [deepcopy(p.grad) for p in module.parameters()]
    example = torch.randn(2, 4)
    seed, python = torch.get_rng_state(), random.getstate()
    if mode == "fails":
        with pytest.raises(ValueError, match="the user's own") as caught:
            profile(module, example, [1, 2, 4])
        assert caught.value.__notes__ == ["while bpipe.profile ran Fails on a microbatch of 4"]
    else:
        profile(module, example, [2, 4])
    after = state(module)
    assert before[0] == after[0] and before[3] == after[3]
    assert all(old is new for old, new in zip(before[1], after[1], strict=True))
    assert before[2].keys() == after[2].keys() and all(before[2][name] is after[2][name] for name in before[2])
    assert values.keys() == module.state_dict().keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in module.state_dict().items())
    assert all(old is None or torch.equal(old, p.grad) for old, p in zip(grads, module.parameters()))
    assert torch.equal(seed, torch.get_rng_state()) and python == random.getstate()
    assert not example.requires_grad and example.grad is None


def test_autocast_and_no_grad_of_the_caller() -> None:
    module, example = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (half,) = profile(module, example, repeats=1).measurements
    (full,) = profile(module, example, repeats=1).measurements
    assert half.output_bytes == 16 and full.output_bytes == 32
    with torch.no_grad():
        assert profile(module, example, repeats=1).measurements[0].own_bytes == full.own_bytes


def test_advice_takes_it() -> None:
    one = profile(Block(), torch.randn(1, 16, 32), [1, 2], repeats=1)
    assert Profile.from_json(one.to_json()) == one
    from bpipe.estimate.advisor import advise

    advice = advise(one, num_stages=4, batch=8, memory_bytes=10 * 2**20)
    assert advice.best is not None and {candidate.microbatch_size for candidate in advice.candidates} == {1, 2}


def test_advice_refuses_forwards_alone() -> None:
    from bpipe.estimate.advisor import advise

    alone = profile(Block(), torch.randn(1, 16, 32), [1], repeats=1, backward=False)
    with pytest.raises(ConfigurationError, match="only the forward of Block was measured"):
        advise(alone, num_stages=4, batch=8, memory_bytes=10 * 2**20)


# Bad input.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: profile(5, torch.ones(1, 4)), "profile measures an nn.Module, got int"),  # type: ignore[arg-type]
        (lambda: profile(nn.Linear(4, 4), None), "the example has no tensor"),
        (lambda: profile(nn.Linear(4, 4), torch.ones(())), "dimension 0 must be rows"),
        (lambda: profile(nn.Linear(4, 4), torch.ones(0, 4)), "dimension 0 must be rows"),
        (lambda: profile(nn.Linear(4, 4), torch.ones(1, 4), []), "microbatch_sizes"),
        (lambda: profile(nn.Linear(4, 4), torch.ones(1, 4), [0]), "microbatch size=0"),
        (lambda: profile(nn.Linear(4, 4), torch.ones(1, 4), "2"), "microbatch size='2'"),  # type: ignore[arg-type]
        (lambda: profile(nn.Linear(4, 4), torch.ones(1, 4), repeats=0), "repeats=0"),
        (lambda: profile(nn.Linear(4, 4, device="meta"), torch.ones(1, 4)), "not there yet"),
        (lambda: profile(nn.LazyLinear(4), torch.ones(1, 4)), "not there yet"),
    ],
)
def test_bad_input(call: Callable[[], Profile], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_optimizers_in_the_backward_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigurationError, match="post-accumulate-grad hook"):
        profile(module, torch.ones(1, 4))


def test_nothing_to_train() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(StageError, match="needs a gradient") as caught:
        profile(frozen, torch.ones(1, 4), is_first=True)
    assert "microbatch of 1" in caught.value.__notes__[0]
    (one,) = profile(frozen, torch.ones(1, 4), is_first=True, backward=False, repeats=1).measurements
    assert one.own_bytes == 0
    assert profile(frozen, torch.ones(1, 4), repeats=1).num_trainable == 0  # a frozen stage in the middle has a backward


def test_outputs_and_losses_that_cannot_be_used() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {1, 2}

    with pytest.raises(StageError, match="cannot be sent"):
        profile(Odd(), torch.ones(1, 4))
    with pytest.raises(StageError, match="loss_fn returned"):
        profile(nn.Linear(4, 4), torch.ones(1, 4), loss_fn=lambda output, target: output)


def test_the_last_stage_keeps_its_loss() -> None:
    x, y = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    plain, last = (profile(ConvNorm(), x, [2], repeats=1, **more).at(2) for more in ({}, {"loss_fn": F.mse_loss, "target": y}))
    assert last.output_bytes == 0 < plain.output_bytes and last.input_gradient_bytes == plain.input_gradient_bytes
