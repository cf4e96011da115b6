"""bpipe plans what it planned before the redesign of its core; and the oracle that says so tells where a plan is another one."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.oracle.cases import COSTS, STAGES_A_RANK, all_cases
from tests.oracle.comparing import report
from tests.oracle.plan_files import HERE, ROOT, STORED, plans_of, read, write
from tests.oracle.todays_plans import answer

SAMPLE = 60  # cases, most of which take some hundredths of a second
V_HALF = "v_half p=4 v=2 m=8"


@cache
def stored() -> dict[str, Any]:
    return read(STORED)


def stored_of(names: Sequence[str]) -> dict[str, Any]:
    return {**stored(), "plans": {name: stored()["plans"][name] for name in names}}


def test_a_sample_of_plans_is_as_before() -> None:
    before = stored_of(Random(0).sample(sorted(stored()["plans"]), SAMPLE))
    now = {name: {**one, "plan": json.loads(json.dumps(answer(one["case"], COSTS)))} for name, one in before["plans"].items()}
    lines, num_unequal = report(before, {"plans": now})
    assert num_unequal == 0, "\n".join(lines)


@pytest.mark.timeout(900)
def test_all_plans_are_as_before() -> None:
    lines, num_unequal = report(stored(), plans_of(ROOT))
    assert num_unequal == 0, "\n".join(lines)


def test_the_stored_plans_are_many_of_every_schedule_and_feature() -> None:
    cases, plans = all_cases(), stored()["plans"]
    assert {name: one["case"] for name, one in plans.items()} == cases and stored()["costs"] == COSTS
    planned = [cases[name] for name, one in plans.items() if "refused" not in one["plan"]]
    assert len(planned) >= 400 and {case["schedule"] for case in planned} == {*STAGES_A_RANK, "replicas"}
    for feature in ("slices", "skips", "side by side", "speeds", "bytes", "to", "encoder", "forward only"):
        assert len({(case["ranks"], case["microbatches"]) for case in planned if feature in case}) >= 3, feature
    ways = {case["keep"]["by"] for case in planned if "keep" in case}
    assert ways == {"eviction", "eager eviction", "recomputation", "either", "orders"}


def test_a_checkout_equals_its_copy_until_a_constant_changes(tmp_path: Path) -> None:
    """V-Half with one slot more on each rank: its plan is another one, and others stay."""
    shutil.copytree(ROOT / "bpipe", tmp_path / "bpipe", ignore=shutil.ignore_patterns("__pycache__"))
    here = stored_of(names := [V_HALF, "v_half p=2 v=2 m=1", "zbv p=4 v=2 m=8"])
    assert report(here, plans_of(tmp_path, names)) == (["3 plans and 0 refusals compared: all equal"], 0)
    file = tmp_path / "bpipe/schedules/v_shape.py"
    file.write_text(file.read_text().replace("slots=2 * _slots(p, share))", "slots=2 * _slots(p, share) + 1)"))
    lines, num_unequal = report(here, plans_of(tmp_path, names))
    assert num_unequal == 1 and all(line.startswith(V_HALF) for line in lines[:-1])
    told = f"{V_HALF}: order, rank 0, place 14: ['backward for weights', 7, 2, 0] and ['forward', 0, 5, 0]"
    assert told in lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("actions", "rank 1", 5), ["evict", 1, 1, 0, None, None, 2], "actions, rank 1, place 5: {} and {}"),
        (("channels", "outputs 0 to 1", 2), [0, 1, 0, 0, None], "channels, outputs 0 to 1, place 2: {} and {}"),
        (("channels", "outputs 3 to 0"), [], "channels, outputs 3 to 0: {} and {}"),
        (("peaks", "activations", "rank 2"), 1, "peaks, activations, rank 2: {} and {}"),
        (("bytes", "evicted", "rank 0"), 1, "bytes, evicted, rank 0: {} and {}"),
        (("seconds", "slow links"), 1e3, "seconds, slow links: {} and {}"),
        (("refused",), True, "refused: False and True"),
    ],
)
def test_a_difference_is_told_with_its_place(place: Sequence[Any], value: Any, told: str, tmp_path: Path) -> None:
    """On the command line, which then ends with status 1; of the two other cases nothing is said."""
    name = next(name for name, one in stored()["plans"].items() if one["plan"].get("bytes", {}).get("evicted", {}).get("rank 0"))
    before = stored_of([V_HALF, name, "features: slices, local"])
    changed = deepcopy(before)
    *path, last = place
    inner: Any = changed["plans"][name]["plan"]
    for key in path:
        inner = inner[key]
    was = inner[last] if isinstance(last, int) else inner.get(last, "nothing")
    inner[last] = value
    files = [tmp_path / "before.json.xz", tmp_path / "changed.json"]
    for file, made in zip(files, (before, changed)):
        write(file, made)
    command = [sys.executable, "-m", "tests.oracle", "compare", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    counted = f"2 plans and 1 refusals compared: 1 unequal ({place[0]} 1)"
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [f"{name}: {told.format(was, value)}", counted]


def test_seconds_may_differ_by_rounding_alone() -> None:
    before = stored_of([V_HALF])
    for factor, num_unequal in ((1 + 1e-12, 0), (1 + 1e-7, 1)):
        changed = deepcopy(before)
        changed["plans"][V_HALF]["plan"]["seconds"]["slow links"] *= factor
        assert report(before, changed)[1] == num_unequal


def test_steps_are_as_long_as_measured_ones() -> None:
    """1F1B with p = 8 and m = 128, by the passes' times, on free links: 0.985 to 1.000 of the measured steps, to three digits.

    The 16 rows without a shared vocabulary of the runs of sail-sg/VocabularyParallelism (6191c3bf), artifact/exp_one_host.csv.
    """
    with open(HERE / "vocabulary_runs.csv", newline="") as file:
        rows = {f"{row['sequence']} {row['vocabulary']} {row['method']}": row for row in csv.DictReader(file)}
    times = {
        name: {word: [float(us) / 1e3 for us in row[f"{word}_us"].split()] for word in ("forward", "backward")}
        for name, row in rows.items()
    }
    steps = answer({"schedule": "1f1b", "ranks": 8, "stages a rank": 1, "microbatches": 128}, times)["seconds"]
    shares = {name: round(steps[name] / float(row["step_ms"]), 3) for name, row in rows.items()}
    assert len(shares) == 16 and (min(shares.values()), max(shares.values())) == (0.985, 1.0), shares
