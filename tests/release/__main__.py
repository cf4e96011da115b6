"""Install the packages in new environments, on every Python and torch that this machine can get, and see that they work.

What cannot be had here is said and is no failure. `--write` puts the results into docs/versions.md, beside those of other parts of
the matrix on the same version of bpipe.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

from bpipe.extras import EXTRAS
from tests.release.environments import Environment, FailedError, find_python
from tests.release.packages import Packages, build
from tests.release.page import Result, merged, page
from tests.release.try_out import EXTRAS_TRIED, Try, is_there, one_extra, resolves, source_distribution, without_extras
from tests.test_repository import ROOT

Report = Callable[[Result], None]

PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.13.0", "2.12.1", "2.11.0")  # the newest of each minor version that setup.py allows and this was written for
WITH_EXTRAS: dict[str, Try] = {
    "source distribution": source_distribution,
    **{f"extra {extra}": partial(one_extra if extra in EXTRAS_TRIED else resolves, extra=extra) for extra in EXTRAS},
}
PAGE = ROOT / "docs" / "versions.md"


def main() -> int:
    arguments = argparse.ArgumentParser(prog="make test-release", description=__doc__)
    arguments.add_argument("--pythons", default=",".join(PYTHONS), help="versions, such as 3.11,3.12")
    arguments.add_argument("--torches", default=",".join(TORCHES), help="versions, such as 2.11.0; extras are tried with the first")
    arguments.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    chosen = arguments.parse_args()
    if shutil.which("uv") is None:
        sys.exit("there is no uv: `make test-release` installs it")
    results, one_at_a_time = list[Result](), Lock()

    def report(result: Result) -> None:
        """Say it at once, and keep it: what was found stays if the rest takes too long."""
        with one_at_a_time:
            results.append(result)
            print(*result[:3], result.said, result.error, sep=", ", file=sys.stderr, flush=True)
            if chosen.write:
                PAGE.write_text(page(merged(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", results)), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="bpipe-release-") as folder:
        try_all(chosen.pythons.split(","), chosen.torches.split(","), Path(folder), report)
    print(page(results))
    return int(any(result.failed for result in results))


def try_all(pythons: list[str], torches: list[str], folder: Path, report: Report) -> None:
    """Every combination, those of each Python beside those of the others."""
    packages = build(folder)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda version: try_python(version, torches, packages, folder, report), pythons))


def try_python(version: str, torches: list[str], packages: Packages, folder: Path, report: Report) -> None:
    """One Python with every torch, the extras with the first."""
    python = find_python(version)
    if python is None:
        report(Result(version, "", "all", "not on this machine"))
        return
    for torch in torches:
        try_torch(version, python, torch, packages, folder, report, extras=torch == torches[0])


def try_torch(
    version: str, python: Path, torch: str, packages: Packages, folder: Path, report: Report, *, extras: bool
) -> None:
    """One Python with one torch, in an environment that is removed afterwards."""
    here = Environment.new(folder / f"{version}-{torch}", python)
    try:
        if not is_there(here, torch):
            report(Result(version, torch, "all", "no index that is reached from here has it"))
            return
        for what, does in {"no extras": without_extras, **(WITH_EXTRAS if extras else {})}.items():
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
