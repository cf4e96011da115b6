"""Files that are either whole or not there: written beside their place, then renamed into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["whole", "write_json"]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a path to write to, which becomes `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    yield part
    part.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, paths in it as text, whole or not at all."""
    with whole(path) as part:
        part.write_text(json.dumps(content, indent=2, default=str) + "\n")
