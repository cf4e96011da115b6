"""The page to play with, without a browser: its answers are bpipe's, its Python and its command make the same plan."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from bpipe.schedules import Costs, Link, Plan, Timeline, build, names, simulate
from bpipe.tools.balancing import balanced
from bpipe.tools.cli import main
from bpipe.tools.page import as_data, render
from bpipe.tools.scene import compose
from docs.play import answers
from docs.play.__main__ import HERE, STATIC, sources
from docs.play.__main__ import build as build_page

SIZES = "--ranks 4 --microbatches 8"
COSTS = f"{SIZES} --forward 30ms --saved 1.5GiB --output 32MiB --static 8GiB --bandwidth 50GB/s --latency 10us"
RANK = f"{COSTS} --per-rank"


def costs(**changed: Any) -> Costs:
    usual = {"forward_s": 0.03, "saved_bytes": 3 * 2**29, "output_bytes": 2**25, "static_bytes": 2**33}
    return Costs(**{**usual, "link": Link(latency_s=1e-5, bytes_per_s=50e9), **changed})


def in_bytes(plan: Plan, given: Costs, budget: Any) -> Timeline:
    return simulate(balanced(plan, given, budget), given)


def sliced(plan: Plan) -> Timeline:
    return simulate(plan, costs().of_slices(plan))


HALF = costs(forward_s=0.015, saved_bytes=3 * 2**28, static_bytes=2**32)
LAST = costs(forward_s=(0.03, 0.03, 0.03, 0.05))
ASKED = {
    f"1f1b {RANK}": lambda: simulate(build("1f1b", 4, 8), costs()),
    f"balanced_1f1b {RANK}": lambda: simulate(build("balanced_1f1b", 4, 8), costs()),
    f"1f1b --slots 3,3,-,- {RANK}": lambda: simulate(build("1f1b", 4, 8, slots=(3, 3, None, None)), costs()),
    f"1f1b --budget 13GiB {RANK}": lambda: in_bytes(build("1f1b", 4, 8), costs(), 13 * 2**30),
    f"1f1b --budget 13GiB,-,-,- {RANK}": lambda: in_bytes(build("1f1b", 4, 8), costs(), (13 * 2**30, None, None, None)),
    f"zbv --budget lowest {RANK}": lambda: in_bytes(build("zbv", 8, 8), HALF, "lowest"),
    f"interleaved_1f1b --stages-per-rank 2 {RANK}": lambda: simulate(build("interleaved_1f1b", 8, 8), HALF),
    f"seq_1f1b --slices 4 {RANK}": lambda: sliced(build("seq_1f1b", 4, 8, slices=4)),
    f"1f1b {COSTS} --forward 30ms,30ms,30ms,50ms": lambda: simulate(build("1f1b", 4, 8), LAST),
    f"gpipe {SIZES}": lambda: simulate(build("gpipe", 4, 8), Costs()),
}


@pytest.mark.parametrize("words", ASKED)
def test_the_plan_is_that_of_build_and_simulate(words: str) -> None:
    expected = ASKED[words]()
    scene = compose([expected])
    found = answers.answer([words.split()], is_first=True)
    assert found["plans"][0]["grid"] == str(expected.plan)
    assert found["scene"] == as_data(scene) and found["page"] == render(scene)
    assert found["numbers"][0] == ["time of a step", answers.show_seconds(expected.makespan_s)]


@pytest.mark.parametrize("words", ASKED)
def test_the_python_and_the_command_make_the_same_plan(words: str, tmp_path: Path, capsys: Any) -> None:
    shown = answers.answer([words.split()])["plans"][0]
    with contextlib.chdir(tmp_path):
        ran: dict[str, Any] = {}
        exec(compile(shown["python"], "copied.py", "exec"), ran)
        assert ran["timeline"] == ASKED[words]() and Path("plan.html").read_text() == render(compose([ran["timeline"]]))
        Path("plan.html").unlink()
        capsys.readouterr()
        program, *rest = shlex.split(shown["command"])
        assert program == "bpipe" and main([*rest, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["makespan_s"] == ran["timeline"].makespan_s and Path("plan.html").exists()


def test_two_plans_are_compared_on_one_axis() -> None:
    both = [f"1f1b {RANK}", f"balanced_1f1b {RANK}"]
    found = answers.answer([words.split() for words in both])
    assert found["scene"] == as_data(compose([ASKED[words]() for words in both])) and "page" not in found
    assert [panel["name"] for panel in found["scene"]["panels"]] == ["1f1b", "balanced_1f1b"]
    rows = {name: rest for name, *rest in found["numbers"]}
    assert rows["fullest rank holds"] == ["14.0 GiB", "12.5 GiB", "-10.7%"]
    assert rows["emptiest rank holds"] == ["9.50 GiB", "11.0 GiB", "+15.8%"]
    bubbles = [1 - 8 * 0.09 / ASKED[words]().makespan_s for words in both]
    assert rows["largest bubble"] == [*(f"{bubble:.1%}" for bubble in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points"]
    assert rows["evictions in a step"] == ["0", "3", "+3"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("1f1b --slots 1", "1 slots are too few for 1f1b with 4 stages and 8 microbatches"),
        ("1f1b --saved 1GiB --budget 1GiB", "The smallest budget that works here is"),
        ("interleaved_1f1b --microbatches 9", "interleaved_1f1b takes a multiple of floor(m/p) microbatches"),
        ("1f1b --slots many", "argument --slots: 'many' is not a whole number of at least 1"),
        ("1f1b --forward 1,2,3", "forward_s has 3 entries"),
        ("nothing", "no schedule is called 'nothing'"),
        ("/etc/hosts", "no schedule is called '/etc/hosts'"),
    ],
)
def test_a_refusal_is_one_sentence_of_bpipe_and_leaves_the_other_plan(words: str, sentence: str) -> None:
    schedule, *rest = words.split()
    refused = [schedule, *SIZES.split(), *rest]
    wrong, right = answers.answer([refused, f"1f1b {SIZES}".split()])["plans"]
    assert sentence in wrong["error"] and "\n" not in wrong["error"]
    assert right["grid"] == str(build("1f1b", 4, 8))


def test_more_boxes_than_a_picture_may_have_are_refused_for_both_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.tools.scene.MAX_BOXES", 100)
    found = answers.answer([["1f1b", *SIZES.split()], ["gpipe", *SIZES.split()]])
    assert [plan["error"] for plan in found["plans"]] == 2 * [found["plans"][0]["error"]] and found["scene"] is None
    assert "boxes that one picture may have" in found["plans"][0]["error"]


def test_the_page_offers_every_schedule_with_what_it_takes() -> None:
    offered = {found["name"]: found for found in answers.schedules()}
    assert tuple(offered) == names()
    assert [name for name, found in offered.items() if found["has_slices"]] == ["interleaved_1f1b", "seq_1f1b", "tera_pipe"]
    assert [name for name, found in offered.items() if found["slices"] > 1] == ["seq_1f1b", "tera_pipe"]
    looped = ["interleaved_1f1b", "interleaved_zb", "breadth_first"]
    assert [name for name, found in offered.items() if found["has_stages"]] == looped
    for name in offered:
        (plan,) = answers.answer([[name, *RANK.split()]])["plans"]
        assert "error" not in plan, plan


def test_every_option_of_the_form_is_one_of_the_command_line() -> None:
    options = re.findall(r'option: "(--[a-z-]+)"', (HERE / "play.js").read_text())
    assert len(options) == 13
    parser = answers._parser("simulate", answers.import_module("bpipe.tools.commands.simulate"))
    assert set(options) <= set(parser._option_string_actions)


RUN = """
import sys
for name in ("torch", "numpy", "matplotlib", "rich"):
    sys.modules[name] = None
