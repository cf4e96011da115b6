"""Small changes of the package's source, each of which makes it wrong, or so one should think."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

CORE = ("engine", "memory", "comm", "plan", "passes", "verifier", "session")
BESIDE = ("estimate", "tools", "partition", "chooser", "search", "training", "relaxed", "fill", "overlap")
OPPOSITE = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="}
SWAPPED = (ast.Expr, ast.Assign, ast.AugAssign)


class Mutation(NamedTuple):
    """One change.

    Args:
        path: the file, from the checkout's root.
        line: its line, from 1.
        kind: what is done to the code.
        start, end: the characters of the file that it replaces.
        new: what stands there then.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    new: str

    def apply(self, root: Path) -> None:
        """Change the file in a checkout."""
        text = (root / self.path).read_text()
        (root / self.path).write_text(text[: self.start] + self.new + text[self.end :])


def drawn(root: Path, rooms: tuple[str, ...], count: int, seed: int) -> list[Mutation]:
    """Draw so many mutations: a room, then a file of it by its length, then a kind, then a place, so that no kind is rare."""
    draw = random.Random(seed)
    chosen: list[Mutation] = []
    while len(chosen) < count:
        paths = sorted((root / "bpipe" / draw.choice(rooms)).rglob("*.py"))
        path = draw.choices(paths, [len(path.read_text()) for path in paths])[0]
        found = [*mutations(path, root)]
        kinds = sorted({mutation.kind for mutation in found})
        if kinds:
            kind = draw.choice(kinds)
            mutation = draw.choice([mutation for mutation in found if mutation.kind == kind])
            chosen += [mutation] if mutation not in chosen else []
    return chosen


def mutations(path: Path, root: Path) -> Iterator[Mutation]:
    """Yield all mutations of a file; what is there for type checkers, and messages of errors, stay as they are."""
    text = path.read_text()
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def place(node: ast.stmt | ast.expr) -> tuple[int, int]:
        lines = text.splitlines(keepends=True)  # columns are of UTF-8
        return tuple(
            begins[line - 1] + len(lines[line - 1].encode()[:column].decode())
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        )  # type: ignore[return-value]

    for node in _executed(ast.parse(text)):
        for kind, target, new in _changes(node, text):
            start, end = place(target[0])[0], place(target[-1])[1]
            yield Mutation(str(path.relative_to(root)), target[0].lineno, kind, start, end, new)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Functions and what is in them, but for raised errors, assertions and annotations."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield function
            for statement in function.body:
                yield from _below(statement)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.ClassDef)):
        return
    yield node
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _below(child)


Change = tuple[str, list[ast.stmt] | list[ast.expr], str]


def _changes(node: ast.AST, text: str) -> Iterator[Change]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not _is_for_types(node.test):
        yield "condition negated", [node.test], _negated(node.test, text)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant changed", [node], str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant changed", [node], str(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", [node], "pass"
    for _, body in ast.iter_fields(node):
        if isinstance(body, list):
            for one, other in pairwise(body):
                if isinstance(one, SWAPPED) and isinstance(other, SWAPPED) and _names(one) & _names(other):
                    first, second = (ast.get_source_segment(text, statement) or "" for statement in (one, other))
                    between = "\n" + " " * one.col_offset
                    yield "order swapped", [one, other], second + between + first


def _names(node: ast.AST) -> set[str]:
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _negated(test: ast.expr, text: str) -> str:
    code = ast.get_source_segment(text, test) or ""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPPOSITE:
        left, right = (ast.get_source_segment(text, side) for side in (test.left, test.comparators[0]))
        return f"({left} {OPPOSITE[type(test.ops[0])]} {right})"
    return f"(not ({code}))"


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
