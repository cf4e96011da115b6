"""docs/versions.md: what `make test-release` found."""

from __future__ import annotations

import platform
import re
from typing import NamedTuple

import bpipe

ROW = re.compile(r"^\| (3\.\d+) \| ([\d.]*) \| (.+?) \| (.+) \|$", re.MULTILINE)
HEAD = """# Versions of Python and torch that bpipe was installed on

`make test-release ARGS=--write` writes this page, and `make test-release ARGS="--suite --write"` its lines about `make test`. Both
ask the package index which releases of torch there are, and take the newest patch of each minor version from 2.11 on.

For each line a new virtual environment has the wheel that `pip wheel` builds, or the source distribution, and nothing but what
that brings. Without the checkout it runs `import bpipe`, `bpipe env`, `bpipe show`, imports every public name, and trains two
steps on the loopback with `OneFOneB`, `BalancedOneFOneB` and `Balanced(budget="lowest")`, whose gradients must be equal to the
bit. With no extras it also runs README's loop over four processes; then come the packages of the command line, of the pictures
and of the tests, for three steps of README's main job and a part of the tests. All runs are on CPU. The packages of an extra do
not depend on the version of torch: a run tries them with the newest torch, and this page keeps the rows of all runs. "make test"
is all of it, with the reasons why tests were skipped.
"""


class Result(NamedTuple):
    """What was tried on which Python and torch, what to say of it, and the error if there was one."""

    python: str
    torch: str
    what: str
    said: str
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)


def page(results: list[Result]) -> str:
    rows = [f"| {result.python} | {result.torch} | {result.what} | {result.said} |" for result in sorted(results)]
    return "\n".join([HEAD, where(), "", "| Python | torch | installed | result |", "|---|---|---|---|", *rows]) + "\n"


def where() -> str:
    return f"bpipe {bpipe.__version__}, {platform.system()} {platform.machine()}."


def merged(text: str, results: list[Result]) -> list[Result]:
    """The results, and those on a page of this version, made by runs of other parts."""
    found = [Result(*row) for row in ROW.findall(text)] if where() in text else []
    new = {result[:3] for result in results}
    return [*results, *(result for result in found if result[:3] not in new)]
