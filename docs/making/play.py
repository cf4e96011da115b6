"""The page to play with, which docs/play builds: how the site gets it, where there is npm to fetch Pyodide with."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from docs.making.repository import DOCS

__all__ = ["build", "pages"]

PAGE = """# Play with a plan

Choose a schedule, the number of ranks and microbatches, times, sizes, a budget and a link. See what they do to a step's time
and to the memory of every rank. Compare two plans, and copy the Python that makes them.

{link}

The page runs bpipe's own planner and simulator in your browser, with Pyodide. It needs no server, and sends nothing anywhere.
"""
LINK = '<a class="md-button md-button--primary" href="play/index.html">Open the page</a>'
MISSING = "This copy of the site was built without `npm`, so it lacks the page. Install Node.js, and run `make docs` again."


def pages() -> dict[str, str]:
    """Return the page of the site that leads to it, if it is there."""
    return {"play.md": PAGE.format(link=LINK if _can_build() else MISSING)} if _is_there() else {}


def build(site: Path) -> None:
    """Write it into the built site."""
    if _is_there() and _can_build():
        import_module("docs.play.__main__").build(site / "play")


def _is_there() -> bool:
    return (DOCS / "play" / "__main__.py").exists()


def _can_build() -> bool:
    return shutil.which("npm") is not None
