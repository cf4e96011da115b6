"""Modules that change between steps: layers, dtypes, buffers, hooks, what is trained. What was learned before is not trusted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import bpipe
from bpipe.memory.makeup import Makeups
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, pipeline
from tests.found import finds_sizes
from tests.models import state_of
from tests.ranks import run_ranks
from tests.test_memory_use import Watched

pytestmark = pytest.mark.usefixtures("one_thread")

M, ROWS, WIDTH, STEPS = 4, 2, 16, 4
LARGE = 2**12  # rows of a buffer that a recomputation copies only where it is written
Modules = list[nn.Module]
T = torch.Tensor


class Stage(nn.Module):
    """Two layers and a place for others, in the dtype of the weights whatever it gets."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.more = nn.Sequential(nn.Identity())

    def forward(self, x: T) -> T:
        x = x.to(next(self.parameters()).dtype)
        return x + self.more(self.second(torch.tanh(self.first(x))))


class Wide(nn.Module):
    """Saves much more than it gets, and has nothing to train."""

    def forward(self, x: T) -> T:
        return torch.sigmoid(torch.tanh(x.repeat(1, 8)))[:, :WIDTH]


class Counter(nn.Module):
    """Writes its buffer in each forward, and reads it."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(rows, WIDTH))

    def forward(self, x: T) -> T:
        with torch.no_grad():
            self.rows.mul_(1.01).add_(0.1)
        return x * self.rows[0].clone()


class Growing(nn.Module):
    """Replaces its buffer by a larger one in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: T) -> T:
        self.calls += 1
        if int(self.calls) in (2, M + 2):
            self.seen = torch.cat([self.seen, self.seen])
        return torch.sin(x)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: T) -> T:
        return self.base(x) + self.b(self.a(x))


class Lazy(nn.LazyLinear):
    """Gets its weights in the first forward, and draws no random numbers for them."""

    def reset_parameters(self) -> None:
        if self.in_features:
            nn.init.eye_(self.weight)
            nn.init.zeros_(self.bias)


class Doubled(nn.Module):
    def forward(self, weight: T) -> T:
        return torch.sigmoid(weight) + weight * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: T) -> T:
        return self.second(torch.tanh(self.first(x)))


