"""Every trace file that a test writes goes through the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tools.chrome_schema import violations


def checked(path: Path) -> dict[str, Any]:
    """A trace file's content, after the schema found nothing wrong with it."""
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert violations(trace) == []
    assert trace["traceEvents"]
    return trace
