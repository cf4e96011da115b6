"""A file is written whole or not at all: after an error what was there before is there still, and the error has its name."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from benchmarks.gpu_check.one_check import _write
from bpipe.schedules import Costs, build, simulate
from bpipe.tools.cli import main
from bpipe.whole_file import write_whole

ROOM = 100  # bytes
SEARCH = ["search", "1f1b", "-p", "2", "-m", "8", "--forward", "1", "--backward", "2", "--saved", "1000", "--effort", "1"]
BEFORE = "what was there before"


@contextmanager
def full_disk() -> Iterator[None]:
    """A file may have ROOM bytes: the next write fails, as one on a full disk does, after a part has been written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python would leave cut files of bytecode behind, for good
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = before


def schedule() -> bpipe.OneFOneB:
    stage = bpipe.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
    return bpipe.OneFOneB(stage, 40, loss_fn=nn.functional.mse_loss)


def traced(path: Path) -> None:
    one = schedule()
    with bpipe.trace(one, path=path.parent):
        one.step(torch.ones(40, 4), target=torch.ones(40, 4))


def timeline() -> Any:
    return simulate(build("balanced_1f1b", 4, 8), Costs(saved_bytes=2**20))


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a trace": ("rank-0.json", traced),
    "a simulated trace": ("planned.json", lambda path: bpipe.save_trace(timeline(), path)),
    "a page": ("plan.html", lambda path: bpipe.draw(timeline(), path)),
    "a picture": ("plan.svg", lambda path: bpipe.draw(timeline(), path)),
    "a CSV": ("plan.csv", lambda path: schedule().dump_csv(path)),
    "a report of GPUs": ("found.json", lambda path: _write([Verdict()] * 9, path)),  # type: ignore[list-item]
    "a plan of the command line": ("plan.txt", lambda path: main([*SEARCH, "--out", str(path)])),
}


class Verdict:
    def to_dict(self) -> dict[str, str]:
        return {"name": "a check of a GPU"}


@pytest.mark.parametrize("name, write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_leaves_what_was_there(name: str, write: Callable[[Path], object], tmp_path: Path, capsys: Any) -> None:
    """The trace was cut short, in the place of an older one, and the error named no file."""
    path = tmp_path / name
    path.write_text(BEFORE)
    try:
        with full_disk():
            code = write(path)
        said = capsys.readouterr().err
        assert code, "the command says that it failed"
    except (OSError, bpipe.errors.ConfigurationError) as error:
        said = str(error)
    assert str(path) in said and os.strerror(errno.EFBIG) in said
    assert path.read_text() == BEFORE and [one.name for one in tmp_path.iterdir()] == [name]


def interrupted() -> Iterator[str]:
    yield "a part"
    raise KeyboardInterrupt


def broken() -> Iterator[str]:
    yield "a part"
    raise ValueError("boom")


def halves() -> Iterator[str]:
    yield "\ud800"


@pytest.mark.parametrize(
    "parts, error",
    [(interrupted, KeyboardInterrupt), (broken, ValueError), (halves, UnicodeEncodeError)],
    ids=lambda one: one.__name__,
)
def test_whatever_ends_the_writing(parts: Callable[[], Iterator[str]], error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(BEFORE)
    with pytest.raises(error):
        write_whole(path, parts())
    assert path.read_text() == BEFORE and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["nowhere/file", "file/file", "folder"])
def test_an_impossible_place_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(BEFORE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011  of several classes
        write_whole(tmp_path / place, "text")
    assert caught.value.filename == str(tmp_path / place) and str(tmp_path / place) in str(caught.value)
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_link_stays_one_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path, link, new = tmp_path / "file", tmp_path / "link", tmp_path / "new"
    path.write_text(BEFORE)
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, ["Zeile 1\n", "Zeile zwei: ä"])
    assert link.is_symlink() and path.read_text(encoding="utf-8") == "Zeile 1\nZeile zwei: ä"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_whole(new, b"\xff\0")
    finally:
        os.umask(umask)
    assert new.read_bytes() == b"\xff\0" and stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_pipe_is_written_itself(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    thread.start()
    write_whole(path, "text")
    thread.join()
    assert read == ["text"] and path.is_fifo()


def test_many_threads_write_one_file_and_it_is_that_of_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    threads = [threading.Thread(target=write_whole, args=(path, f"{number}" * 99_999)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = path.read_text()
    assert text == text[0] * 99_999 and list(tmp_path.iterdir()) == [path]


def test_two_writers_who_are_alike_keep_apart(tmp_path: Path) -> None:
    """Processes of two containers that share a folder may have the same numbers: here one process writes a file within another."""

    def text() -> Iterator[str]:
        yield "first"
        write_whole(tmp_path / "second", "other")
        yield " and last"

    write_whole(tmp_path / "first", text())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"first": "first and last", "second": "other"}
