"""Hooks that are about a backward as a whole: on several tensors, and callbacks for its end. Split backwards are whole for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

from bpipe.errors import StageError
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Case, M, pipeline
from tests.edge_cases.test_split_hooks import WIDTH, Stage, T, batch, seen_by
from tests.live import LiveRanks

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = NUM_STAGES - 1
SPLIT = ["zb_h1", "zb_h2", "zbv", "v_half", "dualpipe_v"]
SOME = ["1f1b", "zb_h1", "dualpipe_v"]


def queue(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)


class Mixed(Stage):
    """The issue's own: an activation, and a tensor that leads to a parameter alone."""

    mode: Any = "all"

    def forward(self, x: T) -> T:
        y, weight = self.first(x), self.second.weight * 2
        register_multi_grad_hook([y, weight], self.hooked, mode=self.mode)
        return F.linear(torch.tanh(y), weight)

    def hooked(self, gradients: Any) -> None:
        self.see("mixed", *(gradients if isinstance(gradients, (tuple, list)) else [gradients]))


class MixedAny(Mixed):
    mode = "any"


class BesideOnly(Stage):
    """Two tensors on two branches."""

    def forward(self, x: T) -> T:
        first, second = self.first.weight * 2, self.second.weight.tanh()
        register_multi_grad_hook([first, second], lambda gradients: self.see("beside", *gradients))
        return F.linear(torch.tanh(F.linear(x, first)), second)


class WithInput(Stage):
    """The stage's input, a view and what is not used."""

    def forward(self, x: T) -> T:
        weight, unused = self.second.weight.t(), self.first.weight * 2
        tensors = [weight, unused, *([x] if x.requires_grad else [])]
        register_multi_grad_hook(tensors, lambda gradients: self.see("input", *gradients))
        return torch.tanh(self.first(x)) @ weight


class InAModuleHook(Stage):
    """As torch's module trackers do."""

    def hook(self) -> None:
        self.second.register_forward_hook(self.track)

    def track(self, module: nn.Module, args: tuple[T, ...], output: T) -> None:
        register_multi_grad_hook([output, self.first.weight * 1, *args], lambda gradients: self.see("tracked", *gradients[::2]))


class SomeMicrobatches(Stage):
    """Others are in halves."""

    num_forwards = 0

    def forward(self, x: T) -> T:
        weight = self.second.weight * 2
        y = self.first(x)
        self.num_forwards += 1
        if self.num_forwards % 3 == 0:
            register_multi_grad_hook([y, weight], lambda gradients: self.see("some", *gradients))
        return F.linear(torch.tanh(y), weight)


class OfTheOutput(Stage):
    """At a stage's output its backward begins, which torch does not count among the nodes of a backward."""

    def forward(self, x: T) -> T:
        output = super().forward(x)
        register_multi_grad_hook([output, self.first.bias * 1], lambda gradients: self.see("output", *gradients[:1]), mode="all")
        return output


class Queues(Stage):
    """The issue's own: hooks on parameters queue a callback, which looks at all gradients."""

    is_queued = False

    def hook(self) -> None:
        for one in self.hooked():
            one.register_hook(lambda gradient: self.queue())

    def hooked(self) -> Sequence[T]:
        return list(self.parameters())

    def queue(self) -> None:
        if not self.is_queued:
            self.is_queued = True
            queue(self.finish)

    def finish(self) -> None:
        self.is_queued = False
        self.see("end", *(one.grad for one in self.parameters()))


class QueuesEach(Queues):
    """Once for each hook."""

    def queue(self) -> None:
        queue(self.finish)


class QueuesFromMatrices(Queues):
    """Whose gradients are weight halves."""

    def hooked(self) -> Sequence[T]:
        return [self.first.weight, self.second.weight]


class QueuesAfterwards(Queues):
    """From hooks for when a gradient has been added."""

    def hook(self) -> None:
        self.second.weight.register_post_accumulate_grad_hook(lambda one: self.queue())


class QueuesFromActivations(Queues):
    def hook(self) -> None:
        pass

    def between(self, x: T) -> T:
        x.register_hook(lambda gradient: self.queue())
        return x


class QueuesFromModules(Queues):
    def hook(self) -> None:
        self.second.register_full_backward_hook(lambda *_: self.queue())


class QueuesFromAccumulators(Queues):
    """On the nodes that add gradients up, as before there were hooks for that."""

    def hook(self) -> None:
        self.nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in self.parameters()]
        for node in self.nodes:
            node.register_hook(lambda *_: self.queue())


class QueuesFromCallbacks(Queues):
    """A callback queues another one."""

    def finish(self) -> None:
        self.see("first", *(one.grad for one in self.parameters()))
        queue(super().finish)