class Image(nn.Module):
    """A convolution over [b, 4, 2, 2], whose output lies in memory as its weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: T) -> T:
        return torch.tanh(self.conv(x.view(-1, 4, 2, 2) if x.ndim == 2 else x))


class Flat(Image):
    def forward(self, x: T) -> T:
        return super().forward(x).flatten(1)


def stages(kind: Callable[[], nn.Module] = Stage) -> Callable[[], Modules]:
    return lambda: [kind() for _ in range(NUM_STAGES)]


def images() -> Modules:
    return [Image(), Image(), Image(), Flat()]


def lazy() -> Modules:
    return [nn.Sequential(Lazy(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_STAGES)]


def with_frozen_layers() -> Modules:
    modules = stages()()
    each(freeze)(modules)
    return modules


def each(change: Callable[[Any], object]) -> Callable[[Modules], None]:
    """The change of every stage."""
    return lambda modules: [change(module) for module in modules] and None


def freeze(stage: Stage) -> None:
    stage.first.requires_grad_(False)


def unfreeze(stage: Stage) -> None:
    stage.first.requires_grad_(True)


def add_layers(modules: Modules) -> None:
    modules[1].more.extend([nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))])


def remove_a_layer(modules: Modules) -> None:
    del modules[1].more[2]


def widen(modules: Modules) -> None:
    modules[1].first, modules[1].second = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)


def swap(make: Callable[[], nn.Module]) -> Callable[[Modules], None]:
    return lambda modules: modules[1].more.__setitem__(0, make())


def replace_a_stage(modules: Modules) -> None:
    modules[2] = Stage(64)
    modules[2].more[0] = Counter(LARGE)


def adapt(stage: Stage) -> None:
    stage.first = Adapted(stage.first)


def put_a_hook_on(stage: Stage) -> None:
    stage.second.register_forward_hook(lambda module, args, output: torch.sigmoid(torch.sin(output)))


def replace_a_forward(stage: Stage) -> None:
    forward = stage.second.forward
    stage.second.forward = lambda x: torch.sigmoid(forward(x))


def larger_buffer(modules: Modules) -> None:
    modules[1].more[0].rows = torch.ones(LARGE, WIDTH)


def untie(stage: Tied) -> None:
    stage.second.weight = nn.Parameter(stage.second.weight.detach().clone())


def share_memory(stage: Tied) -> None:
    stage.second.weight.data = stage.first.weight.data


def train_every_other(first: int) -> Callable[[Modules], None]:
    """Like the two networks of a GAN; in between gradients are given up."""

    def toggle(modules: Modules) -> None:
        for i, module in enumerate(modules):
            module.zero_grad()
            module.first.requires_grad_(i % 2 == first)

    return toggle


@dataclass
class Changing:
    """Modules, and what is done to them before some of the steps.

    Args:
        make: the modules.
        before: changes, by the number of the step that comes after them.
        measured: the steps in which a schedule that is balanced in bytes finds sizes anew.
    """

    make: Callable[[], Modules]
    before: Mapping[int, Callable[[Modules], object]] = field(default_factory=dict)
    measured: tuple[int, ...] = (0,)

    def made(self) -> Modules:
        torch.manual_seed(0)
        return self.make()

    def change(self, modules: Modules, step: int) -> None:
        if step in self.before:
            torch.manual_seed(step)
            self.before[step](modules)

    def alone(self) -> list[list[Any]]:
        """Gradients and buffers of a single process, step by step."""
        modules, found = self.made(), []
        for step in range(STEPS):
            self.change(modules, step)
            x, y = batch(step)
            for part, target in zip(x.chunk(M), y.chunk(M)):
                for module in modules:
                    part = module(part)
                (loss(part, target) / M).backward()
            found.append(state(modules))
        return found

    def check(self, names: Sequence[str]) -> None:
        expected = self.alone()
        for name in names:
            modules = self.made()
            loopback, schedules = pipeline(SCHEDULES[name], modules, loss, M)
            measured = []
            for step in range(STEPS):
                self.change(modules, step)
                put_in(modules, schedules)
                run(loopback, schedules, step)
                assert_equal(state(modules), expected[step], f"{name}, step {step}")
                check_static(modules, schedules, f"{name}, step {step}")
                if name == "bytes" and finds_sizes(schedules[0]):
                    measured.append(step)
            if name == "bytes":
                assert tuple(measured) == self.measured
            else:
                assert activations(schedules) == self.as_from_now_on(modules, name), name

    def as_from_now_on(self, modules: Modules, name: str) -> list[tuple[float, ...]]:
        """The peaks of schedules that have not seen the modules before."""
        loopback, schedules = pipeline(SCHEDULES[name], modules, loss, M)
        for step in range(2):
            run(loopback, schedules, step)
        return activations(schedules)


def put_in(modules: Modules, schedules: Sequence[bpipe.Schedule]) -> None:
    for schedule in schedules:
        for index, stage in schedule.session.context.stages.items():
            stage.submod = modules[index]


def run(loopback: bpipe.Loopback, schedules: Sequence[bpipe.Schedule], step: int) -> None:
    x, y = batch(step)
    loopback.step(schedules, x, target=y, return_outputs=False)


def batch(step: int) -> tuple[T, T]:
    x, y = torch.randn(2, M * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


def loss(output: T, target: T) -> T:
    return (output.float() - target).square().mean()  # in a storage of its own, unlike mse_loss on CPU


def state(modules: Modules) -> list[Any]:
    found = [state_of(module) for module in modules]
    return [([None if g is None else g.clone() for g in gradients], buffers) for gradients, buffers in found]


def assert_equal(found: list[Any], expected: list[Any], where: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
            assert a is b is None or torch.equal(a, b), where


def check_static(modules: Modules, schedules: Sequence[bpipe.Schedule], where: str) -> None:
    """What stays is what a count of the storages finds, and it is a part of the device's peak."""
    for schedule in schedules:
        stats, held = schedule.stats, [modules[index] for index in schedule.session.context.stages]
        losses = 4 * M if NUM_STAGES - 1 in schedule.session.context.stages else 0
        assert stats["static_bytes"] == counted(held) + losses + stats["held_bytes"], where
        assert stats["device_peak_bytes"] >= stats["static_bytes"] + stats["remote_buffer_bytes"], where


