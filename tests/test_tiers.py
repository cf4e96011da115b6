"""Which test runs when: each function of the core once at least, and cases that stand for the others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bpipe
from tests import quiet
from tests.conftest import TIER
from tests.tiers import (
    APART,
    BESIDE,
    BUDGET_S,
    LONG_S,
    ROOT,
    TIMED,
    TOGETHER,
    Place,
    Seconds,
    Tier,
    examples,
    measured,
    parted,
    places,
)

NOTHING = Seconds({}, {})
RESULTS = {"Estimate", "StageChoice", "UnevenHalves"}  # classes of results, of which tests name the fields alone
ARGUMENTS = {"p": (2, 3, 4), "m": (4, 8, 16), "name": ("1f1b", "gpipe", "zb_h1"), "late": (False, True)}


def cases_of(function: str, arguments: dict[str, Sequence[object]] = ARGUMENTS) -> list[Any]:
    """Stand-ins for the items that pytest makes of a product of arguments."""
    rows = [dict(zip(arguments, values)) for values in product(*arguments.values())]
    names = ["-".join(map(str, row.values())) for row in rows]
    return [SimpleNamespace(nodeid=f"{function}[{name}]", callspec=SimpleNamespace(params=row)) for name, row in zip(names, rows)]


def taken(cases: list[Any], seconds: Seconds) -> list[Any]:
    found = places(cases, seconds)
    return [case for case in cases if found[case.nodeid].tier == Tier.TEST]


def test_a_function_that_is_not_in_the_table_runs_whole() -> None:
    cases = cases_of("tests/comm/test_new.py::test_new")
    assert taken(cases, NOTHING) == cases


def test_cases_that_fit_into_the_budget_hold_every_pair_of_values() -> None:
    function = "tests/comm/test_some.py::test_some"
    cases = cases_of(function)
    some = taken(cases, Seconds({}, {function: BUDGET_S / 14}))
    assert len(some) == 14 < len(cases)
    for one, other in combinations(ARGUMENTS, 2):
        held = {(case.callspec.params[one], case.callspec.params[other]) for case in some}
        assert held == {*product(ARGUMENTS[one], ARGUMENTS[other])}


def test_a_function_of_the_core_keeps_a_case_and_one_beside_it_if_that_is_short() -> None:
    core, beside = "tests/comm/test_some.py::test_some", "tests/tools/test_some.py::test_some"
    assert len(taken(cases_of(core), Seconds({}, {core: LONG_S - 0.1}))) == 1
    assert len(taken(cases_of(beside), Seconds({}, {beside: 0.2}))) == 1
    assert not taken(cases_of(beside), Seconds({}, {beside: LONG_S - 0.1}))


def test_what_took_long_runs_in_test_all() -> None:
    cases = cases_of("tests/comm/test_some.py::test_some")
    assert taken(cases, Seconds({cases[0].nodeid: LONG_S}, {})) == cases[1:]
    assert places(cases, Seconds({cases[0].nodeid: LONG_S}, {}))[cases[0].nodeid] == Place(Tier.ALL, f"took {LONG_S} s")


def test_what_measures_time_is_named_whole() -> None:
    """And not by what its name begins with: a twin that measures none runs in `make test`."""
    (name,) = (name for name in TIMED if name.endswith("if_costs_were_wrong"))
    timed, twins = ({place.tier for place in places(cases_of(one), NOTHING).values()} for one in (name, f"{name}_by_a_clock"))
    assert timed == {Tier.TIMED} and twins == {Tier.TEST, Tier.ALL}


@pytest.mark.parametrize("tier", Tier)
def test_each_test_is_in_one_tier(tier: Tier) -> None:
    function = "tests/comm/test_some.py::test_some"
    names = [TIMED[0], f"{APART[0]}test_some.py::test_some"]
    cases = [*cases_of(function), *(case for name in names for case in cases_of(name))]
    seconds = Seconds({}, {function: 0.3})
    runs, left_out = parted(cases, tier)
    assert sorted([*runs, *left_out], key=id) == sorted(cases, key=id)
    assert runs == [case for case in cases if places(cases, measured())[case.nodeid].tier == tier]
    assert places(cases, seconds).keys() == {case.nodeid for case in cases}


def collected(tier: str) -> set[str]:
    """The tests that a command would run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "--tier", tier]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line for line in shown.splitlines() if "::" in line}


