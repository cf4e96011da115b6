"""Draw timelines as pictures: PNG, SVG and PDF through matplotlib, HTML without it."""

from __future__ import annotations

import os
from pathlib import Path

from bpipe.errors import ConfigurationError
from bpipe.extras import how_to_install
from bpipe.schedules import Timeline
from bpipe.tools.scene import Scene, compose
from bpipe.whole_file import write_whole

__all__ = ["draw"]

SUFFIXES = (".png", ".svg", ".pdf", ".html")


def draw(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    other: Timeline | None = None,
    title: str | None = None,
    window: tuple[float, float] | None = None,
) -> None:
    """Draw when every rank computes, waits, sends and moves memory, and what it holds.

    Args:
        timeline: what to draw, simulated or measured.
        path: where to write it. Its suffix decides: .png, .svg and .pdf need matplotlib; .html is one page that needs
            nothing, where you can zoom, hover and follow a microbatch.
        other: a second timeline below the first, on the same axis of time and with the same scale of memory.
        title: a line above the picture.
        window: from when to when, in seconds; default: all.

    Raises:
        ConfigurationError: an unknown suffix, a file that cannot be written, a window that shows nothing, too many boxes for
            one picture, or no matplotlib.

    Example:
        >>> import tempfile
        >>> from bpipe.schedules import build, simulate, Costs
        >>> costs = Costs(forward_s=0.1, saved_bytes=2**30)
        >>> plain, balanced = (simulate(build(name, 4, 8), costs) for name in ("1f1b", "balanced_1f1b"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw(plain, f"{folder}/plain-and-balanced.html", other=balanced)
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigurationError(f"{str(path)!r} does not end in a known format: end it in {', '.join(SUFFIXES)}")
    scene = compose([timeline] if other is None else [timeline, other], title=title, window=window)
    data = _page(scene) if suffix == ".html" else _picture(scene, suffix)
    try:
        write_whole(target, data)
    except OSError as error:
        raise ConfigurationError(f"cannot write the picture to {str(path)!r}: {error.strerror or error}") from error


def _page(scene: Scene) -> bytes:
    from bpipe.tools.page import render

    return render(scene).encode()


def _picture(scene: Scene, suffix: str) -> bytes:
    try:
        from bpipe.tools.picture import render
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{suffix} needs matplotlib, which is not installed: {how_to_install('plot')}; or draw to .html, which needs nothing"
        ) from error
    return render(scene, suffix[1:])
