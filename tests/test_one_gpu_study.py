"""The study of one GPU measures what it says, as far as a CPU can tell; the figures of a GPU are made up here, and only here."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import gpu, one_eviction, one_gpu
from benchmarks.alternate import Taken
from benchmarks.blocks import GPTBlock, Size
from benchmarks.one_gpu import COLUMNS, MIB, STUDY, Account, Pipeline, Waits, Work
from bpipe.schedules import Op
from tests.storages import StorageCount

SMALL = Size(32, 16, 1)
OF_GPU = {key for key, *_ in COLUMNS if key.endswith(("_us", "_mib")) and key != "moved_mib"} | {"gb_s"}
OF_GPU |= {"exposed", "exposed_low", "exposed_high"}


def small(attention: str, to: str) -> Work:
    return Work(4, 6, attention, to, SMALL, "cpu", 0.1)


def pipeline(work: Work, *, is_balanced: bool = True) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(work, one_gpu.blocks(work, work.p), one_gpu.batch_of(work, work.m), is_balanced=is_balanced)


@pytest.mark.parametrize("attention, to", [("materialised", "host"), ("flash", "peer")])
def test_a_case_is_measured(attention, to):
    """What a GPU alone can give is not there, and no CPU figure stands in its place."""
    (row,) = one_gpu.measure(small(attention, to))
    assert set(row) == {key for key, *_ in COLUMNS}
    assert json.loads(json.dumps(row)) == row
    assert {key for key, value in row.items() if value is None} == OF_GPU
    assert row["moved_mib"] > 0 and row["num_rounds"] >= 7 and row["time_low"] <= row["time"] <= row["time_high"]
    assert one_gpu.claims([row]) == []
    assert one_gpu.draw([row]).axes


def test_both_attentions_are_the_same_function():
    torch.manual_seed(0)
    block, x = GPTBlock(SMALL, "flash"), torch.randn(2, SMALL.tokens, SMALL.width)
    other = GPTBlock(SMALL, "materialised")
    other.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(x), other(x))


def test_materialised_attention_saves_the_softmax():
    evicted = {}
    for attention in ("flash", "materialised"):
        of = pipeline(small(attention, "peer"))
        of.step()
        evicted[attention] = of.schedules[0].stats["evicted_bytes"] / len(of.schedules[0].plan.evicted(0))
    assert evicted["materialised"] - evicted["flash"] >= SMALL.tokens**2 * 2


@pytest.mark.parametrize("attention", ["flash", "materialised"])
@pytest.mark.parametrize("to", ["peer", "host"])
@pytest.mark.parametrize("is_balanced", [False, True])
def test_the_fullest_rank_s_account_is_the_plan_s(attention, to, is_balanced):
    """With every live storage counted, in place of the allocator's statistics."""
    of, count = pipeline(small(attention, to), is_balanced=is_balanced), StorageCount()
    with count.mode():
        of.step()  # from now on, what stays is counted before an action as after it
        found = one_gpu.bytes_of(of, count.live_bytes)
    assert found["peak_mib"] == found["planned_mib"] > 0
    assert found["freed_mib"] == found["evicted_mib"] and (found["freed_mib"] > 0) == is_balanced


def test_an_account_has_its_rank_s_own_actions_alone():
    now = [1000]
    account, send, evict = Account(lambda: now[0]), [Op.SEND_F], [Op.WAIT_EVICT]
    for op, taken, meanwhile in ((send, 50, 7), (send, 20, 0), (evict, -30, 100), (send, -15, 0)):
        account.before(None, ActionOf(*op))
        now[0] += taken
        account.after(None, ActionOf(*op))
        now[0] += meanwhile  # another rank's
    assert (account.live_bytes, account.peak_bytes, account.freed_bytes) == (25, 70, 30)


def test_the_fullest_rank_may_be_one_with_remote_activations():
    """Their buffers are older than the step."""
    now = [0]

    class Ran:
        schedules = [SimpleNamespace(stats=stats_of(80, 0)), SimpleNamespace(stats=stats_of(100, 40))]  # noqa: RUF012

        @contextmanager
        def followed(self, accounts: Any) -> Any:
            self.accounts = accounts
            yield

        def step(self) -> None:
            for account, taken in zip(self.accounts, (70 * MIB, 50 * MIB)):
                account.before(None, ActionOf(Op.F))
                now[0] += taken
                account.after(None, ActionOf(Op.F))

    found = one_gpu.bytes_of(Ran(), lambda: now[0])
    assert found == {"planned_mib": 100.0, "peak_mib": 90.0, "evicted_mib": 0.0, "freed_mib": 0.0}


