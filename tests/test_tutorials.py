"""A tutorial's programs and commands run from top to bottom in an empty folder, and print what the page says they print.

A comment `<!-- run by tests/test_tutorials.py -->` stands before each block that this test runs: a program, or commands. A
program is saved under the last `name.py` that the text above it has; lines of an `examples/name.py` have to be in it, in this
order. A block `text` after commands is their output. Processes print in any order and times differ, so each line has to be
somewhere in what is printed, but for numbers that are measured in seconds. Two processes' lines may run into one. `...` stands
for any lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- run by tests/test_tutorials.py -->\n\n"
BLOCK = re.compile(r"(?:^<!-- run by tests/test_tutorials\.py -->\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:examples/)?\w+\.py)`")
VARIES = re.compile(r"[\d.]+(?: (?:µs|ms|s)\b|%)|(?<=loss )[\d.]+")
TABLE = re.compile(r"^[\s─]*$")
PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if MARK in path.read_text()}


def masked(text: str) -> list[str]:
    """The lines, without what differs from run to run, and without the lines and spaces that a terminal draws a table with."""
    lines = (" ".join(VARIES.sub("N", line).split()) for line in text.splitlines())
    return [line for line in lines if not TABLE.match(line) and line != "..."]


def missing(expected: str, printed: str) -> list[str]:
    whole = "\n".join(masked(printed))
    return [line for line in masked(expected) if line not in whole]


def commands(code: str) -> list[list[str]]:
    joined = re.sub(r" *\\\n *", " ", code)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def run(words: list[str], folder: Path) -> str:
    """What a command prints, both of torchrun's processes and of `bpipe`."""
    module = {"torchrun": "torch.distributed.run", "bpipe": "bpipe"}[words[0]]
    local = ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1"]
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    command = [sys.executable, "-m", module, *(local if words[0] == "torchrun" else []), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}"
    return done.stdout


def use(name: str, code: str, folder: Path) -> None:
    """Save a program, or find the lines of an example in it."""
    if not name.startswith("examples/"):
        (folder / name).write_text(code)
        return
    lines = iter([line.strip() for line in (ROOT / name).read_text().splitlines()])
    shown = [line.strip() for line in code.splitlines() if line.strip() not in ("", "...")]
    assert not [line for line in shown if line not in lines], name


@pytest.mark.parametrize("name", PAGES)
def test_tutorial(name: str, tmp_path: Path) -> None:
    text, printed = PAGES[name].read_text(), ""
    for block in BLOCK.finditer(text):
        language, code = block.groups()
        if language == "text" and printed:
            assert not missing(code, printed), f"the programs do not print\n{missing(code, printed)}\nbut\n{printed}"
        elif block[0].startswith(MARK):
            if language == "python":
                use(NAMED.findall(text[: block.start()])[-1], code, tmp_path)
            else:
                printed = "".join(run(words, tmp_path) for words in commands(code))


def test_all_tutorials_are_run() -> None:
    assert {path.stem for path in (ROOT / "docs" / "tutorials").glob("*.md")} - {*PAGES} <= {"budgets"}  # in one process


def test_a_tutorial_that_says_something_else_is_noticed() -> None:
    printed = "rank 0: memory 1.50 MiB\nstep 1  loss 2.345  in 3.4 ms\n"
    assert not missing("step 1  loss 2.999  in 9.9 ms\n...\n", printed)
    assert missing("rank 0: memory 1.51 MiB", printed)
