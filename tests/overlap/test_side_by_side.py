"""Pairs of a forward and a backward over gloo: the bits of one after the other, whoever runs them, and in less time."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

import bpipe
from bpipe.device.generators import Source
from bpipe.errors import ConfigurationError, RankFailedError, StageError
from bpipe.overlap import TwoThreads, all_to_all, yield_here
from bpipe.overlap.turns import change_over
from bpipe.schedules import Op
from bpipe.session.side_by_side import SideBySide
from tests.ranks import run_ranks
from tests.tries import holds_in_one_try

WIDTH = 16
Half = Callable[[], None]


class Block(nn.Module):
    """A layer with dropout, which changes over twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = yield_here(torch.relu(self.first(x)))
        return x + yield_here(nn.functional.dropout(self.second(hidden), 0.1))


def one_after_the_other(forward: Half, backward: Half) -> None:
    forward()
    backward()


def backward_first(forward: Half, backward: Half) -> None:
    backward()
    forward()


def in_a_thread(forward: Half, backward: Half) -> None:
    """As a user may write it: both at once, without turns."""
    thread = threading.Thread(target=backward)
    thread.start()
    forward()
    thread.join()


def gradients(rank: int, make: Callable[[Any, int, list[nn.Module]], Any], stages: tuple[int, int], overlap: Any) -> Any:
    """Train two steps; return losses, gradients, the peak of activations, and which computations overlapped."""
    torch.manual_seed(rank)
    modules: list[nn.Module] = [nn.Sequential(Block(), Block()) for _ in stages]
    schedule = make(rank, len(modules), modules)
    if overlap is not None:
        schedule.overlap = overlap
    torch.manual_seed(7)
    x, target, losses = torch.randn(16, WIDTH), torch.randn(16, WIDTH), list[torch.Tensor]()
    with bpipe.trace(schedule) as tracing:
        for _ in range(2):
            schedule.step(x, target=target, losses=losses)
    timeline = tracing.gather()[-1]
    spans = {span.action: span for span in timeline.computations(rank)}
    lane = timeline.plan.actions[rank]
    pairs = [(spans[lane[i]], spans[lane[i + 1]]) for i, action in enumerate(lane) if timeline.plan.begins_pair(action)]
    beside = sum(backward.begin_s < forward.end_s and forward.begin_s < backward.end_s for forward, backward in pairs)
    found = [p.grad for module in modules for p in module.parameters()]
    assert timeline.bubble_s(rank) >= 0
    moved = sum(action.op is Op.EVICT for action in lane)
    return [loss.item() for loss in losses], found, schedule.stats["peak_bytes"], len(pairs), beside, moved


def dualpipe_v(rank: int, overlapped: bool, overlap: Any, is_torchs: bool) -> Any:
    from torch.distributed.pipelining import PipelineStage as TorchStage

    def make(rank: int, num: int, modules: list[nn.Module]) -> bpipe.DualPipeV:
        kind = TorchStage if is_torchs else bpipe.PipelineStage
        stages = [kind(module, stage, 4, torch.device("cpu")) for stage, module in zip((rank, 3 - rank), modules)]
        return bpipe.DualPipeV(stages, 8, loss_fn=nn.functional.mse_loss, overlapped=overlapped)

    return gradients(rank, make, (rank, 3 - rank), overlap)


def all_ways(rank: int) -> list[Any]:
    """Unpaired and paired, on bpipe's stage and on torch's, by several functions."""
    ways = [(False, None, False), (True, None, False), (True, TwoThreads(), False), (True, backward_first, False)]
    ways += [(True, one_after_the_other, True), (True, TwoThreads(), True), (False, None, True)]
    return [dualpipe_v(rank, *way) for way in ways]


def same(one: Any, other: Any) -> bool:
    return bool(one[0] == other[0] and all(map(torch.equal, one[1], other[1])))


def test_dualpipe_v() -> None:
    for found in run_ranks(all_ways, 2):
        assert all(same(found[0], other) for other in found)
        assert [other[3] > 0 for other in found] == [False, True, True, True, True, True, False]
        for number, (*_, num_pairs, num_beside, _) in enumerate(found):
            assert num_beside == (num_pairs if number in (2, 5) else 0)
        assert found[1][2] == found[2][2] >= found[3][2]  # a backward that comes first has freed its activations


def interleaved(rank: int, overlap: Any, slots: int | None) -> Any:
    def make(rank: int, num: int, modules: list[nn.Module]) -> bpipe.Interleaved1F1B:
        stages = [bpipe.PipelineStage(module, stage, 8, "cpu") for stage, module in zip((rank, rank + 4), modules)]
        is_paired = overlap is not None
        return bpipe.Interleaved1F1B(
            stages, 8, loss_fn=nn.functional.mse_loss, overlapped=is_paired, options=bpipe.Options(slots=slots)
        )

    return gradients(rank, make, (rank, rank + 4), overlap)


