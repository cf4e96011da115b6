"""`make test-release` says what it cannot have, and fails on what fails; its page is of this package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bpipe
from bpipe.torch_private.names import NEWEST
from tests.release import __main__ as release
from tests.release.environments import Environment, FailedError, find_python, run
from tests.release.packages import Packages
from tests.release.page import HEAD, ROW, Result, merged, page
from tests.release.releases import UnreachableError, minor_of, releases
from tests.test_forge import CLASSIFIED

NONE = Packages(wheel=Path(), sdist=Path(), tests=Path(), checkout=Path())
ON_INDEX = ["2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0", "3.0.0"]


def index(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], tuple[int, str, str]]) -> None:
    """Let uv answer: with its status, what it prints, and its error."""

    def asked(command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == ["uv", "pip", "compile"]
        return subprocess.CompletedProcess(command, *answer(input.strip()))

    monkeypatch.setattr(subprocess, "run", asked)


def test_the_newest_patch_of_each_minor_version_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written down by hand: what a next release is called, the index says."""

    def answer(asked: str) -> tuple[int, str, str]:
        below = asked.partition("<")[2] or "4.0"
        fitting = [one for one in ON_INDEX if minor_of(one) < minor_of(below)]
        return (0, f"torch=={fitting[-1]}\n", "") if fitting else (1, "", "error: No solution found when resolving dependencies")

    index(monkeypatch, answer)
    assert releases() == ["3.0.0", "2.15.0", "2.14.1", "2.13.0", "2.12.1", "2.11.0"]
    ON_INDEX.remove("2.10.0")
    assert releases()[-1] == "2.11.0"


@pytest.mark.parametrize("arguments", [["--newest"], []])
def test_without_an_index_nothing_is_tried_and_that_is_said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index(monkeypatch, lambda asked: (2, "", "error: Request failed after 3 retries"))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["release", *arguments])
    assert release.main() == 0
    assert "the index of packages cannot be reached from here:\nerror: Request failed" in capsys.readouterr().out
    index(monkeypatch, lambda asked: (1, "", "No solution found, as torch is not in the cache: the network was disabled"))
    with pytest.raises(UnreachableError):
        releases()


def test_pythons_are_found_by_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shim that starts none is not one."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = find_python(here)
    assert python is not None and f"Python {here}." in run(python, "--version", cwd=Path())
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_python("3.99") is None


def test_a_python_that_is_not_here_is_said_and_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(release, "build", lambda folder: NONE)
    results: list[Result] = []
    release.try_all(["3.99"], ["2.11.0"], tmp_path, results.append)
    assert results == [Result("3.99", "", "all", "not on this machine")] and not results[0].failed
    assert "| 3.99 |  | all | not on this machine |" in page(results)


def test_what_fails_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(here: Environment, torch: str, packages: Packages) -> str:
        raise FailedError("the last lines")

    monkeypatch.setattr(release, "is_there", lambda here, torch: True)
    monkeypatch.setattr(Environment, "new", lambda folder, python: Environment(folder))
    (tmp_path / "3.11-2.11.0").mkdir()
    results: list[Result] = []
    release.try_torch("3.11", Path(), "2.11.0", NONE, tmp_path, results.append, {"no extras": fails})
    (result,) = results
    assert result.failed and result.said == "failed" and result.error == "the last lines"
    assert not (tmp_path / "3.11-2.11.0").exists()


def test_a_part_of_the_matrix_replaces_its_own_rows() -> None:
    old, other = Result("3.11", "2.11.0", "no extras", "failed"), Result("3.12", "2.11.0", "no extras", "works")
    new = old._replace(said="works")
    assert merged(page([old, other]), [new]) == [new, other]
    assert merged(page([old, other]).replace(f"bpipe {bpipe.__version__},", "bpipe 0.0.1,"), [new]) == [new]


def test_the_page_has_every_python_the_oldest_torch_and_no_failure() -> None:
    rows = ROW.findall(release.PAGE.read_text(encoding="utf-8"))
    assert {python for python, *_ in rows} == CLASSIFIED == set(release.PYTHONS)
    minors = {minor_of(torch) for _, torch, *_ in rows}
    assert minors == {(2, minor) for minor in range(bpipe.OLDEST_TORCH[1], max(minors)[1] + 1)}
    assert max(minors) == tuple(map(int, NEWEST.split(".")))  # of private names
    for tried in ("no extras", "make test"):
        assert {minor_of(torch) for _, torch, what, _ in rows if what == tried} == minors
    text = release.PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD) and f"\nbpipe {bpipe.__version__}," in text
    assert rows and not [row for row in rows if row[-1] == "failed"]
