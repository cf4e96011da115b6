"""Which tests run when: the one place that decides.

`make test` runs each short test function of the core, once at least, on a machine of any speed; `make test-all` everything else;
`make test-timed` what measures time. By these rules, the first that holds:

1. What TIMED names measures time.
2. What APART names is about the pages, examples, packages and copies of the code, or takes a device, a browser, another program.
   In what TOGETHER names, the tests of a file share processes that run for many times LONG_S, once for each worker.
3. A case that took LONG_S or longer when it was measured last is too long for `make test`.
4. Of a function's other cases, `make test` takes as many as fit into its BUDGET_S, one at least: first those that hold the most
   pairs of its arguments' values that no earlier one holds, and among equals in a fixed order at random. Of a function of a room
   BESIDE the core it takes one, if that took no longer than BESIDE_S.

A test with Hypothesis that is short with few examples runs in `make test` with these, and in `make test-all` with all of its own.

`seconds.json` has what was measured: `make test SIDE_BY_SIDE= ARGS="--tier every --write-seconds"` renews it, on a quiet machine,
or a part of it with a folder's name. A test that it does not have counts as short. `make test ARGS="-n 0 --explain-tiers"` prints
each test's tier, and why.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import combinations, compress, islice
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.pairs import by_pairs

ROOT = Path(__file__).parents[1]
SECONDS = Path(__file__).with_name("seconds.json")
LONG_S, BUDGET_S, BESIDE_S = 2.0, 0.5, 0.3
FEW_EXAMPLES = 15

TIMED = (
    "tests/attacks/test_channels.py",
    "tests/attacks/test_meetings.py",
    "tests/attacks/test_steps.py",
    "tests/chooser/test_auto.py::test_another_plan_takes_its_place_if_costs_were_wrong",
    "tests/faults/test_killed_at_random.py::test_the_others_raise_in_time",
    "tests/faults/test_promptness.py",
    "tests/fill/test_filled.py::test_a_wait_that_nobody_sees_end_is_not_learned_from_its_own_fill",
    "tests/fill/test_filled.py::test_idle_time_is_used_and_steps_take_as_long",
    "tests/overlap/test_side_by_side.py::test_steady_state",
    "tests/relaxed/test_local_learning.py::test_a_step_takes_as_long_as_the_plan_says_and_early_ranks_are_done_early",
    "tests/relaxed/test_routes.py::test_a_slow_replica_gets_less",
    "tests/relaxed/test_stream.py::test_a_tick_takes_as_long_as_the_slowest_stage",
    "tests/relaxed/test_stream_faults.py::test_faults_end_promptly",
    "tests/schedules/test_reach.py::test_uneven_parts_are_planned_in_seconds",
    "tests/schedules/test_rules.py::test_orders_take_a_time_near_to_linear",
    "tests/schedules/test_verify.py::test_planning_is_quick_and_linear",
    "tests/search/test_time.py",
    "tests/slices/test_step_time.py",
    "tests/test_benchmarks.py::test_many_ranks_stay_cheap",
    "tests/test_failing_cost.py",
    "tests/test_hiding.py",
    "tests/test_prediction.py",
    "tests/test_prediction_of_transfers.py",
    "tests/test_real_choices.py::test_a_layer_on_a_device_takes_its_time",
    "tests/test_real_choices.py::test_the_chosen_plan_is_the_fastest_and_takes_what_was_predicted",
    "tests/tools/test_cli.py::test_many_stages_and_microbatches_take_seconds",
    "tests/tools/test_cli.py::test_starts_quickly",
    "tests/tools/test_play_in_browser.py",
)
APART = (
    *("tests/deletion/", "tests/docs/", "tests/gpu/", "tests/release/", "tests/trainers/"),
    "tests/accelerator/test_on_device.py::test_on_device",
    "tests/accelerator/test_on_device.py::test_on_second_make",
    "tests/faults/test_outage.py",
    *("tests/test_benchmarks.py", "tests/test_examples.py", "tests/test_install.py", "tests/test_published_page.py"),
    *("tests/test_house.py", "tests/test_quickstart.py", "tests/test_readme.py", "tests/test_repository.py"),
    "tests/test_tutorials.py",
    *("tests/partition/test_all_transformers.py", "tests/slices/test_transformers_by_class.py"),
)
TOGETHER = (
    *("tests/test_compile.py", "tests/test_tensor_parallel.py"),
    "tests/test_sharding.py::test_after_a_step_everything_is_as_fsdp_leaves_it",
    "tests/test_sharding.py::test_bfloat16_throughout",
    "tests/test_sharding.py::test_gathers_reductions_and_gradients",
    "tests/test_sharding.py::test_gradients_add_up_in_the_precision_of_the_reduction",
    "tests/test_sharding.py::test_halves_of_weights_that_stay",
    "tests/test_sharding.py::test_halves_without_sharding_in_the_plan_are_one_backward",
    "tests/test_sharding.py::test_resharding_to_groups",
    "tests/test_sharding.py::test_the_user_decides_whether_a_step_reduces",
    "tests/test_sharding.py::test_what_the_plan_says_nothing_of_reduces_once_a_step",
    *("tests/training/test_gathered.py", "tests/training/test_replica_norms.py", "tests/training/test_sharded.py"),
)
BESIDE = (
    *("tests/chooser/", "tests/estimate/", "tests/fill/", "tests/overlap/", "tests/partition/", "tests/relaxed/", "tests/search/"),
    *("tests/tools/", "tests/training/", "tests/test_gpu_check.py", "tests/test_one_gpu_study.py", "tests/test_torchtitan.py"),
)


class Tier(StrEnum):
    """One of the three commands."""

    TEST = "test"
    ALL = "all"
    TIMED = "timed"


class Place(NamedTuple):
    """The tier of a test, and the rule that says so."""

    tier: Tier
    why: str


class Seconds(NamedTuple):
    """What tests took.

    Args:
        long: the cases that took LONG_S or longer; None for one that was marked as long before, and is not measured yet.
        mean: of the other cases of a function, where it is not short.
    """

    long: dict[str, float | None]
    mean: dict[str, float]


def measured() -> Seconds:
    """Return what the tests took when they were measured last."""
    return Seconds(**json.loads(SECONDS.read_text()))


def examples(count: int) -> int:
    """How many examples a test with Hypothesis draws: its own number, or a few in `make test`."""
    return min(count, FEW_EXAMPLES) if settings().max_examples == FEW_EXAMPLES else count


def places(items: Iterable[pytest.Item], seconds: Seconds) -> dict[str, Place]:
    """Sort tests into tiers, by their ids."""
    found: dict[str, Place] = {}
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        place = _by_name(item.nodeid) or _by_length(item.nodeid, seconds)
        if place is None:
            functions[item.nodeid.partition("[")[0]].append(item)
        else:
            found[item.nodeid] = place
    for function, cases in functions.items():
        found |= _by_budget(function, cases, seconds)
    return found


def _by_name(test: str) -> Place | None:
    if measures_time(test):
        return Place(Tier.TIMED, "measures time")
    if _is_among(test, APART):
        return Place(Tier.ALL, "not about the code alone")
    if _is_among(test, TOGETHER):
        return Place(Tier.ALL, "shares processes that take long with others")
    return None


def measures_time(test: str) -> bool:
    """Whether TIMED names a test."""
    return _is_among(test, TIMED)


def _is_among(test: str, names: Sequence[str]) -> bool:
    """Whether one of these names a test's function, file, or a folder above it, whose name ends with a slash."""
    function = test.partition("[")[0]
    return function in names or test.partition("::")[0] in names or test.startswith(tuple(n for n in names if n.endswith("/")))