def balanced_ways(rank: int) -> list[Any]:
    return [interleaved(rank, None, None), interleaved(rank, TwoThreads(), None), interleaved(rank, TwoThreads(), 10)]


def test_interleaved_with_evictions() -> None:
    """The pairs' microbatches are evicted and loaded like others'."""
    results = run_ranks(balanced_ways, 4)
    for plain, paired, balanced in results:
        assert same(plain, paired) and same(plain, balanced)
        assert paired[3] == paired[4] > 0 and balanced[3] == balanced[4] == paired[3]
    assert results[0][2][5] > 0


def exchanged(rank: int) -> None:
    """Rows for each rank, as many as they like, and their gradients back: as torch's own function does it."""
    generator = torch.Generator().manual_seed(rank)
    for splits in (None, [[1, 4], [2, 3]]):
        into = None if splits is None else splits[rank]
        out = None if splits is None else [of_rank[rank] for of_rank in splits]
        num_rows = 6 if out is None else sum(out)
        ours, theirs = (torch.randn(6 if into is None else sum(into), 3, generator=generator).requires_grad_() for _ in range(2))
        with torch.no_grad():
            theirs.copy_(ours)
        found, weight = all_to_all(ours * 2, None, out, into), torch.randn(num_rows, 3, generator=generator)
        expected = all_to_all_single(torch.empty(num_rows, 3), theirs * 2, out, into)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        assert torch.equal(found, expected) and ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_all_to_all_is_torchs_own() -> None:
    run_ranks(exchanged, 2)


# Time.


