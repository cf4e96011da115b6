"""What a fill job, or the backward beside a forward, may touch of what training reads."""

from __future__ import annotations

import decimal
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.data import DataLoader

import bpipe
import bpipe.errors
import bpipe.fill
from bpipe.overlap import TwoThreads
from tests.ranks import run_ranks

M = 4
KEPT: list[Any] = []  # what is entered and never left


class AddsOne(TorchFunctionMode):
    """Each `torch.add` that it sees is one more."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return out + 1 if function is torch.add else out


def _enter(make: Callable[[], Any]) -> None:
    KEPT.append(make())
    KEPT[-1].__enter__()


def _count_of_a_recomputation() -> float:
    """How often what is behind the last saved tensor runs: once, or twice without the early stop."""
    calls = []

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        calls.append(1)
        return y + 1

    x = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(checkpoint.checkpoint(region, x, use_reentrant=False).sum(), x)
    return float(len(calls))


def _overflow() -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.float32(1e38) * np.float32(10))


def _rejects_broken_sparse() -> float:
    try:
        torch.sparse_coo_tensor(torch.tensor([[5]]).repeat(1, 1), torch.ones(1), (9,), is_coalesced=True)
        torch.sparse_csr_tensor(torch.tensor([0, 2, 1]), torch.tensor([0]), torch.ones(1), (2, 2))
    except RuntimeError:
        return 2.0
    return 1.0


def _keeps_its_parameter() -> float:
    layer = nn.Linear(1, 1)
    before = layer.weight
    return float(before is layer.to(torch.float64).weight)


def _reads_of_a_parametrized_weight() -> float:
    """Two reads of a parametrized weight give two tensors, one with the cache."""
    layer = nn.Linear(1, 1)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return float(layer.weight is layer.weight)


STATES: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
    "a cache of parametrizations": (lambda: _enter(parametrize.cached), _reads_of_a_parametrized_weight),
    "checkpoints that stop early": (lambda: _enter(lambda: checkpoint.set_checkpoint_early_stop(False)), _count_of_a_recomputation),
    "denormal numbers flushed": (lambda: torch.set_flush_denormal(True), lambda: (torch.tensor(1e-40) * 0.5).item() * 1e40),
    "numpy's errors raised": (lambda: np.seterr(all="raise"), _overflow),
    "a decimal context": (lambda: setattr(decimal.getcontext(), "prec", 3), lambda: float(decimal.Decimal(1) / 3)),
    "a function mode": (lambda: _enter(AddsOne), lambda: torch.add(torch.ones(()), 1).item()),
    "a number of threads": (lambda: torch.set_num_threads(3), lambda: float(torch.get_num_threads())),
    "backwards in one thread": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: float(torch._C._is_multithreading_enabled()),
    ),
    "invariants of sparse tensors": (torch.sparse.check_sparse_tensor_invariants.enable, _rejects_broken_sparse),
    "parameters that a conversion replaces": (
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
        _keeps_its_parameter,
    ),
    "the fast path of attention": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        lambda: float(torch.backends.mha.get_fastpath_enabled()),
    ),
}


class LogCapture(logging.Handler):
    """What the logger of bpipe says meanwhile."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()

    def __enter__(self) -> LogCapture:
        logging.getLogger("bpipe").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bpipe").removeHandler(self)


class Reads(nn.Module):
    """Multiplies by what it reads of the process's state, forward and backward, and writes it down."""

    probe: Callable[[], float] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.probe:
            self.seen.append(self.probe())
            y = y * self.seen[-1] if np.isfinite(self.seen[-1]) else y
            y.register_hook(lambda g: self.seen.append(self.probe()))
        return y


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return super().forward(x)


def _pipeline(rank: int) -> tuple[nn.Module, bpipe.OneFOneB]:
    torch.manual_seed(rank)
    module = [Reads, lambda: Slow(4, 4)][rank]()
    return module, bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cpu"), M, loss_fn=nn.functional.mse_loss)


