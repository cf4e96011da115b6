"""What is checked of a case that was played: every rank's error and what comes after it; and, apart, how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bpipe.errors import AgreementError, BPipeError, PipelineBrokenError, RankFailedError, TransferTimeoutError
from tests.faults.case import After, Case, Fate
from tests.faults.harness import Outcome
from tests.faults.scene import Report, Seen
from tests.patience import too_late

AT_ONCE_S = 0.5


def check(case: Case, outcome: Outcome) -> float | None:
    """Check what the ranks saw; the seconds from the fault to the last rank's error, of a case that has errors."""
    assert not outcome.missing, f"{too_late(f'a word of ranks {sorted(outcome.missing)}')}; {told(outcome)}"
    for rank, report in outcome.reports.items():
        check_error(case, rank, report.fault)
        if report.next is not None:
            check_next(case, rank, report)
        if report.retry is not None:
            assert report.retry.kind is None, report.retry.traceback
    assert not case.culprits or case.culprits & outcome.fired.keys(), "the fault did not happen"
    return seconds_of(case, outcome) if case.here or case.there else None


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
        assert issubclass(found.kind, BPipeError), found.traceback  # it was told that another rank gave up first, and meets again
        return
    assert issubclass(found.kind, BPipeError if case.after is After.LEFT else PipelineBrokenError), found.traceback
    assert not issubclass(found.kind, TransferTimeoutError), "the next call has waited for others"


def seconds_of(case: Case, outcome: Outcome) -> float:
    """From the fault to the last rank's error, but for those of ranks that were stopped."""
    stopped = case.culprits if case.fate is Fate.THAWS else frozenset()
    return outcome.seconds(rank for rank, report in outcome.reports.items() if report.fault.kind and rank not in stopped)


def check_times(case: Case, outcome: Outcome) -> None:
    """Check that errors come within the case's bound, and that the next call is refused at once."""
    assert seconds_of(case, outcome) < case.bound_s, told(outcome)
    for rank, report in outcome.reports.items():
        if case.fate is Fate.THAWS and rank in case.culprits:
            assert report.fault.at - outcome.thawed_at < case.bound_s
        if report.next is not None and report.fault.kind is not None and case.after is not After.WHOLE:
            assert report.next.seconds < AT_ONCE_S, rank
