"""The figures of a package grow as it does, and not when something in it moves or is documented."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.house.figures import TABLE, beyond, figures, limits, lower
from tests.house.source import Source
from tests.house.walk import Walk

MADE_UP = {
    "bpipe/__init__.py": """
from typing import TypedDict, Unpack
__all__ = ["train"]
class Options(TypedDict, total=False):
    budget: int
def train(model: object, **options: Unpack[Options]) -> None: ...
""",
    "bpipe/plan/sizes.py": """
class Amount:
    num_bytes: int
class StageSizes:
    saved: Amount
    def largest(self) -> None:
        self._found = 1
""",
    "bpipe/plan/late.py": "",
    "bpipe/engine/run.py": """
from bpipe.plan.sizes import StageSizes
def run(sizes: StageSizes) -> None:
    print(sizes)
""",
    "benchmarks/study.py": "",
}
RUN = "    print(sizes)\n"
SIZES = re.search(r"class StageSizes.*", MADE_UP["bpipe/plan/sizes.py"], re.DOTALL)[0]
Edit = tuple[str, str, str]  # a file, what stands there, and what is to; at its end, where nothing stands there


def made_up(root: Path, *edits: Edit) -> dict[str, int]:
    """The figures of the made-up package at `root`, with these edits: a file, what stands there, and what is to."""
    texts = dict(MADE_UP)
    for file, old, new in edits:
        assert old in texts.setdefault(file, "")
        texts[file] = texts[file].replace(old, new, 1) if old else texts[file] + new
    for file, text in texts.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    spec = importlib.util.spec_from_file_location("bpipe", root / "bpipe/__init__.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return figures(Source(root), package, Walk([], [], [], [], 0))


UNHEAVY = {
    "a class moves": [
        ("bpipe/plan/sizes.py", SIZES, ""),
        ("bpipe/plan/late.py", "", SIZES),
        ("bpipe/engine/run.py", "plan.sizes", "plan.late"),
    ],
    "more files": [("bpipe/plan/sooner.py", "", ""), ("bpipe/loose.py", "", "")],
    "documentation": [("bpipe/engine/run.py", RUN, f'    """Run all slices."""\n    # Each of the slices.\n\n{RUN}')],
}


@pytest.mark.parametrize("edits", UNHEAVY.values(), ids=UNHEAVY.keys())
def test_what_moves_or_documents_changes_nothing(edits: list[Edit], tmp_path: Path) -> None:
    assert made_up(tmp_path / "after", *edits) == made_up(tmp_path / "before")


@pytest.mark.parametrize(
    "file, places",
    [
        ("bpipe/engine/run.py", {"bpipe", "bpipe and benchmarks", "core"}),
        ("bpipe/search/find.py", {"bpipe", "bpipe and benchmarks"}),
        ("benchmarks/study.py", {"bpipe and benchmarks"}),
    ],
)
def test_a_statement_is_weighed_where_it_stands(file: str, places: set[str], tmp_path: Path) -> None:
    assert risen(tmp_path, (file, "", "x = 1\n")) == {f"{what} in {place}" for what in ("statements", "tokens") for place in places}


HEAVIER = {
    "parameters of public callables": ("bpipe/__init__.py", "budget: int", "budget: int\n    seed: int"),
    "fields of StageSizes, with those inside": ("bpipe/plan/sizes.py", "num_bytes: int", "num_bytes: int\n    late: int"),
    "bodies over 40 lines in core": ("bpipe/engine/run.py", RUN, 40 * RUN + RUN),
    "classes over 250 lines in bpipe": ("bpipe/plan/sizes.py", "num_bytes: int", "num_bytes: int" + 250 * "\n    pass"),
    "lines of the core that name slices": ("bpipe/engine/run.py", "print(sizes)", "print(sizes, slices)"),
    "rooms in circles": ("bpipe/plan/late.py", "", "from bpipe.engine.run import run"),
    "modules in circles": ("bpipe/plan/sizes.py", "", "import bpipe.engine.run"),
    "uses of private attributes of our other objects": ("bpipe/engine/run.py", "print(sizes)", "print(sizes._found)"),
    "dicts by microbatch": ("bpipe/engine/run.py", "", "class State(dict[Key, int]): pass"),
    "docstrings whose first line is not imperative": ("bpipe/engine/run.py", RUN, f'    """Runs it."""\n{RUN}'),
}


@pytest.mark.parametrize("figure", HEAVIER)
def test_what_the_package_grows_by_raises_its_figure(figure: str, tmp_path: Path) -> None:
    assert figure in risen(tmp_path, HEAVIER[figure])


def risen(root: Path, edit: Edit) -> set[str]:
    before, after = made_up(root / "before"), made_up(root / "after", edit)
    return {name for name in after if after[name] > before[name]}


def test_what_is_wrong_is_said_with_the_growth() -> None:
    assert beyond({"a": 3, "b": 1}, {"a": 2, "b": 5}) == ["a: 3, 1 more than 2"]
    new, gone = beyond({"new": 4}, {"gone": 0})
    assert new.startswith("new: has no ratchet; today it is 4") and gone.startswith("gone: is measured no more")


def test_lowering_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / TABLE).parent.mkdir(parents=True)
    (tmp_path / TABLE).write_text(json.dumps({"a": 2, "b": 5, "gone": 4}))
    lower(tmp_path, {"a": 3, "b": 1, "new": 7})
    assert limits(tmp_path) == {"a": 2, "b": 1, "gone": 4}
