"""Every fault ends on every rank, promptly and with its cause; and a new pipeline over the same processes is exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

import bpipe
from bpipe.errors import AgreementError, BPipeError, PipelineBrokenError, RankFailedError
from bpipe.schedules import Plan
from tests.faults.case import After, Case, Fate, Setup
from tests.faults.cases import CASES, GROUPS
from tests.faults.harness import Company, Outcome
from tests.faults.pipeline import Pipeline
from tests.faults.raises import BALANCED, MEASURED
from tests.faults.scene import Report, Seen
from tests.faults.table import PATH, page, untimed

pytestmark = pytest.mark.usefixtures("one_thread")

AT_ONCE_S = 0.5

Companies = dict[int, Company]


@pytest.fixture(scope="module")
def companies() -> Iterator[Companies]:
    """Processes for the cases that leave them alive, by number of ranks."""
    started: Companies = {}
    yield started
    for company in started.values():
        company.kill()


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Seconds from the fault to the last rank's error, by case."""
    return {}


def played(case: Case, companies: Companies) -> Outcome:
    if case.is_alone or case.store_on is not None:
        return Company(case.num_ranks, case.store_on).play(case)
    if case.num_ranks not in companies or companies[case.num_ranks].is_gone:
        companies[case.num_ranks] = Company(case.num_ranks)
    return companies[case.num_ranks].play(case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case: Case, companies: Companies, measured: dict[str, float]) -> None:
    outcome = played(case, companies)
    assert not outcome.missing, f"ranks {sorted(outcome.missing)} said nothing; {told(outcome)}"
    for rank, report in outcome.reports.items():
        check_error(case, rank, report.fault)
        if report.next is not None:
            check_next(case, rank, report)
        if report.retry is not None:
            assert report.retry.kind is None, report.retry.traceback
    assert not case.culprits or case.culprits & outcome.fired.keys(), "the fault did not happen"
    if case.here or case.there:
        measured[case.name] = check_time(case, outcome)


def told(outcome: Outcome) -> str:
    return "\n".join(f"rank {rank}: {report.fault.text}" for rank, report in outcome.reports.items())


def check_error(case: Case, rank: int, found: Seen) -> None:
    is_culprit = rank in case.culprits
    expected = case.here if is_culprit else case.there
    if expected is None or (found.kind is None and rank in case.early):
        assert found.kind is None, found.traceback
        return
    assert found.kind is not None, f"rank {rank} ended without an error"
    assert issubclass(found.kind, expected), found.traceback
    if issubclass(found.kind, RankFailedError):
        assert found.attributes["rank"] in case.culprits, found.traceback
        if case.strike is not None and case.error:
            assert found.attributes["action"].startswith(case.failing) and found.attributes["step"] == case.strike.step, found
            assert case.error in found.attributes["error"]
    assert missing((*case.says, *(case.place if is_culprit else ())), found.text) == [], found.traceback
    assert missing(() if is_culprit else (*case.place, case.error), found.message) == [], found.traceback
    assert len(missing(case.says_not, found.text)) == len(case.says_not), found.traceback


def missing(words: Iterable[str], text: str) -> list[str]:
    return [word for word in words if word not in text]


def check_next(case: Case, rank: int, report: Report) -> None:
    found = report.next
    assert found is not None
    if rank in case.early and report.fault.kind is None:
        check_error(replace(case, early=frozenset()), rank, found)
        return
    if case.after is After.WHOLE:
        assert found.kind is None, found.traceback
        return
    assert found.kind is not None, "the call after the fault went through"
    if case.fate is Fate.ENDS and report.fault.kind is not None and issubclass(report.fault.kind, AgreementError):
        assert issubclass(found.kind, BPipeError), found.traceback  # it was told that another rank gave up first, and meets anew
        return
    assert issubclass(found.kind, BPipeError if case.after is After.LEFT else PipelineBrokenError), found.traceback
    assert found.seconds < AT_ONCE_S


def check_time(case: Case, outcome: Outcome) -> float:
    raised = [rank for rank, report in outcome.reports.items() if report.fault.kind is not None]
    if case.fate is Fate.THAWS:
        for rank in case.culprits:
            raised.remove(rank)
            assert outcome.reports[rank].fault.at - outcome.thawed_at < case.bound_s
    seconds = outcome.seconds(raised)
    assert seconds < case.bound_s, told(outcome)
    return seconds


def test_ranks_that_saw_all_this_end_well(companies: Companies) -> None:
    for company in companies.values():
        assert company.is_gone or company.dismiss() == [0] * company.size


def test_the_table(measured: dict[str, float], request: pytest.FixtureRequest) -> None:
    """It has exactly these cases and outcomes."""
    if request.config.getoption("--write-table"):
        unmeasured = [case.name for case in CASES.values() if (case.here or case.there) and case.name not in measured]
        assert not unmeasured, "run the whole suite to write the table"
        PATH.write_text(page(GROUPS, measured))
    assert untimed(PATH.read_text()) == untimed(page(GROUPS, {}))


def test_no_two_cases_share_a_name() -> None:
    assert len(CASES) == sum(map(len, GROUPS.values()))


def test_faults_on_the_acceptor_and_the_evictor_strike_while_bytes_are_away() -> None:
    """What is sure in the lanes' order: rank 0 has evicted microbatch 1 before 0F3, and loads it only after 3B0."""
    plan, evicted_bytes = trained(BALANCED)
    own, served = ([str(action) for action in lane] for lane in (plan.actions[0], plan.served[3]))
    assert evicted_bytes > 0
    assert own.index("0WAIT_EVICT1") < own.index("0F3") < own.index("0WAIT_RECV_B0") < own.index("0LOAD1")
    assert served[:2] == ["0ACCEPT1", "0WAIT_ACCEPT1"]


def test_a_part_leaves_inside_the_forward_that_raises() -> None:
    plan, evicted_bytes = trained(MEASURED)
    own = [str(action) for action in plan.actions[0]]
    assert evicted_bytes > 0
    assert own.index("0EVICT1.2") < own.index("0F3.1") < own.index("0WAIT_EVICT1.2") < own.index("0F3.2") < own.index("0LOAD1.2")


def trained(setup: Setup) -> tuple[Plan, float]:
    """The plan of four ranks after three steps, and what rank 0 has evicted."""
    loopback = bpipe.Loopback(4)
    pipelines = [Pipeline(rank, 4, setup, group=loopback.rank(rank)) for rank in range(4)]
    x, y = pipelines[0].batch
    for _ in range(3):
        loopback.step([pipeline.schedule for pipeline in pipelines], x, target=y)
    return pipelines[0].schedule.plan, pipelines[0].schedule.stats["evicted_bytes"]
