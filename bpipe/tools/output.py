"""Write timelines to files in the format that the suffix names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bpipe.errors import ConfigurationError
from bpipe.schedules import Timeline
from bpipe.tools.draw import SUFFIXES
from bpipe.tools.terminal import sign_of_life

__all__: list[str] = []


def check_out(path: Path | None, suffixes: Sequence[str] = (*SUFFIXES, ".json")) -> None:
    """Refuse an unusable output path, unless it is None, before the work that would end there."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise ConfigurationError(f"{str(path)!r} does not end in a format of this command: end it in {', '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigurationError(f"{path}: {'a folder' if path.is_dir() else f'there is no folder {path.parent}'}")


def write(
    timelines: Timeline | Sequence[Timeline],
    path: Path | None,
    *,
    other: Timeline | None = None,
    window: tuple[float, float] | None = None,
) -> list[str]:
    """Write a trace or a picture, if a path is given, and return lines that say so."""
    if path is None:
        return []
    with sign_of_life(f"Writing {path}"):
        if path.suffix == ".json":
            from bpipe.tools.chrome import save_trace

            save_trace([timelines] if isinstance(timelines, Timeline) else timelines, path)
            return [f"wrote {path}; open it at ui.perfetto.dev"]
        from bpipe.tools.draw import draw

        draw(timelines if isinstance(timelines, Timeline) else timelines[0], path, other=other, window=window)
        return [f"wrote {path}"]
