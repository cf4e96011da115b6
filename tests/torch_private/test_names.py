"""torch's private names lie in one room, are listed, and can be missing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._composable_state
import torch.distributed.fsdp
import torch.distributed.pipelining.schedules
from torch import nn

import bpipe
from bpipe.errors import UnsupportedTorchError
from bpipe.torch_private.names import NAMES, NEWEST, PrivateName, ask, missing
from bpipe.torch_private.release import release
from tests.torch_private.without import RUNS, hidden, trained

PACKAGE = Path(bpipe.__file__).parent
ROOM = PACKAGE / "torch_private"
# What modules that people write rely on, and attributes of torch's pipelines that bpipe has or refuses by name.
COMMON = {"_modules", "_parameters", "_buffers"}
REFUSED = PACKAGE / "model" / "of_torch_alone.py"
OF_OTHERS = {"_replace", "_asdict", "_fields", "_DummyThread", "_ActionsContainer"}  # of Python's named tuples, threads, argparse
OF_OTHERS |= {"_tied_weights_keys"}  # of Transformers
PARTS_OF_TEXT = {"_slice_spec", "_out", "_id", "_ids", "_s", "_tensor_constant"}  # of names that bpipe or a model's author writes


def private_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names with one underscore that a module asks others for, as attributes, as strings or by an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((node.lineno, part) for part in (node.module or "").split("."))
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, part) for alias in node.names for part in alias.name.split("."))


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def owners() -> dict[str, Any]:
    """The owners of the list that can be had without a step, by how the list says them."""
    names = {entry.owner for entry in NAMES.values() if re.fullmatch(r"torch[\w.]+", entry.owner)} - {"torch.jit.ScriptModule"}
    found = {name: eval(name, {"torch": torch}) for name in names}  # the list is ours
    objects = {"torch.nn.Module": nn.Module(), "torch.amp.GradScaler": torch.amp.GradScaler("cpu"), "torch.Tensor": torch.ones(1)}
    return found | objects | {"torch.UntypedStorage": torch.UntypedStorage(0)}


OWNERS = owners()


def test_no_other_room_has_a_private_name_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if ROOM not in path.parents and path != REFUSED}
    own = {name for tree in trees.values() for name in defined_in(tree)} | PARTS_OF_TEXT
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_in(tree)
        if name.startswith("_") and not name.startswith(("__", "_bpipe_")) and name not in own | COMMON | OF_OTHERS
    ]
    assert not found


def test_the_list_has_what_the_room_asks_for() -> None:
    trees = [ast.parse(path.read_text()) for path in ROOM.glob("*.py") if path.name != "names.py"]
    strings = {name for tree in trees for name in (*(name for _, name in private_in(tree)), *defined_in(tree))}
    strings |= {"_raw_saved_tensors", "_raw_saved_self"}
    attention = "_scaled_dot_product_flash_attention"
    strings |= {attention, f"{attention}_backward", f"{attention}_for_cpu", f"{attention}_for_cpu_backward"}
    assert {*NAMES} <= strings
    asked = {
        node.args[1].value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ask", "has", "_set_later")
        if isinstance(node.args[1], ast.Constant)
    }
    assert asked and asked <= {*NAMES}


def is_here(entry: PrivateName) -> bool:
    """Whether the list says that the torch here has a name; of newer releases than it knows, that they are as the newest."""
    since, until, newest = (tuple(map(int, text.split("."))) for text in (entry.since, entry.until, NEWEST))
    return since <= min(release(), newest) <= until


@pytest.mark.parametrize("name", [name for name, entry in NAMES.items() if entry.owner in OWNERS])
def test_the_torch_that_is_installed_has_what_the_list_says(name: str) -> None:
    assert hasattr(OWNERS[NAMES[name].owner], name) == is_here(NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_what_is_missing_and_since_when(name: str) -> None:
    text, entry = str(missing(name)), NAMES[name]
    for part in (name, entry.owner, entry.use, entry.without, f"torch {entry.since} to {entry.until}", torch.__version__):
        assert part in text
    with hidden(name), pytest.raises(UnsupportedTorchError, match=name):
        ask(torch, name)


@pytest.fixture(scope="module")
def imported() -> None:
    """Import what is imported on first use now, while nothing is hidden: other tests in this process need it whole."""
    for path in ROOM.glob("*.py"):
        import_module(f"bpipe.torch_private.{path.stem}")
    assert [trained("OneFOneB"), trained("BalancedOneFOneB")] == [RUNS, RUNS]


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", NAMES)
def test_steps_run_without_a_name_that_is_asked_for_late(name: str) -> None:
    with hidden(name):
        assert [trained("OneFOneB"), trained("BalancedOneFOneB")] == [RUNS, RUNS]


def test_without_a_name_that_is_asked_for_early_bpipe_is_imported_and_trains_or_says_what_it_needs() -> None:
    command = [sys.executable, "-m", "tests.torch_private.without"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    results = {one.pop("name"): one for one in map(json.loads, done.stdout.splitlines())}
    assert results.keys() <= NAMES.keys() and {"_storage_Use_Count", "_ImperativeEngine", "TorchDispatchMode"} <= results.keys()
    for name, result in results.items():
        assert result["OneFOneB"] == RUNS, (name, result)
        is_needed = "Nothing can be evicted" in NAMES[name].without
        says = f"UnsupportedTorchError: bpipe needs {name} of {NAMES[name].owner} to" if is_needed else RUNS
        assert result["BalancedOneFOneB"].startswith(says), (name, result)