class QueuesInTheLast(Queues):
    """After the last microbatch, as reducers do."""

    num_backwards = 0

    def hooked(self) -> Sequence[T]:
        return [self.second.weight]

    def queue(self) -> None:
        self.num_backwards += 1
        if self.num_backwards % M == 0:
            super().queue()


class Inner(torch.autograd.Function):
    """A backward of its own inside of a backward."""

    @staticmethod
    def forward(ctx: Any, x: T, stage: Any) -> T:
        ctx.stage = stage
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x.sin()
        y.register_hook(lambda gradient: queue(lambda: ctx.stage.see("inner end", gradient)))
        y.backward(gradient)
        ctx.stage.see("after inner", x.grad)
        return x.grad, None


class QueuesInside(Queues):
    """A backward inside of a half has an end of its own."""

    def hook(self) -> None:
        pass

    def between(self, x: T) -> T:
        return Inner.apply(x, self)


class QueuesInsideBesideTheTrunk(QueuesInside):
    """Likewise in a weight half."""

    def forward(self, x: T) -> T:
        return self.second(torch.tanh(F.linear(x, Inner.apply(self.first.weight * 1, self))))


KINDS = [
    *(Mixed, MixedAny, BesideOnly, WithInput, InAModuleHook, SomeMicrobatches, OfTheOutput, Queues, QueuesEach),
    *(QueuesFromMatrices, QueuesAfterwards, QueuesFromActivations, QueuesFromModules, QueuesFromAccumulators),
    *(QueuesFromCallbacks, QueuesInTheLast, QueuesInside, QueuesInsideBesideTheTrunk),
]


def check(kind: type[Stage], names: Sequence[str], steps: int = 2) -> None:
    runs: list[list[Any]] = []
    case = Case(
        lambda: [kind() for _ in range(NUM_STAGES)],
        batch,
        F.mse_loss,
        steps=steps,
        after=lambda modules, step: runs.append(seen_by(modules)),
    )
    case.check(names)
    alone, rest = runs[:steps], runs[steps:]
    assert all(map(any, alone))
    for name, found in zip(names, (rest[i : i + steps] for i in range(0, len(rest), steps)), strict=True):
        assert found == alone, name


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_as_often_and_see_the_same(kind: type[Stage]) -> None:
    check(kind, ["1f1b", *SPLIT] if kind in (Mixed, QueuesFromMatrices) else SOME)


class QueuesLater(QueuesFromMatrices):
    """In the second step, and not in its last microbatch."""

    num_backwards = 0

    def queue(self) -> None:
        self.num_backwards += 1
        if self.num_backwards == 2 * M + 2:
            super().queue()


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_what_is_queued_too_late_is_refused(name: str) -> None:
    modules: list[Any] = [QueuesLater() for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES[name], modules, F.mse_loss)
    engine, handle = Variable._execution_engine, torch.autograd.graph._MultiHandle
    x, y = batch(0).args[0], batch(0).target
    loopback.step(schedules, x, target=y)
    with pytest.raises(StageError, match=r"a hook queues Queues.finish \(.*test_whole_hooks.py:\d+\) for the end of a backward"):
        loopback.step(schedules, x, target=y)
    assert Variable._execution_engine is engine and torch.autograd.graph._MultiHandle is handle


class Silent(Stage):
    """Hooks that queue nothing."""

    def hook(self) -> None:
        for one in self.parameters():
            one.register_hook(lambda gradient: self.see("one", gradient))


def test_hooks_that_queue_nothing_leave_backwards_in_halves() -> None:
    peaks = []
    for kind in (Stage, Silent):
        loopback, schedules = pipeline(SCHEDULES["zb_h2"], [kind() for _ in range(NUM_STAGES)], F.mse_loss)
        for step in range(2):
            loopback.step(schedules, batch(step).args[0], target=batch(step).target)
        assert [one.stats["peak_bytes"] for one in schedules] == [one.stats["predicted_peak_bytes"] for one in schedules]
        peaks.append([one.stats["peak_bytes"] for one in schedules])
    assert peaks[0] == peaks[1]


