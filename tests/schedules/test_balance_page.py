"""The page on the balance pass: its drawings are the library's, and the files act in the order that it says."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from types import FrameType

import pytest

from bpipe.passes.balance import balance as module
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Costs, Link, Sizes, build

FOLDER = Path(module.__file__).parent
PAGE = (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", ["1f1b", "balanced_1f1b"])
def test_its_drawings_are_plans(name: str) -> None:
    assert textwrap.indent(str(build(name, 4, 4)), "    ") in PAGE


def test_it_names_every_file_once_and_functions_that_exist() -> None:
    named = re.findall(r"^(?:\d\.|-) (.*)$", PAGE, re.MULTILINE)
    files = [file for line in named for file in re.findall(r"`(\w+\.py)`", line)] + re.findall(r"; `(\w+\.py)`", PAGE)
    assert sorted({*files}) == sorted(path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py")
    for file, names in re.findall(r"`(\w+\.py)` `([\w.]+)`", PAGE):
        assert all(re.search(rf"(class|def) {name}\b", (FOLDER / file).read_text()) for name in names.split(".")), names


def test_the_files_act_in_this_order() -> None:
    acted: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == FOLDER and path.name not in acted:
            acted.append(path.name)

    plan = computations_only(build("1f1b", 4, 4))
    costs = Costs(saved_bytes=8, link=Link(bytes_per_s=16))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        module.balance(plan, sizes=Sizes.of([8] * 4), budgets=24, costs=costs)
    finally:
        sys.setprofile(before)
    assert re.findall(r"^\d\. `(\w+\.py)`", PAGE, re.MULTILINE) == acted