def _by_length(test: str, seconds: Seconds) -> Place | None:
    if test not in seconds.long:
        return None
    took = seconds.long[test]
    return Place(Tier.ALL, "was marked as long, and is not measured yet" if took is None else f"took {took} s")


def _by_budget(function: str, cases: Sequence[pytest.Item], seconds: Seconds) -> dict[str, Place]:
    each = seconds.mean.get(function, 0.0)
    if _is_among(function, BESIDE):
        count = int(each <= BESIDE_S)
    elif each:
        count = max(1, int(BUDGET_S / each))
    else:
        count = len(cases)
    ranked = _by_pairs(cases, count) if count else []
    left_out = Place(Tier.ALL, f"takes {each} s, beside the core" if not count else f"{count} of {len(cases)} cases stand for all")
    return {item.nodeid: left_out for item in cases} | {item.nodeid: Place(Tier.TEST, "short") for item in ranked}


def _by_pairs(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """The first so many cases of a covering array: each holds the most pairs of values that no earlier one holds."""
    if count >= len(cases):
        return list(cases)
    shuffled = sorted(cases, key=lambda case: hashlib.md5(case.nodeid.encode()).digest())
    return [case for case, _ in islice(by_pairs(shuffled, _pairs), count)]


def _pairs(case: pytest.Item) -> set[object]:
    """The pairs of a case's arguments, each by its place among the values of its argument."""
    arguments = [(name, repr(value) if _is_plain(value) else id(value)) for name, value in case.callspec.params.items()]
    return {*combinations(arguments, min(2, len(arguments)))}


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def parted(items: Sequence[pytest.Item], tier: Tier) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that a command runs, and those that it leaves out."""
    found = places(items, measured())
    are_run = [found[item.nodeid].tier == tier or (tier == Tier.ALL and _draws_more(item, found)) for item in items]
    return [*compress(items, are_run)], [item for item, is_run in zip(items, are_run) if not is_run]


def _draws_more(item: pytest.Item, found: dict[str, Place]) -> bool:
    return found[item.nodeid].tier == Tier.TEST and is_hypothesis_test(getattr(item, "obj", None))


def is_named(argument: str) -> bool:
    """Whether an argument names a file or tests of one, or a folder that `make test` leaves out: all of that is meant."""
    path = argument.partition("::")[0]
    return Path(path).suffix == ".py" or has_none(Path(path).absolute(), Tier.TEST)


def has_none(path: Path, tier: str) -> bool:
    """Whether no test of a file or folder is in a tier, by its name alone."""
    name = f"{path.relative_to(ROOT)}{'/' * path.is_dir()}" if path.is_relative_to(ROOT) else ""
    if tier == Tier.TEST:
        return _is_among(name, (*TIMED, *APART, *TOGETHER))
    is_file = path.suffix == ".py" and path.stem.startswith("test_")
    return tier == Tier.TIMED and is_file and not any(one.startswith(name) for one in TIMED)


class Stopwatch:
    """A plugin that renews `seconds.json` for the functions that ran.

    Args:
        are_all: whether all cases of these functions ran: of others, what is known of theirs stays.
    """

    def __init__(self, *, are_all: bool) -> None:
        self._are_all = are_all
        self._took: dict[str, dict[str, float]] = defaultdict(dict)  # by function, then by case

    def pytest_sessionstart(self) -> None:
        """Start the server of processes: it would count for the first test that needs it."""
        from tests.ranks import run_ranks

        run_ranks(abs, 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._took[report.nodeid.partition("[")[0]][report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        before = measured()
        ran = {*self._took} if self._are_all else {case for took in self._took.values() for case in took}
        long = {test: took for test, took in before.long.items() if not {test, test.partition("[")[0]} & ran}
        mean = {function: took for function, took in before.mean.items() if function not in self._took or not self._are_all}
        for function, took in self._took.items():
            long |= {test: round(seconds, 1) for test, seconds in took.items() if seconds >= LONG_S}
            short = [seconds for seconds in took.values() if seconds < LONG_S]
            if short and (function in mean or sum(short) > BUDGET_S or (len(short) == 1 and short[0] > BESIDE_S)):
                mean[function] = round(statistics.mean(short), 2)
        table = {"long": dict(sorted(long.items())), "mean": dict(sorted(mean.items()))}
        SECONDS.write_text(json.dumps(table, indent=0) + "\n")


def explanation(items: Iterable[pytest.Item], expected: Iterable[str]) -> Iterator[str]:
    """Yield a line for each test: its tier, and why; one for each test of a list that is not there; and how many there are."""
    found = places(items, measured())
    missing = [test for test in expected if test not in found]
    yield from (f"{place.tier} {test}: {place.why}" for test, place in found.items())
    yield from (f"none {test}: not there" for test in missing)
    yield f"{dict(Counter(str(place.tier) for place in found.values()))}, not there: {len(missing)}"
