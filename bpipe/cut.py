"""How a stage's module was cut from a model, if bpipe cut it: a mark by which ranks notice that they cut differently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__: list[str] = []

MARK = "_bpipe_cut"
UNKNOWN = bytes(16)


class Cut(NamedTuple):
    """Which of a model's stages a module is.

    Args:
        digest: 16 bytes that stand for the names of all stages' modules.
        stage: which of them it is.
        num_stages: in all.
    """

    digest: bytes
    stage: int
    num_stages: int


def mark(parts: Sequence[Any], names: Sequence[Sequence[str]]) -> None:
    """Mark the stages that were cut by these names."""
    digest = hashlib.sha256(json.dumps([list(one) for one in names]).encode()).digest()[:16]
    for index, part in enumerate(parts):
        setattr(part, MARK, Cut(digest, index, len(parts)))


def cut_of(module: Any) -> Cut | None:
    """How a module was cut; None if nobody knows, as for a module that you wrote, or one inside a wrapper."""
    found = getattr(module, MARK, None)
    return found if isinstance(found, Cut) else None
