"""The fault suite on the device: each fault ends on every rank as it does on CPU, without a race.

Messages between stages travel over the simulated NCCL in one half of the cases, and by copies from device to device in the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.case import Case
from tests.faults.cases import GROUPS
from tests.faults.checks import check
from tests.faults.harness import Companies

# What works on CPU and looks like trouble: its modules are those of tests/models, and test_equality.py is the device's.
WORKS = "What looks like a fault and works"
# What ends in time on the device as well, but with another text: the device's own wait, or the other half of the pair.
SAYS_ELSE = {"SIGSTOP of the store's host, in a step", "Ctrl-C while the backward of a pair runs in its thread"}
FAULTS = [case for name, group in GROUPS.items() if name != WORKS for case in group if case.name not in SAYS_ELSE]
CASES = {case.name: case for case in FAULTS[::3]}  # the others run on CPU alone


@pytest.fixture(scope="module")
def companies() -> Iterator[list[Companies]]:
    started = [Companies(), Companies(copies=True)]
    yield started
    for one in started:
        one.kill()


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, companies: list[Companies], one_thread: None) -> None:
    case: Case = CASES[name]
    check(case, companies[list(CASES).index(name) % len(companies)].play(case))


def test_ranks_that_saw_all_this_end_well(companies: list[Companies]) -> None:
    for one in companies:
        for size, codes in one.dismiss().items():
            assert codes == [0] * size
