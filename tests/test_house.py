"""The house stays one that a stranger can move into: its weight, its names, and the page that leads through it."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.house.figures import COMPARABLE, REMEDY, beyond, figures, limits
from tests.house.imports import arrows
from tests.house.source import HERE, SATELLITES, Source
from tests.house.walk import Walk, walk

PAGE = (HERE / "bpipe/README.md").read_text()


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(HERE)


@pytest.fixture(scope="module")
def walked(source: Source) -> Walk:
    return walk(source)


@pytest.mark.skipif(not COMPARABLE, reason="the ratchets are of Python 3.11: later ones cut f-strings into tokens")
def test_no_figure_grew(source: Source, walked: Walk) -> None:
    found = figures(source, bpipe, walked)
    assert found["statements in core"] and walked.switches and walked.proofs
    assert not (wrong := beyond(found, limits(HERE))), "\n".join([*wrong, REMEDY])


def test_modules_have_names_of_their_own(source: Source) -> None:
    """A module's name says which one it is, without its folder."""
    names = Counter(module.path.stem for module in source.package if not module.path.stem.startswith("__"))
    assert len(names) > 200 and not [name for name, count in names.items() if count > 1]


def test_no_name_of_a_package_hides_one_of_its_modules(source: Source) -> None:
    """So that `import bpipe.room.name as module` gives a module, and never a function of that name."""
    modules = {module.name for module in source.package}
    packages = [module for module in source.package if module.path.stem == "__init__"]
    names = {f"{package.name}.{name}" for package in packages for name in bound(package.nodes)}
    hidden = names & modules
    assert len(packages) > 20 and not hidden


def bound(nodes: list[ast.AST]) -> set[str]:
    """The names that a package has, those that it loads on first use included."""
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return imported | defined | {text for text in texts if text.isidentifier()}


def test_the_core_imports_nothing_beside_it(source: Source) -> None:
    """But for `bpipe` itself, which has the public names, and what stands at its root to use them."""
    used = arrows(source.package)
    beside = {module.name for module in source.package if module.room in SATELLITES} | {"bpipe.torchtitan"}
    core = {module.name for module in source.package if module.name.count(".") > 1} - beside
    assert len(core) > 100 and len(beside) > 50 and not {name: used[name] & beside for name in core if used[name] & beside}


def test_the_page_names_every_room(source: Source) -> None:
    package = HERE / "bpipe"
    for name in {str(module.path.parent.relative_to("bpipe")) for module in source.package} - {"."}:
        outer, _, inner = name.partition("/")
        assert f"`{name}/`" in PAGE or (f"`{outer}/`" in PAGE and (f"`{inner}/`" in PAGE or outer == "tools")), name
    for named in re.findall(r"`([a-z_/]+)/`", PAGE.partition("| room |")[2].partition("\n\n")[0]):
        assert (package / named).is_dir() or (package / "comm" / named).is_dir(), named


def followed(title: str) -> list[tuple[str, str]]:
    """The functions that a part of the page names, each with its file; a name without one is of the file before."""
    part, named, file = PAGE.partition(title)[2].partition("\n# ")[0], [], ""
    for word in re.findall(r"`([\w/.]+)`", part):
        if word.endswith(".py") and not word.startswith("tests/"):
            file = word
        elif re.fullmatch(r"(_?[A-Z]\w*\.)?_*[a-z]\w*", word) and word != "step":
            named.append((file, word))
    return named


def test_the_page_follows_a_microbatch(walked: Walk) -> None:
    """Each function that it names is called, in this order."""
    named = followed("# One microbatch")
    assert len(named) > 25
    actions = re.findall(r"`(0[A-Z_]+1)`", PAGE.partition("The step begins")[2])
    done = iter(walked.actions)
    assert len(actions) >= 9 and all(action in done for action in actions), (actions, walked.actions)
    calls = iter([*walked.before, *walked.calls])
    for call in named:
        assert call in calls, f"{call} is not called after those before it"


class Adding(nn.Module):
    """Hands on what the later stages add."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor | float = 0.0) -> Any:
        return x.sin() + kept


class Making(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"kept": x.cos() @ self.weight}


def test_the_page_follows_a_skip() -> None:
    named, calls = followed("# A skip"), list[tuple[str, str]]()
    loopback, skips = bpipe.Loopback(2), {"kept": (0, 1, 3)}
    modules = [Making(4, 4), *(Adding() for _ in range(3))]
    ranks = [[bpipe.PipelineStage(modules[i], i, 4, "cpu", loopback.rank(i % 2), skips=skips) for i in (k, k + 2)] for k in (0, 1)]
    schedules = [bpipe.Interleaved1F1B(stages, 2, nn.functional.mse_loss) for stages in ranks]
    root, x = f"{HERE / 'bpipe'}/", torch.randn(2, 4)

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        loopback.step(schedules, x, target=x)
    finally:
        sys.setprofile(before)
    done = iter(calls)
    assert len(named) >= 8
    for call in named:
        assert call in done, f"{call} is not called after those before it"
