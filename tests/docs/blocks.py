"""Find the code in a page of Markdown. What a page has to say about its code, it says in comments, which a reader does not see:

    <!-- ranks: 4 -->                 a new program begins here: the blocks of Python that follow, in one namespace, run on each of
                                      four processes that are joined by gloo, and find `rank`; without it, in one process
    <!-- python
    stage = ...                       Python that runs, but is not shown
    -->
    <!-- not run: it needs a GPU -->  the next block does not run, and why
    <!-- run by tests/fill/test.py --> another test runs the next block
    <!-- output -->                   the next block is what the block before prints; a line `...` stands for any lines
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([\w-]*)(.*)$")
COMMENT = re.compile(r"^ *<!-- (ranks: \d+|not run: .+|run by tests/[\w/.]+|output) -->$")
HIDDEN = re.compile(r"^ *<!-- python$")
INDENTED = re.compile(r"^    (?=(?:bpipe|make|pip|python|torchrun) \S)")


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    code: str
    line: int  # of the page, where the code begins
    note: str = ""  # what the comment before it says

    @property
    def runs(self) -> bool:
        return not self.note.startswith(("not run", "run by"))


def pages() -> dict[str, Path]:
    """The pages that users read, by their names in the repository."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bpipe/README.md")]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def blocks(text: str) -> list[Block]:
    return list(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    note, i = "", 0
    while i < len(lines):
        begin = i + 1
        if (comment := COMMENT.match(lines[i])) is not None:
            note = comment[1]
            if note.startswith("ranks"):
                yield Block("ranks", note.partition(": ")[2], begin)
                note = ""
        elif HIDDEN.match(lines[i]):
            i = _next(lines, begin, re.compile("^ *-->$"))
            yield Block("python", _dedented(lines[begin:i]), begin + 1)
        elif (fence := FENCE.match(lines[i])) is not None:
            i = _next(lines, begin, re.compile(f"^ *{fence[2]}`* *$"))
            yield Block(fence[3], _dedented(lines[begin:i]), begin + 1, note)
            note = ""
        elif INDENTED.match(lines[i]) and not (i and lines[i - 1].strip()):
            i = next((j for j in range(i, len(lines)) if not lines[j].startswith("    ")), len(lines))
            yield Block("bash", _dedented(lines[begin - 1 : i]), begin, note)
            note = ""
        elif lines[i].strip():
            note = ""
        i += 1


def _next(lines: list[str], begin: int, end: re.Pattern[str]) -> int:
    for i in range(begin, len(lines)):
        if end.match(lines[i]):
            return i
    raise AssertionError(f"line {begin}: a block has no end")


def _dedented(lines: list[str]) -> str:
    return textwrap.dedent("\n".join([*lines, ""]))


class Program(NamedTuple):
    """Blocks of Python that run one after another, and on how many ranks; 0 is this process."""

    num_ranks: int
    blocks: list[Block]


def programs(text: str) -> list[Program]:
    """The programs of a page, with blocks of output behind the blocks that print it."""
    found = [Program(0, [])]
    for block in blocks(text):
        if block.language == "ranks":
            found.append(Program(int(block.code), []))
        elif block.runs and (block.language == "python" or (block.note == "output" and found[-1].blocks)):
            found[-1].blocks.append(block)
    return [program for program in found if program.blocks]


def is_printed(expected: str, printed: str) -> bool:
    """Whether this text was printed; a line `...` stands for any lines, ends of lines do not count."""
    parts = [[re.escape(line.rstrip()) for line in part.splitlines()] for part in re.split(r"(?m)^ *\.\.\.$\n?", expected)]
    pattern = r"(?:.*\n)*".join("".join(f"{line} *\n" for line in part) for part in parts)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed.splitlines())) is not None
