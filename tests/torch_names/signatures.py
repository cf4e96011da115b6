"""What torch.distributed.pipelining's public names take, read from its sources without importing them, so that any version can be.

Recorded for several versions in signatures.json. A name is a function, a class (its construction) or `Class.method`; an argument is
text, such as `device` or `group=None`.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
MODULES = ("_IR", "microbatch", "schedules", "stage")
PRIVATE = {"_PipelineScheduleRuntime", "_load_csv"}  # that programs use all the same

Signatures = dict[str, list[str]]


def recorded() -> dict[str, Signatures]:
    """Return the signatures of each recorded version of torch, the oldest first."""
    read = json.loads(RECORD.read_text())
    return {version: {name: given.split(", ") if given else [] for name, given in names.items()} for version, names in read.items()}


def record(version: str, folder: Path) -> None:
    """Add a version, whose torch/distributed/pipelining is `folder`."""
    known = (recorded() if RECORD.exists() else {}) | {version: signatures(folder)}
    ordered = sorted(known.items(), key=lambda item: [*map(int, item[0].split("."))])
    texts = {one: {name: ", ".join(given) for name, given in names.items()} for one, names in ordered}
    RECORD.write_text(json.dumps(texts, indent=1) + "\n")


def signatures(folder: Path) -> Signatures:
    """Read the signatures of a version."""
    public = _public(folder)
    tops = {one.name: one for module in MODULES for one in ast.parse((folder / f"{module}.py").read_text()).body if _has_name(one)}
    found: Signatures = {}
    for name in sorted(public & tops.keys()):
        top = tops[name]
        if isinstance(top, ast.FunctionDef):
            found[name] = _arguments(top)
        elif isinstance(top, ast.ClassDef):
            methods = _methods(top, tops)
            found[name] = _arguments(methods["__init__"]) if "__init__" in methods else _fields(top)
            shown = (method for method in sorted(methods) if not method.startswith("_") or method in PRIVATE)
            found |= {f"{name}.{method}": _arguments(methods[method]) for method in shown}
    return {name: [one for one in given if one not in ("self", "cls")] for name, given in found.items()}


def _public(folder: Path) -> set[str]:
    names = set(PRIVATE)
    for path in [folder / "__init__.py", *(folder / f"{module}.py" for module in MODULES)]:
        for one in ast.parse(path.read_text()).body:
            if isinstance(one, ast.Assign) and getattr(one.targets[0], "id", "") == "__all__":
                names |= set(ast.literal_eval(one.value))
    return names


def _has_name(one: ast.stmt) -> bool:
    return isinstance(one, (ast.FunctionDef, ast.ClassDef))


def _methods(kind: ast.ClassDef, tops: dict[str, ast.stmt]) -> dict[str, ast.FunctionDef]:
    """Return a class's methods, its bases' included; properties and the methods of torch's other classes left out."""
    found: dict[str, ast.FunctionDef] = {}
    for base in reversed(kind.bases):
        above = tops.get(getattr(base, "id", ""))
        if isinstance(above, ast.ClassDef):
            found |= _methods(above, tops)
    for one in kind.body:
        if isinstance(one, ast.FunctionDef) and not (_is_property(one) or _hands_on(one)):
            found[one.name] = one
    return found


def _fields(kind: ast.ClassDef) -> list[str]:
    """Return the arguments of a dataclass; none of another class."""
    if "dataclass" not in " ".join(map(ast.unparse, kind.decorator_list)):
        return []
    fields = [one for one in kind.body if isinstance(one, ast.AnnAssign)]
    return [_text(ast.arg(ast.unparse(one.target)), None if isinstance(one.value, ast.Call) else one.value) for one in fields]


def _is_property(function: ast.FunctionDef) -> bool:
    return re.search(r"property|setter", " ".join(map(ast.unparse, function.decorator_list))) is not None


def _hands_on(function: ast.FunctionDef) -> bool:
    """Return whether it is a construction whose arguments are its base's."""
    return function.name == "__init__" and len(function.args.args) == 1 and function.args.vararg is not None


def _arguments(function: ast.FunctionDef) -> list[str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults]
    texts = [_text(one, default) for one, default in zip(positional, defaults)]
    texts += [f"*{given.vararg.arg}"] if given.vararg else []
    texts += [_text(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults)]
    return texts + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _text(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
