"""The house stays one that a stranger can move into: its figures, and the page that leads through it."""

from __future__ import annotations

import re

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
    assert walked.proofs == 2


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
