"""Run each check in a process of its own with a time limit: a crash or a hang is a verdict, and the next check begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_check.verdict import Outcome, Verdict, failed

LIMITS_S: dict[str, float] = {"environment": 40, "equality": 80, "memory": 60, "nccl": 150, "study": 150, "suite": 110}
MOST_S = 600.0
LAUNCH = (sys.executable, "-m", "benchmarks.gpu_check.one_check")
ENDING_S = 5.0
TOLD_BYTES = 400  # of a process's last output before it died
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it, cuBLAS adds in another order on each stream


class Ran(NamedTuple):
    """A check, and how long it took."""

    name: str
    verdicts: list[Verdict]
    took_s: float

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "took_s": round(self.took_s, 1), "verdicts": [one.to_dict() for one in self.verdicts]}


def run_all(
    limits_s: Mapping[str, float],
    size: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    launch: Sequence[str] = LAUNCH,
    most_s: float = MOST_S,
) -> list[Ran]:
    """Run checks one after another."""
    until = time.monotonic() + most_s
    ran = []
    for name, limit_s in limits_s.items():
        limit = min(limit_s, until - time.monotonic())
        say(f"{name}: at most {max(0.0, limit):.0f} s")
        began = time.monotonic()
        verdicts = run_one(name, size, limit, launch)
        ran.append(Ran(name, verdicts, time.monotonic() - began))
        for verdict in verdicts:
            say(f"  {verdict.outcome.value}: {verdict.check}{f': {verdict.reason}' if verdict.reason else ''}")
    return ran


def run_one(name: str, size: Mapping[str, Any], limit_s: float, launch: Sequence[str] = LAUNCH) -> list[Verdict]:
    """Run one check, and end all its processes if it takes too long."""
    if limit_s <= 0:
        return [failed(name, "no time was left for it: earlier checks took too long")]
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "verdicts.json", Path(folder) / "log.txt"
        code = _run([*launch, name, str(path), json.dumps(dict(size))], log, limit_s)
        found = [Verdict.from_dict(one) for one in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
        if code is None:
            found.append(failed(name, f"did not end within {limit_s:.0f} s, and was ended. {_last_words(log)}"))
        elif code != 0:
            found.append(failed(name, f"its process ended with exit code {code}. {_last_words(log)}"))
        return found or [failed(name, "gave no verdict")]


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command and return its exit code, or None if ended at its limit; if it fails, end all processes that it started."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | SETTINGS, start_new_session=True
        )
        code: int | None = -1
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if code != 0:
                _end(process)
        return code


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        else:
            process.kill()
    with suppress(subprocess.TimeoutExpired):  # a driver that hangs holds its process
        process.wait(ENDING_S)


def _last_words(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return f"It said last: {text[-TOLD_BYTES:]}" if text else "It said nothing."


def count(ran: Sequence[Ran]) -> dict[Outcome, int]:
    """Count the verdicts of each kind."""
    outcomes = [verdict.outcome for one in ran for verdict in one.verdicts]
    return {outcome: outcomes.count(outcome) for outcome in Outcome}
