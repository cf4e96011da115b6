"""Which tests run the function that a mutant is in: they are tried first, so that most mutants are caught in seconds."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.mutations import Mutation

# Notes the test that runs, once. Processes that a test starts inherit its name, but those of a fork server have an old one.
PROBE = (
    "(lambda known, entry: entry in known or (known.add(entry), open({path!r}, 'a').write(entry + chr(10)))) "
    "(__import__('sys').__dict__.setdefault('_probed', set()), __import__('os').environ.get('PYTEST_CURRENT_TEST', ''))"
)


def put_probes(root: Path, mutants: Sequence[Mutation], folder: Path) -> None:
    """Change a checkout so that the function around each mutant notes the tests that run it."""
    of_files: Mapping[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        of_files[mutant.path].append(number)
    for path, numbers in of_files.items():
        text = (root / path).read_text()
        lines = text.splitlines(keepends=True)
        places = [(*_begin_of_function(text, mutants[number].line), number) for number in numbers]
        for line, column, number in sorted(places, reverse=True):
            probe = PROBE.format(path=str(folder / str(number)))
            lines.insert(line - 1, f"{' ' * column}{probe.replace('_probed', f'_probed_{number}')}\n")
        (root / path).write_text("".join(lines))


def _begin_of_function(text: str, line: int) -> tuple[int, int]:
    """Return the line and column of the first statement, after the docstring, of the function around a line."""
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    function = max(around, key=lambda node: node.lineno)
    first = function.body[1 if ast.get_docstring(function) is not None and len(function.body) > 1 else 0]
    decorators = getattr(first, "decorator_list", [])
    return min([first.lineno, *(one.lineno for one in decorators)]), first.col_offset


def noted(folder: Path, number: int) -> list[str]:
    """Return the tests that have run the function of a mutant."""
    file = folder / str(number)
    found = file.read_text().splitlines() if file.exists() else []
    return sorted({line.rpartition(" (")[0] for line in found if " (" in line})