def _step(module: nn.Module, schedule: bpipe.OneFOneB) -> list[torch.Tensor]:
    module.zero_grad()
    x = torch.arange(32.0).reshape(8, 4) / 32
    schedule.step(x, target=1 - x)
    return [p.grad.clone() for p in module.parameters()]


def _steps(module: nn.Module, schedule: bpipe.OneFOneB, is_done: Callable[[], bool]) -> Iterator[list[torch.Tensor]]:
    """Step twice, and on until rank 0 is done, at most 40 times: a busy machine leaves few waits to fill."""
    for number in range(40):
        yield _step(module, schedule)
        done = torch.tensor(is_done())
        dist.broadcast(done, 0)
        if done and number:
            return


def _touching(touch: Callable[[], Any], how: str, ran: list[int]) -> Iterator[str]:
    touch()
    for _ in range(20):
        ran.append(1)
        time.sleep(0.001)
        yield "a"
        if how == "raises":
            raise RuntimeError("gone")


def _gradients_and_values(rank: int, names: list[str], how: str) -> list[tuple[str, list[float], list[float], bool, bool]]:
    """For each state: what training reads without a job and with one, whether its gradients are the same, and whether it ran."""
    module, schedule = _pipeline(rank)
    found = []
    for _ in range(4):
        _step(module, schedule)
    for name in names:
        touch, probe = STATES[name]
        if rank == 0:
            module.probe, module.seen = probe, []
        without = _step(module, schedule)
        before = sorted(set(module.seen)) if rank == 0 else []
        ran: list[int] = []

        warnings.simplefilter("ignore")
        if rank == 0:
            schedule.fill = bpipe.fill.Pieces(partial(_touching, touch, how, ran), on_error="stop", unknown_s=0.0001)
            module.seen = []
        same = [all(map(torch.equal, without, got)) for got in _steps(module, schedule, partial(bool, ran))]
        schedule.fill = None
        after = sorted(set(module.seen)) if rank == 0 else []
        found.append((name, before, after, all(same), bool(ran) or rank == 1))
    schedule.close()
    return found


@pytest.mark.parametrize("how", ["stays", "raises"])
def test_training_reads_its_own_state_whatever_a_job_touches(how: str) -> None:
    """A job that yields or raises within a state of torch, numpy or Python leaves training's values and gradients as they were."""
    for ranks in run_ranks(_gradients_and_values, 2, list(STATES), how):
        for name, before, after, same, ran in ranks:
            assert ran, name
            assert before == after, name
            assert same, name


def _in_a_level(rank: int, on_error: str) -> tuple[str, bool]:
    """What is said of a job that yields within a level of forward derivatives, and whether training's own ones work behind it."""
    module, schedule = _pipeline(rank)
    for _ in range(4):
        _step(module, schedule)

    def job() -> Iterator[None]:
        with forward_ad.dual_level():
            yield
            yield

    said = ""
    with warnings.catch_warnings(record=True), LogCapture() as log:
        if rank == 0:
            schedule.fill = bpipe.fill.Pieces(job, on_error=on_error, unknown_s=0.0001)
        try:
            for _ in range(20):
                _step(module, schedule)
        except bpipe.errors.BPipeError as error:
            said = str(error)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(torch.ones(2), torch.ones(2)) * 2).tangent
    schedule.close()
    return said or log.text, bool((tangent == 2).all())


@pytest.mark.parametrize("on_error", ["stop", "fail"])
def test_a_job_that_stays_in_a_level_of_forward_derivatives_is_stopped_by_name(on_error: str) -> None:
    """Torch has one such level in the process, and its derivatives end with it: the job ends, and training has its own levels."""
    (said, works), _ = run_ranks(_in_a_level, 2, on_error)
    assert "job" in said and "forward derivatives" in said
    assert works


