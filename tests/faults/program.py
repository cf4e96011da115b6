"""A training program that catches nothing, with an error on rank 1: `python -m tests.faults.program RANK SIZE PORT`."""

from __future__ import annotations

import sys
from typing import Any

from tests.faults.case import Setup, Where
from tests.faults.pipeline import Pipeline
from tests.ranks import join


def struck(stage: int, where: Where, call: int, value: Any) -> Any:
    if (stage, where, call) == (1, "forward", 6):
        raise ValueError("boom")
    return value


if __name__ == "__main__":
    rank, size, port = map(int, sys.argv[1:])
    join(rank, size, port)
    pipeline = Pipeline(rank, size, Setup(), struck)
    for _ in range(3):
        pipeline.step()
