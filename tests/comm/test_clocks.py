"""Clocks of several ranks: what their readings prove, whatever the delays; and the agreement around them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bpipe
from bpipe.comm.health.clocks import Reading, align, offsets
from bpipe.comm.health.collective import Collective
from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import AgreementError
from tests.models import mse
from tests.ranks import run_ranks

delays = st.integers(0, 10_000_000)


@st.composite
def simulated(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """True offsets, and what ranks with such clocks read around exchanges that take what they take."""
    size, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    true = [0, *(draw(st.integers(-(10**15), 10**15)) for _ in range(size - 1))]
    now, readings = [draw(delays) for _ in range(size)], [[] for _ in range(size)]
    for _ in range(rounds):
        before = [moment + draw(delays) for moment in now]
        now = [max(before) + 1 + draw(delays) for _ in range(size)]  # nobody has all before everybody gave
        for rank in range(size):
            readings[rank].append((before[rank] + true[rank], now[rank] + true[rank]))
    return true, readings


@given(simulated())
def test_the_true_offset_is_within_the_bounds(simulation):
    true, readings = simulation
    for offset, found in zip(true, offsets(readings), strict=True):
        assert abs(found.offset_ns - offset) <= found.error_ns


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(-(10**15), 10**15))
def test_the_best_round_counts(delay, better, offset):
    slow, fast = (
        [(0, 10**7 + delay), (offset, offset + 10**7 + delay)],
        [(10**9, 10**9 + better), (10**9 + offset, 10**9 + offset + better)],
    )
    (_, found) = offsets([[slow[0], fast[0]], [slow[1], fast[1]]])
    assert found.error_ns <= 2 * better
    assert offsets([[slow[0]], [slow[1]]])[1].error_ns >= found.error_ns


def test_clocks_that_may_agree_are_one():
    readings = [[(100, 200)], [(130, 190)]]
    assert offsets(readings)[1].offset_ns == 0
    assert offsets(readings)[1].error_ns == 90


def test_a_reading_survives_packing():
    reading = Reading(b"x" * 16, "f" * 32, 3, -5, 2**62)
    assert decode(Reading, encode(reading), "reading") == reading


# Over processes, whose clock on one machine is one


class Shifted:
    """A transport whose rank has another clock."""

    def __init__(self, transport: Any, shift_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchange = transport.exchange
        true = time.perf_counter_ns
        monkeypatch.setattr("bpipe.comm.health.clocks.time.perf_counter_ns", lambda: true() + shift_ns)


def schedule_of(rank: int, num_ranks: int) -> bpipe.Schedule:
    stage = bpipe.PipelineStage(torch.nn.Linear(4, 4), rank, num_ranks, "cpu")
    return bpipe.OneFOneB(stage, 2, loss_fn=mse)


def align_shifted(rank: int) -> tuple[Any, Any]:
    schedule = schedule_of(rank, 3)
    transport = schedule.session.context.transport
    here = align(transport.exchange, "f" * 32, 2 - rank)
    with pytest.MonkeyPatch.context() as patch:
        shifted = align(Shifted(transport, rank * 10**12, patch).exchange, "f" * 32, 2 - rank)
    schedule.close()
    return here, shifted


def test_alignment_over_processes():
    results = run_ranks(align_shifted, 3)
    assert results[0] == results[1] == results[2]
    here, shifted = results[0]
    assert here.plan_ranks == (2, 1, 0)
    assert here.token != shifted.token
    assert [offset.offset_ns for offset in here.offsets] == [0, 0, 0]
    for rank, (offset_ns, error_ns) in enumerate(shifted.offsets):
        assert abs(offset_ns - rank * 10**12) <= error_ns < 10**11  # bounded: how closely depends on the machine


def refuse(rank: int, how: str) -> str:
    schedule = schedule_of(rank, 2)
    try:
        if how == "step" and rank:
            schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
        elif how == "gather" and rank:
            schedule.session.context.transport.exchange(Collective.GATHER, b"")
        elif how == "refusal" and rank:
            schedule.session.context.transport.refuse("no room")
            return "refused"
        else:
            align(schedule.session.context.transport.exchange, str(rank if how == "plan" else 0) * 32, rank)
    except bpipe.errors.BPipeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "how, said",
    [
        ("refusal", "rank 1 cannot trace: no room"),
        ("plan", "ranks 0 and 1 trace schedules with different plans"),
        ("step", "rank 1 runs a step"),
    ],
)
def test_all_ranks_hear_why_not(how, said):
    first, second = run_ranks(refuse, 2, how)
    assert said in first and first.startswith(AgreementError.__name__)
    assert second  # nobody goes on alone


def test_ranks_that_gather_and_trace_at_once_do_not_hang():
    first, second = run_ranks(refuse, 2, "gather")
    assert "rank 1" in first and "rank 0" in second


def exchange_lengths(rank: int) -> list[list[bytes]]:
    schedule = schedule_of(rank, 3)
    transport, given = schedule.session.context.transport, (bytes([rank]) * rank * 1000, b"", b"\0" * (3 - rank))
    found = [transport.exchange(Collective.GATHER, data) for data in given]
    schedule.close()  # not only at the process's end, which says nothing to a rank that has not read all
    return found


def test_exchange_of_any_length():
    expected = [[b"", b"\1" * 1000, b"\2" * 2000], [b""] * 3, [b"\0\0\0", b"\0\0", b"\0"]]
    assert run_ranks(exchange_lengths, 3) == [expected] * 3