def _endings(rank: int) -> list[tuple[str, str, list[float]]]:
    """How a job's ways to end come out, with the sums of the step's gradients in which it ended."""
    module, schedule = _pipeline(rank)
    right = [_step(module, schedule) for _ in range(4)][-1]
    found = []

    def from_next() -> Iterator[None]:
        yield
        next(iter(()))

    def thrown_in() -> Iterator[None]:
        inner = from_inner()
        next(inner)
        inner.throw(StopIteration("inner"))
        yield

    def from_inner() -> Iterator[None]:
        yield

    def asynchronous() -> Iterator[None]:
        yield
        raise StopAsyncIteration

    class Bare(bpipe.fill.Job):
        name, on_error = "bare", "stop"

        def step(self, seconds: float, num_bytes: int) -> float:
            raise StopIteration

    class Iterates:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> None:
            raise ZeroDivisionError

    jobs: dict[str, Any] = {
        "next of nothing": lambda: bpipe.fill.Pieces(from_next, on_error="stop", unknown_s=0.0001),
        "thrown into an inner one": lambda: bpipe.fill.Pieces(thrown_in, on_error="stop", unknown_s=0.0001),
        "StopAsyncIteration": lambda: bpipe.fill.Pieces(asynchronous, on_error="stop", unknown_s=0.0001),
        "StopIteration of a job of one's own": Bare,
        "an iterator that raises": lambda: bpipe.fill.Pieces(Iterates, on_error="stop", unknown_s=0.0001),
    }
    for name, make in jobs.items():
        with LogCapture() as log:
            if rank == 0:
                schedule.fill = make()
            for got in _steps(module, schedule, lambda: schedule.fill is None):
                last = got
            stopped = rank == 1 or schedule.fill is None
        found.append(
            (name, log.text if rank == 0 else "stopped", [float(torch.equal(a, b)) for a, b in zip(last, right)] + [stopped])
        )
    schedule.close()
    return found


def test_a_job_ends_by_name_whatever_it_raises_at_its_end() -> None:
    """Exceptions that Python gives a meaning of its own in iterators stop the job with a warning, and training goes on."""
    for rank, ends in enumerate(run_ranks(_endings, 2)):
        for name, told, values in ends:
            assert all(values), (rank, name)
            assert "stop" in told, (rank, name, told)


class Backwards(nn.Module):
    """A linear layer whose backward adds a number drawn by `draw` to its gradient, and whose forward draws one, too."""

    def __init__(self, draw: Callable[[], float], in_backward: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.linear, self.draw, self.in_backward = nn.Linear(4, 4), draw, in_backward or draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = bpipe.yield_here(self.linear(x) * (1 + self.draw()))
        y.register_hook(lambda g: g * (1 + self.in_backward()))
        return bpipe.yield_here(y * (1 + self.draw()))


class Draws:
    """An object of its own kind, with a method that draws."""

    def __init__(self) -> None:
        self.source = random.Random(3)

    def draw(self) -> float:
        return self.source.random()


def _partial_of_a_torch_generator() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=generator).item()


def _numpy_generator() -> Callable[[], float]:
    generator = np.random.default_rng(3)
    return lambda: float(generator.random())


def _numpy_state() -> Callable[[], float]:
    state = np.random.RandomState(3)
    return lambda: float(state.random_sample())


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "Python's": lambda: random.random,
    "torch's, in numpy's hands": lambda: lambda: float(torch.rand(1).numpy()[0]),
    "numpy's global normal, which keeps every second": lambda: lambda: float(np.random.standard_normal()) * 0.1,
    "a bound method of an object": lambda: Draws().draw,
    "a torch generator in a closure": _partial_of_a_torch_generator,
    "a numpy generator in a closure": _numpy_generator,
    "a RandomState in a closure": _numpy_state,
    "dropout of the gradient": lambda: lambda: nn.functional.dropout(torch.ones(()), 0.5).item(),
}