def counted(modules: Modules) -> int:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    tensors = [*parameters, *gradients, *(buffer for module in modules for buffer in module.buffers())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def activations(schedules: Sequence[bpipe.Schedule]) -> list[tuple[float, ...]]:
    """The peaks of each rank, without the buffers for remote activations, which do not shrink."""
    names = ("peak_bytes", "predicted_peak_bytes")
    return [tuple(one.stats[name] - one.stats["remote_buffer_bytes"] for name in names) for one in schedules]


CHANGES: dict[str, Changing] = {
    "unfrozen": Changing(with_frozen_layers, {2: each(unfreeze)}, (0, 2)),
    "layers added and removed": Changing(stages(), {1: add_layers, 2: remove_a_layer}, (0, 1, 2)),
    "widened": Changing(stages(), {2: widen}, (0, 2)),
    "to bfloat16": Changing(stages(), {2: each(nn.Module.bfloat16)}, (0, 2)),
    "another module of no weights": Changing(stages(), {2: swap(Wide)}, (0, 2)),
    "another buffer that forwards write": Changing(stages(), {2: swap(lambda: Counter(LARGE))}, (0, 2)),
}
SIBLINGS: dict[str, Changing] = {
    "to float64 and back": Changing(stages(), {1: each(nn.Module.double), 3: each(nn.Module.float)}, (0, 1)),
    "a whole stage": Changing(stages(), {2: replace_a_stage}, (0, 2)),
    "adapters": Changing(stages(), {2: each(adapt)}, (0, 2)),
    "a parametrization": Changing(
        stages(), {2: each(lambda one: parametrize.register_parametrization(one.first, "weight", Doubled()))}, (0, 2)
    ),
    "pruned": Changing(stages(), {2: each(lambda one: prune.random_unstructured(one.first, "weight", 0.5))}, (0, 2)),
    "fake quantization": Changing(stages(), {2: swap(torch.ao.quantization.FakeQuantize)}, (0, 2)),
    "a buffer that is replaced by a larger one": Changing(stages(), {0: swap(Counter), 2: larger_buffer}, (0, 2)),
    "a buffer that grows in a step": Changing(stages(), {0: swap(Growing)}, (0, 1, 2)),
    "trained by turns": Changing(stages(), {step: train_every_other(step % 2) for step in range(STEPS)}, (0, 1)),
    "gradients that come and go": Changing(
        stages(), {step: each(lambda one, step=step: one.zero_grad(set_to_none=step % 2 == 0)) for step in range(STEPS)}
    ),
    "gradients of what is frozen": Changing(stages(), {1: each(freeze), 3: each(nn.Module.zero_grad)}, (0, 1)),
    "lazy layers": Changing(lazy, {}, (0, 1)),
    "untied": Changing(stages(Tied), {2: each(untie)}, (0, 2)),
    "tied by their memory": Changing(stages(Tied), {1: each(untie), 2: each(share_memory)}, (0, 1)),
    "channels last": Changing(images, {2: each(lambda one: one.to(memory_format=torch.channels_last))}, (0, 2)),
    "hooks": Changing(stages(), {2: each(put_a_hook_on)}, (0, 2)),
    "another forward": Changing(stages(), {2: each(replace_a_forward)}, (0, 2)),
    "in eval mode and back": Changing(stages(), {1: each(nn.Module.eval), 3: each(nn.Module.train)}, (0, 1)),
}
OTHERS = ("recompute", "1f1b", "balanced_1f1b", "zb_h1", "interleaved", "zbv")


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_learned_anew_under_every_kind_of_schedule(what: str) -> None:
    CHANGES[what].check(("1f1b", "balanced_1f1b", "bytes", "recompute", "interleaved", "zb_h1"))


@pytest.mark.parametrize("what", SIBLINGS)
def test_other_changes(what: str) -> None:
    other = OTHERS[list(SIBLINGS).index(what) % len(OTHERS)]
    SIBLINGS[what].check(("bytes", other))


def counted_by_rank(rank: int, p: int) -> list[str]:
    """What is wrong in the peaks of one rank, before and after changes, by a count of its live storages."""
    wrong = []
    for what, name in PEAKS.items():
        modules = CHANGES[what].made()
        stage = bpipe.PipelineStage(modules[rank], rank, p, "cpu")
        watched = Watched(SCHEDULES[name](stage, M, loss_fn=loss), modules[rank])
        for step in range(STEPS):
            CHANGES[what].change(modules, step)
            stage.submod = watched.module = modules[rank]
            watched.step(*batch(step))
            stats = watched.schedule.stats
            peaks = [watched.peak, stats["peak_bytes"], stats["predicted_peak_bytes"]]
            static = counted([modules[rank]]) + 4 * M * (rank == p - 1)
            if len({*peaks}) > 1 or static + stats["held_bytes"] != stats["static_bytes"]:
                wrong.append(f"{what} under {name}, step {step}: {peaks}, {static} and {stats}")
    return wrong


PEAKS = {"another module of no weights": "1f1b", "to bfloat16": "bytes", "widened": "balanced_1f1b", "unfrozen": "gpipe"}


def test_peaks_are_those_of_a_count_of_storages_before_and_after_a_change() -> None:
    for wrong in run_ranks(counted_by_rank, 2, 2):
        assert not wrong


class Scaled(nn.Module):
    """A loss with a weight, which a loop may move or freeze, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output: T, target: T) -> T:
        many = output.repeat(1, 4) if self.scale.dtype is torch.float64 else output
        return F.mse_loss(many[:, :WIDTH] * self.scale, target.to(self.scale.dtype))


def test_a_loss_that_has_changed_is_measured_anew() -> None:
    modules, scaled = CHANGES["widened"].made(), Scaled()
    loopback, schedules = pipeline(SCHEDULES["1f1b"], modules, scaled, M)
    run(loopback, schedules, 0)
    before = activations(schedules)
    scaled.double()
    run(loopback, schedules, 1)
    loopback, fresh = pipeline(SCHEDULES["1f1b"], modules, scaled, M)
    run(loopback, fresh, 1)
    assert activations(schedules) == activations(fresh) != before


def test_a_stage_that_was_replaced_is_given_up() -> None:
    """Nothing that was learned of it keeps it alive, where forwards run twice neither."""
    modules = stages()()
    loopback, schedules = pipeline(SCHEDULES["recompute"], modules, loss, M)
    run(loopback, schedules, 0)
    weight = weakref.ref(modules[0].first.weight)
    modules[0] = Stage()
    put_in(modules, schedules)
    assert weight() is None


def number(makeups: Makeups, module: nn.Module) -> int:
    return makeups.number(list(module.modules()), list(module.parameters()))


def test_what_does_not_change_a_makeup() -> None:
    module, makeups = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Makeups()
    first = number(makeups, module)
    module(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        module[0].weight.sub_(module[0].weight.grad)
    module.zero_grad()
    module.load_state_dict(module.state_dict())
    assert number(makeups, module) == first
    module.eval().requires_grad_(False)  # of which a stage's mode tells
    assert number(makeups, module) == first
    numbers = set()
    for _ in range(3):  # as a loop that looks into each step does
        handle = module[0].register_forward_hook(partial(print, end=""))
        numbers.add(number(makeups, module))
        handle.remove()
        assert number(makeups, module) == first
    assert len(numbers) == 1 and numbers != {first}


def test_a_module_at_the_place_of_a_dead_one_is_another() -> None:
    module, makeups = nn.Sequential(nn.Dropout()), Makeups()
    numbers, other = [number(makeups, module)], module[0]
    for _ in range(9):
        module[0] = nn.Dropout()
        numbers.append(number(makeups, module))
    assert len(set(numbers)) == 10
    module[0] = other
    assert number(makeups, module) == numbers[0]


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), nn.parameter.UninitializedBuffer()])
def test_buffers_that_have_no_strides_or_no_shape(tensor: T) -> None:
    module, makeups = nn.Linear(2, 2), Makeups()
    before = number(makeups, module)
    module.register_buffer("odd", tensor)
    assert before != number(makeups, module) == number(makeups, module)


def test_what_is_not_initialised_takes_nothing_yet() -> None:
    class Unused(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.later = nn.LazyLinear(3)

    modules = stages(Unused)()
    loopback, schedules = pipeline(SCHEDULES["1f1b"], modules, loss, M)
    run(loopback, schedules, 0)
    stage = Stage()
    assert schedules[0].stats["static_bytes"] == 2 * sum(parameter.nbytes for parameter in stage.parameters())
