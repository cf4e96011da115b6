"""Draw mutants, run `make test` on each until a test fails, and write what was caught into RESULTS.md, beside this file.

All are of one commit, so that what was judged stays, whatever comes after it.

python -m tests.mutants                      # 40 of the core, 20 of the rooms beside it; hours, which can be interrupted
python -m tests.mutants --commit HEAD        # of another commit than RESULTS.md's: all anew
python -m tests.mutants --only 3 --tier all tests/memory tests/slices   # one that survived, against these of `make test-all`
python -m tests.mutants --only 3 --why "the same, but ..."              # why no test can catch it: what it does is right, too
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.covering import noted, put_probes
from tests.mutants.mutations import BESIDE, CORE, Mutation, drawn
from tests.test_repository import ROOT

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).with_name("RESULTS.md")
OPTIONS = ("-q", "-rfE", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider")
LIMIT_S = 2400  # enough where other work runs beside it
SEED = 42
NUM_FIRST = 100
PARTS = {"The core": (CORE, 40), "The rooms beside it": (BESIDE, 20)}


class Outcome(NamedTuple):
    """What became of a mutant.

    Args:
        part: of the package.
        mutant: where it is, and what is done there.
        caught_by: the first test that failed; an empty text if none did.
        tier: of that test.
        seconds: until then.
        why: no test catches it; written by a reader.
    """

    part: str
    mutant: str
    caught_by: str
    tier: str
    seconds: int
    why: str = ""


def main() -> None:
    """Run the mutants that were not run yet, or one of them against some tests."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--commit", help="the commit that is changed")
    arguments.add_argument("--only", type=int, help="the number of one mutant")
    arguments.add_argument("--tier", default="test")
    arguments.add_argument("--why", help="why no test can catch that one")
    arguments.add_argument("tests", nargs="*", help="these alone")
    chosen = arguments.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"commit": "HEAD", "outcomes": []}
    commit = _git("rev-parse", str(chosen.commit or results["commit"]))
    outcomes = [Outcome(*row) for row in results["outcomes"]] if commit == results["commit"] else []
    known = {outcome.mutant for outcome in outcomes}
    with tempfile.TemporaryDirectory() as folder:
        root = cloned(commit, Path(folder))
        mutants = [(part, mutant) for part, (rooms, count) in PARTS.items() for mutant in drawn(root, rooms, count, SEED)]
        tests = [] if chosen.why else covering([mutant for _, mutant in mutants], commit)
        for number, (part, mutant) in enumerate(mutants):
            text = text_of(root, mutant)
            if number == chosen.only or (chosen.only is None and text not in known):
                outcome = Outcome(part, text, "", "", 0, chosen.why or "")
                if not chosen.why:
                    runs = [chosen.tests] if chosen.tests else [*first(tests[number]), []]
                    caught_by, seconds = tried(root, mutant, chosen.tier, runs)
                    outcome = outcome._replace(caught_by=caught_by, tier=chosen.tier, seconds=seconds)
                print(f"{number} of {len(mutants)}: {outcome}", flush=True)
                if outcome.caught_by or outcome.why or text not in known:
                    outcomes = [*(other for other in outcomes if other.mutant != text), outcome]
                    RESULTS.write_text(json.dumps({"commit": commit, "outcomes": outcomes}, indent=0) + "\n")
                    PAGE.write_text(page(commit, outcomes))


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def cloned(commit: str, folder: Path) -> Path:
    """Check out a commit below a folder."""
    root = folder / "bpipe"
    _git("clone", "--quiet", "--no-checkout", str(ROOT), str(root))
    _git("-C", str(root), "checkout", "--quiet", commit)
    return root


def text_of(root: Path, mutant: Mutation) -> str:
    """Return where a mutant is, and what is done there."""
    old = (root / mutant.path).read_text()[mutant.start : mutant.end]
    return " ".join(f"{mutant.path}:{mutant.line} {mutant.kind} at {mutant.start}: `{old}` becomes `{mutant.new}`".split())


def covering(mutants: list[Mutation], commit: str) -> list[list[str]]:
    """Run `make test` without a mutant, once for a commit; return the tests that run the function of each."""
    file = ROOT / "runs" / f"covering-{commit[:12]}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory() as name:
            copy, notes = cloned(commit, Path(name)), Path(name) / "notes"
            notes.mkdir()
            put_probes(copy, mutants, notes)
            if failed := first_failure(copy, "test", [], stops=False):
                print(f"without a mutant, too, but with the probes, which fill lines: {failed}", flush=True)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps([noted(notes, number) for number in range(len(mutants))]))
    tests: list[list[str]] = json.loads(file.read_text())
    return tests


def first(tests: list[str]) -> list[list[str]]:
    """Return some of the tests that run a mutant's function, and then all of them, because what goes wrong does so in most."""
    if not tests:
        return []
    some = random.Random(SEED).sample(tests, min(NUM_FIRST, len(tests)))
    return [some] if len(some) == len(tests) else [some, tests]


def tried(root: Path, mutant: Mutation, tier: str, runs: list[list[str]]) -> tuple[str, int]:
    """Run tests on a checkout with the mutant until one fails; return that one, and the seconds until then.

    Args:
        runs: the tests of each run; none are all of the tier.
    """
    begun, original = time.monotonic(), (root / mutant.path).read_text()
    mutant.apply(root)
    try:
        caught_by = next((failed for run in runs if (failed := first_failure(root, tier, run))), "")
    finally:
        (root / mutant.path).write_text(original)
    return caught_by, round(time.monotonic() - begun)


def first_failure(root: Path, tier: str, tests: list[str], *, stops: bool = True) -> str:
    """Return the first test that fails, or the end of what was printed if it is none; with `stops`, no test runs after it."""
    (root / "chosen.txt").write_text("".join(f"{test}\n" for test in tests))
    command = [sys.executable, "-m", "pytest", *OPTIONS, *(["-x"] if stops else []), "--tier", tier, "@chosen.txt"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the workers, too
        run.wait()
        return f"the tests did not end within {LIMIT_S} s"
    if run.returncode in (0, 5):  # 5: none of these tests is in the tier
        return ""
    if run.returncode > 2:
        sys.exit(f"pytest ended with status {run.returncode}: {printed[-4000:]}")
    lines = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [printed[-300:]])[0].removeprefix("FAILED ").partition(" - ")[0]


def page(commit: str, outcomes: list[Outcome]) -> str:
    """Return the table."""
    lines = [
        "# Mutants",
        "",
        f"`python -m tests.mutants` draws them by seed {SEED} from commit {commit[:12]}, runs them and writes this page.",
        "Where no test catches a mutant, a reader says why: the code is right with it, too, or a test has come since.",
        "",
    ]
    for part in PARTS:
        of_part = [outcome for outcome in outcomes if outcome.part == part]
        caught = sum(bool(outcome.caught_by) and outcome.tier == "test" for outcome in of_part)
        later = sum(bool(outcome.caught_by) for outcome in of_part) - caught
        same = sum(bool(outcome.why) for outcome in of_part)
        known = f"of {len(of_part)} `make test` catches {caught}, `make test-all` {later}"
        lines.append(f"- {part}: {known}; of {same} a reader says why none does.")
    lines += ["", "| mutant | the first test that fails | tier | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        caught_by = f"`{outcome.caught_by}` | {outcome.tier}" if outcome.caught_by else f"**none** {outcome.why} |"
        lines.append(f"| {outcome.mutant.replace('|', '&#124;')} | {caught_by} | {outcome.seconds} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
