"""`python -m benchmarks.gpu_check.one_check CHECK FILE SIZE`: run one check, and write its verdicts into a file as they come."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.verdict import Verdict, failed
from bpipe.whole_file import write_whole


def main(arguments: Sequence[str]) -> None:
    """Run a check, and turn an error that it raises into a verdict."""
    name, path, size = arguments
    found: list[Verdict] = []
    try:
        from benchmarks.gpu_check.model import Size
        from benchmarks.gpu_check.tasks import verdicts_of

        for verdict in verdicts_of(name, Size(**json.loads(size))):
            found.append(verdict)
            _write(found, Path(path))
    except Exception as error:
        traceback.print_exc()
        found.append(failed(name, format_error(error)))
    _write(found, Path(path))


def format_error(error: BaseException) -> str:
    """Return what was raised and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"


def _write(found: Sequence[Verdict], path: Path) -> None:
    """Write the file all at once, because the process that reads it may end this one at any moment."""
    write_whole(path, json.dumps([verdict.to_dict() for verdict in found]))


if __name__ == "__main__":
    main(sys.argv[1:])
