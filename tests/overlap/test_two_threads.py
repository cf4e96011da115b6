"""Two halves that take turns in two threads: their order, their state, and their errors."""

from __future__ import annotations

import contextvars
import gc
import logging
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bpipe import logs
from bpipe.errors import StageError
from bpipe.model.state.reachable import Reachable
from bpipe.overlap import TwoThreads, yield_here
from bpipe.overlap.turns import Half, Turns, change_over
from tests.patience import PATIENCE_S, ended, until

NAME = contextvars.ContextVar("NAME", default="nobody")


def nothing() -> None:
    return None


def counting(order: list[str], name: str, num_points: int) -> Callable[[], None]:
    """A half that notes where it is."""

    def half() -> None:
        for number in range(num_points + 1):
            order.append(f"{name}{number}")
            if number < num_points:
                yield_here()

    return half


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (2, 2, "F0 B0 F1 B1 F2 B2"),
        (0, 2, "F0 B0 B1 B2"),
        (3, 1, "F0 B0 F1 B1 F2 F3"),
        (1, 3, "F0 B0 F1 B1 B2 B3"),
        (0, 0, "F0 B0"),
    ],
)
def test_they_take_turns(forward: int, backward: int, expected: str) -> None:
    overlap, order = TwoThreads(), list[str]()
    for _ in range(20):
        order.clear()
        overlap(counting(order, "F", forward), counting(order, "B", backward))
        assert order == expected.split()


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())  # threads of other tests may still end
    overlap = TwoThreads()
    overlap(nothing, nothing)
    (ours,) = set(threading.enumerate()) - before
    del overlap
    gc.collect()
    ended(ours)


class Layers(nn.Module):
    """Layers that change over, with dropout, one of them under a checkpoint, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(self._run, layer, x, use_reentrant=False)
            x = yield_here(nn.functional.dropout(x, 0.3))
        return x

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return yield_here(nn.functional.dropout(torch.tanh(layer(x)), 0.3))


def trained(overlap: Callable[[Callable[[], None], Callable[[], None]], object]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The gradients and the random state after three forwards, of which the last two run beside the backward of the one before."""
    torch.manual_seed(0)
    model, outputs = Layers(), list[torch.Tensor]()
    x = torch.randn(4, 8)

    def forward() -> None:
        outputs.append(model(x).sum())

    def backward() -> None:
        outputs.pop(0).backward()

    with torch.autocast("cpu", torch.bfloat16):
        forward()
        for _ in range(2):
            overlap(forward, backward)
        backward()
    return [one.grad for one in model.parameters() if one.grad is not None], torch.get_rng_state()


def test_bits(one_thread: None) -> None:
    """Under autocast, with recomputations that restore random numbers, all is as one after the other."""
    plain, random = trained(lambda forward, backward: (forward(), backward()))
    for _ in range(3):
        beside, random_beside = trained(TwoThreads())
        assert len(plain) == 6 and all(map(torch.equal, plain, beside))
        assert torch.equal(random, random_beside)


