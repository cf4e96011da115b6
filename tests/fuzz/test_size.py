"""Hostile files of any size take memory and time in proportion to their size."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from bpipe.errors import BPipeError
from bpipe.plan.action import Action, Op
from bpipe.plan.reserved import reserve
from bpipe.schedules import Costs, Plan, build, simulate, verify
from bpipe.schedules.torch_csv import from_csv
from bpipe.tools.trace_record import Origin, packed, parse

MEMORY, ALLOWANCE = 400, 2**20  # bytes for each byte of input, and in any case
FACTOR, MOST = 8, 24  # a file that is 8 times as large takes less than 24 times as long; it would take 64 if that were quadratic
CELLS = 2**26  # bytes of the largest picture

Read = Callable[[str], object]


def _plan(num_stages: int, m: int, lane: Iterable[str], served: Iterable[str] = (), *sizes: str) -> str:
    head = f"bpipe-plan 2 name=x slots=-\nflow chain [[{','.join(['0'] * num_stages)}],{m},true]"
    return "\n".join([head, *sizes, f"rank 0: {' '.join(lane)}", f"serve 0: {' '.join(served)}", ""])


def _on_one_rank(n: int) -> str:
    return _plan(n, 1, [*(f"{stage}F0" for stage in range(n)), *(f"{stage}B0" for stage in reversed(range(n)))])


def _on_many_ranks(n: int) -> str:
    return build("1f1b", n, 1).to_text()


def _with_skips(text: str, *skips: tuple[int, ...]) -> str:
    """Add skips to a plan that has none: messages are missing where stages are on several ranks."""
    head, lanes = text.split("\n", maxsplit=1)
    return f"{head} skips={','.join('>'.join(map(str, skip)) for skip in skips)}\n{lanes}"


def _pieces(n: int) -> str:
    return _plan(1, n, (f"0F{i}.1" for i in range(n)), (), "size 0: 1,1 0 0 0 0 0", "static: 0")


def _moves_at_one_place(n: int) -> str:
    forwards, backwards, moves = ([f"0{op}{i}" for i in range(n)] for op in ("F", "B", "EVICT"))
    return _plan(1, n, [*forwards[:1], *moves, *forwards[1:], *backwards])


def _check(text: str) -> None:
    verify(Plan.from_text(text))


def _draw(text: str) -> str:
    return str(Plan.from_text(text))


def _peak_slots(text: str) -> object:
    return Plan.from_text(text).peak_slots


def _trace(change: Callable[[dict[str, Any]], None]) -> str:
    trace = json.loads("".join(packed([simulate(build("balanced_1f1b", 4, 4), Costs())], Origin())))
    change(trace)
    return json.dumps(trace)


def _read_trace(text: str) -> object:
    return parse(text, "trace.json")


def _timelines(n: int) -> str:
    """Timelines over a plan, of which none has times."""

    def change(trace: dict[str, Any]) -> None:
        trace["plans"] = [build("gpipe", 4, n).to_text()]
        for lane in (*trace["timelines"][0][4], *trace["timelines"][0][5]):
            lane[:4] = [], [], [], []
        trace["timelines"] *= n

    return _trace(change)


def _with_a_long(value: Any) -> Callable[[int], str]:
    """A value that is to be a time, and is much too long for one."""

    def make(n: int) -> str:
        def change(trace: dict[str, Any]) -> None:
            trace["timelines"][0][4][0][0][0] = value * n

        return _trace(change)

    return make


CASES: dict[str, tuple[Callable[[int], str], Read, int]] = {  # what makes a file of size n, what reads it, n
    "check stages of one rank": (_on_one_rank, _check, 400),
    "check stages of many ranks": (_on_many_ranks, _check, 50),
    "check skips on one rank": (lambda n: _with_skips(_on_one_rank(n), *((i, i + 2) for i in range(n - 2))), _check, 400),
    "check skips between ranks": (lambda n: _with_skips(_on_many_ranks(n), *((i, i + 2) for i in range(n - 2))), _check, 50),
    "check a skip to all stages": (lambda n: _with_skips(_on_one_rank(n), tuple(range(n))), _check, 400),
    "check repeated actions": (lambda n: _plan(1, n, ["0F0"] * n), _check, 400),
    "check missing actions": (lambda n: _plan(1, n, (f"0F{i}" for i in range(n))), _check, 400),
    "check pieces": (_pieces, _check, 400),
    "check peers": (lambda n: _plan(1, 1, ["0F0", "0B0"], (f"0ACCEPT0@{i}" for i in range(n))), _check, 400),
    "draw stages without actions": (lambda n: _plan(10 * n, 1, ["0F0", "0B0"]), _draw, 400),
    "draw peers": (lambda n: _plan(1, 1, ["0F0", "0B0"], (f"0ACCEPT0@{i}" for i in range(n))), _draw, 400),
    "draw moves at one place": (_moves_at_one_place, _draw, 400),
    "peak slots": (lambda n: _plan(1, 1, [], (f"0ACCEPT{i}@1" for i in range(n))), _peak_slots, 400),
    "csv": (lambda n: "\n".join(f"{stage}F0,{stage}B0" for stage in range(n)), from_csv, 50),
    "trace of many timelines": (_timelines, _read_trace, 30),
    "trace with a long text": (_with_a_long("9" * 100), _read_trace, 2000),
    "trace with a long list": (_with_a_long([9]), _read_trace, 200_000),
    "trace of a long plan": (lambda n: _trace(lambda trace: trace["plans"].append(_on_one_rank(n))), _read_trace, 400),
}


def _attempt(read: Read, text: str) -> str:
    try:
        read(text)
    except BPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_memory_is_in_proportion(name: str) -> None:
    make, read, n = CASES[name]
    text = make(n)
    tracemalloc.start()
    try:
        said = _attempt(read, text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY * len(text) + ALLOWANCE and len(said) < 4000


@pytest.mark.parametrize("name", CASES)
def test_time_is_in_proportion(name: str) -> None:
    make, read, n = CASES[name]
    texts = make(n), make(FACTOR * n)
    seconds = [min(of_text) for of_text in zip(*([_seconds(read, text) for text in texts] for _ in range(3)))]
    assert seconds[1] < MOST * seconds[0] * len(texts[1]) / (FACTOR * len(texts[0])) + 0.05


def _seconds(read: Read, text: str) -> float:
    """Without the collection of what other tests have left in this process."""
    gc.disable()
    try:
        start = time.process_time()
        _attempt(read, text)
        return time.process_time() - start
    finally:
        gc.enable()


@pytest.mark.parametrize("skips", [(), ((0, 2),), (tuple(range(50_000)),)], ids=["chain", "one skip", "a skip to all"])
def test_fifty_thousand_stages_are_checked_at_once(skips: tuple[tuple[int, ...], ...]) -> None:
    text = _on_one_rank(50_000)
    text = _with_skips(text, *skips) if skips else text
    assert _seconds(_check, text) < 30  # some 5 s on a quiet machine; 60 s when each stage's neighbours were searched for


def test_timelines_without_times_take_no_room_for_them() -> None:
    text = _timelines(500)
    tracemalloc.start()
    assert not _attempt(_read_trace, text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY / 4 * len(text)


def test_a_picture_has_a_bounded_size() -> None:
    picture = _draw(_on_many_ranks(1500))
    assert len(picture) < CELLS and "more columns" in picture.splitlines()[-1]
    assert "more columns" not in _draw(_on_many_ranks(20))


def test_buffers_are_reserved_at_once() -> None:
    n = 20_000
    arrive, leave = ([Action(op, 0, i) for i in range(n)] for op in (Op.ACCEPT, Op.WAIT_RETURN))
    start = time.process_time()
    assert len(reserve([*arrive, *leave, *arrive]).sizes) == n
    assert time.process_time() - start < 5
