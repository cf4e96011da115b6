"""The repository's own tests for GPUs, `tests/gpu`, and its study of one GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import one_gpu
from benchmarks.gpu_check.verdict import Verdict, failed, judged, not_applicable

ROOT = Path(__file__).resolve().parents[2]
SUITE, STUDY = "tests/gpu", "study of one GPU"
STUDY_S = 8.0  # of alternating steps in a case
TESTED = "The tests that need a GPU pass, among them two ranks over NCCL, failing together, flash attention, and graphs refused."
STUDIED = "What evictions free, how much memory the plan says, and how much of evictions is hidden, with larger blocks."


def suite() -> Verdict:
    """Run the repository's tests for GPUs."""
    missing = [name for name in ("pytest", "xdist", "pytest_timeout") if find_spec(name) is None]
    if missing:
        return not_applicable(SUITE, f"{', '.join(missing)} cannot be imported: `make gpu` installs what it takes")
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        options = ("-q", "-n", "0", "-p", "no:cacheprovider", "--tier", "every", f"--junitxml={report}")
        command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if not report.exists():
            return failed(SUITE, f"pytest ended with exit code {done.returncode}: {done.stdout[-400:]}")
        return counted(report.read_text(encoding="utf-8"))


def counted(report: str) -> Verdict:
    """Return the verdict on pytest's report in JUnit's format."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    found: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in cases:
        children = {child.tag: child.get("message") or "" for child in case}
        wrong = next((children[tag] for tag in ("failure", "error") if tag in children), None)
        how = "failed" if wrong is not None else "skipped" if "skipped" in children else "passed"
        found[how].append(f"{case.get('name')}: {(wrong or children.get('skipped', ''))[:150]}")
    numbers = {how: len(names) for how, names in found.items()}
    if cases and not found["failed"] and not found["passed"]:
        return not_applicable(SUITE, f"all were skipped: {found['skipped'][0]}", numbers)
    problems = found["failed"] or ["no test was found"] * (not cases)
    return judged(SUITE, TESTED, problems, numbers)


def study() -> Iterator[Verdict]:
    """Measure the cases of `benchmarks/one_gpu.py`, one verdict each; nothing in `benchmarks/results` changes."""
    for work in one_gpu.WORKS:
        yield _case(work._replace(seconds=STUDY_S))


def _case(work: Any) -> Verdict:
    name = f"{STUDY}: {one_gpu.name_of(work._asdict())}"
    try:
        rows = one_gpu.measure(work)
    except Exception as error:
        if "out of memory" in str(error):
            return not_applicable(name, "this GPU has not enough free memory for it")
        return failed(name, f"{type(error).__name__}: {str(error)[-500:]}")
    claims = one_gpu.claims(rows)
    missed = (claim for claim in claims if claim.verdict.startswith("no"))
    problems = [f"{claim.what} is {claim.interval.median:.3f}, target {claim.target}" for claim in missed]
    numbers = {claim.what.partition(",")[0]: claim.interval.median for claim in claims}
    return judged(name, STUDIED, problems, numbers | {"balanced over plain": rows[0]["time"], "moved, MiB": rows[0]["moved_mib"]})
