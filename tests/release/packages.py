"""The wheel and the source distribution of this checkout, built as a user builds them."""

from __future__ import annotations

import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.release.environments import run
from tests.test_repository import NOT_OURS, ROOT


@dataclass(frozen=True)
class Packages:
    """Paths of what was built, of the checkout it was built from, and of the distribution's tests, without bpipe beside them."""

    wheel: Path
    sdist: Path
    tests: Path
    checkout: Path


def build(folder: Path) -> Packages:
    """Build both in environments of their own, and check that an index would take and show them."""
    source, out = folder / "checkout", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_OURS))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, ".", cwd=source)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ".", cwd=source)
    wheel, sdist = next(out.glob("*.whl")), next(out.glob("*.tar.gz"))
    run("uvx", "twine", "check", "--strict", wheel, sdist, cwd=folder)
    run("uvx", "check-wheel-contents", wheel, cwd=folder)
    return Packages(wheel=wheel, sdist=sdist, tests=_tests(sdist, folder / "unpacked"), checkout=source)


def _tests(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = next(folder.iterdir())
    shutil.rmtree(unpacked / "bpipe")
    return unpacked
