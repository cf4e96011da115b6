"""`make gpu` without a GPU: that it says so, its page, and that what crashes or hangs is a verdict and not the end."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu
from benchmarks.gpu_check import checkout
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.contenders import PARTS, PLAIN, SLOTS
from benchmarks.gpu_check.equality import Difference, compare
from benchmarks.gpu_check.issue_page import page
from benchmarks.gpu_check.memory import Seen
from benchmarks.gpu_check.model import Size
from benchmarks.gpu_check.nccl import check, judge
from benchmarks.gpu_check.ranks import OfRank
from benchmarks.gpu_check.runner import LIMITS_S, MOST_S, Ran, run_all, run_one
from benchmarks.gpu_check.verdict import Outcome, Verdict, judged, not_applicable, public
from benchmarks.intervals import Interval
from benchmarks.one_gpu import WORKS
from benchmarks.study import Claim
from tests.patience import until

MIB = 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_without_a_gpu_it_says_so_and_writes_nothing(capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert out == "" and "error: no GPU: " in err and "Run this where nvidia-smi lists a GPU" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, says",
    [(["--only", "speed"], "no check 'speed'; there are environment, equality"), (["--out", "missing"], "no folder")],
)
def test_bad_input_is_refused_before_anything_runs(capsys: Any, arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert says in capsys.readouterr().err


def test_all_checks_fit_in_ten_minutes() -> None:
    assert sum(LIMITS_S.values()) <= MOST_S == 600


# The page


RAN = [
    Ran("memory", [judged("memory", "It is | so.", [], {"said_bytes, GPipe": 3 * MIB, "step_s": 0.5, "share": 0.25})], 12.34),
    Ran("nccl", [not_applicable("ranks", "one GPU"), judged("equality", "Equal.", ["rank 1", "<b>"], {"differing": 2})], 3.0),
]


def test_the_page_is_written_from_the_json() -> None:
    data = gpu.data_of(RAN, "bpipe 1.0, torch 2.13, 1 x GPU", 15.4)
    lines = page(json.loads(json.dumps(data))).splitlines()
    assert lines[0] == "bpipe 1.0, torch 2.13, 1 x GPU: 1 passed, 1 failed, 1 not applicable, in 15 s"
    assert lines[2:7] == [
        "| check | verdict | numbers | what it means |",
        "| --- | --- | --- | --- |",
        "| memory | passed | said, GPipe: 3.00 MiB<br>step: 500 ms<br>share: 0.25 | It is \\| so. |",
        "| ranks | not applicable |  | one GPU |",
        "| equality | **failed** | differing: 2 | rank 1; &lt;b> |",
    ]
    assert "memory 12 s, nccl 3 s" in lines[8]


def test_the_page_names_no_machine_and_no_folder() -> None:
    kept = "tests/gpu, 20 GB/s, 1/2"
    told = public(f"OSError: {Path.cwd() / 'x' / 'some.py'}\n/data/me/y.py, C:\\Users\\me\\z.py, {kept}")
    assert told == f"OSError: some.py y.py, z.py, {kept}"
    assert platform.node() and public(f"no route to {platform.node()}: x") == "no route to this machine: x"
    assert len(public("x" * 5000)) < 700


@pytest.mark.parametrize("outcome, code", [(Outcome.PASSED, 0), (Outcome.NOT_APPLICABLE, 0), (Outcome.FAILED, 1)])
def test_the_exit_code_says_whether_one_failed(outcome: Outcome, code: int, capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    ran = [Ran("equality", [Verdict(check="equality", outcome=outcome)], 1.0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_gpus", lambda: "bpipe on 1 x GPU")
    monkeypatch.setattr(gpu, "run_all", lambda limits_s, size, say: ran)
    assert main(["--out", str(tmp_path), "--only", "equality"]) == code
    assert str(tmp_path / "bpipe-gpu.md") in capsys.readouterr().out
    assert json.loads((tmp_path / "bpipe-gpu.json").read_text())["counts"][outcome.value] == 1
    assert (tmp_path / "bpipe-gpu.md").read_text().startswith("bpipe on 1 x GPU: ")


# Checks that do not come to an end

PASSED = Verdict(check="first", outcome=Outcome.PASSED).to_dict()
BEGIN = f"import json, os, subprocess, sys, time; file = sys.argv[2]; json.dump([{PASSED!r}], open(file, 'w'))\n"
SLEEP = "open('{}', 'w'); time.sleep(60)"  # the file says that the check is under way
SLEEPER = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"


def launching(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", BEGIN + code


@pytest.fixture
def under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a check makes when it is under way: its limit is counted from then on, because a busy machine begins late."""

    class Popen(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            until(lambda: path.exists() or self.poll() is not None, "a check begins")
            return super().wait(timeout)

    path = tmp_path / "under way"
    monkeypatch.setattr(subprocess, "Popen", Popen)
    return path


@pytest.mark.parametrize(
    "code, says",
    [
        ("print('out of luck', flush=True); os._exit(3)", "exit code 3. It said last: out of luck"),
        ("os.abort()", "exit code -6"),
        (SLEEP, "did not end within 1 s, and was ended. It said nothing"),
    ],
)
def test_a_check_that_crashes_or_hangs_is_a_verdict(code: str, says: str, under_way: Path) -> None:
    first, second = run_one("memory", {}, 1.0 if code == SLEEP else 60.0, launching(code.format(under_way)))
    assert (first.check, first.outcome) == ("first", Outcome.PASSED)
    assert second.check == "memory" and second.outcome is Outcome.FAILED and says in second.reason


def test_what_a_check_has_started_ends_with_it(tmp_path: Path, under_way: Path) -> None:
    pid = tmp_path / "pid"
    run_one("memory", {}, 0.5, launching(f"open({str(pid)!r}, 'w').write(str({SLEEPER}.pid)); {SLEEP.format(under_way)}"))
    until(lambda: not _is_running(int(pid.read_text())), "what a check has started ends with it")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_the_others_run_and_the_time_of_all_is_limited(under_way: Path) -> None:
    said: list[str] = []
    sleeping = launching(f"if sys.argv[1] == 'memory': {SLEEP.format(under_way)}")
    ran = run_all({"equality": 60, "memory": 1, "study": 60}, {}, said.append, launch=sleeping)
    assert [[verdict.outcome.value for verdict in one.verdicts] for one in ran] == [["passed"], ["passed", "failed"], ["passed"]]
    assert said[0] == "equality: at most 60 s" and said[1] == "  passed: first" and "did not end" in said[4]
    (late,) = run_all({"memory": 60}, {}, said.append, launch=launching(""), most_s=0.0)
    assert "no time was left" in late.verdicts[0].reason


def test_what_a_check_raises_is_a_verdict() -> None:
    (found,) = run_one("equality", {"width": "wide"}, 60.0)
    assert found.outcome is Outcome.FAILED and found.check == "equality" and "Error in " in found.reason and "line " in found.reason


# What numbers mean


def test_a_nan_and_another_shape_are_differences() -> None:
    one = torch.ones(3)
    assert compare([one], [one.clone()]).num_differing == 0
    assert compare([one, one * torch.nan], [one + 0.5, one * torch.nan])[:2] == (2, 2)
    assert compare([one], [torch.ones(4)]).largest == compare([one], [one, one]).largest == float("inf")


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, None),
        ({"allocated_bytes": 109 * MIB}, None),
        ({"allocated_bytes": 115 * MIB}, "over the"),
        ({"allocated_bytes": 115 * MIB, "rounded_bytes": 6 * MIB}, None),
        ({"allocated_bytes": 95 * MIB}, "peak was only"),
        ({"beside_bytes": 300 * MIB}, "more are allocated than bpipe counts"),
        ({"beside_bytes": -5 * MIB}, "more are allocated than bpipe counts"),
    ],
)
def test_memory_has_a_tolerance_that_is_stated(changed: dict[str, int], says: str | None) -> None:
    bytes_of = {"said": 100, "allocated": 103, "moment": 8, "rounded": 0, "beside": 20, "unused": 3}
    seen = Seen(**{f"{name}_bytes": number * MIB for name, number in bytes_of.items()} | changed)
    problems = seen.problems("GPipe")
    assert len(problems) == (says is not None) and (says is None or says in problems[0])