def _drawn(rank: int, name: str, overlap: Any, other: str = "") -> list[torch.Tensor]:
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    draw, in_backward = DRAWS[name](), DRAWS[other]() if other else None
    modules = [Backwards(draw, in_backward) for _ in range(2)]
    stages = [bpipe.PipelineStage(module, s, 4, "cpu") for module, s in zip(modules, (rank, 3 - rank))]
    schedule = bpipe.DualPipeV(stages, 6, loss_fn=nn.functional.mse_loss, overlapped=True)
    schedule.overlap = overlap
    x = torch.arange(48.0).reshape(12, 4) / 48
    losses: list[torch.Tensor] = []
    for _ in range(2):
        schedule.step(x, target=1 - x, losses=losses)
    schedule.close()
    return [p.grad for module in modules for p in module.parameters()] + losses


def _drawn_both_ways(rank: int) -> dict[str, str]:
    found = {}
    for name in DRAWS:
        one = _drawn(rank, name, None)
        try:
            found[name] = "same" if all(map(torch.equal, one, _drawn(rank, name, TwoThreads()))) else "other numbers"
        except bpipe.errors.BPipeError as error:
            found[name] = str(error)
    return found


def test_a_backward_that_draws_from_the_source_of_the_forward_beside_it_is_refused() -> None:
    """How far the forward has come when the backward draws is not known: every source of numbers is found, and named."""
    for rank in run_ranks(_drawn_both_ways, 2):
        for name, said in rank.items():
            assert "draw" in said and "random numbers" in said, name


APART = [
    ("Python's", "numpy's global normal, which keeps every second"),
    ("torch's, in numpy's hands", "Python's"),
    ("a torch generator in a closure", "a numpy generator in a closure"),
    ("a bound method of an object", "a bound method of an object"),  # of two objects
    ("dropout of the gradient", "a RandomState in a closure"),
]


def _drawn_apart(rank: int) -> dict[str, bool]:
    pairs = {f"{one}, {two}": (_drawn(rank, one, None, two), _drawn(rank, one, TwoThreads(), two)) for one, two in APART}
    return {name: all(map(torch.equal, *both)) for name, both in pairs.items()}


def test_a_backward_that_draws_from_another_source_than_the_forward_beside_it_is_as_one_after_the_other() -> None:
    """Numbers of two sources do not depend on each other's order: all bits are those of a pair without threads."""
    for same in run_ranks(_drawn_apart, 2):
        assert all(same.values()), same


def _keep(outputs: list[float], output: torch.Tensor) -> None:
    outputs.append(output.sum().item())


def _evaluates(rank: int) -> list[tuple[str, int, bool]]:
    """For each kind of data set: how many batches were evaluated without a budget, and whether the outputs are right."""
    module, schedule = _pipeline(rank)
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(7))
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh()).eval()
    kinds: dict[str, Callable[[], Any]] = {
        "unbind": lambda: rows.unbind(),
        "split": lambda: rows.split(4),
        "a generator of slices": lambda: (rows[i : i + 4] for i in range(0, 4096, 4)),
        "a DataLoader": lambda: DataLoader(rows, batch_size=4),
        "views of a numpy array": lambda: [torch.from_numpy(rows.numpy()[i : i + 4]) for i in range(0, 64, 4)],
        "rows that overlap": lambda: rows.flatten().unfold(0, 64, 1).unbind()[:100],
        "columns": lambda: [one.t() for one in rows.t().reshape(64, 1024, 4).permute(1, 0, 2)],
    }
    found = []
    for _ in range(4):
        _step(module, schedule)
    for name, make in kinds.items():
        outputs: list[float] = []
        if rank == 0:
            schedule.fill = bpipe.fill.Inference(model, make(), partial(_keep, outputs), budget=300_000)
        for _ in _steps(module, schedule, partial(bool, outputs)):
            pass
        schedule.fill = None
        right = []
        if rank == 0:
            with torch.no_grad():
                right = [model(batch).sum().item() for batch, _ in zip(make(), outputs)]
        found.append((name, len(outputs), outputs == right))
    schedule.close()
    return found


def test_rows_of_one_large_tensor_are_evaluated_however_they_are_cut() -> None:
    """A batch that is a view counts as itself, not as the whole data set that it belongs to."""
    for name, number, right in run_ranks(_evaluates, 2)[0]:
        assert number > 0, name
        assert right, name
