"""Every fault ends on every rank, with its cause; and a new pipeline over the same processes is exact. Not by the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bpipe
from bpipe.schedules import Plan
from tests.faults.case import Case, Setup
from tests.faults.cases import CASES, GROUPS
from tests.faults.checks import check
from tests.faults.harness import Companies
from tests.faults.pipeline import Pipeline
from tests.faults.raises import BALANCED, MEASURED
from tests.faults.table import PATH, page, untimed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def companies() -> Iterator[Companies]:
    started = Companies()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Seconds from the fault to the last rank's error, by case."""
    return {}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case: Case, companies: Companies, measured: dict[str, float]) -> None:
    if (seconds := check(case, companies.play(case))) is not None:
        measured[case.name] = seconds


def test_ranks_that_saw_all_this_end_well(companies: Companies) -> None:
    for size, codes in companies.dismiss().items():
        assert codes == [0] * size


def test_the_table(measured: dict[str, float], request: pytest.FixtureRequest) -> None:
    """It has exactly these cases and outcomes."""
    if request.config.getoption("--write-table"):
        unmeasured = [case.name for case in CASES.values() if (case.here or case.there) and case.name not in measured]
        assert not unmeasured, "run the whole suite to write the table"
        late = [name for name, seconds in measured.items() if seconds >= CASES[name].bound_s]
        assert not late, f"the page says less: write it on a quiet machine, without {late}"
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


def test_a_part_is_away_when_the_forward_raises() -> None:
    plan, evicted_bytes = trained(MEASURED)
    own = [str(action) for action in plan.actions[0]]
    assert evicted_bytes > 0
    assert own.index("0EVICT6.2") < own.index("0F7") < own.index("0LOAD6.2")


def trained(setup: Setup) -> tuple[Plan, float]:
    """The plan of four ranks after three steps, and what rank 0 has evicted."""
    loopback = bpipe.Loopback(4)
    pipelines = [Pipeline(rank, 4, setup, group=loopback.rank(rank)) for rank in range(4)]
    x, y = pipelines[0].batch
    for _ in range(3):
        loopback.step([pipeline.schedule for pipeline in pipelines], x, target=y)
    return pipelines[0].schedule.plan, pipelines[0].schedule.stats["evicted_bytes"]