def rank(**changed: Any) -> OfRank:
    """What one of four ranks may have found."""
    names = (PLAIN, SLOTS, PARTS)
    seen = {"moment_bytes": MIB, "rounded_bytes": 0, "beside_bytes": 0, "unused_bytes": 0}
    peaks = {name: (100 if name == PLAIN else 80) * MIB for name in names}
    steps = {name: [{"step_s": 1.0, "evictions_s": 0.01 * (name == SLOTS), "messages_s": 0.2}] * 5 for name in names[:2]}
    found: dict[str, Any] = {
        "differences": {name: {"num_tensors": 12, "num_differing": 0, "largest": 0.0} for name in names},
        "moved": {name: name != PLAIN for name in names},
        "memory": {name: {"said_bytes": peaks[name], "allocated_bytes": peaks[name], **seen} for name in names},
        "timed": {"steps": steps, "forward_s": 0.01, "evicted_bytes": 10 * MIB},
    }
    for path, value in changed.items():
        *folders, last = path.split("__")
        place = found
        for folder in folders:
            place = place[{"plain": PLAIN, "slots": SLOTS}.get(folder, folder)]
        place[{"plain": PLAIN, "slots": SLOTS}.get(last, last)] = value
    differences = {name: Difference(**one) for name, one in found["differences"].items()}
    return OfRank(differences, found["moved"], {name: Seen(**one) for name, one in found["memory"].items()}, **found["timed"])


