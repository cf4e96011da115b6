"""The modules of a checkout, each parsed once, and what to look for in them."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parents[2]
SATELLITES = ("estimate", "tools", "training", "partition", "relaxed", "search", "chooser")  # rooms that all others do not import
BESIDE = {  # rooms that a reader of the core need not know; some are still to come
    *SATELLITES,
    *("batching", "dry_run", "features", "fill", "flows", "as_torch", "overlap", "recomputation", "schedules"),
    *("prediction", "skips", "slices", "stores", "trainers", "transformers", "twins", "vocabulary"),
}
PLANNING = ("schedules", "simulator", "plan", "passes", "verifier")  # where there are plans, and no microbatches yet
KEYS = r"(Key|MicrobatchKey|PartKey|OpKey|Identity|Place|Started|tuple\[(Op, )?int, int(, int)?\])"
BY_MICROBATCH = re.compile(rf"(?:self\.\w+: (?:default)?|class \w+\()dict\[{KEYS}, ")
WORDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """One file: its path below the root, its text, its tree, the nodes of this, its name, and its room in bpipe/ if it has one."""

    def __init__(self, file: Path, root: Path) -> None:
        self.path = file.relative_to(root)
        self.text = file.read_text()
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        self.room = self.path.parts[1] if len(self.path.parts) > 2 else ""
        parts = self.path.with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def docstring_lines(self) -> set[int]:
        """The numbers of the lines that hold docstrings."""
        documented = (
            node for node in self.nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        )
        spans = (node.body[0] for node in documented)
        return {line for span in spans for line in range(span.lineno, (span.end_lineno or span.lineno) + 1)}

    @cached_property
    def code(self) -> list[str]:
        """The lines that have code: no comments, no docstrings, no spaces that mean nothing."""
        lines: dict[int, list[str]] = defaultdict(list)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type in WORDS and token.start[0] not in self.docstring_lines:
                lines[token.start[0]].append(token.string)
        return [" ".join(words).replace(" . ", ".") for words in lines.values()]


class Source:
    """The package in a checkout, the benchmarks beside it, and the core: what a reader of it has to know."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package, self.benchmarks = (
            [Module(file, root) for file in sorted((root / folder).rglob("*.py"))] for folder in ("bpipe", "benchmarks")
        )
        self.core = [module for module in self.package if module.room and module.room not in BESIDE]

    def reaches(self) -> list[str]:
        """Uses of private attributes of other objects that this package defines, outside the module that defines them."""
        private = {module: {*_private_names(module)} for module in self.package}
        defined = set().union(*private.values()) - {*dir(nn.Module()), *dir(torch.Tensor)}  # torch's own have no other name
        return [
            f"{module.path}:{node.lineno} {ast.unparse(node)}"
            for module in self.package
            for node in module.nodes
            if isinstance(node, ast.Attribute) and node.attr in defined - private[module] and not _is_own(node.value)
        ]

    def dicts_by_microbatch(self) -> list[str]:
        return [
            f"{module.path}: {match.group().rstrip(', ')}"
            for module in self.package
            if module.room not in PLANNING
            for match in BY_MICROBATCH.finditer(module.text)
        ]

    def docstrings(self) -> tuple[int, int]:
        """How many functions have one, and the first lines of how many are not imperative, as pydocstyle's D401 sees it."""
        functions = [node for module in self.package for node in module.nodes if isinstance(node, ast.FunctionDef)]
        command = ["ruff", "check", "--isolated", "--select", "D401", "--output-format", "json", str(self.root / "bpipe")]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
        return sum(ast.get_docstring(node) is not None for node in functions), len(json.loads(done.stdout))


def _private_names(module: Module) -> Iterator[str]:
    """The private attributes and methods of a module's classes."""
    for node in (node for cls in module.nodes if isinstance(cls, ast.ClassDef) for node in ast.walk(cls)):
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
