"""The quickstart notebook runs from top to bottom, and shows what its text says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib")

PATH = Path(__file__).resolve().parents[1] / "docs" / "quickstart.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def ipython(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for a kernel's way to show a picture; return what was shown."""
    shown: list[str] = []
    package, display = ModuleType("IPython"), ModuleType("IPython.display")
    package.version_info = (9, 0)  # type: ignore[attr-defined]  # matplotlib asks for it
    display.Image = lambda path: shown.append(path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_it_runs_and_shows_what_it_says(
    ipython: list[str], one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for i, code in enumerate(CODE):
        exec(compile(code, f"cell {i}", "exec"), names)
    printed = capsys.readouterr().out
    assert "peak slots 4 3 2 1" in printed and re.search(r"\| +>1 .*<1", printed)  # what the text explains
    rows = [[float(number) for number in row.split()] for row in re.findall(r"(?m)^rank \d ((?: +[\d.]+){4})$", printed)]
    assert len(rows) == 4 and all(row[0] == row[1] and row[2] == row[3] for row in rows)
    assert max(row[3] for row in rows) < 0.8 * max(row[1] for row in rows)
    assert len(ipython) == 2 and all(Path(path).read_bytes().startswith(b"\x89PNG") for path in ipython)


def test_it_has_no_outputs_of_another_day() -> None:
    assert not [cell for cell in NOTEBOOK["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert NOTEBOOK["nbformat"] == 4 and len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_its_links_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert len(links) > 2 and not [link for link in links if not (PATH.parent / link).exists()]
