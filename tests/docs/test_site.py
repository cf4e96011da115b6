"""The site: generated pages are complete and their code runs, links lead somewhere, a strict build is read from disk."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import bpipe
from bpipe.schedules.registry import OWN_RULES
from docs.making import gallery, proofs, reference, repository
from docs.making.figures import FIGURES, FOLDER
from tests.docs import commands
from tests.docs.blocks import ROOT, blocks
from tests.docs.test_blocks import execute, folder, programs  # noqa: F401

DOCS = ROOT / "docs"


# What is generated.


@pytest.mark.parametrize("rule", OWN_RULES, ids=lambda rule: rule.name)
def test_a_page_of_the_gallery_runs(rule: Any, folder: Path) -> None:  # noqa: F811
    page = gallery.page(rule)
    assert f"bpipe.{rule.runs_as}" in page and rule.title in page and rule.peak_text in page and rule.bubble_text in page
    (program,) = programs(page)
    execute(program, f"gallery/{rule.name}.md", {})
    of_commands = [block for block in blocks(page) if block.runs and commands.is_of_commands(block)]
    assert len(of_commands) == 2
    for block in of_commands:
        commands.run(block)


def test_the_gallery_has_every_schedule() -> None:
    index = gallery.pages()["gallery/index.md"]
    assert [rule.name for rule in OWN_RULES if f"]({rule.name}.md)" not in index] == []
    assert {*gallery.pictures()} == {f"gallery/{rule.name}.svg" for rule in OWN_RULES}


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = reference.pages()
    anchors = [anchor for page in pages.values() for anchor in re.findall(r'<a id="([\w.]+)"></a>', page)]
    named = [f"{one.room}.{one.name}" for one in reference.public()]
    assert sorted(anchors) == sorted(named) and len({*anchors}) == len(anchors)
    shown = [(one.home, one.name) for one in reference.public()]
    assert len({*shown}) == len(shown)  # not once more for each room that exports it
    assert {name for name in bpipe.__all__ if not name.startswith("__")} <= {name for _, name in shown}


def test_every_public_name_has_an_example() -> None:
    """It runs in tests/test_public_api.py, with all others, but for two that need processes."""
    find = doctest.DocTestFinder().find
    of_ours = [one for one in reference.public() if one.home.startswith("bpipe")]
    without = [one for one in of_ours if not any(test.examples for test in find(one.value, one.name, globs={}))]
    assert {one.name for one in without} == {"Routes", "all_to_all"}
    assert all("    Example:\n" in one.value.__doc__ for one in without)


def test_figures_are_those_that_the_script_draws() -> None:
    """`python -m docs.making.figures` writes them."""
    assert {path.stem: path.read_text() for path in FOLDER.glob("*.svg")} == {name: draw() for name, draw in FIGURES.items()}


def test_the_table_of_proofs_has_every_rule_of_the_verifier() -> None:
    rows = re.findall(r"(?m)^\| ([a-z ]+) \| (.+) \| .+ \|$", proofs.table())
    assert [name for name, _ in rows][1:3] == ["shape", "belongs"] and "progresses" in dict(rows)
    assert all(len(said) > 20 and said.endswith(".") for name, said in rows[1:])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("1f1b", "Use it to begin with"),
        ("gpipe", "Use it with few microbatches"),
        ("balanced_1f1b", "Use it where memory is the limit."),
        ("interleaved_1f1b", "Use it for shorter steps where there is memory left."),
        ("v_min", "Use it for shorter steps in less memory."),
        ("zbv", "Use it for shorter steps, which take no more memory."),
    ],
)
def test_the_gallery_says_when_to_use_a_schedule(name: str, says: str) -> None:
    (rule,) = [rule for rule in OWN_RULES if rule.name == name]
    assert any(line.startswith(says) for line in gallery._advice(rule))


# Links.


def markdown() -> list[Path]:
    return [*ROOT.glob("*.md"), ROOT / "bpipe/README.md", *(ROOT / "benchmarks").glob("*.md"), *DOCS.rglob("*.md")]


@pytest.mark.parametrize("page", markdown(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    generated = {*repository.pages(), *(f"gallery/{rule.name}.md" for rule in OWN_RULES), "gallery/index.md", *reference.pages()}
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^ *```.*?^ *```|<!--.*?-->|`[^`\n]*`", "", page.read_text())):
        if re.match("[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_made = str(target.relative_to(DOCS) if target.is_relative_to(DOCS) else target) in generated
        has_heading = not anchor or target.suffix != ".md" or (target.exists() and anchor in headings(target))
        if not is_made and not (target.exists() and has_heading):
            dead.append(link)
    assert dead == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    found = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-") for heading in found}


def test_the_navigation_has_every_page_and_no_other() -> None:
    named = [*names(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=AnyTag)["nav"])]
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    pages |= {str(path.relative_to(DOCS).with_suffix(".md")) for path in DOCS.rglob("*.ipynb")}
    assert [page for page in sorted(pages) if not any(fnmatch(page, name) for name in named)] == []
    generated = {"gallery/index.md", "reference/index.md", "changelog.md"}
    assert {name for name in named if "*" not in name} <= pages | generated


class AnyTag(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects, without them."""


AnyTag.add_multi_constructor("", lambda loader, suffix, node: None)


def names(nav: Any) -> Any:
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [value] if isinstance(value, str) else names(value)


# The site as it is built.


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    return out


class Links(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")}
        if "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loaded.append(given["href"])
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])


@pytest.mark.timeout(600)
def test_the_site_is_read_from_disk(site: Path) -> None:
    """Pages load nothing from a server, all that they load is there, and so is all that they link to."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 80 and (site / "search/search_index.js").exists()
    wrong = []
    for page, links in pages.items():
        if page.name == "404.html":  # for servers: its links begin at their root
            continue
        loaded = [link for link in links.loaded if not link.startswith("data:")]
        for link in [*loaded, *links.linked]:
            url = urlsplit(link)
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            if url.scheme or url.netloc:
                wrong += [(page.name, link)] * (link in loaded)
            elif target.name == "runtime.js" and which("npm") is None:
                continue  # the page says that it is not built
            elif not target.is_file() or (target in pages and unquote(url.fragment) not in pages[target].anchors):
                wrong.append((page.name, link))
    assert wrong == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//", styles) and "@import" not in styles


@pytest.mark.timeout(600)
def test_the_notebook_s_page_has_what_a_kernel_printed_and_drew(site: Path) -> None:
    text = (site / "quickstart.html").read_text()
    assert "peak slots 4 3 2 1" in text and text.count("data:image/png;base64,") == 2