def test_the_backward_has_the_callers_state() -> None:
    found: list[object] = []

    def look() -> None:
        found.append((threading.current_thread().name, NAME.get(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert torch._C._is_multithreading_enabled() == (NAME.get() == "nobody")
        found.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))

    overlap = TwoThreads()
    NAME.set("caller")
    with torch.autograd.set_multithreading_enabled(False):
        with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False):
            overlap(nothing, look)
        with torch.inference_mode():
            overlap(nothing, look)
    NAME.set("nobody")
    assert found == [
        ("bpipe-backward", "caller", False, False),
        (True, torch.float16, False),
        ("bpipe-backward", "caller", False, True),
        (False, torch.bfloat16, True),
    ]


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "text"),
    [
        (_Mode, "a torch function mode"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), "a saved-tensor hook"),
        (lambda: FlopCounterMode(display=False), "mode"),
    ],
)
def test_what_belongs_to_a_thread(context: Callable[[], object], text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Then both run in the caller's thread, one after the other; the log says so once."""
    order: list[str] = []
    overlap = TwoThreads()
    with caplog.at_level(logging.WARNING, "bpipe"), context():  # type: ignore[attr-defined]
        for _ in range(2):
            overlap(counting(order, "F", 1), counting(order, "B", 1))
    assert order == ["F0", "F1", "B0", "B1"] * 2
    assert [text in record.getMessage() for record in caplog.records] == [True]


def test_a_backward_that_draws_is_refused() -> None:
    with pytest.raises(StageError, match="a backward draws random numbers"):
        TwoThreads()(nothing, lambda: torch.rand(1))


# Ways to draw numbers that are not torch's own, each from a source of its own that `source` makes.
SOURCES: dict[str, Callable[[], Callable[[], object]]] = {
    "Python's": lambda: random.random,
    "Python's, by shuffling": lambda: lambda: random.shuffle([*range(5)]),
    "NumPy's": lambda: np.random.rand,
    "NumPy's, half of a pair": lambda: np.random.normal,
    "a module's generator of torch's": lambda: partial(torch.rand, 1, generator=torch.Generator().manual_seed(0)),
    "a module's generator of NumPy's": lambda: np.random.default_rng(0).normal,
    "a module's RandomState": lambda: np.random.RandomState(0).normal,
    "a module's Random": lambda: random.Random(0).random,
}


class Drawing(nn.Module):
    """Draws in its forward, in its backward, or in both, from one source; it keeps the generator, if there is one."""

    def __init__(self, draw: Callable[[], object], *, forward: bool, backward: bool) -> None:
        super().__init__()
        self.generator = draw.keywords["generator"] if isinstance(draw, partial) else getattr(draw, "__self__", None)
        self._draw, self._forward, self._backward = draw, forward, backward
        self.drawn: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if self._forward:
                self.drawn.append(self._draw())
            x = yield_here(x * 2)
            if self._backward:
                x.register_hook(self._hook)
        return x

    def _hook(self, gradient: torch.Tensor) -> None:
        self.drawn.append(self._draw())


def drawn_by(name: str, forward: bool, backward: bool, overlap: Callable[..., object]) -> list[object]:
    """What is drawn by a forward, and a backward beside another forward."""
    random.seed(0)
    np.random.seed(0)
    module = Drawing(SOURCES[name](), forward=forward, backward=backward)
    if isinstance(overlap, TwoThreads):
        overlap.begin_step(Reachable([module]).sources)
    x = torch.ones(1, requires_grad=True)
    first = module(x)
    overlap(lambda: module(x), first.sum().backward)
    return [repr(one) for one in module.drawn]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.usefixtures("no_other_threads")
def test_halves_that_draw_from_one_source(name: str) -> None:
    """One of them alone draws what it would draw one after the other; both of them cannot, and that is refused."""
    for forward, backward in ((True, False), (False, True)):
        plain = drawn_by(name, forward, backward, lambda forward, backward: (forward(), backward()))
        assert drawn_by(name, forward, backward, TwoThreads()) == plain and plain
    with pytest.raises(StageError, match=r"a backward and the forward beside it both draw random numbers \("):
        drawn_by(name, True, True, TwoThreads())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["Python", "NumPy"])
