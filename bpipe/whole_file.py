"""Write a file whole or not at all: one that a full disk cuts short looks like a result, and takes the place of an older one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__: list[str] = []

MOST_NAMED = 100  # characters: a file's name has a limit


def write_whole(path: str | os.PathLike[str], parts: str | bytes | Iterable[str]) -> None:
    """Write a file beside its place, and move it there once it is whole. What is no file, such as a pipe, is written itself.

    Args:
        path: its place; a link stays one.
        parts: its text, in UTF-8, or its bytes.

    Raises:
        OSError: it cannot be written; it has the file's name, and what was there before is still there.
    """
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name[:MOST_NAMED]}-{secrets.token_hex(8)}.part")  # another rank may share the folder
    if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
        part = target
    try:
        with part.open("wb") as file:
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in _pieces(parts))
        if part != target:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None
        if part != target:
            with suppress(OSError):
                part.unlink()
        raise


def _pieces(parts: str | bytes | Iterable[str]) -> Iterable[str | bytes]:
    return [parts] if isinstance(parts, str | bytes) else parts
