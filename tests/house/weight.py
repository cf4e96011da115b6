"""What the code weighs, so counted that moving it changes nothing: where it stands is no matter, what there is of it is."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from types import ModuleType

from tests.house.source import Module

FEATURES = {  # words by which the core would know a feature
    "slices": r"\b(num_)?slices?\b|\bslice_\w+|\bby_slice\b",
    "skips": r"\b_?skips?\b|\bskip_\w+",
    "directions": r"\bdirections?\b|\b\w*twins?\b",
    "pairs": r"\boverlapped\w*|\bwith_pairs\b|\bbegins_pair\b",
    "local": r"\.local\b|\blocal\s*[=:]",
    "paths": r"\.paths\b|\bpaths\s*[=:]",
    "vocabulary": r"\bvocabulary\w*|\bshards?_of_head\b",
    "recomputation": r"\brecomput\w+|\brerun\w*",
    "fill": r"\bfill(er|ed|ing|s)?\b",
}
RECORDS = ("Plan", "PlanData", "StageSizes", "Sizes", "StepRecord", "MicrobatchState")


def weight(modules: list[Module]) -> dict[str, int]:
    """Statements and tokens, without docstrings and comments; long bodies and classes; and the paper that they take."""
    nodes = [node for module in modules for node in module.nodes]
    bodies = [_without_docstring(node) for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {
        "statements": sum(isinstance(node, ast.stmt) and not _is_bare(node) for node in nodes),
        "tokens": sum(len(line.split()) for module in modules for line in module.code),
        "bodies over 40 lines": sum(bool(body) and _num_lines(body) > 40 for body in bodies),
        "classes over 250 lines": sum(isinstance(node, ast.ClassDef) and _num_lines([node]) > 250 for node in nodes),
        "files": len(modules),
        "lines": sum(len(module.text.splitlines()) for module in modules),
        "lines of docstrings": sum(len(module.docstring_lines) for module in modules),
    }


def _without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return function.body[ast.get_docstring(function) is not None :]


def _is_bare(node: ast.stmt) -> bool:
    """Is it a docstring, or `...`?"""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _num_lines(body: list[ast.stmt]) -> int:
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def naming(modules: list[Module]) -> dict[str, tuple[int, int]]:
    """For each feature, how many of the files and of the lines of code name it."""
    counts = {
        name: [sum(bool(re.search(words, line)) for line in module.code) for module in modules] for name, words in FEATURES.items()
    }
    return {name: (sum(count > 0 for count in by_file), sum(by_file)) for name, by_file in counts.items()}


def fields(package: list[Module], records: tuple[str, ...] = RECORDS) -> dict[str, tuple[int, int]]:
    """For each large record, its own fields, and these with those of the records inside them."""
    own: dict[str, list[ast.AnnAssign]] = {}
    for node in (node for module in package for node in module.nodes if isinstance(node, ast.ClassDef)):
        annotated = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        if len(annotated) >= len(own.get(node.name, [])):
            own[node.name] = annotated

    def count(name: str, above: frozenset[str]) -> int:
        inside = [
            {word for word in re.findall(r"\w+", ast.unparse(field.annotation)) if own.get(word)} - above for field in own[name]
        ]
        return sum(1 + sum(count(record, above | {record}) for record in found) for found in inside)

    return {name: (len(own[name]), count(name, frozenset({name}))) for name in records if name in own}


def parameters(package: ModuleType) -> int:
    """The parameters of all public callables, their public methods included."""
    total = 0
    for thing in (getattr(package, name) for name in {*package.__all__}):
        total += _parameters(thing) if callable(thing) else 0
        if inspect.isclass(thing):
            total += sum(
                _parameters(part) for name, part in vars(thing).items() if not name.startswith("_") and inspect.isfunction(part)
            )
    return total


def _parameters(thing: typing.Any) -> int:
    """Those of one callable, with those of an `Unpack`ed TypedDict."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return 0
    total = 0
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            hints = typing.get_type_hints(thing if inspect.isfunction(thing) else thing.__init__, include_extras=True)
            options = typing.get_args(hints.get(parameter.name))
            total += len(typing.get_type_hints(options[0])) if options and typing.is_typeddict(options[0]) else 1
        else:
            total += parameter.name != "self"
    return total
