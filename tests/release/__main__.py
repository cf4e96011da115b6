"""Install the packages in new environments, on every Python and torch that this machine can get, and see that they work.

What cannot be had here is said and is no failure. `--write` puts the results into docs/versions.md, beside those of other parts of
the matrix on the same version of bpipe.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

from bpipe.extras import EXTRAS
from tests.release.environments import Environment, FailedError, find_python
from tests.release.packages import Packages, build
from tests.release.page import Result, merged, page
from tests.release.releases import UnreachableError, releases
from tests.release.try_out import (
    EXTRAS_TRIED,
    Try,
    close_to_torch,
    is_there,
    one_extra,
    resolves,
    source_distribution,
    whole_suite,
    without_extras,
)
from tests.test_repository import ROOT

Report = Callable[[Result], None]
Tries = Mapping[str, Try]

PYTHONS = ("3.11", "3.12", "3.13")
WITH_EXTRAS: dict[str, Try] = {
    "source distribution": source_distribution,
    **{f"extra {extra}": partial(one_extra if extra in EXTRAS_TRIED else resolves, extra=extra) for extra in EXTRAS},
}
PAGE = ROOT / "docs" / "versions.md"


def main() -> int:
    arguments = argparse.ArgumentParser(prog="make test-release", description=__doc__)
    arguments.add_argument("--pythons", default=",".join(PYTHONS), help="versions, such as 3.11,3.12")
    arguments.add_argument("--torches", help="versions, such as 2.11.0, or all of the index; extras are tried with the first")
    arguments.add_argument("--suite", action="store_true", help="run all of `make test` with each torch, and nothing else")
    arguments.add_argument("--newest", action="store_true", help="try only the newest torch, with the tests that are close to it")
    arguments.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    chosen = arguments.parse_args()
    if shutil.which("uv") is None:
        print("Nothing was tried, because there is no uv here: make installs it where the index of packages can be reached")
        return 0 if chosen.newest else 1
    try:
        torches = chosen.torches.split(",") if chosen.torches else releases()
    except UnreachableError as error:
        print(f"Nothing was tried, because the index of packages cannot be reached from here:\n{error}")
        return 0
    if chosen.newest:
        chosen.pythons, torches = PYTHONS[0], torches[:1]
    tries = {"close to torch": close_to_torch} if chosen.newest else {"make test": whole_suite} if chosen.suite else None
    results, one_at_a_time = list[Result](), Lock()

    def report(result: Result) -> None:
        """Say it at once, and keep it: what was found stays if the rest takes too long."""
        with one_at_a_time:
            results.append(result)
            print(*result[:3], result.said, result.error, sep=", ", file=sys.stderr, flush=True)
            if chosen.write:
                PAGE.write_text(page(merged(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", results)), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="bpipe-release-") as folder:
        try_all(chosen.pythons.split(","), torches, Path(folder), report, tries)
    print(page(results))
    return int(any(result.failed for result in results))


def try_all(pythons: list[str], torches: list[str], folder: Path, report: Report, tries: Tries | None = None) -> None:
    """Every combination, those of each Python beside those of the others.

    Args:
        tries: what to do with each; default: the wheel with every torch, and the rest with the first.
    """
    packages = build(folder)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda version: try_python(version, torches, packages, folder, report, tries), pythons))


def try_python(
    version: str, torches: list[str], packages: Packages, folder: Path, report: Report, tries: Tries | None
) -> None:
    """One Python with every torch."""
    python = find_python(version)
    if python is None:
        report(Result(version, "", "all", "not on this machine"))
        return
    for torch in torches:
        rest = WITH_EXTRAS if torch == torches[0] else {}
        try_torch(version, python, torch, packages, folder, report, tries or {"no extras": without_extras, **rest})


def try_torch(
    version: str, python: Path, torch: str, packages: Packages, folder: Path, report: Report, tries: Tries
) -> None:
    """One Python with one torch, in an environment that is removed afterwards."""
    here = Environment.new(folder / f"{version}-{torch}", python)
    try:
        try:
            is_missing = not is_there(here, torch)
        except FailedError as error:
            report(Result(version, torch, "all", "failed", str(error)))
            return
        if is_missing:
            report(Result(version, torch, "all", "no index that is reached from here has it"))
            return
        for what, does in tries.items():
            report(tried(Result(version, torch, what, ""), partial(does, here, torch, packages)))
    finally:
        here.remove()


def tried(asked: Result, does: Callable[[], str]) -> Result:
    """The result with what to say of it, or with its error."""
    try:
        return asked._replace(said=does())
    except FailedError as error:
        return asked._replace(said="failed", error=str(error))


if __name__ == "__main__":
    sys.exit(main())
