"""The code of every page runs: blocks of Python from top to bottom, commands where they can, and what both are said to print."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bpipe.schedules import names, unregister
from bpipe.schedules.registry import OWN_RULES
from tests.docs.blocks import ROOT, Block, Program, blocks, is_printed, pages, programs
from tests.docs.commands import is_of_commands, run
from tests.ranks import run_ranks

PAGES = pages()
OTHERS = ("ranks", "python", "text", "css", "html", "bibtex")
PYTHON = [(name, i) for name, path in PAGES.items() for i in range(len(programs(path.read_text())))]
COMMANDS = [
    (name, block.line) for name, path in PAGES.items() for block in blocks(path.read_text()) if block.runs and is_of_commands(block)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, where a page's code writes; schedules that it registers are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    yield tmp_path
    for name in {*names()} - {rule.name for rule in OWN_RULES}:
        unregister(name)


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_python(page: str, number: int, folder: Path, one_thread: None) -> None:
    program = programs(PAGES[page].read_text())[number]
    if program.num_ranks:
        run_ranks(run_here, program.num_ranks, program, page, str(folder))
    else:
        execute(program, page, {"__name__": "__main__"})


def run_here(rank: int, program: Program, page: str, folder: str) -> None:
    """Run on one of several ranks."""
    os.chdir(folder)
    execute(program, page, {"__name__": "__main__", "rank": rank})


def execute(program: Program, page: str, names: dict[str, Any]) -> None:
    """Run the blocks in one namespace. Tracebacks name the page and the line."""
    printed = ""
    for block in program.blocks:
        if block.note == "output":
            assert is_printed(block.code, printed), f"{page}:{block.line} is not what is printed:\n{printed}"
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            _execute(block, page, names)
        printed = out.getvalue()


def _execute(block: Block, page: str, names: dict[str, Any]) -> None:
    if block.code.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.code, names, page, page, block.line)
        assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
        names.update(test.globs)
    else:
        exec(compile("\n" * (block.line - 1) + block.code, ROOT / page, "exec"), names)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands(page: str, line: int, folder: Path) -> None:
    run(next(block for block in blocks(PAGES[page].read_text()) if block.line == line))


def test_no_block_is_left_out() -> None:
    """A block that nothing runs is data or text that is as it says, or has a reason."""
    for page, path in PAGES.items():
        for block in blocks(path.read_text()):
            where = f"{page}:{block.line}"
            if block.note.startswith("run by "):
                assert (ROOT / block.note.removeprefix("run by ")).is_file(), where
            elif block.language == "toml":
                tomllib.loads(block.code)
            elif block.language == "json":
                json.loads(block.code)
            elif block.language == "diff":
                ast.parse(after(block.code), where)
            elif block.language not in OTHERS and block.runs:
                assert is_of_commands(block) or not block.language, f"{where}: what runs {block.language!r}?"


def after(diff: str) -> str:
    """What a change of Python leads to."""
    return "\n".join(line[1:] if line[:1] in "+ " else line for line in diff.splitlines() if not line.startswith("-"))


def test_a_page_says_what_runs_and_what_is_printed(folder: Path) -> None:
    """The harness itself: a wrong output, an error and an unknown command are seen."""
    page = "<!-- python\nx = 1\n-->\n```python\nprint(x)\nprint(2)\nprint(3)\n```\n<!-- output -->\n```text\n1\n...\n{}\n```\n"
    (right,), (wrong,) = programs(page.format(3)), programs(page.format(4))
    execute(right, "page.md", {})
    with pytest.raises(AssertionError, match=r"page.md:11 is not what is printed:\s+1\s+2\s+3\s"):
        execute(wrong, "page.md", {})
    assert programs("<!-- not run: no GPU -->\n```python\n1 / 0\n```\n") == []
    assert programs("<!-- ranks: 4 -->\n```python\nx\n```\n") == [(4, [("python", "x\n", 3, "")])]
    with pytest.raises(AssertionError, match="ends with 2"):
        run(Block("bash", "bpipe show no_such -p 4 -m 8\n", 1))
    with pytest.raises(AssertionError, match="what is 'rm'"):
        run(Block("bash", "rm x\n", 1))
    with pytest.raises(AssertionError, match="prints\nbalanced_1f1b: 4 stages, 8 microbatches"):
        run(Block("", "$ bpipe show balanced_1f1b -p 4 -m 8\nbalanced_1f1b: 5 stages\n...\n", 1))
    head = "balanced_1f1b: 4 stages, 8 microbatches, peak slots 3 3 2 3, budget 3 3 3 3"
    run(Block("", f"$ bpipe show balanced_1f1b -p 4 -m 8\n{head}\n...\n", 1))
