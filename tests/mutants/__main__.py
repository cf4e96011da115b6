"""Draw mutants, run `make test` on each until a test fails, and write what was caught into RESULTS.md, beside this file.

python -m tests.mutants                      # 40 of the core, 20 of the rooms beside it; hours, which can be interrupted
python -m tests.mutants --only 3 --tier all tests/memory tests/slices   # one that survived, against these of `make test-all`
python -m tests.mutants --only 3 --why "the same, but ..."              # why no test can catch it: what it does is right, too
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.covering import noted, put_probes
from tests.mutants.mutations import BESIDE, CORE, Mutation, drawn
from tests.test_repository import NOT_OURS, ROOT

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).with_name("RESULTS.md")
COVERING = ROOT / "runs" / "covering.json"
OPTIONS = ("-q", "-rfE", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider")
LIMIT_S = 900
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
        why: no test can catch it; written by a reader.
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
    arguments.add_argument("--only", type=int, help="the number of one mutant")
    arguments.add_argument("--tier", default="test")
    arguments.add_argument("--why", help="why no test can catch that one")
    arguments.add_argument("tests", nargs="*", help="these alone")
    chosen = arguments.parse_args()
    mutants = [(part, mutant) for part, (rooms, count) in PARTS.items() for mutant in drawn(ROOT, rooms, count, SEED)]
    outcomes = [Outcome(*row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    texts = [text_of(mutant) for _, mutant in mutants]
    outcomes = [outcome for outcome in outcomes if outcome.mutant in texts]
    known = {outcome.mutant for outcome in outcomes}
    if not COVERING.exists():
        COVERING.parent.mkdir(exist_ok=True)
        COVERING.write_text(json.dumps(covering([mutant for _, mutant in mutants])))
    tests = json.loads(COVERING.read_text())
    for number, (part, mutant) in enumerate(mutants):
        if number == chosen.only or (chosen.only is None and text_of(mutant) not in known):
            if chosen.why:
                outcome = Outcome(part, text_of(mutant), "", "", 0, chosen.why)
            else:
                outcome = tried(part, mutant, chosen.tier, [chosen.tests] if chosen.tests else [*first(tests[number]), []])
            print(f"{number} of {len(mutants)}: {outcome}", flush=True)
            if outcome.caught_by or outcome.why or text_of(mutant) not in known:
                outcomes = [*(other for other in outcomes if other.mutant != outcome.mutant), outcome]
                RESULTS.write_text(json.dumps(outcomes, indent=0) + "\n")
                PAGE.write_text(page(outcomes))


def text_of(mutant: Mutation) -> str:
    """Return where a mutant is, and what is done there."""
    old = (ROOT / mutant.path).read_text()[mutant.start : mutant.end]
    return " ".join(f"{mutant.path}:{mutant.line} {mutant.kind} at {mutant.start}: `{old}` becomes `{mutant.new}`".split())


def covering(mutants: list[Mutation]) -> list[list[str]]:
    """Run `make test` without a mutant; return the tests that run the function of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        root = copied(folder)
        put_probes(root, mutants, folder / "notes")
        if failed := first_failure(root, "test", [], stops=False):
            print(f"without a mutant, too, but with the probes, which fill lines: {failed}", flush=True)
        return [noted(folder / "notes", number) for number in range(len(mutants))]


def first(tests: list[str]) -> list[list[str]]:
    """Return some of the tests that run a mutant's function, and then all of them, because what goes wrong does so in most."""
    if not tests:
        return []
    some = random.Random(SEED).sample(tests, min(NUM_FIRST, len(tests)))
    return [some] if len(some) == len(tests) else [some, tests]


def copied(folder: Path) -> Path:
    """Copy the checkout into a folder."""
    root = folder / "bpipe"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_OURS))
    return root


def tried(part: str, mutant: Mutation, tier: str, runs: list[list[str]]) -> Outcome:
    """Run tests on a copy of the checkout with the mutant until one fails.

    Args:
        runs: the tests of each run; none are all of the tier.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        mutant.apply(root)
        caught_by = next((failed for run in runs if (failed := first_failure(root, tier, run))), "")
    return Outcome(part, text_of(mutant), caught_by, tier, round(time.monotonic() - begun))


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


def page(outcomes: list[Outcome]) -> str:
    """Return the table."""
    lines = [
        "# Mutants",
        "",
        f"`python -m tests.mutants` draws them by seed {SEED}, runs them and writes this page.",
        "Where a line says why no test catches a mutant, a reader has found that the code is right with it, too.",
        "",
    ]
    for part in PARTS:
        of_part = [outcome for outcome in outcomes if outcome.part == part]
        caught = sum(bool(outcome.caught_by) and outcome.tier == "test" for outcome in of_part)
        later = sum(bool(outcome.caught_by) for outcome in of_part) - caught
        same = sum(bool(outcome.why) for outcome in of_part)
        lines.append(f"- {part}: of {len(of_part)} `make test` catches {caught}, `make test-all` {later}; {same} change nothing.")
    lines += ["", "| mutant | the first test that fails | tier | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        caught_by = f"`{outcome.caught_by}` | {outcome.tier}" if outcome.caught_by else f"**none** {outcome.why} |"
        lines.append(f"| {outcome.mutant.replace('|', '&#124;')} | {caught_by} | {outcome.seconds} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