class Communicating(nn.Module):
    """Layers that compute, and wait for a communication that needs no processor: 30% of the time. Only pairs take their time."""

    in_pairs = False

    def __init__(self, seconds: float, num_layers: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._seconds, self._num_layers = seconds / num_layers, num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self._num_layers):
            x = _Layer.apply(x, self._seconds)
        return x


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _compute_and_communicate(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _compute_and_communicate(2 * ctx.seconds)
        return gradient, None


def _compute_and_communicate(seconds: float) -> None:
    for _ in range(2 * Communicating.in_pairs):  # dispatch and combine
        time.sleep(0.35 * seconds)
        has_come = time.perf_counter() + 0.15 * seconds
        change_over()
        time.sleep(max(0.0, has_come - time.perf_counter()))


SECONDS, LAYERS = 0.14, 8


def timed(rank: int) -> tuple[list[float], list[float]]:
    """Seconds from the begin of a pair to that of the next one, one after the other and in two threads, in turns."""
    stages = [bpipe.PipelineStage(Communicating(SECONDS, LAYERS), stage, 4, "cpu") for stage in (rank, 3 - rank)]
    schedule = bpipe.DualPipeV(stages, 6, loss_fn=nn.functional.mse_loss, overlapped=True)
    x, found = torch.ones(6, 4), ([], [])
    threads = TwoThreads()
    for overlap, periods in zip((one_after_the_other, threads), found):
        begins: list[float] = []

        def noted(forward: Half, backward: Half, overlap: Any = overlap, begins: list[float] = begins) -> None:
            begins.append(time.perf_counter())
            Communicating.in_pairs = True
            overlap(forward, backward)
            Communicating.in_pairs = False

        schedule.overlap = noted
        schedule.step(x, target=x)
        periods += [end - begin for begin, end in pairwise(begins[1:])]
    return found


def test_steady_state() -> None:
    """30% of each stage is communication: 0.70 of the time would be ideal."""

    def measure() -> list[float]:
        return [statistics.median(beside) / statistics.median(apart) for apart, beside in run_ranks(timed, 2)]

    holds_in_one_try(measure, lambda ratios: max(ratios) <= 0.75)


class Learning:
    """A function that notes the generators of each step."""

    def __init__(self) -> None:
        self.states: list[list[Any]] = []

    def begin_step(self, sources: Sequence[Source]) -> None:
        self.states.append([source.get() for source in sources])


def test_a_step_without_pairs_looks_for_no_generators() -> None:
    """As evaluations, and steps of other plans. Others look each time, and keep nothing alive that a module may drop."""
    function, module = Learning(), nn.Linear(1, 1)
    module.generator, module.last = random.Random(0), torch.ones(2)
    pairs = SideBySide(function)  # type: ignore[arg-type]

    def begin(overlapped: Any) -> bool:
        run: Any = SimpleNamespace(plan=SimpleNamespace(overlapped=overlapped), is_sharded=False)
        return pairs.runs(run, (module, len))

    assert not begin(()) and not function.states
    assert begin({0}) and function.states[-1] == [random.Random(0).getstate()]
    module.generator, activation, module.last = random.Random(1), weakref.ref(module.last), None
    assert activation() is None
    assert begin({0}) and function.states[-1] == [random.Random(1).getstate()]


# What goes wrong.


def test_refused() -> None:
    loopback = bpipe.Loopback(2)
    stages = [[bpipe.PipelineStage(Block(), s, 4, "cpu", loopback.rank(r)) for s in (r, 3 - r)] for r in range(2)]
    paired = bpipe.DualPipeV(stages[0], 4, overlapped=True)
    with pytest.raises(ConfigurationError, match="a Loopback runs one action of all ranks after the other"):
        paired.overlap = TwoThreads()
    with pytest.raises(ConfigurationError, match="overlap=3: give a function"):
        paired.overlap = 3  # type: ignore[assignment]
    plain = bpipe.DualPipeV(stages[0], 4)
    with pytest.raises(ConfigurationError, match="dualpipe_v runs no forward side by side with a backward: make the schedule with"):
        plain.overlap = TwoThreads()
    assert plain.overlap is None


def wrong(rank: int, overlap: Any) -> tuple[str, str]:
    """The error of a step with a function that does something wrong on rank 0, and of the next step."""
    stages = [bpipe.PipelineStage(Block(), stage, 4, "cpu") for stage in (rank, 3 - rank)]
    schedule = bpipe.DualPipeV(stages, 4, loss_fn=nn.functional.mse_loss, overlapped=True, options=bpipe.Options(timeout_s=20))
    schedule.overlap = overlap if not rank else TwoThreads()
    if overlap is not_waiting:
        for stage in stages:
            stage.submod.second.weight.register_hook(slowly)
    x = torch.ones(4, WIDTH)
    errors = []
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            schedule.step(x, target=x)
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors[0], errors[1]


def slowly(gradient: torch.Tensor) -> torch.Tensor:
    time.sleep(0.5)
    return gradient


def forward_alone(forward: Half, backward: Half) -> None:
    forward()


def twice(forward: Half, backward: Half) -> None:
    forward()
    backward()
    backward()


def forward_elsewhere(forward: Half, backward: Half) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            forward()
        except StageError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise caught[0]


def not_waiting(forward: Half, backward: Half) -> None:
    threading.Thread(target=backward).start()
    time.sleep(0.1)
    forward()


class Noisy(torch.autograd.Function):
    """Adds noise of NumPy's to a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + float(np.random.rand())


class NoisyBlock(Block):
    """A block that draws NumPy's numbers in its backward, and a generator's of its own in its forward, or in both."""

    def __init__(self, draws_in_both: bool) -> None:
        super().__init__()
        self.numbers = np.random.RandomState(0)
        self._draws_in_both = draws_in_both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(Noisy.apply(x)) + float(self.numbers.rand())  # type: ignore[no-untyped-call]
        return x + float(np.random.rand()) if self._draws_in_both else x


def noisy(rank: int, overlap: Any, draws_in_both: bool) -> Any:
    """The gradients of a step, or the error's text."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    modules = [NoisyBlock(draws_in_both) for _ in range(2)]
    stages = [bpipe.PipelineStage(module, stage, 4, "cpu") for module, stage in zip(modules, (rank, 3 - rank))]
    schedule = bpipe.DualPipeV(stages, 8, loss_fn=nn.functional.mse_loss, overlapped=True)
    schedule.overlap = overlap
    try:
        schedule.step(torch.ones(8, WIDTH), target=torch.zeros(8, WIDTH))
    except (StageError, RankFailedError) as error:
        return str(error)
    return [p.grad for module in modules for p in module.parameters()]


def test_a_backward_that_draws_other_numbers_than_torchs() -> None:
    """If the forward beside it draws none of them, gradients are those of one after the other; else all ranks are told."""
    for beside, plain in zip(run_ranks(noisy, 2, TwoThreads(), False), run_ranks(noisy, 2, None, False)):
        assert len(plain) == 8 and all(map(torch.equal, beside, plain))
    assert all("both draw random numbers (NumPy's numbers)" in told for told in run_ranks(noisy, 2, TwoThreads(), True))


@pytest.mark.parametrize(
    ("overlap", "text"),
    [
        (forward_alone, r"backward\(\) was not called: call both, each once"),
        (twice, r"given 0F3 and 3B1: backward\(\) was called a second time"),
        (forward_elsewhere, r"forward\(\) was called in another thread than the function"),
        (not_waiting, r"backward\(\) was still running when the function returned: wait for its thread"),
    ],
)
def test_functions_that_do_not_run_both(overlap: Any, text: str) -> None:
    (here, again), (there, _) = run_ranks(wrong, 2, overlap)
    assert re.search(rf"^StageError: the overlap function, .*{text}", here), here
    assert there.startswith("RankFailedError") and "rank 0" in there
    assert again.startswith("PipelineBrokenError")
