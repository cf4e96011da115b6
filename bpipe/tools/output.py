"""Timelines into files: the suffix says how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bpipe.schedules import Timeline
from bpipe.tools.terminal import sign_of_life

__all__: list[str] = []


def write(
    timelines: Timeline | Sequence[Timeline],
    path: Path | None,
    *,
    other: Timeline | None = None,
    window: tuple[float, float] | None = None,
) -> list[str]:
    """Write a trace or a picture, if a path is given.

    Returns:
        Lines that say so.
    """
    if path is None:
        return []
    with sign_of_life(f"Writing {path} ..."):
        if path.suffix == ".json":
            from bpipe.tools.chrome import save_trace

            save_trace([timelines] if isinstance(timelines, Timeline) else timelines, path)
            return [f"wrote {path}; open it at ui.perfetto.dev"]
        from bpipe.tools.draw import draw

        draw(timelines if isinstance(timelines, Timeline) else timelines[0], path, other=other, window=window)
        return [f"wrote {path}"]
