"""Every fault ends on every rank promptly: within its bound, and without a wait in the next call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.case import Case
from tests.faults.cases import CASES
from tests.faults.checks import check, check_times
from tests.faults.harness import Companies

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTS = {name: case for name, case in CASES.items() if case.here or case.there}


@pytest.fixture(scope="module")
def companies() -> Iterator[Companies]:
    started = Companies()
    yield started
    started.kill()


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_case(case: Case, companies: Companies) -> None:
    outcome = companies.play(case)
    check(case, outcome)
    check_times(case, outcome)
