"""The memory that the kernel can still give this process: what the host has, and what its control groups (containers) allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__: list[str] = []

UNKNOWN = 2**63


class _Group(NamedTuple):
    """Where the kernel shows the memory of control groups, and the names of its files."""

    mount: str
    limit: str
    used: str
    reclaimable: str  # in memory.stat: counted as used, and given back before anything fails


VERSION_1 = _Group("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _Group("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can still be had; 2**63 if nothing says how many.

    Args:
        root: where /proc and /sys are.
    """
    return max(0, min([_of_host(root), *_of_groups(root)]))


def _of_host(root: Path) -> int:
    return 1024 * _named(root / "proc/meminfo", "MemAvailable:", UNKNOWN // 1024)


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what each control group leaves that this process is in: all around its own one count as well."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            kind = VERSION_2 if number == "0" else VERSION_1
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):  # in a container the path may be the host's, and only the last one is there
                yield _left(root / kind.mount / group, kind)


def _left(folder: Path, kind: _Group) -> int:
    limit, used = _text(folder / kind.limit).strip(), _text(folder / kind.used).strip()
    if not (limit.isdecimal() and used.isdecimal()):  # no such group, or no limit
        return UNKNOWN
    return int(limit) - int(used) + _named(folder / "memory.stat", kind.reclaimable, 0)


def _named(path: Path, name: str, default: int) -> int:
    """Return the number behind a name in a file of such lines."""
    for words in map(str.split, _text(path).splitlines()):
        if words[:1] == [name] and len(words) > 1 and words[1].isdecimal():
            return int(words[1])
    return default


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
