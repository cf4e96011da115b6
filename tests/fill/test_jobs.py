"""Fill jobs by themselves: their pieces, settings that cannot work, and what stops them."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import bpipe
from bpipe.errors import ConfigurationError, FillError, RankFailedError
from bpipe.fill import Inference, Job, Pieces
from bpipe.fill.counted import Counted
from bpipe.fill.piece_seconds import KnownSeconds
from bpipe.fill.room import Waits
from bpipe.schedules import build
from tests.fill.test_filled import BATCH, WIDTH, M, P, stage_of
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.sleepers import Sleeper
from tests.storages import StorageCount

PLENTY = 2**40
PAGE = Path(bpipe.__file__).parents[1] / "docs/fill.md"


def test_pieces_run_in_order_where_they_fit() -> None:
    ran: list[int] = []

    def work() -> Iterator[str]:
        for i in range(4):
            ran.append(i)
            time.sleep(0.02 * (i % 2))
            yield "long" if i % 2 == 0 else "short"

    job = Pieces(work, num_bytes=100, unknown_s=0.5)
    assert job.step(0.4, PLENTY) is None and job.step(60.0, 99) is None and not ran  # unknown, and too large
    assert job.step(60.0, 100) is not None and job.step(60.0, 100) is not None
    assert job.step(0.015, 100) is None  # "short" is not known yet
    assert job.step(60.0, 100) is not None and ran == [0, 1, 2]
    assert job.step(0.015, 100) is None  # "long" is
    assert job.step(60.0, 100) is not None
    assert job.step(60.0, 100) is not None and job.is_over and job.num_pieces == 5  # behind the last yield, too, is a piece
    assert job.step(60.0, 100) is None and ran == [0, 1, 2, 3]


def test_pieces_begin_again() -> None:
    ran: list[int] = []

    def work() -> Iterator[None]:
        ran.append(0)
        yield

    job = Pieces(work, repeats=True)
    for _ in range(6):
        job.step(1.0, 0)
    assert len(ran) == 3 and not job.is_over


def test_a_slow_moment_does_not_stay_decisive() -> None:
    known = KnownSeconds()
    assert known.fits("x", 0.5, 0.5) and not known.fits("x", 0.49, 0.5)
    known.learn("x", 1.0)  # the first run is slow
    assert not known.fits("x", 0.9, 0.0)
    assert any(known.fits("x", 0.9, 0.0) for _ in range(10))  # it is tried again some time
    for seconds in (0.1, 0.1, 0.1):
        known.learn("x", seconds)
    assert known.fits("x", 0.1, 0.0) and not known.fits("x", 0.09, 0.0)
    known.learn("x", 0.3)
    assert not known.fits("x", 0.2, 0.0)  # two of the latest were slow
    for seconds in (0.1, 0.1, 0.1, 0.1):
        known.learn("x", seconds)
    assert known.fits("x", 0.1, 0.0)


def test_inference_says_what_it_needs() -> None:
    layers = [nn.Linear(10, 1000), nn.Linear(1000, 10)]
    found: list[Any] = []
    inputs = [torch.ones(4, 10) for _ in range(3)]
    job = Inference(layers, iter(inputs), found.append, kept_bytes=7)
    static = sum(p.nbytes for layer in layers for p in layer.parameters())
    hidden = 4 * 1000 * 4
    assert (job.static_bytes, job.held_bytes) == (static, hidden + inputs[0].nbytes + 7)
    assert job._num_bytes == 4 * 10 * 4  # the last output, beside the hidden state
    while not job.is_over:
        assert job.step(10.0, PLENTY) is not None
    expected = [layers[1](layers[0](x)) for x in inputs]
    assert all(map(torch.equal, found, expected)) and not any(one.requires_grad for one in found)


def counted_batches() -> dict[str, tuple[Any, int]]:
    """Batches of 4 samples of 10 numbers, by how they are made, each with the bytes that one takes."""
    data, one = torch.ones(100, 4, 10), 4 * 10 * 4
    both = torch.ones(100, 8, 10)
    return {
        "rows of one tensor": (data, one),
        "slices": ((data[i] for i in range(3)), one),
        "of their own": ([torch.ones(4, 10) for _ in range(3)], one),
        "made by the iterator": ((torch.ones(4, 10) for _ in range(3)), one),
        "a part of what the iterator makes": ((torch.ones(100, 4, 10)[0] for _ in range(3)), 100 * one),
        "gathered": (DataLoader(data.flatten(0, 1), batch_size=4), one),
        "two parts of one row": (((row[:4], row[4:]) for row in both), 2 * one),
        "one row, repeated": ((torch.ones(10).expand(4, 10) for _ in range(3)), one // 4),
        "of NumPy": ((torch.from_numpy(row) for row in data.numpy()), one),
    }


class Summed(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return sum(tensors[1:], tensors[0]).sum(0)


@pytest.mark.parametrize("name", counted_batches())
def test_a_batch_counts_as_what_it_takes(name: str) -> None:
    """Not as the whole data set that it is a row of: the job would never have room."""
    batches, num_bytes = counted_batches()[name]
    found: list[torch.Tensor] = []
    job = Inference([Summed()], batches, found.append)
    assert job.held_bytes == num_bytes
    job.step(10.0, PLENTY)
    assert torch.equal(found[0], torch.full((10,), 8.0 if name.startswith("two") else 4.0))


def drawing() -> Iterator[torch.Tensor]:
    while True:
        yield torch.rand(2, 10) + np.random.rand() + random.random()


@pytest.mark.parametrize("batches", [DataLoader(torch.ones(8, 10), batch_size=2, shuffle=True), drawing()])
def test_making_an_inference_draws_none_of_the_training_s_random_numbers(batches: Any) -> None:
    """A DataLoader draws its seed when it begins, and so may what makes batches, or a layer."""
    layers = [nn.Linear(10, 10), nn.Dropout()]
    before, others = torch.get_rng_state(), (random.getstate(), repr(np.random.get_state()))
    Inference(layers, batches, print)
    assert torch.equal(torch.get_rng_state(), before) and (random.getstate(), repr(np.random.get_state())) == others


@pytest.mark.parametrize(("layers", "batches"), [([], [torch.ones(1)]), ([nn.ReLU()], [])])
def test_inference_of_nothing_is_refused(layers: list[nn.Module], batches: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match="at least one layer and one batch"):
        Inference(layers, batches, print)


def test_bytes_are_counted_as_long_as_they_live() -> None:
    counted, kept = Counted(torch.device("cpu")), []
    with counted:
        counted.begin()
        x = torch.ones(100)
        (x + 1).mul_(2)
        kept.append(x[:10])  # all of it
        del x
    assert (counted.peak_bytes, counted.live_bytes()) == (800, 400)
    with counted:
        counted.begin()
        kept.clear()
        torch.ones(10)
    assert (counted.peak_bytes, counted.live_bytes()) == (400, 0)


def test_a_wait_that_was_short_once_is_still_filled() -> None:
    waits = Waits()
    assert waits.expected(None, "here") == 0
    for seconds in (0.5, 0.4, 0.0, 0.6):
        waits.learn(None, "here", seconds)
    assert waits.expected(None, "here") == 0.4
    waits.learn(None, "here", 0.1)
    assert waits.expected(None, "here") == 0.1


def job_with(**settings: Any) -> Job:
    job = Job()
    for name, value in settings.items():
        setattr(job, name, value)
    return job


REFUSED = [
    (object(), "give an object with step(seconds, num_bytes)"),
    (job_with(on_error="ignore"), "on_error='ignore': choose 'fail' or 'stop'"),
    (job_with(budget=0), "budget=0: give a whole number of at least 1, or None"),
    (job_with(held_bytes=-1), "held_bytes=-1: give a whole number of at least 0, or None"),
    (job_with(static_bytes=-1), "static_bytes=-1: give a whole number of at least 0"),
    (job_with(grace_s=0), "grace_s=0: give a positive number of seconds"),
]


def refused(rank: int) -> None:
    schedule = bpipe.OneFOneB(stage_of(rank), M, loss_fn=nn.functional.mse_loss)
    for job, says in REFUSED:
        with pytest.raises(ConfigurationError, match=re.escape(says)):
            schedule.fill = job
    assert schedule.fill is None
    schedule.close()


def test_settings_that_cannot_work_are_refused() -> None:
    run_ranks(refused, P)


def test_a_loopback_has_nothing_to_fill() -> None:
    stage = bpipe.PipelineStage(nn.Linear(2, 2), 0, 2, "cpu", bpipe.Loopback(2).rank(0))
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match="share a thread and never wait"):
        schedule.fill = Job()


class Endless(Job):
    """A piece that does not end before the others have failed."""

    name, grace_s = "endless", 0.2

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.has_seen_all_fail = False

    def step(self, seconds: float, num_bytes: int) -> float | None:
        began = time.monotonic()
        while not self.has_seen_all_fail and time.monotonic() < began + PATIENCE_S:
            time.sleep(0.01)
            self.has_seen_all_fail = len([*self._folder.iterdir()]) == P - 1
        return time.monotonic() - began


def beside_an_endless_one(rank: int, folder: str) -> tuple[str, bool]:
    schedule, x = bpipe.OneFOneB(stage_of(rank), M, loss_fn=nn.functional.mse_loss), torch.randn(M * BATCH, 16, WIDTH)
    job = Endless(folder)
    if rank == 1:
        schedule.fill = job
    try:
        for _ in range(20):
            schedule.step(x, target=x)
    except (RankFailedError, FillError) as error:
        if rank != 1:
            (Path(folder) / str(rank)).touch()
        return str(error), job.has_seen_all_fail
    raise AssertionError("no piece has run")


def test_the_others_do_not_wait_for_a_piece_that_does_not_end(tmp_path: Path) -> None:
    for rank, (text, has_seen_all_fail) in enumerate(run_ranks(beside_an_endless_one, P, str(tmp_path))):
        if rank == 1:
            assert "fill job endless took" in text and has_seen_all_fail
        else:
            assert "rank 1 failed" in text and "fill job endless does not end" in text


class Failing(Job):
    name, on_error = "failing", "stop"

    def step(self, seconds: float, num_bytes: int) -> float | None:
        raise ValueError("no more data")


def stopped(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bpipe").addHandler(handler)
    schedule, x = bpipe.OneFOneB(stage_of(rank), M, loss_fn=nn.functional.mse_loss), torch.randn(M * BATCH, 16, WIDTH)
    schedule.fill = Failing()
    for _ in range(6):
        schedule.step(x, target=x)
    assert schedule.fill is None
    return said


def test_a_job_that_is_stopped_is_named_once() -> None:
    for rank, said in enumerate(run_ranks(stopped, P)):
        assert said == [f"rank {rank}: the fill job failing raised ValueError: no more data: it is stopped, and training goes on"]


def starved(rank: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bpipe").addHandler(handler)
    schedule, x = bpipe.OneFOneB(stage_of(rank), M, loss_fn=nn.functional.mse_loss), torch.randn(M * BATCH, 16, WIDTH)
    schedule.fill = Pieces(lambda: iter(int, 1), name="large", held_bytes=10**9)
    for _ in range(12):
        schedule.step(x, target=x)
    assert not schedule.stats["fill_pieces"] and not schedule.stats["fill_offered_s"]
    return said


def test_a_job_that_never_has_room_is_told_once_what_it_lacks() -> None:
    for rank, said in enumerate(run_ranks(starved, P)):
        assert len(said) == 1 and f"rank {rank}: the fill job large has not run in 5 steps: it keeps 1,000,000,000 bytes" in said[0]
        assert re.search(r"which are 999,\d{3},\d{3} more than this rank has free", said[0])


def within_no_grad() -> Iterator[None]:
    with torch.no_grad():
        while True:
            assert not torch.ones(1, requires_grad=True).exp().requires_grad
            yield


def within(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with context():
        while True:
            yield


def within_a_dispatch_mode() -> Iterator[None]:
    return within(StorageCount().mode)


def attention() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


def with_another_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield


HELD: dict[str, Callable[[], Iterator[None]]] = {
    "the grad mode": within_no_grad,
    "autocast": partial(within, partial(torch.autocast, "cpu", torch.bfloat16)),
    "inference mode": partial(within, torch.inference_mode),
    "the default dtype": with_another_dtype,
    "the default device": partial(within, partial(torch.device, "meta")),
    "hooks on saved tensors": partial(within, partial(torch.autograd.graph.saved_tensors_hooks, torch.neg, torch.abs)),
    "an attention": partial(within, attention),
}


def in_a_mode(rank: int, work: Any, on_error: Any = "fail") -> tuple[str, list[torch.Tensor], float]:
    stage = stage_of(rank, 2)
    schedule, x = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss), torch.ones(M * BATCH, 16, WIDTH)
    torch.manual_seed(0)
    if work is not None:
        schedule.fill = Pieces(work, unknown_s=0.0, on_error=on_error)
    pieces, told = 0.0, ""
    try:
        for _ in range(6):
            schedule.step(x, target=x)
            pieces += schedule.stats.get("fill_pieces", 0.0)
    except (FillError, RankFailedError) as error:
        told = str(error)
    return told, [p.grad for p in stage.submod.parameters() if p.grad is not None], pieces


@pytest.mark.parametrize("name", HELD)
def test_a_generator_may_yield_within_a_mode(name: str) -> None:
    """On each rank the gradients are those of no job."""
    for (_, expected, _), (told, found, pieces) in zip(run_ranks(in_a_mode, 2, None), run_ranks(in_a_mode, 2, HELD[name])):
        assert not told and pieces > 0 and len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("on_error", ["fail", "stop"])
def test_a_job_that_yields_within_a_dispatch_mode_is_stopped(on_error: str) -> None:
    """Whether a process is within one is known to torch for all threads."""
    plain = run_ranks(in_a_mode, 2, None)
    for (_, expected, _), (told, found, _) in zip(plain, run_ranks(in_a_mode, 2, within_a_dispatch_mode, on_error)):
        if on_error == "fail":
            assert "leaves a dispatch mode on behind a piece: undo that before the piece ends" in told
        else:
            assert not told and len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class Ending(Job):
    """Raises what ends an iterator, as a generator or a loop of a job might let through."""

    name = "ending"

    def __init__(self, error: type[BaseException], on_error: Any) -> None:
        self._error, self.on_error = error, on_error

    def step(self, seconds: float, num_bytes: int) -> float | None:
        raise self._error("over")


def ended_by(rank: int, error: type[BaseException], on_error: str) -> tuple[str, bool]:
    schedule, x = bpipe.OneFOneB(stage_of(rank, 2), M, loss_fn=nn.functional.mse_loss), torch.ones(M * BATCH, 16, WIDTH)
    schedule.fill = Ending(error, on_error)
    try:
        for _ in range(6):
            schedule.step(x, target=x)
    except (FillError, RankFailedError) as raised:
        return str(raised), False
    return "", schedule.fill is None


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, IndexError, RuntimeError])
def test_what_ends_an_iterator_is_an_error_like_others(error: type[BaseException]) -> None:
    for told, _ in run_ranks(ended_by, 2, error, "fail"):
        assert f"the fill job ending raised {error.__name__}: over" in told
    assert run_ranks(ended_by, 2, error, "stop") == [("", True)] * 2


class Noting(Job):
    """Notes the modes in which its pieces run."""

    def __init__(self) -> None:
        self.seen: set[tuple[bool, torch.dtype, bool, bool]] = set()

    def step(self, seconds: float, num_bytes: int) -> float | None:
        self.seen.add((*autocast_now(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return None

    stage_done = finish = lambda self, *given: self.step(0.0, 0)


def autocast_now() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def in_the_modes_of_when_it_was_set(rank: int) -> None:
    schedule, x = bpipe.OneFOneB(stage_of(rank, 2), M, loss_fn=nn.functional.mse_loss), torch.ones(M * BATCH, 16, WIDTH)
    half, plain = torch.autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False)
    for at, then, is_inference in ((plain, half, False), (half, plain, False), (half, half, True)):
        with at, torch.inference_mode(is_inference):
            schedule.fill = job = Noting()
            expected = autocast_now()
        with then:
            now = autocast_now()
            for _ in range(4):
                schedule.step(x, target=x)
            assert autocast_now() == now and torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        assert job.seen == {(*expected, is_inference, not is_inference)}
    schedule.close()


def test_a_job_runs_in_the_modes_of_when_it_was_set() -> None:
    run_ranks(in_the_modes_of_when_it_was_set, 2)


class Eager(Job):
    """A job that must not begin where its settings are wrong."""

    budget = 0

    def begin(self, stages: Any) -> None:
        raise AssertionError("begun before its settings were looked at")


def naps() -> Iterator[None]:
    while True:
        time.sleep(0.002)
        yield


def set_again(rank: int) -> tuple[float, int, int]:
    """Pieces of the first step after a job was set anew, and how many looks the control thread has before and after."""
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(Sleeper(0.02, 1000), rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, looks, before = torch.ones(2, 8), list[Any](), 0
    for _ in range(5):
        schedule.fill = Pieces(naps)
        schedule.step(x, target=x)
        looks = schedule.session.context.transport.control.looks  # type: ignore[attr-defined]
        before = len(looks)
    schedule.fill = None
    schedule.fill = Pieces(naps)
    schedule.step(x, target=x)
    found = schedule.stats["fill_pieces"], before, len(looks)
    with pytest.raises(ConfigurationError, match="budget=0"):
        schedule.fill = Eager()
    schedule.close()
    schedule.fill = None
    assert schedule.fill is None
    return found


def test_what_is_known_of_a_rank_stays_when_another_job_comes() -> None:
    results = run_ranks(set_again, 2)
    assert any(pieces > 0 for pieces, *_ in results)
    assert all(0 < before == after for _, before, after in results), results


def test_only_a_few_plans_are_known() -> None:
    """And none of them by the identity of one that is gone."""
    waits, plans = Waits(), [build("1f1b", 2, m) for m in range(1, 12)]
    for plan in plans:
        waits.learn(plan, "here", 1.0)
    assert [waits.expected(plan, "here") for plan in reversed(plans)] == [1.0] * 8 + [0.0] * 3


def of_the_page(rank: int) -> tuple[int, bool]:
    """How many batches the first example of the page has evaluated, and whether it found what one process would find."""
    torch.manual_seed(3)
    model, batches = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(20, 4, 8)
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(Sleeper(0.01, 10), rank, 2, "cpu"), 4, loss_fn=nn.functional.mse_loss)
    names = {"schedule": schedule, "other_model": model, "batches": batches, "loader": [(torch.ones(4, 8), torch.ones(4, 8))] * 6}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1], names)  # type: ignore[index]
    schedule.close()
    scores = names["scores"]
    return len(scores), scores == [model(batch).mean().item() for batch in batches[: len(scores)]]


def test_the_first_example_of_the_page_evaluates_while_ranks_wait() -> None:
    for num_scores, are_right in run_ranks(of_the_page, 2):
        assert num_scores > 2 and are_right
