"""Run the commands of a page: those of `bpipe` in this process, and of others see that what they name is there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from bpipe.tools import cli
from tests.docs.blocks import ROOT, Block, is_printed

SHELLS = ("bash", "sh", "shell", "console", "")
FREE = ("export", "cd", "git", "source", ".", "open")  # which say nothing about this repository
TAKES = r"(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:bpipe|make|pip|python3?|torchrun)(?: |$)"


def is_of_commands(block: Block) -> bool:
    return (block.language in SHELLS and re.match(TAKES, block.code) is not None) or block.language in SHELLS[:-1]


def run(block: Block) -> None:
    """Run a block's commands; where a command has `$ ` before it, what follows is what it prints."""
    for command, expected in _sessions(block.code):
        printed = _run(command)
        assert expected is None or is_printed(expected, printed), f"{shlex.join(command)} prints\n{printed}"


def _sessions(code: str) -> Iterator[tuple[list[str], str | None]]:
    """Yield each command, as words, and what the page says that it prints."""
    joined = re.sub(r" *\\\n *", " ", code)
    if not joined.startswith("$ "):
        yield from ((words, None) for line in joined.splitlines() if (words := shlex.split(line, comments=True)))
        return
    for session in re.split(r"(?m)^\$ ", joined)[1:]:
        command, _, output = session.partition("\n")
        yield shlex.split(command, comments=True), output.rstrip("\n") or None


def _run(words: list[str]) -> str:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    name, *arguments = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    if name in ("python", "python3"):
        if arguments[:2] == ["-m", "bpipe"]:
            return _bpipe(arguments[2:])
        _assert_there(arguments)
    elif name == "bpipe":
        return _bpipe(arguments)
    elif name == "make":
        targets = [argument for argument in arguments if not re.match(r"[A-Z]+=|-", argument)]
        assert set(targets) <= {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}, targets
    elif name == "torchrun":
        _assert_there([argument for argument in arguments if argument.endswith(".py")])
    else:
        assert name in ("pip", *FREE), f"what is {name!r}? Say `<!-- not run: why -->` before the block"
    return ""


def _bpipe(arguments: list[str]) -> str:
    """What a command prints; one that needs GPUs, or the folder of a trace that is not there, is only parsed."""
    out = io.StringIO()
    is_only_parsed = arguments[0] == "gpu" or any(word.startswith("runs/") and not Path(word).exists() for word in arguments)
    with contextlib.redirect_stdout(out), contextlib.ExitStack() as stack:
        if is_only_parsed:
            stack.enter_context(mock.patch.object(cli, "_print"))
            stack.enter_context(mock.patch(f"bpipe.tools.commands.{arguments[0]}.run"))
        code = cli.main(arguments)
    assert is_only_parsed or code == 0, f"bpipe {shlex.join(arguments)} ends with {code}"
    return out.getvalue()


def _assert_there(arguments: list[str]) -> None:
    """A module or a file of this repository that is named exists; `train.py`, without a folder, is the reader's own."""
    if arguments[:1] == ["-m"]:
        assert find_spec(arguments[1]) is not None, arguments[1]
    elif arguments and "/" in arguments[0]:
        assert (ROOT / arguments[0]).exists(), arguments[0]