class HooksInSome(nn.Module):
    """Hooks in some of a step's microbatches alone: only their backwards are whole."""

    num_forwards = -1

    def __init__(self, is_one: Callable[[int], bool], is_queued: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.is_one, self.is_queued = is_one, is_queued

    def forward(self, x: T) -> T:
        self.num_forwards += 1
        y = torch.tanh(self.first(x))
        z = self.second(y)
        if self.is_one(self.num_forwards) and self.is_queued:
            y.register_hook(lambda gradient: queue(lambda: None))
        elif self.is_one(self.num_forwards):
            register_multi_grad_hook([y, z], lambda gradients: None)
        return torch.tanh(z)


WHICH: dict[str, Callable[[int], bool]] = {
    "last": lambda n: n % M == M - 1,
    "first": lambda n: n % M == 0,
    "every second": lambda n: n % 2 == 0,
    "after the first step": lambda n: n >= M,
}


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("which", WHICH)
def test_statistics_are_never_below_a_count(which: str, is_queued: bool) -> None:
    modules = [HooksInSome(WHICH[which], is_queued) for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES["zb_h2"], modules, F.mse_loss)
    live = LiveRanks(loopback, schedules, modules)
    for _ in range(2):
        counted = live.step(*torch.randn(2, M * 16, 32))
    assert all(0 < count <= stats["peak_bytes"] for count, stats in counted), counted
    if which == "after the first step":  # whatever the first one left between halves, but for a message
        assert all(stats["peak_bytes"] <= count + 16 * 32 * 4 for count, stats in counted), counted


class QueuesBeforeAnIdleOne(QueuesFromMatrices):
    """The next stage leaves the input of the first microbatch unused: it shows nothing of hooks."""

    index, num_forwards = 0, 0

    def hook(self) -> None:
        if self.index == 1:
            super().hook()

    def forward(self, x: T) -> T:
        self.num_forwards += 1
        return super().forward(torch.zeros_like(x) if self.index == 2 and self.num_forwards == 1 else x)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_an_idle_first_microbatch_shows_nothing_of_hooks(name: str) -> None:
    kinds = [type("Queueing", (QueuesBeforeAnIdleOne,), {"index": i}) for i in range(NUM_STAGES)]
    Case(lambda: [kind() for kind in kinds], batch, F.mse_loss, steps=2).check([name])


class QueuesInOne(Stage):
    """One stage queues; the hooks of others queue nothing."""

    does_queue = False

    def hook(self) -> None:
        for one in self.parameters():
            one.register_hook(lambda gradient: queue(lambda: None) if self.does_queue else None)


def test_hooks_of_one_stage_leave_others_in_halves() -> None:
    peaks = []
    for queueing in (None, 0, LAST):
        modules = [QueuesInOne() for _ in range(NUM_STAGES)]
        for i, module in enumerate(modules):
            module.does_queue = i == queueing
        loopback, schedules = pipeline(SCHEDULES["zb_h2"], modules, F.mse_loss)
        for step in range(2):
            loopback.step(schedules, batch(step).args[0], target=batch(step).target)
        peaks.append([one.stats["peak_bytes"] for one in schedules])
    none, first, last = peaks
    assert first[1:] == none[1:] and first[0] < none[0]
    assert last[:LAST] == none[:LAST] and last[LAST] < none[LAST]


def test_a_hook_on_the_loss_waits_for_it_as_where_a_single_process_divides_it() -> None:
    seen: list[list[bool]] = []

    def loss_fn(output: T, target: T) -> T:
        loss = F.mse_loss(output, target)
        if loss.requires_grad:
            register_multi_grad_hook([loss, output], lambda gradients: seen.append([one is not None for one in gradients]))
        return loss

    Case(lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_STAGES)], batch, loss_fn, steps=1).check(["1f1b", "zb_h1"])
    assert seen == [[True, True]] * (3 * M)


class Meets(nn.Linear):
    """Calls back from the first forward."""

    meet: Callable[[], object] | None = None

    def forward(self, x: T) -> T:
        meet, self.meet = self.meet, None
        if meet is not None:
            meet()
        return super().forward(x)


def test_pipelines_in_two_threads_leave_torch_as_it_was() -> None:
    """The one that came first leaves first."""
    engine, handle = Variable._execution_engine, torch.autograd.graph._MultiHandle
    is_in = Event()

    def run(meet: Callable[[], object]) -> None:
        modules = [Meets(WIDTH, WIDTH) for _ in range(NUM_STAGES)]
        modules[0].meet = meet
        loopback, schedules = pipeline(SCHEDULES["zb_h1"], modules, F.mse_loss)
        loopback.step(schedules, batch(0).args[0], target=batch(0).target)

    def second() -> None:
        is_in.set()
        threads[0].join(60)

    first_is_in = Event()

    def first() -> None:
        first_is_in.set()
        is_in.wait(60)

    threads = [Thread(target=run, args=(meet,)) for meet in (first, second)]
    threads[0].start()
    first_is_in.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert is_in.is_set() and not any(thread.is_alive() for thread in threads)
    assert Variable._execution_engine is engine and torch.autograd.graph._MultiHandle is handle
