"""A notebook as a page: its text, its code, and what the code prints and draws while the site is built."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import nbformat
from nbclient import NotebookClient

__all__ = ["page"]


def page(path: Path) -> str:
    """Run a notebook, and return it as Markdown, with a link to it at the end."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, IPYTHONDIR=folder):
        quiet = ["--IPKernelApp.log_level=40"]  # it warns that others of this machine could read along
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, extra_arguments=quiet, resources=where).execute()
    link = f'<a href="{path.name}" download>This page as a notebook</a>'
    return "\n\n".join([*(text for cell in notebook.cells for text in _cell(cell)), link, ""])


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = cell["source"]
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
        yield f"![output](data:image/png;base64,{data['image/png'].strip()})"
    elif text := output.get("text", data.get("text/plain", "")):
        yield f"````text\n{text.rstrip()}\n````"
