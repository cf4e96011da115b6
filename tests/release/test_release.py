"""`make test-release` says what it cannot have, and fails on what fails; its page is of this package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bpipe
from tests.release import __main__ as release
from tests.release.environments import Environment, FailedError, find_python, run
from tests.release.packages import Packages
from tests.release.page import HEAD, ROW, Result, merged, page
from tests.test_forge import CLASSIFIED

NONE = Packages(wheel=Path(), sdist=Path(), tests=Path())


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
    monkeypatch.setattr(release, "without_extras", fails)
    monkeypatch.setattr(Environment, "new", lambda folder, python: Environment(folder))
    (tmp_path / "3.11-2.11.0").mkdir()
    results: list[Result] = []
    release.try_torch("3.11", Path(), "2.11.0", NONE, tmp_path, results.append, extras=False)
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
    assert ".".join(map(str, bpipe.OLDEST_TORCH)) in {torch.rpartition(".")[0] for _, torch, *_ in rows}
    text = release.PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD) and f"\nbpipe {bpipe.__version__}," in text
    assert rows and not [row for row in rows if row[-1] == "failed"]