def test_another_thread_that_draws_ends_no_training(
    draw: Callable[[], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that loads and changes data: nobody can tell whose numbers these were, so that it is said once."""
    monkeypatch.setattr(logs, "_SAID", set())
    ways = {key: threading.Semaphore(0) for key in ("ask", "drawn")}

    def load() -> None:
        while ways["ask"].acquire() and not has_ended:
            draw()
            ways["drawn"].release()

    def half() -> None:
        for _ in range(2):
            ways["ask"].release()
            assert ways["drawn"].acquire(timeout=PATIENCE_S)
            yield_here()

    has_ended: list[bool] = []
    loader = threading.Thread(target=load, name="loader")
    loader.start()
    overlap = TwoThreads()
    try:
        for _ in range(2):
            overlap(half, half)
        with pytest.raises(StageError, match="a backward draws random numbers"):  # torch's are still the backward's
            overlap(half, lambda: torch.rand(1))
    finally:
        has_ended.append(True)
        ways["ask"].release()
        loader.join(PATIENCE_S)
    (record,) = caplog.records
    assert "or by another thread of this process (" in record.getMessage() and "loader" in record.getMessage()


def test_halves_that_draw_from_two_generators() -> None:
    """Each from its module's own: nothing depends on how far the other one is."""

    def drawn(overlap: Callable[..., object]) -> list[object]:
        modules = [Drawing(random.Random(seed).random, forward=not seed, backward=bool(seed)) for seed in range(2)]
        if isinstance(overlap, TwoThreads):
            overlap.begin_step(Reachable(modules).sources)
        x = torch.ones(1, requires_grad=True)
        first = modules[1](x)
        overlap(lambda: modules[0](x), first.sum().backward)
        return [module.drawn for module in modules]

    assert drawn(TwoThreads()) == drawn(lambda forward, backward: (forward(), backward()))


def test_other_threads_are_left_alone() -> None:
    """A thread that belongs to no half runs through a module's points as if there were no pair."""
    order: list[str] = []

    def forward() -> None:
        other = threading.Thread(target=change_over)
        other.start()
        other.join(PATIENCE_S)
        order.append(f"F {other.is_alive()}")

    TwoThreads()(forward, lambda: order.append("B"))
    assert order == ["F False", "B"]
    assert yield_here(torch.ones(1)) == 1 and [len(yield_here(torch.ones(1), torch.ones(2)))] == [2]


# Errors.


def failing(*, before: int, then: Callable[[], object] = lambda: 1 / 0) -> None:
    for _ in range(before):
        yield_here()
    then()


def forever(seen: list[BaseException]) -> None:
    """A half that has many points, and notes how it is stopped."""
    try:
        while True:
            yield_here()
    except BaseException as error:
        seen.append(error)
        raise


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("is_forward", [True, False])
def test_an_error_stops_the_other_half(before: int, is_forward: bool) -> None:
    """The error itself is raised, and the other half's says what has stopped it."""
    seen: list[BaseException] = []
    halves = [partial(failing, before=before), partial(forever, seen)]
    overlap = TwoThreads()
    with pytest.raises(ZeroDivisionError):
        overlap(*(halves if is_forward else halves[::-1]))
    for error in seen:
        assert isinstance(error, StageError) and isinstance(error.__cause__, ZeroDivisionError)
    assert len(seen) == (not is_forward or before > 0)
    order: list[str] = []
    overlap(counting(order, "F", 1), counting(order, "B", 1))  # it can be used again
    assert order == ["F0", "B0", "F1", "B1"]


def test_an_error_that_the_other_half_catches_is_raised() -> None:
    def deaf() -> None:
        for _ in range(3):
            with suppress(StageError):
                yield_here()

    with pytest.raises(ZeroDivisionError):
        TwoThreads()(deaf, partial(failing, before=1))


def test_a_backward_that_hangs_after_its_forward_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    free, has_ended = threading.Event(), threading.Event()
    overlap = TwoThreads(grace_s=0.1)

    def hang() -> None:
        yield_here()
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        free.wait(PATIENCE_S)
        has_ended.set()

    def forward() -> None:
        yield_here()
        yield_here()

    with pytest.raises(KeyboardInterrupt):
        overlap(forward, hang)
    assert not has_ended.is_set()
    assert "has not ended within 0.1 s" in caplog.text
    free.set()
    order: list[str] = []
    overlap(counting(order, "F", 1), counting(order, "B", 1))
    assert order == ["F0", "B0", "F1", "B1"]


def test_ctrl_c_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one ends the wait for a backward that hangs, and the next pair does not wait behind it."""
    free, has_ended, overlap = threading.Event(), threading.Event(), TwoThreads(grace_s=PATIENCE_S)
    graces, join = list[float](), Turns.join

    def joins(self: Turns, half: Half, seconds: float | None = None) -> bool:
        graces.extend([] if seconds is None else [seconds])
        return join(self, half, seconds)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        until(lambda: graces, "the first Ctrl-C is noticed, and the backward gets its grace")
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    def hang() -> None:
        threading.Timer(0.1, interrupt).start()
        free.wait(2 * PATIENCE_S)
        has_ended.set()

    monkeypatch.setattr(Turns, "join", joins)
    with pytest.raises(KeyboardInterrupt):
        overlap(nothing, hang)
    assert graces == [PATIENCE_S]
    order: list[str] = []
    overlap(counting(order, "F", 1), counting(order, "B", 1))
    assert order == ["F0", "B0", "F1", "B1"] and not has_ended.is_set()
    free.set()


def test_nothing_is_kept() -> None:
    """What the halves hold is free when they have ended, also after an error."""
    overlap = TwoThreads()
    for then in (nothing, lambda: 1 / 0):
        held = nn.Linear(1, 1)
        alive = weakref.ref(held)

        def backward(held: nn.Module = held, then: Callable[[], object] = then) -> None:
            yield_here()
            then()

        with suppress(ZeroDivisionError):
            overlap(lambda: yield_here(), backward)
        del held, backward
        gc.collect()
        assert alive() is None
