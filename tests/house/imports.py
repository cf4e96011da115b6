"""Who imports whom: modules, and rooms. No module may import itself by way of others; rooms still do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.source import Module

Arrows = dict[str, set[str]]  # what each name imports


def arrows(package: list[Module]) -> Arrows:
    """The modules that each one imports, inside functions and for types included."""
    known = {module.name for module in package}
    return {module.name: {*_imported(module, known)} - {module.name} for module in package}


def room_arrows(package: list[Module]) -> Arrows:
    """The rooms that each one imports; a facade counts as the rooms whose names it gives."""
    homes = {
        (facade.name, alias.asname or alias.name): room
        for facade in package
        if facade.path.name == "__init__.py" and facade.name.count(".") == 1
        for _, alias, room in _names(facade)
    }
    found: Arrows = {module.room: set() for module in package if module.room}
    for module in package:
        if module.room and module.path.name != "__init__.py":
            found[module.room] |= {homes.get((origin, alias.name), room) for origin, alias, room in _names(module)}
    return {room: (used & found.keys()) - {room} for room, used in found.items()}


def circles(arrows: Arrows) -> list[list[str]]:
    """Groups of those that import each other, directly or by way of others."""
    reached = {name: _reached(arrows, name) for name in arrows}
    in_circle = {name for name in arrows if name in reached[name]}
    groups = {frozenset({other for other in in_circle & reached[name] if name in reached[other]}) for name in in_circle}
    return sorted(sorted(group) for group in groups)


def _imported(module: Module, known: set[str]) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            yield from modules
            if len(modules) < len(node.names) and node.module in known:
                yield node.module


def _names(module: Module) -> Iterator[tuple[str, ast.alias, str]]:
    """The names that a module has from others: the module that gives it, the name, and the room that it stands in."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bpipe."):
            yield from ((node.module, alias, node.module.split(".")[1]) for alias in node.names)


def _reached(arrows: Arrows, start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for name in arrows[ahead.pop()] - found:
            found.add(name)
            ahead.append(name)
    return found