def slow_steps(**changed: Any) -> list[dict[str, Any]]:
    return [{"step_s": 1.0, "evictions_s": 0.0, "messages_s": 0.0, **changed}] * 5


@pytest.mark.parametrize(
    "changed, gb_s, outcomes",
    [
        ({}, 100, "passed passed passed passed"),
        ({"differences__slots__num_differing": 1}, 100, "failed passed passed passed"),
        ({"moved__slots": False}, 100, "failed passed passed passed"),
        ({"memory__plain__allocated_bytes": 70 * MIB}, 100, "passed failed passed passed"),
        ({"timed__steps__slots": slow_steps(evictions_s=0.05)}, 100, "passed passed failed passed"),
        ({"timed__steps__slots": slow_steps(evictions_s=0.05)}, 1, "passed passed not-applicable passed"),
        ({"timed__steps__slots": slow_steps(step_s=1.1)}, 100, "passed passed passed failed"),
        ({"timed__steps__slots": slow_steps(step_s=1.1)}, 1, "passed passed passed not-applicable"),
    ],
)
def test_verdicts_on_several_ranks(changed: dict[str, Any], gb_s: float, outcomes: str) -> None:
    found = [rank(**changed), rank(), rank(), rank()]
    verdicts = judge(found, Size(num_ranks=4), gb_s * 1e9)
    assert [verdict.outcome.value.replace(" ", "-") for verdict in verdicts] == outcomes.split()
    assert all(bool(verdict.reason) == (verdict.outcome is not Outcome.PASSED) and verdict.numbers for verdict in verdicts)


def test_waits_that_nobody_knows_are_no_proof() -> None:
    found = [rank(timed__steps__slots=slow_steps(evictions_s=None))] * 4
    verdict = judge(found, Size(num_ranks=4), 1e11)[2]
    assert verdict.outcome is Outcome.FAILED and "said how long it waited" in verdict.reason


def test_one_gpu_is_no_pair() -> None:
    (verdict,) = check(Size(), 1)
    assert verdict.outcome is Outcome.NOT_APPLICABLE and verdict.reason.startswith("one GPU")


# The repository's own

CASE = '<testcase name="test_{0}">{1}</testcase>'
SKIPPED, FAILED = '<skipped message="no GPU"/>', '<failure message="boom"/>'


@pytest.mark.parametrize(
    "cases, outcome, says",
    [
        ([""], Outcome.PASSED, ""),
        (["", SKIPPED], Outcome.PASSED, ""),
        (["", FAILED], Outcome.FAILED, "test_1: boom"),
        ([SKIPPED], Outcome.NOT_APPLICABLE, "no GPU"),
        ([], Outcome.FAILED, "no test was found"),
    ],
)
def test_the_report_of_pytest_is_counted(cases: list[str], outcome: Outcome, says: str) -> None:
    text = "".join(CASE.format(number, inside) for number, inside in enumerate(cases))
    verdict = checkout.counted(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    assert verdict.outcome is outcome and says in verdict.reason
    assert sum(verdict.numbers.values()) == len(cases)


class Study:
    """As much of `benchmarks.one_gpu` as is asked, with figures that are made up."""

    def __init__(self, value: float, error: str = "") -> None:
        self.claim = Claim(what="exposed, flash", target=0.02, value=Interval(value, value, value))
        self.error = error

    def name_of(self, row: dict[str, Any]) -> str:
        return "one case"

    def measure(self, work: Any) -> list[dict[str, float]]:
        if self.error:
            raise RuntimeError(self.error)
        return [{"time": 1.0, "moved_mib": 3.0}]

    def claims(self, rows: Any) -> list[Claim]:
        return [self.claim]


@pytest.mark.parametrize(
    "study, outcome, says",
    [
        (Study(0.01), Outcome.PASSED, ""),
        (Study(0.03), Outcome.FAILED, "exposed, flash is 0.030, target 0.02"),
        (Study(0.0, "CUDA out of memory. Tried"), Outcome.NOT_APPLICABLE, "not enough free memory"),
        (Study(0.0, "a rank died"), Outcome.FAILED, "RuntimeError: a rank died"),
    ],
)
def test_a_case_of_the_study_is_judged_by_its_claims(
    study: Study, outcome: Outcome, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "one_gpu", study)
    verdict = checkout._case(WORKS[0])
    assert verdict.outcome is outcome and says in verdict.reason and verdict.check.endswith("one case")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU on this machine")
def test_the_repository_s_tests_are_run() -> None:
    """Without a GPU all of them are skipped, and that is what the verdict says."""
    verdict = checkout.suite()
    assert verdict.outcome is Outcome.NOT_APPLICABLE and "no GPU on this machine" in verdict.reason
    assert verdict.numbers["skipped"] > 5 and verdict.numbers["passed"] == verdict.numbers["failed"] == 0
