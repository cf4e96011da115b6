"""When a wait is too long: all ranks are asked, one of them shows what they do, once a step, and in the end the pipeline fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.effects import Send, Warn
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.watchdog import ANSWERS_S, Timeouts, Watchdog
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.logs import LOG
from bpipe.plan.action import Op
from bpipe.schedules import Plan, build

PLAN = build("1f1b", 3, 4)
SLOW_S, TIMEOUT_S = 10.0, 60.0


def position_of(text: str, rank: int, plan: Plan = PLAN) -> int:
    return [str(action) for action in plan.actions[rank]].index(text)


class Ranks:
    """The watches of three ranks, whose time and messages the test drives."""

    def __init__(self, positions: Sequence[str]) -> None:
        self.failures: list[Failure] = []
        self.silent: set[int] = set()
        self.activities = [Activity() for _ in range(3)]
        self.watches = [self._watch(rank) for rank in range(3)]
        self.start = 1000.0
        for rank, text in enumerate(positions):
            self.activities[rank].begin(PLAN, rank, 7, [0, 1, 2])
            self.activities[rank].position = position_of(text, rank)

    def _watch(self, rank: int) -> Watchdog:
        return Watchdog(rank, 3, self.activities[rank], Timeouts(TIMEOUT_S, SLOW_S), 1000.0)

    def tick(self, rank: int, now: float) -> None:
        for finding in self.watches[rank].tick(now, {1}):
            if isinstance(finding, Send):
                self.ask(rank, finding.frame)
            elif isinstance(finding, Warn):
                LOG.warning(finding.text)
            else:
                self.failures.append(finding)

    def ask(self, rank: int, frame: Frame) -> None:
        assert frame.kind is Kind.ASK
        for other in {0, 1, 2} - {rank} - self.silent:
            self.watches[rank].on_status(other, frame.number, Status.unpack(self.watches[other].answer(rank).pack()))

    def run(self, seconds: float, begin: float = 0.0, ranks: Sequence[int] = (0, 1, 2)) -> None:
        for tick in range(int(seconds * 4) + 1):
            for rank in ranks:
                self.tick(rank, self.start + begin + tick / 4)


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_rank_that_computes_for_long_is_shown_once_by_the_lowest_that_waits(caplog):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.run(SLOW_S - 1)
    assert not shown(caplog)
    ranks.run(40, begin=SLOW_S - 1)
    (text,) = shown(caplog)
    assert text.startswith("rank 0 has waited 10")
    assert "in step 7, stage 0, microbatch 0, action 0WAIT_RECV_B0, for rank 1." in text
    assert "frozen" not in text
    assert "rank 1 has been computing 1F1 for" in text
    assert "rank 2 has waited" in text
    grid = [line for line in text.splitlines() if "|" in line]
    assert [line.count(">") for line in grid] == [1, 1, 1]
    assert ">F1<" in grid[1]
    assert not ranks.failures


def test_a_frozen_rank_is_named(caplog):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.silent = {1}
    ranks.run(SLOW_S + ANSWERS_S + 1, ranks=(0, 2))
    (text,) = shown(caplog)
    assert "rank 1 is frozen: no answer" in text
    assert "rank 1 does not answer" in text
    assert "rank 1 ? |" in text


def masked(text: str) -> list[str]:
    """The lines of a report, without what differs from run to run."""
    return re.sub(r"\d+\.\d+ s\b", "N s", re.sub(r"in step \d+", "in step N", text)).strip().splitlines()


@pytest.mark.parametrize("page, silent", [("docs/tutorials/failures.md", set()), ("docs/when-it-hangs.md", {1})])
def test_the_pages_show_what_is_logged(caplog, page, silent):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.silent = silent
    ranks.run(SLOW_S + ANSWERS_S + 1, ranks=[2])
    (text,) = shown(caplog)
    shows = (Path(__file__).parents[2] / page).read_text()
    begin = shows.index("rank 2 has waited 3")
    lines = masked(shows[begin : shows.index("```", begin)])
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in masked(text)]


def test_what_is_shown_in_a_step_is_shown_again_in_a_later_one_only(caplog):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.run(20)
    for activity in ranks.activities:
        activity.position += 1
    ranks.activities[0].position = position_of("0WAIT_RECV_B1", 0)
    ranks.run(20, begin=20)
    assert len(shown(caplog)) == 1
    for rank, activity in enumerate(ranks.activities):
        activity.begin(PLAN, rank, 8, [0, 1, 2])
        activity.position = position_of(f"{rank}{'F0' if rank == 0 else 'WAIT_RECV_F0'}", rank)
    ranks.run(20, begin=40)
    assert len(shown(caplog)) == 2


def test_a_rank_that_was_asked_between_steps_shows_its_wait_in_the_next_one(caplog):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2F1"])
    ranks.activities[2].end(8)  # it has done its part of step 7
    ranks.run(SLOW_S + 1)
    assert len(shown(caplog)) == 1 and not ranks.watches[2].shows()
    ranks.activities[2].begin(PLAN, 2, 8, [0, 1, 2])
    ranks.activities[2].position = position_of("2WAIT_RECV_F1", 2)
    ranks.run(SLOW_S + 1, begin=SLOW_S + 1, ranks=[2])
    first, second = shown(caplog)
    assert first.startswith("rank 0") and second.startswith("rank 2") and "in step 8" in second


def test_the_timeout_fails_with_the_picture(caplog):
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.silent = {1}
    ranks.run(TIMEOUT_S - 0.5, ranks=(0, 2))
    assert not ranks.failures
    ranks.run(1.0, begin=TIMEOUT_S - 0.5, ranks=(0, 2))
    failure = ranks.failures[0]
    assert (failure.cause, failure.rank, failure.step) == (Cause.TIMED_OUT, 0, 7)
    assert "rank 1 is frozen" in failure.error
    assert "longer than timeout_s=60" in failure.error
    assert "rank 1 does not answer" in failure.details
    assert len(shown(caplog)) == 1


def test_progress_starts_a_wait_anew():
    ranks = Ranks(["0WAIT_RECV_B0", "1F1", "2WAIT_RECV_F1"])
    ranks.run(TIMEOUT_S - 2)
    for activity in ranks.activities:
        activity.position += 1
    ranks.run(TIMEOUT_S - 2, begin=TIMEOUT_S - 2)
    assert not ranks.failures


def test_nobody_waits_in_a_computation():
    ranks = Ranks(["0F1", "1F1", "2F0"])
    ranks.run(10 * TIMEOUT_S)
    assert not ranks.failures


def test_ranks_that_have_not_come_to_a_step_are_named(caplog):
    ranks = Ranks(["0F0", "1F0", "2F0"])
    for rank, activity in enumerate(ranks.activities):
        activity.end(8)
        activity.state = State.OUTSIDE if rank == 1 else State.MEETING
    ranks.run(20)
    (text,) = shown(caplog)
    assert "for rank 1 to begin step 8" in text
    assert "rank 1 has been in user code for" in text
    assert "between steps (8 completed)" in text


def test_a_rank_whose_stored_activations_are_not_reloaded_waits():
    plan = build("balanced_1f1b", 4, 8)
    activity = Activity()
    activity.begin(plan, 3, 0, [0, 1, 2, 3], plan.chains(3))
    activity.position = len(plan.actions[3])
    watch = Watchdog(3, 4, activity, Timeouts(TIMEOUT_S, SLOW_S), 0.0)
    (evictor,) = activity.serving
    activity.serving[evictor] = next(i for i, action in enumerate(plan.chains(3)[evictor]) if action.op is Op.WAIT_RETURN)
    findings = [finding for tick in range(80) for finding in watch.tick(tick / 4, ())]
    (text,) = (finding.text for finding in findings if isinstance(finding, Warn))
    assert "rank 3 has waited" in text
    assert "for peers to reload the activations it stores" in text
    assert "its acceptor for rank 0 is at 0WAIT_RETURN" in text