@pytest.mark.parametrize("tier", Tier)
def test_one_with_hypothesis_runs_in_two_tiers(tier: Tier) -> None:
    """With few examples in `make test`, and with all of its own in `make test-all`."""
    drawn = given(st.integers())(lambda number: None)
    one: Any = SimpleNamespace(nodeid="tests/comm/test_some.py::test_some", obj=drawn)
    assert parted([one], tier) == (([], [one]) if tier == Tier.TIMED else ([one], []))


def told() -> dict[str, str]:
    """The tier of each test, as `--explain-tiers` prints it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--explain-tiers"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = (line.partition(" ") for line in shown.splitlines() if line.partition(" ")[0] in [*Tier])
    return {rest.rpartition(": ")[0]: tier for tier, _, rest in lines}


def test_each_test_runs_by_one_of_three_commands() -> None:
    """`make test-all` runs what the other two leave; what the table calls long is there, and is none of `make test`'s."""
    tiers = told()
    assert len(tiers) > 8000
    for tier in (Tier.TEST, Tier.TIMED):
        assert collected(tier) == {test for test, one in tiers.items() if one == tier}
    assert all(tiers[test] != Tier.TEST for test in measured().long)


def test_what_the_rules_name_is_there() -> None:
    for name in (*TIMED, *APART, *TOGETHER, *BESIDE):
        file, _, function = name.partition("::")
        assert (ROOT / file).exists(), name
        assert f"def {function}" in (ROOT / file).read_text() if function else True, name
    functions = {test.partition("[")[0] for test in [*measured().long, *measured().mean]}
    for file, function in (name.split("::", 1) for name in functions):
        assert (ROOT / file).exists() and f"def {function.split('::')[-1]}(" in (ROOT / file).read_text(), (file, function)


def test_a_test_with_hypothesis_draws_few_examples_in_make_test(request: pytest.FixtureRequest) -> None:
    assert examples(400) == (15 if request.config.stash[TIER] == Tier.TEST else 400)


def test_every_public_name_of_a_room_beside_the_core_has_a_test_here(request: pytest.FixtureRequest) -> None:
    """It is in the text of a file of which a test runs."""
    if request.config.stash[TIER] != Tier.TEST or len({item.path for item in request.session.items}) < 200:
        pytest.skip("a part of the tests runs")
    rooms = tuple(f"bpipe.{name.split('/')[1]}" for name in BESIDE if name.endswith("/"))
    names = {name for name in bpipe.__all__ if getattr(getattr(bpipe, name), "__module__", "").startswith(rooms)}
    names |= {name for room in rooms for name in import_module(room).__all__} - RESULTS
    texts = [path.read_text() for path in {item.path for item in request.session.items}]
    assert len(names) > 20
    assert not [name for name in sorted(names) if not any(re.search(rf"\b{name}\b", text) for text in texts)]


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "SPIN", "print(0.1)")
    assert "is busy, and decides nothing" in quiet.why_busy() and "20%" in quiet.why_busy()
    monkeypatch.setattr(quiet, "SPIN", "print(0.5)")
    assert quiet.why_busy() == ""


def test_a_bound_in_seconds_grows_with_what_this_processor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_count", lambda: 2 * quiet.REFERENCE_S)
    assert quiet.here(3.0) == pytest.approx(6.0)
    monkeypatch.setattr(quiet, "_count", lambda: quiet.REFERENCE_S / 2)
    assert quiet.here(3.0) == 3.0