def stats_of(planned_mib: int, guest_mib: int) -> dict[str, float]:
    """Of a rank on which 5 MiB stay."""
    sizes = {
        "predicted_device_peak_bytes": 5 + planned_mib,
        "static_bytes": 5,
        "remote_buffer_bytes": guest_mib,
        "evicted_bytes": 0,
    }
    return {key: value * MIB for key, value in sizes.items()}


class ActionOf:
    """As much of an action as observers look at."""

    def __init__(self, op: Op) -> None:
        self.op = op


class Mark:
    """An event, of a clock that stands still but for waits."""

    now_ms = 0.0

    def __init__(self) -> None:
        self.at_ms = Mark.now_ms

    def elapsed_time(self, end: Mark) -> float:
        return end.at_ms - self.at_ms


def test_waits_are_those_of_evictions_and_loads():
    waits = Waits(Mark)
    for op, took_ms in ((Op.F, 100.0), (Op.WAIT_EVICT, 2.0), (Op.WAIT_RECV_F, 30.0), (Op.WAIT_LOAD, 1.0), (Op.WAIT_ACCEPT, 5.0)):
        waits.before(None, ActionOf(op))
        Mark.now_ms += took_ms
        waits.after(None, ActionOf(op))
    assert waits.seconds() == 0.003


