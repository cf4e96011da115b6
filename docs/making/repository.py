"""Files of the repository that pages link to: each becomes a page of its own, so that the site needs nothing but itself."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["LINK", "ROOT", "content", "led", "pages"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(#[^)\s]*)?\))")  # of Markdown, to a file
LANGUAGES = {".py": "python", ".toml": "toml", ".csv": "text", "": "text"}  # of files that are shown as blocks of code


@cache
def pages() -> dict[str, Path]:
    """Return the files outside docs/ that are pages, by their place in the site: those that pages link to, and the examples."""
    ahead = [ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*.py"))]
    ahead += [target for path in DOCS.rglob("*.md") for target in _targets(path) if not target.is_relative_to(DOCS)]
    made: dict[str, Path] = {}
    while ahead:
        path = ahead.pop()
        if path.is_file() and _uri(path) not in made:
            made[_uri(path)] = path
            ahead += [target for target in _targets(path) if not target.is_relative_to(DOCS)]
    made.pop("index.md", None)  # docs/index.md is the site's own
    return made


def content(path: Path) -> str | bytes:
    """Return what the site has of a file: Markdown and pictures as they are, anything else as a block of code."""
    if path.suffix not in LANGUAGES:
        return path.read_bytes()
    return f"# {path.relative_to(ROOT)}\n\n````{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def led(markdown: str, uri: str) -> str:
    """Return a page's text with its links out of docs/ led to the pages of those files, and links of those files into docs/."""
    source = pages().get(uri, DOCS / uri)

    def lead(match: re.Match[str]) -> str:
        target = _resolved(source, match[1])
        if target is None or (uri not in pages() and target.is_relative_to(DOCS)):
            return match[1]
        return posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".")

    return LINK.sub(lead, markdown)


def _targets(path: Path) -> Iterator[Path]:
    """Yield the files that a page of Markdown links to."""
    if path.suffix == ".md":
        for match in LINK.finditer(path.read_text(encoding="utf-8")):
            if (target := _resolved(path, match[1])) is not None:
                yield target


def _resolved(source: Path, link: str) -> Path | None:
    """Return the file of the repository that a link in `source` names, if there is one."""
    target = (source.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _uri(path: Path) -> str:
    """Return the place of a file of the repository in the site."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    homes = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    if name in homes:
        return homes[name]
    if name.startswith("examples/"):
        return f"examples/{path.stem}.md"
    return f"repository/{name}" + ".md" * (path.suffix in LANGUAGES)
