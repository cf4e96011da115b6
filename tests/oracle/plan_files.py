"""Ask a checkout for its plans, and write and read them as JSON, compressed if the file's name ends in `.xz`."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.oracle.cases import COSTS, all_cases

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STORED = HERE / "plans.json.xz"
EVERY = 50  # plans between two lines about progress


def plans_of(root: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The plans of a checkout, each with its case, by name; all cases, or those of some names."""
    cases = all_cases()
    cases = cases if names is None else {name: cases[name] for name in names}
    requests = "".join(json.dumps({"case": case, "costs": COSTS}) + "\n" for case in cases.values())
    plans: dict[str, Any] = {}
    began = time.monotonic()
    for name, line in zip(cases, _answers(root, requests)):
        plans[name] = {"case": cases[name], "plan": json.loads(line)}
        if len(plans) % EVERY == 0:
            print(f"{root}: {len(plans)} of {len(cases)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr)
    if len(plans) < len(cases):
        raise SystemExit(f"{root}: it has no answer to {list(cases)[len(plans)]!r}")
    return {"commit": _commit(root), "costs": COSTS, "plans": plans}


def _answers(root: Path, requests: str) -> Iterable[str]:
    asked = root / "tests/oracle/todays_plans.py"
    command = [sys.executable, str(asked if asked.exists() else HERE / asked.name)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": str(root)}) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in requests.splitlines(keepends=True):
            process.stdin.write(request)
            process.stdin.flush()
            if not (line := process.stdout.readline()):
                return
            yield line
        process.stdin.close()


def _commit(root: Path) -> str:
    """The last commit that changed bpipe/, and whether that has changed since."""
    git = ["git", "-C", str(root)]
    commands = [*git, "log", "-1", "--format=%H", "--", "bpipe"], [*git, "status", "--porcelain", "--", "bpipe"]
    last, changed = (subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in commands)
    return f"{last}{' with changes' * bool(changed)}"


def write(path: Path, made: dict[str, Any]) -> None:
    text = json.dumps(made, separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(text, preset=9) if path.suffix == ".xz" else text)


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)