def test_the_share_is_of_the_rank_that_waits_longest(monkeypatch):
    """Each mark is a millisecond behind the one before, and a step takes a second: a rank's waits, over 1000."""
    of, seconds, made = pipeline(small("flash", "peer")), iter(range(1000)), []
    monkeypatch.setattr(one_gpu.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(of, "step", lambda: None)

    def waits(mark: Any) -> Any:
        made.append(len(made) % 4 * 0.001)
        return WaitsOf(made[-1])

    monkeypatch.setattr(one_gpu, "Waits", waits)
    assert one_gpu.exposed(of, Mark) == {"exposed": 0.003, "exposed_low": 0.003, "exposed_high": 0.003}


class WaitsOf(Waits):
    """So many seconds of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


def test_every_wait_of_a_step_is_marked_twice():
    of = pipeline(small("flash", "peer"))
    waits = [Waits(Mark) for _ in of.schedules]
    with of.followed(waits):
        of.step()
    plan = of.schedules[0].plan
    assert [len(one._marks) for one in waits] == [4 * len(plan.evicted(rank)) for rank in range(4)]
    assert waits[0]._marks
    assert all(schedule.session.observer is None for schedule in of.schedules)


@pytest.mark.parametrize("attention", ["flash", "materialised"])
@pytest.mark.parametrize("to", ["peer", "host"])
def test_an_eviction_by_itself_moves_what_one_in_a_step_moves(attention, to, monkeypatch):
    """All of a microbatch but its input, which a stage of a pipeline gets from another one."""
    work, moved = small(attention, to), []
    move = one_eviction.eviction
    monkeypatch.setattr(
        one_eviction, "eviction", lambda messages, *args, **how: moved.append(messages) or move(messages, *args, **how)
    )
    monkeypatch.setattr(one_eviction, "device_us", lambda call, device: (call(), 2.0)[1])
    found = one_eviction.alone(*one_gpu.blocks(work, 1), one_gpu.batch_of(work, 1).requires_grad_(), to_host=to == "host")
    num_bytes = sum(map(len, moved[0]))
    of = pipeline(work)
    of.step()
    assert num_bytes * len(of.schedules[0].plan.evicted(0)) == of.schedules[0].stats["evicted_bytes"]
    assert found == {"forward_us": 2.0, "evict_us": 2.0, "gb_s": num_bytes / 2000.0}


class Event(Mark):
    """A millisecond behind the one before."""

    def __init__(self) -> None:
        Mark.now_ms += 1.0
        super().__init__()

    def synchronize(self) -> None:
        """Nothing is under way."""


def test_a_gpu_fills_every_column(monkeypatch):
    """With a clock and an allocator that stand in for its own."""
    count = StorageCount()
    for module in (gpu, one_gpu):
        monkeypatch.setattr(module, "is_on_gpu", lambda device: True)
        monkeypatch.setattr(module, "event_mark", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: count.live_bytes())
    monkeypatch.setattr(one_gpu, "in_turns", lambda steps, seconds: {name: Taken([1.0], [1.0]) for name in steps})
    with count.mode():
        found = one_gpu.in_one_process(0, small("flash", "peer"))
    assert set(found) == {key for key, *_ in COLUMNS} and None not in found.values()
    assert found["plain_peak_mib"] > found["peak_mib"] == found["planned_mib"]
    assert found["freed_mib"] == found["evicted_mib"] > 0
    assert found["exposed"] > 0 and found["moved_mib"] >= found["evicted_mib"]


def rows_of_a_gpu(**changed: float) -> list[dict[str, Any]]:
    """Made up."""
    figures = {"freed_mib": 101.0, "evicted_mib": 100.0, "peak_mib": 505.0, "planned_mib": 500.0, "plain_ms": 400.0}
    figures |= {"forward_us": 1000.0, "evict_us": 200.0, "gb_s": 1300.0, "moved_mib": 300.0, "num_rounds": 9}
    figures |= {"exposed": 0.01, "exposed_low": 0.009, "exposed_high": 0.012, "time": 1.01, "time_low": 1.0, "time_high": 1.03}
    columns = dict.fromkeys(key for key, *_ in COLUMNS)
    return [{**columns, **work._asdict(), **work.size._asdict(), **figures, **changed} for work in one_gpu.WORKS]


@pytest.mark.parametrize(
    "changed, verdicts",
    [
        ({}, ["yes", "yes", "yes", "yes"]),
        ({"freed_mib": 99.0}, ["no", "yes", "yes", "yes"]),
        ({"peak_mib": 550.0}, ["yes", "no", "yes", "yes"]),
        ({"exposed": 0.03}, ["yes", "yes", "within the interval", "yes"]),
        ({"time": 1.05, "time_low": 1.04}, ["yes", "yes", "yes", "no"]),
        ({"evict_us": 1000.0}, ["yes", "yes"]),
    ],
)
def test_claims_are_made_of_what_a_gpu_measured(changed, verdicts):
    rows = rows_of_a_gpu(**changed)
    assert [claim.verdict for claim in one_gpu.claims(rows)] == verdicts * len(rows)


def test_a_picture_has_a_place_for_each_case():
    rows = [
        *rows_of_a_gpu(),
        {**dict.fromkeys(key for key, *_ in COLUMNS), **rows_of_a_gpu()[0], "evict_us": None},
    ]
    times, copies = one_gpu.draw(rows).axes
    assert len(times.get_yticks()) == len(rows)
    assert [len(axes.lines[0].get_xdata()) for axes in (times, copies)] == [len(rows), len(rows) - 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_without_a_gpu_the_study_is_left_out_loudly(capsys):
    assert STUDY not in benchmarks.chosen([])
    assert capsys.readouterr().out == "one_gpu is not measured: it takes a GPU, and torch.cuda finds none here\n"
    assert benchmarks.chosen(["none"]) == [] and capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_asked_for_by_name_without_a_gpu_nothing_is_written(monkeypatch):
    files = [STUDY.path, STUDY.path.with_suffix(".png"), benchmarks.RESULTS]
    before = [file.stat().st_mtime_ns if file.exists() else None for file in files]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "growth", "one_gpu"])
    monkeypatch.setattr(benchmarks, "run", lambda studies: pytest.fail(f"{studies} would have run"))
    with pytest.raises(SystemExit, match=r"^one_gpu is not measured: it takes a GPU, and torch\.cuda finds none here$"):
        benchmarks.main()
    assert [file.stat().st_mtime_ns if file.exists() else None for file in files] == before


def test_studies_that_take_nothing_special_are_chosen():
    assert [study.name for study in benchmarks.chosen(["growth"])] == ["growth"]
