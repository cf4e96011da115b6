"""What mkdocs calls while it builds the site: pages are generated, the navigation is completed, links into the repository led."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

from docs.making import gallery, notebook, proofs, reference, repository


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the code, and list in the navigation what is there."""
    made = {uri: repository.content(path) for uri, path in repository.pages().items()}
    notebooks = [uri for uri in files.src_uris if uri.endswith(".ipynb")]
    made |= {f"{uri.removesuffix('.ipynb')}.md": notebook.page(Path(config.docs_dir, uri)) for uri in notebooks}
    for uri, content in (made | gallery.pages() | gallery.pictures() | reference.pages()).items():
        files.append(File.generated(config, uri, content=content))
    named = [*_names(config.nav)]
    config.nav = _there(config.nav, [uri for uri in files.src_uris if uri.endswith((".md", ".html"))], named)
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Put in what is made of the code, and lead links that leave docs/ to the pages of the repository's files."""
    markdown = markdown.replace("<!-- made: rules of the verifier -->", proofs.table())
    markdown = re.sub(r"(?<=\]\()([^)\s:]+)\.ipynb(?=\))", r"\1.md", markdown)  # notebooks are pages
    return repository.led(markdown, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Add the page to play with, which is no page of mkdocs; without npm that page says how it is built."""
    try:
        import_module("docs.play.__main__").build(Path(config.site_dir, "play"))
    except (FileNotFoundError, CalledProcessError) as error:  # no npm, or no network for it
        get_plugin_logger("play").info("%s", error)


def _names(nav: Any) -> Any:
    """Yield the files that the navigation names."""
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [value] if isinstance(value, str) else _names(value)


def _there(nav: Any, uris: list[str], named: list[str]) -> list[Any]:
    """Return the navigation without files that do not exist, `folder/*` replaced by the folder's other files."""
    kept: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if not isinstance(value, str):
            kept += [{title: inner}] if (inner := _there(value, uris, named)) else []
        elif value.endswith("*"):
            kept += [uri for uri in uris if fnmatch(uri, value) and uri not in named]
        elif value in uris:
            kept.append(entry)
    return kept
