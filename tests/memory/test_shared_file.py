"""Memory that processes share: how much there is, what is mapped, and what forked children have of it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bpipe.device.available import UNKNOWN, available_bytes
from bpipe.memory import shared_file
from bpipe.memory.shared_file import NoSharedMemoryError, SharedFile, close_in_children, why_not_shared
from tests.patience import PATIENCE_S, until

GIB = 1024**3


def host(root: Path, available_kib: int, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(root: Path, path: str, names: tuple[str, str, str], limit: str, used: int, reclaimable: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {reclaimable}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def test_a_host_without_groups_gives_what_it_has(tmp_path: Path) -> None:
    assert available_bytes(host(tmp_path, 5, "")) == 5 * 1024
    assert available_bytes(tmp_path / "nowhere") == UNKNOWN // 1024 * 1024


@pytest.mark.parametrize("names, line, path", [(V2, "0::/a/b\n", "a/b"), (V1, "4:cpu,memory:/a/b\n", "memory/a/b")])
def test_a_group_s_limit_counts_without_what_can_be_reclaimed(
    tmp_path: Path, names: tuple[str, str, str], line: str, path: str
) -> None:
    root = host(tmp_path, 2**40, line)
    group(root, path, names, str(4 * GIB), 3 * GIB, GIB // 2)
    assert available_bytes(root) == 3 * GIB // 2
    group(root, path, names, str(4 * GIB), 5 * GIB, 0)
    assert available_bytes(root) == 0


def test_the_groups_around_count_too(tmp_path: Path) -> None:
    root = host(tmp_path, 2**40, "0::/a/b\n")
    group(root, "a/b", V2, "max", GIB, 0)
    group(root, "a", V2, str(3 * GIB), GIB, 0)
    assert available_bytes(root) == 2 * GIB


def test_in_a_container_its_group_stands_at_the_top(tmp_path: Path) -> None:
    """Where the path is the host's, of which the container sees only its own part."""
    root = host(tmp_path, 2**40, "0::/docker/0123\n")
    group(root, "", V2, str(GIB), 0, 0)
    assert available_bytes(root) == GIB


def test_a_group_s_limit_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "available_bytes", lambda: 100)
    file = SharedFile()
    file.grow(100)
    with pytest.raises(NoSharedMemoryError, match="Cannot allocate memory") as raised:
        file.grow(201)
    assert raised.value.why == "101 bytes of it cannot be reserved (Cannot allocate memory)"


def test_a_map_that_fails_says_why() -> None:
    with pytest.raises(NoSharedMemoryError, match="Invalid argument"):
        SharedFile().map()  # an empty one


def test_why_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not why_not_shared()
    monkeypatch.delattr(os, "memfd_create")
    assert "this platform does not have it" in why_not_shared()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_mapped_takes_no_open_file_and_may_begin_anywhere() -> None:
    file = SharedFile()
    file.grow(3 * 4096)
    before = open_files()
    parts = [file.map(begin, begin + size) for begin, size in ((0, 100), (100, 100), (4096, 2000), (5000, 100))]
    assert open_files() == before
    parts[3][:] = 3
    parts[2][904:1004] += 1
    assert parts[3].sum() == 400 and file.map()[5000:5100].sum() == 400 and parts[0].sum() == parts[1].sum() == 0


def test_what_is_freed_is_given_back_and_zero() -> None:
    file = SharedFile()
    file.grow(64 * 4096)
    file.map()[:] = 1
    before = os.fstat(file.descriptor).st_blocks
    file.free(100, 60 * 4096)
    assert os.fstat(file.descriptor).st_blocks <= before - 59 * 8
    assert file.map()[99:101].tolist() == [1, 0] and file.num_bytes == 64 * 4096


def held_by(process: int) -> list[str]:
    """What a process has of shared memory: mapped, and as open files."""
    mapped = [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "memfd:bpipe" in line]
    names = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the child closes files meanwhile
            names.append(os.readlink(path))
    return mapped + [name for name in names if "memfd:bpipe" in name]


def test_forked_children_have_no_part_of_it() -> None:
    """A loader's workers may outlive a rank that is killed, and would keep its memory."""
    file = SharedFile()
    file.grow(4096)
    mapped = file.map()
    ours, theirs = socket.socketpair()
    close_in_children(theirs)
    child = os.fork()
    if not child:
        time.sleep(2 * PATIENCE_S)
        os._exit(0)
    try:
        until(lambda: not held_by(child), "a child begins, and lets go of its parent's memory")
        theirs.close()
        ours.settimeout(PATIENCE_S)
        assert ours.recv(1) == b""  # nobody has the other end
        mapped[:] = 1
    finally:
        ours.close()
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_child_frees_nothing_of_its_own() -> None:
    """What stands in a child where its parent has mapped memory is not the parent's."""
    file = SharedFile()
    file.grow(4096)
    mapped = file.map()
    child = os.fork()
    if not child:
        one = os.dup2(os.open("/dev/null", os.O_RDONLY), file.descriptor)  # the number of the file that was closed
        other = SharedFile()
        other.grow(4096)
        at_same_place = other.map()  # likely where the parent's is
        del file, mapped
        os._exit(0 if os.fstat(one) and at_same_place.sum() == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_files_are_closed_in_programs_that_are_started() -> None:
    assert fcntl.fcntl(SharedFile().descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
