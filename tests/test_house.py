"""The house stays one that a stranger can move into: its figures, and the page that leads through it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house import BESIDE, HERE, Source, Walk, walk

PAGE = (HERE / "bpipe/README.md").read_text()
SOURCE = Source(HERE)


@pytest.fixture(scope="module")
def walked() -> Walk:
    return walk(HERE)


def test_figures(walked: Walk) -> None:
    documented, not_imperative = SOURCE.docstrings()
    assert SOURCE.loose_files() <= 9 and SOURCE.most_files()[0] <= 15
    assert not_imperative == 0 and documented > 1000
    assert walked.proofs == 2 and walked.switches <= 120
    assert len(SOURCE.reaches()) < 10 and len(SOURCE.dicts_by_microbatch()) <= 5 and not SOURCE.cycles()


def test_modules_have_names_of_their_own() -> None:
    """A module's name says which one it is, without its folder."""
    names = Counter(path.stem for path in SOURCE.paths if not path.stem.startswith("__"))
    assert len(names) > 200 and not [name for name, count in names.items() if count > 1]


def test_no_name_of_a_package_hides_one_of_its_modules() -> None:
    """So that `import bpipe.room.name as module` gives a module, and never a function of that name."""
    modules = {Path(*name.split(".")) for name in SOURCE.names.values()}
    packages = [path for path in SOURCE.paths if path.stem == "__init__"]
    folders = {path: path.parent.relative_to(HERE) for path in packages}
    hidden = [
        str(folders[path] / name) for path in packages for name in bound(SOURCE.trees[path]) if folders[path] / name in modules
    ]
    assert len(packages) > 20 and not hidden


def bound(package: ast.Module) -> set[str]:
    """The names that a package has, those that it loads on first use included."""
    nodes = list(ast.walk(package))
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return imported | defined | {text for text in texts if text.isidentifier()}


def test_the_core_imports_nothing_beside_it() -> None:
    """But for `bpipe` itself, which has the public names, and what stands at its root to use them."""
    beside = tuple(f"bpipe.{room}" for room in BESIDE)
    core = {name: used for name, used in SOURCE.arrows().items() if name.count(".") > 1 and not name.startswith(beside)}
    assert len(core) > 100
    assert not {name: used for name, used in core.items() if any(one.startswith((*beside, "bpipe.torchtitan")) for one in used)}


def test_the_page_names_every_room() -> None:
    rooms = {path.parent for path in SOURCE.paths} - {SOURCE.root}
    for room in rooms:
        name = str(room.relative_to(SOURCE.root))
        outer, _, inner = name.partition("/")
        assert f"`{name}/`" in PAGE or (f"`{outer}/`" in PAGE and (f"`{inner}/`" in PAGE or outer == "tools")), name
    for named in re.findall(r"`([a-z_/]+)/`", PAGE.partition("| room |")[2].partition("\n\n")[0]):
        assert (SOURCE.root / named).is_dir() or (SOURCE.root / "comm" / named).is_dir(), named


def test_the_page_follows_a_microbatch(walked: Walk) -> None:
    """Each function that it names is called, in this order; a name without a file is of the file before."""
    life = PAGE.partition("# One microbatch")[2]
    named, file = [], ""
    for word in re.findall(r"`([\w/.]+)`", life):
        if word.endswith(".py") and not word.startswith("tests/"):
            file = word
        elif re.fullmatch(r"(_?[A-Z]\w*\.)?_*[a-z]\w*", word) and word != "step":
            named.append((file, word))
    assert len(named) > 25
    actions = re.findall(r"`(0[A-Z_]+1)`", life.partition("The step begins")[2])
    done = iter(walked.actions)
    assert len(actions) >= 9 and all(action in done for action in actions), (actions, walked.actions)
    calls = iter([*walked.before, *walked.calls])
    for call in named:
        assert call in calls, f"{call} is not called after those before it"
