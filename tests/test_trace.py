"""Traces of real steps: they say what happened, in an order that can be, change nothing, and keep nothing alive."""

from __future__ import annotations

import gc
import re
import sys
import time
import weakref
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler

import bpipe
from bpipe.device import times as device_times
from bpipe.device.times import DeviceTimes
from bpipe.errors import ConfigurationError, PipelineBrokenError
from bpipe.plan.action import COMPUTE, HOST, POSTS, RECEIVER_OF, START_OF, WAIT_OF
from bpipe.schedules import Action, Destinations, Op, Span
from bpipe.simulator.critical import critical_path
from bpipe.simulator.measured import Measured
from bpipe.tools.trace_record import load_trace
from bpipe.tools.tracing import trace
from tests.models import Block, mse
from tests.ranks import run_ranks
from tests.tools.traces import checked

P, M, WIDTH = 4, 8, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As each rank of the process tests has: what is compared to the bit is computed alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(num_stages: int = P) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(WIDTH, 4, 0.0) for _ in range(num_stages)]


def batch(m: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 2 * m, 16, WIDTH, generator=generator).unbind())


def pipeline(modules: list[nn.Module], rule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB) -> tuple[bpipe.Loopback, list[Any]]:
    loopback, p = bpipe.Loopback(len(modules)), len(modules)
    stages = [bpipe.PipelineStage(module, i, p, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    return loopback, [rule(stage, M, loss_fn=mse) for stage in stages]


def gradients(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad for module in modules for p in module.parameters()]


def check_order(timeline: Measured) -> None:
    """What must hold of any step that was run: within a rank by one clock, between ranks within their clocks' error."""
    plan = timeline.plan
    spans = {
        (rank, span.action): span
        for rank in range(plan.num_ranks)
        for span in (*timeline.spans(rank), *timeline.served_spans(rank))
    }
    assert len(spans) == sum(len(lane) for lane in (*plan.actions, *plan.served))
    assert all(0 <= span.begin_s <= span.end_s for span in spans.values())
    assert min(span.begin_s for span in spans.values()) == 0
    for rank in range(plan.num_ranks):
        profiling_order = [span for span in timeline.spans(rank) if span.action.op in COMPUTE or span.action.op in START_OF]
        assert all(a.end_s <= b.begin_s for a, b in pairwise(profiling_order))
        assert all(span.seconds > 0 for span in timeline.computations(rank))

    def error_s(*ranks: int) -> float:
        return sum(timeline.clock_error_s[rank] for rank in ranks)

    waits = {(rank, action[:4]): span for (rank, action), span in spans.items() if action.op in START_OF}
    for (rank, action), sent in spans.items():
        if action.op in WAIT_OF:
            assert sent.end_s == waits[rank, (WAIT_OF[action.op], *action[1:4])].end_s
        if action.op in RECEIVER_OF and action.peer != HOST:
            op, offset = RECEIVER_OF[action.op], {Op.SEND_F: 1, Op.SEND_B: -1}.get(action.op, 0)
            end_s = waits[action.peer, (WAIT_OF[op], action.stage + offset, *action[2:4])].end_s
            assert sent.begin_s <= end_s + error_s(rank, action.peer)
    for microbatch in range(plan.num_microbatches):
        forwards = [_pieces(timeline, Op.F, stage, microbatch) for stage in range(plan.num_stages)]
        for stage, (a, b) in enumerate(pairwise(forwards)):
            assert a[-1].end_s <= b[0].begin_s + error_s(*plan.stage_ranks[stage : stage + 2])
    path = [step.span for step in critical_path(timeline)]
    apart_s = max(error_s(a, b) for a, b in permutations(range(plan.num_ranks), 2))
    assert all(a.end_s <= b.begin_s + apart_s for a, b in pairwise(path))
    assert path[0].action[:3] == plan.compute(plan.stage_ranks[path[0].action.stage])[0][:3]
    assert path[-1].end_s == max(timeline.span_s(rank)[1] for rank in range(plan.num_ranks))


def _pieces(timeline: Measured, op: Op, stage: int, microbatch: int) -> list[Span]:
    """A computation: one span, or those of its pieces."""
    return [span for span in timeline.spans(timeline.plan.stage_ranks[stage]) if span.action[:3] == (op, stage, microbatch)]


def check_memory(timeline: Measured, rank: int, stats: dict[str, float]) -> None:
    lane = timeline.actions[rank]
    assert (timeline.peak_bytes(rank), timeline.device_peak_bytes(rank)) == (stats["peak_bytes"], stats["device_peak_bytes"])
    assert lane.remote_buffer_bytes == stats["remote_buffer_bytes"] + stats["held_bytes"]
    assert lane.static_bytes + lane.remote_buffer_bytes == stats["static_bytes"] + stats["remote_buffer_bytes"]
    assert min(lane.activation_bytes) >= 0 and min(lane.message_bytes) >= 0
    moments = list(timeline.memory(rank))
    assert max(held.activation_bytes for held in moments) == stats["peak_bytes"]
    assert max(held.device_bytes for held in moments) == stats["device_peak_bytes"]


# In one process


@pytest.mark.parametrize("rule", [bpipe.OneFOneB, bpipe.BalancedOneFOneB])
def test_steps_in_a_loopback(rule, tmp_path):
    modules, plain = blocks(), blocks()
    x, y = batch()
    loopback, schedules = pipeline(modules, rule)
    reference, untraced = pipeline(plain, rule)
    with trace(schedules, tmp_path / "new" / "folder") as t:
        assert t.timelines == []
        for step in range(2):
            loopback.step(schedules, x, target=y)
            for rank, schedule in enumerate(schedules):
                check_memory(t.timelines[step], rank, schedule.stats)
        loopback.eval(schedules, x)
    for _ in range(2):
        reference.step(untraced, x, target=y)
    assert all(map(torch.equal, gradients(modules), gradients(plain)))
    assert [(one.step, one.source, one.plan.has_backward) for one in t.timelines] == [
        (step, "measured", step < 2) for step in range(3)
    ]
    for one in t.timelines:
        check_order(one)
    assert all(a.began_s + a.makespan_s < b.began_s for a, b in pairwise(t.timelines))
    assert [path.name for path in sorted((tmp_path / "new" / "folder").iterdir())] == [f"rank-{rank}.json" for rank in range(P)]
    for path in (tmp_path / "new" / "folder").iterdir():
        checked(path)
    assert load_trace(tmp_path / "new" / "folder") == t.timelines == t.gather()


def test_evictions_are_in_the_trace():
    loopback, schedules = pipeline(blocks())
    with trace(schedules) as t:
        loopback.step(schedules, *batch()[:1], target=batch()[1])
    (timeline,) = t.timelines
    evicted = [span for span in timeline.transfers(0) if span.action.op is Op.EVICT]
    assert len(evicted) == len(schedules[0].plan.evicted(0)) > 0
    assert len(list(timeline.served_spans(3))) == len(schedules[0].plan.served[3]) > 0
    live = dict(zip(schedules[0].plan.actions[0], timeline.actions[0].activation_bytes))
    assert max(live.values()) == 3 * next(iter(live.values()))  # of its eight microbatches, and it has sent the others away


@pytest.mark.parametrize(("parts", "host"), [(1, "no"), (4, "no"), (2, "only")])
def test_balanced_steps(parts, host, tmp_path):
    loopback, plain = pipeline(blocks(), bpipe.OneFOneB)
    to = Destinations(host=host)
    schedules = [bpipe.Balanced(one, budget="lowest", options=bpipe.Options(parts=parts), to=to) for one in plain]
    with trace(schedules, tmp_path) as t:
        for _ in range(3):
            loopback.step(schedules, batch()[0], target=batch()[1])
    timelines, plan = t.timelines, schedules[0].plan
    assert all(one.plan == plan for one in timelines)
    for one in timelines:
        check_order(one)
    ops = [action for lane in plan.actions for action in lane]
    assert any(a.op is Op.EVICT and (a.peer == HOST) == (host == "only") and bool(a.part) == (parts > 1) for a in ops)
    for rank, schedule in enumerate(schedules):
        check_memory(timelines[2], rank, schedule.stats)
        assert timelines[2].actions[rank].static_bytes > 0
    for path in tmp_path.iterdir():
        checked(path)
    assert load_trace(tmp_path) == timelines


def test_weights_that_are_gathered_more_than_once():
    """Of actions by one name each has its own time, in the order of the list."""
    loopback, modules = bpipe.Loopback(2), blocks(4)
    stages = [bpipe.PipelineStage(module, i, 4, "cpu", loopback.rank(i % 2)) for i, module in enumerate(modules)]
    schedules = [bpipe.BreadthFirst(stages[rank::2], M, loss_fn=mse) for rank in range(2)]
    with trace(schedules) as t:
        loopback.step(schedules, batch()[0], target=batch()[1])
    (timeline,) = t.timelines
    spans = [span for span in timeline.spans(0) if span.action.op not in POSTS]
    gathered = [span for span in spans if span.action == Action(Op.UNSHARD, 0, 0)]
    assert len(gathered) > 1
    assert all(0 <= a.begin_s <= a.end_s <= b.begin_s for a, b in pairwise(spans))


def test_a_trace_keeps_nothing_alive():
    loopback, schedules = pipeline(blocks())
    x, y = batch()
    output = loopback.step(schedules, x, target=y)
    seen: list[Any] = []
    keep = schedules[0].session.agree
    schedules[0].session.agree = lambda *args: (run := keep(*args), seen.append(weakref.ref(run)))[0]
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        with trace(schedules) as t:
            for _ in range(3):
                output = loopback.step(schedules, x, target=y)
            during = count_tensors()
    finally:
        gc.enable()
    assert output is not None and len(t.timelines) == 3
    assert during == before
    assert [ref() for ref in seen] == [None] * 3


def count_tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def test_files_of_an_earlier_trace_are_not_taken_for_this_one(tmp_path):
    modules = blocks()
    loopback, schedules = pipeline(modules)
    (tmp_path / f"rank-{P}.json").write_text("of a run over more ranks")
    (tmp_path / "rank-0.json").write_text("of an earlier run")
    x, y = batch()
    with bpipe.trace(schedules, tmp_path):
        loopback.step(schedules, x, target=y)
    assert len(bpipe.load_trace(tmp_path)) == 1


def test_a_record_is_a_few_bytes_an_action():
    loopback, schedules = pipeline(blocks())
    with trace(schedules) as t:
        loopback.step(schedules, batch()[0], target=batch()[1])
    record, plan = t._recorders[3].records[0], schedules[3].plan
    arrays = [getattr(record, name) for name in record.__slots__ if isinstance(getattr(record, name), array)]
    assert sum(len(a) * a.itemsize for a in arrays) == (24 + 8) * len(plan.actions[3]) + 16 * len(plan.served[3])
    with trace(schedules) as t:
        for _ in range(2):
            loopback.step(schedules, batch()[0], target=batch()[1])
    before, after = t._recorders[3].records
    assert before.taken_bytes is after.taken_bytes  # 8 of them for steps that are alike


class Fails(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("the user's own")
        return super().forward(x)


def test_a_step_that_fails_leaves_the_earlier_ones(tmp_path):
    modules = [Fails(WIDTH, WIDTH) for _ in range(2)]
    loopback, schedules = pipeline(modules)
    x, y = batch()
    t = trace(schedules, tmp_path)

    def train() -> None:
        with t:
            for step in range(3):
                modules[1].fails = step == 2
                loopback.step(schedules, x, target=y)

    with pytest.raises(KeyError, match="the user's own"):
        train()
    assert [one.step for one in t.timelines] == [0, 1]
    assert load_trace(tmp_path) == t.timelines
    assert schedules[0].session.observer is None
    with pytest.raises(PipelineBrokenError), trace(schedules):
        pass


def test_an_error_is_not_hidden_by_one_of_writing(tmp_path):
    _, schedules = pipeline(blocks(1))

    def put_a_file_in_the_way(error: type[Exception] | None) -> None:
        (tmp_path / "folder").unlink(missing_ok=True)
        with trace(schedules, tmp_path / "folder"):
            (tmp_path / "folder").touch()
            if error is not None:
                raise error

    with pytest.raises(KeyError) as caught:
        put_a_file_in_the_way(KeyError)
    assert "nor could the trace be written" in caught.value.__notes__[0]
    with pytest.raises(FileExistsError, match="folder"):
        put_a_file_in_the_way(None)


def test_misuse(tmp_path):
    loopback, schedules = pipeline(blocks(2))
    _, others = pipeline(blocks(2))
    for wrong in (schedules[0], schedules[:1], schedules[::-1], [schedules[0], others[1]], []):
        with pytest.raises(ConfigurationError, match=r"a Loopback is traced as a whole|0 schedules"):
            trace(wrong)
    with trace(schedules) as t:
        with pytest.raises(ConfigurationError, match="is being traced already"), trace(schedules):
            pass
        loopback.step(schedules, batch()[0], target=batch()[1])  # the first trace goes on
    assert len(t.timelines) == 1
    with pytest.raises(ConfigurationError, match="entered once"), t:
        pass
    with pytest.raises(ConfigurationError, match="never entered"):
        trace(schedules).gather()
    assert trace(schedules).timelines == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file is a file: give the folder"), trace(schedules, tmp_path / "file"):
        pass
    schedules[1].close()
    with pytest.raises(PipelineBrokenError, match="closed"), trace(schedules):
        pass
    assert schedules[0].session.observer is None


def test_tracing_from_inside_a_step():
    loopback, schedules = pipeline(blocks(1))

    class Traces(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with trace(schedules):
                return super().forward(x)

    schedules[0].session.context.stages[0].submod = Traces(WIDTH, WIDTH)
    with pytest.raises(PipelineBrokenError, match="one step at a time"):
        loopback.step(schedules, batch()[0], target=batch()[1])


# Nothing when it is off


def calls_of(function: Any) -> list[str]:
    """The Python functions that a call runs, by name."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def test_off_it_runs_nothing(monkeypatch):
    """Not one call more an action than the action's own: neither a clock is read nor record_function made."""
    loopback, schedules = pipeline(blocks(1))
    x, y = batch()
    loopback.step(schedules, x, target=y)
    monkeypatch.setattr(profiler, "record_function", None)
    off = calls_of(lambda: loopback.step(schedules, x, target=y))
    assert not [name for name in off if re.search(r"\b(_execute_observed|Run\._named|Recorder|Observer|record_function)\b", name)]
    with trace(schedules):
        on = calls_of(lambda: loopback.step(schedules, x, target=y))
    num_actions = len(schedules[0].plan.actions[0])
    assert on.count("Recorder.before") == on.count("Recorder.after") == num_actions
    assert off.count("Run.execute") == num_actions


def test_names_in_the_profiler():
    loopback, schedules = pipeline(blocks(2))
    x, y = batch()
    loopback.step(schedules, x, target=y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        loopback.step(schedules, x, target=y)
    named = [event.name for event in profile.events() if event.name.startswith("bpipe")]
    assert sorted(named) == sorted(f"bpipe rank {r} {a}" for r, lane in enumerate(schedules[0].plan.actions) for a in lane)


# Over processes


def train_traced(rank: int, folder: str) -> list[Measured]:
    """A process that trains, with a clock of its own as if on another machine."""
    clock = time.perf_counter_ns
    time.perf_counter_ns = lambda: clock() + rank * 10**12  # type: ignore[assignment]
    x, y = batch()
    results = []
    for is_traced in (True, False):
        module = blocks()[rank]
        schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=mse)
        with trace(schedule, folder) if is_traced else nullcontext() as t:
            for step in range(2):
                schedule.step(x, target=y)
                if is_traced:
                    check_memory(t.timelines[step], rank, schedule.stats)
        results.append([p.grad for p in module.parameters()])
        if is_traced:
            schedule.eval(x)  # not recorded any more
            assert [one.ranks for one in t.timelines] == [[rank]] * 2
            gathered = t.gather()
        schedule.close()
    assert all(map(torch.equal, *results))
    return gathered


def test_steps_over_processes(tmp_path):
    gathered, *others = run_ranks(train_traced, P, str(tmp_path))
    assert others == [gathered] * (P - 1)
    assert load_trace(tmp_path) == gathered
    for path in tmp_path.iterdir():
        checked(path)
    assert [one.step for one in gathered] == [0, 1]
    for one in gathered:
        check_order(one)
        assert all(0 <= error_s < 100 for error_s in one.clock_error_s)


def stop_early(rank: int, folder: str) -> tuple[int, str]:
    """Rank 1's own code fails between steps, outside of any collective; nobody may wait for it."""
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(blocks(2)[rank], rank, 2, "cpu"), M, loss_fn=mse)
    x, y = batch()
    try:
        with trace(schedule, folder) as t:
            schedule.step(x, target=y)
            if rank:
                raise KeyError("the user's own")
    except KeyError as error:
        return len(t.timelines), str(error)
    return len(t.timelines), ""


def test_leaving_is_not_collective(tmp_path):
    assert run_ranks(stop_early, 2, str(tmp_path)) == [(1, ""), (1, '"the user\'s own"')]
    assert [one.step for one in load_trace(tmp_path)] == [0]


def enter_in_different_states(rank: int, folder: str) -> str:
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(blocks(2)[rank], rank, 2, "cpu"), M, loss_fn=mse)
    path = Path(folder) / str(rank)
    if rank:
        path.touch()
    try:
        with trace(schedule, path):
            pass
    except bpipe.errors.BPipeError as error:
        told = f"{type(error).__name__}: {error}"
    schedule.step(batch()[0], target=batch()[1])  # nothing was broken
    return told


def test_one_rank_s_refusal_is_heard_by_all(tmp_path):
    first, second = run_ranks(enter_in_different_states, 2, str(tmp_path))
    assert first.startswith("AgreementError: rank 1 cannot trace: ")
    assert second.startswith("ConfigurationError: ") and "is a file" in second


# Device times, on a device that is not there


class Event:
    """A timing event of a device that is done with everything up to `done_ms`."""

    now_ms = done_ms = 0.0

    def __init__(self) -> None:
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.done_ms

    def synchronize(self) -> None:
        Event.done_ms = max(Event.done_ms, self.at_ms)

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "CUDA would refuse"
        return other.at_ms - self.at_ms


def test_device_times_are_read_when_the_device_is_done(monkeypatch):
    monkeypatch.setattr("bpipe.device.times.timed_moment", lambda device: Event())
    monkeypatch.setattr(device_times.time, "perf_counter_ns", lambda: 5_000)
    times = DeviceTimes(torch.device("cpu"))  # whose events are those above
    steps = [array("q") for _ in range(3)]
    for number, into in enumerate(steps):
        times.start()
        for mark in range(4):
            Event.now_ms = 10.0 * number + mark
            times.mark()
        times.finish(into)
        if number == 1:
            Event.done_ms = 3.0  # the first step's end
    assert [len(into) for into in steps] == [4, 0, 0]
    times.resolve(wait=False)
    assert not steps[1]
    times.resolve(wait=True)
    assert [list(into) for into in steps] == [[5_000 + (10 * n + mark) * 10**6 for mark in range(4)] for n in range(3)]


def test_a_schedule_that_is_balanced_inside_a_trace_is_traced_to_its_end():
    loopback = bpipe.Loopback(1)
    stage = bpipe.PipelineStage(torch.nn.Linear(2, 2), 0, 1, "cpu", loopback.rank(0))
    plain = bpipe.OneFOneB(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    with bpipe.trace([plain]) as trace:
        balanced = bpipe.Balanced(plain, budget="lowest")
        loopback.step([balanced], torch.ones(4, 2), target=torch.ones(4, 2))
    assert len(trace.timelines) == 1 and balanced.session.observer is None
