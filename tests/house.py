"""Measure how hard this house is to move into: `python -m tests.house [ROOT]`. ROOT is a checkout of bpipe; this one by default.

Counted from the source: files, import cycles, private attributes of others, dicts by microbatch, docstrings. Counted while it
runs, in a loopback of four ranks: the files through which an evicted microbatch goes, and the plans that are proven at first.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

HERE = Path(__file__).parents[1]
BESIDE = ("estimate", "tools", "training", "partition", "relaxed", "search", "chooser")  # rooms that the core does not import
PLANNING = ("schedules", "simulator", "plan", "passes", "verifier")  # where there are plans, and no microbatches yet
KEYS = r"(Key|MicrobatchKey|PartKey|OpKey|Identity|Place|Started|tuple\[(Op, )?int, int(, int)?\])"
BY_MICROBATCH = re.compile(rf"(?:self\.\w+: (?:default)?|class \w+\()dict\[{KEYS}, ")


class Source:
    """The package in a checkout, parsed."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted((root / "bpipe").rglob("*.py"))
        self.texts = {path: path.read_text() for path in self.paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.names = {path: _module(path.relative_to(root)) for path in self.paths}
        self.root = root / "bpipe"

    def num_lines(self) -> int:
        return sum(len(text.splitlines()) for text in self.texts.values())

    def loose_files(self) -> int:
        return sum(path.parent == self.root for path in self.paths)

    def most_files(self) -> tuple[int, str]:
        """The fullest folder of the core."""
        folders = Counter(path.parent for path in self.paths if path.relative_to(self.root).parts[0] not in BESIDE)
        folder, count = folders.most_common(1)[0]
        return count, str(folder.relative_to(self.root))

    def arrows(self) -> dict[str, set[str]]:
        """The modules that each one imports, inside functions and for types included."""
        known = set(self.names.values())
        return {name: {*_imported(self.trees[path], known)} - {name} for path, name in self.names.items()}

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other."""
        return [sorted(group) for group in _strongly_connected(self.arrows()) if len(group) > 1]

    def reaches(self) -> list[str]:
        """Uses of private attributes of other objects that this package defines, outside the module that defines them."""
        private = {path: {*_private_names(tree)} for path, tree in self.trees.items()}
        defined = set().union(*private.values()) - {*dir(nn.Module()), *dir(torch.Tensor)}  # torch's own have no other name
        found = []
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in defined - private[path] and not _is_own(node.value):
                    found.append(f"{path.relative_to(self.root)}:{node.lineno} {ast.unparse(node)}")
        return found

    def dicts_by_microbatch(self) -> list[str]:
        return [
            f"{path.relative_to(self.root)}: {match.group().rstrip(', ')}"
            for path, text in self.texts.items()
            if path.relative_to(self.root).parts[0] not in PLANNING
            for match in BY_MICROBATCH.finditer(text)
        ]

    def docstrings(self) -> tuple[int, int]:
        """How many functions have one, and the first lines of how many are not imperative, as pydocstyle's D401 sees it."""
        functions = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        command = ["ruff", "check", "--isolated", "--select", "D401", "--output-format", "json", str(self.root)]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        return sum(ast.get_docstring(node) is not None for node in functions), len(json.loads(done.stdout))


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            yield from modules
            if len(modules) < len(node.names) and node.module in known:
                yield node.module


def _strongly_connected(arrows: dict[str, set[str]]) -> Iterator[set[str]]:
    """Group what reaches each other."""
    reached = {name: _reached(arrows, name) for name in arrows}
    left = set(arrows)
    while left:
        name = left.pop()
        group = {name} | {other for other in left if other in reached[name] and name in reached[other]}
        left -= group
        yield group


def _reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for name in arrows[ahead.pop()] - found:
            found.add(name)
            ahead.append(name)
    return found


def _private_names(tree: ast.AST) -> Iterator[str]:
    """The private attributes and methods of a module's classes."""
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in ast.walk(cls):
            name = ""
            if isinstance(node, ast.FunctionDef):
                name = node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                name = node.attr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            if name.startswith("_") and not name.startswith("__"):
                yield name


def _is_own(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


WALK = """
import importlib, json, sys
import torch
from torch import nn
import bpipe
from bpipe.schedules import Op
run_module, proof_module = (importlib.import_module(name) for name in sys.argv[1:])

proofs, verify = 0, proof_module.verify
def counted(plan):
    global proofs
    proofs += 1
    return verify(plan)
for module in list(sys.modules.values()):
    if getattr(module, "verify", None) is verify and module.__name__.startswith("bpipe"):
        module.verify = counted

root = bpipe.__path__[0] + "/"
before, calls, actions, execute = [], [], [], run_module.Run.execute
into = before
def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        into.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_qualname))
def walked(self, action):
    global into
    into = calls
    if is_followed := (action.stage, action.microbatch) == (0, FOLLOWED):
        actions.append(str(action))
    sys.setprofile(enter if is_followed else None)
    try:
        execute(self, action)
    finally:
        sys.setprofile(None)
loopback = bpipe.Loopback(4)
modules = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]
stages = [bpipe.PipelineStage(module, i, 4, "cpu", group=loopback.rank(i)) for i, module in enumerate(modules)]
bpipe.Balanced(bpipe.OneFOneB(stages[0], 8, loss_fn=nn.functional.mse_loss), budget="lowest").close()
made = proofs
schedules = [bpipe.BalancedOneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
x = torch.randn(16, 64)
loopback.step(schedules, x, target=x)
loopback.step(schedules, x, target=x)
FOLLOWED = next(a.microbatch for a in schedules[0].plan.actions[0] if a.op is Op.EVICT)
run_module.Run.execute = walked
sys.setprofile(enter)
loopback.step(schedules, x, target=x)
print(json.dumps([before, calls, actions, made]))
"""

Calls = list[tuple[str, str]]  # of functions, each with its file in bpipe/


class Walk(NamedTuple):
    """What a step does for a microbatch that is evicted.

    Args:
        before: calls until the first action.
        calls: calls in the actions for this microbatch, on all ranks.
        actions: these.
        proofs: the plans that a rank proves when its balanced schedule is made.
    """

    before: Calls
    calls: Calls
    actions: list[str]
    proofs: int

    @property
    def files(self) -> list[str]:
        return [file for file, _ in self.calls]

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in pairwise(self.files))


def walk(root: Path) -> Walk:
    (run,) = (root / "bpipe").rglob("run.py")
    (proof,) = (path for path in (root / "bpipe").rglob("*.py") if re.search(r"^def verify\(", path.read_text(), re.MULTILINE))
    modules = [_module(path.relative_to(root)) for path in (run, proof)]
    command = [sys.executable, "-c", WALK, *modules]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    before, calls, actions, proofs = json.loads(done.stdout)
    return Walk([tuple(call) for call in before], [tuple(call) for call in calls], actions, proofs)


def main(root: Path) -> None:
    source = Source(root)
    documented, not_imperative = source.docstrings()
    walked = walk(root)
    figures = {
        "lines in bpipe/": source.num_lines(),
        "files loose at its root": source.loose_files(),
        "most files in a folder of the core": "{} ({})".format(*source.most_files()),
        "import cycles, lazy and type-only imports counted": len(source.cycles()),
        "reaches into private attributes of our own objects": len(source.reaches()),
        "dicts keyed by microbatch": len(source.dicts_by_microbatch()),
        "files that an evicted microbatch goes through": len(set(walked.files)),
        "switches between these": walked.switches,
        "plans that a rank proves when its balanced schedule is made": walked.proofs,
        "docstrings of functions whose first line is imperative": f"{1 - not_imperative / documented:.0%} of {documented}",
    }
    for name, figure in figures.items():
        print(f"{name:70} {figure}")
    for group in source.cycles():
        print("cycle:", ", ".join(group))
    if "-v" in sys.argv:
        print(*source.reaches(), *source.dicts_by_microbatch(), sep="\n")


if __name__ == "__main__":
    roots = [argument for argument in sys.argv[1:] if argument != "-v"]
    main(Path(roots[0]).resolve() if roots else HERE)
