"""For pytest in a copy without the room BPIPE_WITHOUT: a test that belongs to the room is left out, when it asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TypeVar

import pytest

from tests.deletion.rooms import belongs

ROOM = os.environ["BPIPE_WITHOUT"]
assert find_spec(f"bpipe.{ROOM}") is None, f"these tests would import another tree's bpipe.{ROOM}"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def left_out(report: Report) -> Report:
    if report.failed and belongs(ROOM, report.nodeid, report.longreprtext):
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, f"it belongs to {ROOM}/")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    return left_out((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    return left_out((yield))
