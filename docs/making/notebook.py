"""A notebook as a page: its text, its code, and what the code printed when the notebook was last run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["page"]


def page(path: Path) -> str:
    """Return the Markdown of a notebook, with a link to it at the end."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    link = f'<a href="{path.name}" download>This page as a notebook</a>'
    return "\n\n".join([*(text for cell in cells for text in _cell(cell)), link, ""])


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source.strip():
        yield f"````python\n{source}\n````"
        for output in cell["outputs"]:
            yield from _output(output)


def _output(output: dict[str, Any]) -> Iterator[str]:
    """Yield a picture, or text: the richest kind that a page can show."""
    data = output.get("data", {})
    if "image/png" in data:
        yield f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    elif "image/svg+xml" in data:
        yield "".join(data["image/svg+xml"])
    elif text := "".join(output.get("text", data.get("text/plain", []))):
        yield f"````text\n{text.rstrip()}\n````"