sys.path[:] = [folder for folder in sys.path if "site-packages" not in folder]
sys.path.insert(0, sys.argv[1])
import json, answers, bpipe
assert bpipe.__file__.startswith(sys.argv[1])
answers.schedules()
print(json.dumps(answers.answer([words.split() for words in json.loads(sys.argv[2])], is_first=True)))
"""


def test_the_sources_that_the_page_carries_are_enough_without_any_package(tmp_path: Path) -> None:
    zipfile.ZipFile(BytesIO(sources())).extractall(tmp_path)
    asked = [f"seq_1f1b --slices 4 --budget lowest {RANK}", f"zbv {RANK}"]
    command = [sys.executable, "-I", "-c", RUN, str(tmp_path), json.dumps(asked)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == json.loads(json.dumps(answers.answer([words.split() for words in asked], is_first=True)))
    assert sources() == sources()


def test_without_npm_the_page_is_there_and_says_that_it_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"there is none here: install Node\.js"):
        build_page(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(STATIC)
    assert "python -m docs.play" in (tmp_path / "play.js").read_text()


def test_no_file_of_the_page_names_a_host() -> None:
    for path in (path for path in HERE.iterdir() if path.is_file()):
        assert not re.search(r"https?://|\"resolved\"", path.read_text()), path
