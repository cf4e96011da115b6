"""Which releases of torch there are. uv asks the index itself, whatever versions a machine's pip is capped at."""

from __future__ import annotations

import subprocess

from bpipe import OLDEST_TORCH

Minor = tuple[int, int]


class UnreachableError(Exception):
    """No index can be reached from here."""


def minor_of(version: str) -> Minor:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def newest(which: str = "") -> str | None:
    """The newest release of torch for Python 3.11, of all or of those that a specifier admits, such as <2.14; None if none is.

    Raises:
        UnreachableError: the index does not answer.
    """
    command = ["uv", "pip", "compile", "--no-deps", "--no-header", "--no-annotate", "--quiet", "--python-version", "3.11", "-"]
    try:
        done = subprocess.run(command, input=f"torch{which}\n", capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"it did not answer within {error.timeout:.0f} s") from error
    if done.returncode == 0:
        return done.stdout.strip().removeprefix("torch==")
    if "No solution found" in done.stderr and "network was disabled" not in done.stderr:
        return None
    raise UnreachableError(done.stderr.strip())


def releases() -> list[str]:
    """The newest patch of each minor version that bpipe supports, the newest first."""
    found, version = list[str](), newest()
    while version is not None and minor_of(version) >= OLDEST_TORCH:
        found.append(version)
        version = newest("<{}.{}".format(*minor_of(version)))
    return found
