"""Schedules from outside: the example of docs/schedules.md is registered, shown, compared, ranked and run like bpipe's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bpipe
from bpipe.errors import ConfigurationError, PlanError
from bpipe.estimate.candidates import variants
from bpipe.schedules import Action, Costs, Op, Rule, build, check_rule, names, register, rules, simulate, unregister
from bpipe.schedules.registry import rule_named
from bpipe.tools.cli import main
from tests.models import batch_of, modules_of, mse, single_process

P, M = 4, 8
NAME = "early_1f1b"
PAGE = Path(bpipe.__file__).parents[1] / "docs/schedules.md"
SIZES = ("-p", str(P), "-m", str(M))


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """What the page's blocks of Python define, run in their order."""
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(block, names)
        yield names
    finally:
        if NAME in bpipe.schedules.names():
            unregister(NAME)


def test_a_registered_rule_is_built_and_listed(page) -> None:
    plan = build(NAME, P, M)
    assert NAME in names() and rules()[-1] is page["rule"]
    assert [str(action) for action in plan.compute(P - 1)][:5] == ["3F0", "3F1", "3B0", "3F2", "3B1"]
    assert plan.peak_slots == (5, 4, 3, 2)
    assert simulate(plan, Costs()).bubble_s(0) == simulate(build("1f1b", P, M), Costs()).bubble_s(0)
    assert max(build(NAME, P, M, slots=4).peak_slots) == 4


def test_the_page_s_class_gives_the_gradients_of_a_single_process(page, capsys) -> None:
    modules, loopback = modules_of("quiet", P), bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(one, r, P, "cpu", loopback.rank(r)) for r, one in enumerate(modules)]
    schedules = [bpipe.Balanced(page["EarlyOneFOneB"](stage, M, loss_fn=mse), budget="lowest") for stage in stages]
    x, y = batch_of("quiet", 2 * M, 0)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        loopback.step(schedules, x, target=y)
    assert schedules[0].stats["evicted_bytes"] > 0 and schedules[0].plan.name.startswith(NAME)
    for module, gradients in zip(modules, single_process("quiet", P, M, steps=1).gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))


def test_the_command_line_shows_and_compares_it(page, capsys) -> None:
    assert main(["show", NAME, *SIZES]) == 0
    assert capsys.readouterr().out == f"{build(NAME, P, M)}\n"
    assert main(["compare", "1f1b", NAME, *SIZES, "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["1f1b", NAME]
    assert main(["schedules"]) == 0
    assert f"{NAME}: 1F1B with one more forward in its warmup\n" in capsys.readouterr().out


def test_advise_ranks_it_and_says_so(page) -> None:
    setup: dict[str, Any] = {
        "batch": 16,
        "num_stages": 4,
        "device": "a100-80gb",
        "microbatch_sizes": [1],
        "recomputations": ["none"],
    }
    advice = bpipe.advise("gpt3-96b", tensor_parallel=8, **setup)
    assert NAME in {one.schedule for one in advice.candidates}
    assert f"Ranked too, because they are registered: {NAME}." in advice.assumptions
    unregister(NAME)
    advice = bpipe.advise("gpt3-96b", tensor_parallel=8, **setup)
    assert not [text for text in advice.assumptions if text.startswith("Ranked too")]
    register(page["rule"])


def test_advise_leaves_out_what_it_cannot_rank(page) -> None:
    for rule in (
        replace(page["rule"], placement=bpipe.schedules.Placement.LOOPED),
        replace(page["rule"], allows=lambda p, m: False),
        replace(page["rule"], order=next(rule for rule in rules() if rule.name == "zb_h1").order),
    ):
        unregister(NAME)
        register(rule)
        assert NAME not in {one.plain.name for one in variants(P, M)}


def test_a_name_is_taken_once(page) -> None:
    assert register(page["rule"]) is page["rule"]
    with pytest.raises(ConfigurationError, match=r"'early_1f1b' is registered already \(1F1B with one more.*unregister"):
        register(replace(page["rule"], order=reversed_gpipe))
    with pytest.raises(ConfigurationError, match="'1f1b' is registered already"):
        register(replace(page["rule"], name="1f1b"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda p, m, v: [], r"register\(\) takes a bpipe.schedules.Rule, got function"),
        (Rule, r"register\(\) takes a bpipe.schedules.Rule, got type"),
        (Rule(name="two words", order=lambda p, m, v: []), "'two words'"),
    ],
)
def test_only_rules_with_a_name_are_registered(given, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        register(given)


def test_only_what_was_registered_is_removed() -> None:
    with pytest.raises(ConfigurationError, match="'1f1b' is one of bpipe's own schedules"):
        unregister("1f1b")
    with pytest.raises(ConfigurationError, match="no schedule is called 'early_1f1b'"):
        unregister(NAME)


def backwards_first(p: int, m: int, v: int) -> list[list[Action]]:
    return [[Action(op, x, i) for op in (Op.B, Op.F) for i in range(m)] for x in range(p)]


def reversed_gpipe(p: int, m: int, v: int) -> list[list[Action]]:
    return [[Action(op, x, i) for op in (Op.F, Op.B) for i in reversed(range(m))] for x in range(p)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (backwards_first, "'wrong'.*wait for each other"),
        (reversed_gpipe, "'wrong'.*stands before"),
        (lambda p, m, v: reversed_gpipe(p, 1, v), "'wrong'"),
        (lambda p, m, v: [], r"'wrong': order\(\) must return a list of actions for each of 3 ranks"),
        (lambda p, m, v: [["0F0"]] * p, r"'wrong': order\(\) must return a list of actions"),
    ],
    ids=["a deadlock", "descending", "incomplete", "no lanes", "no actions"],
)
def test_a_wrong_order_is_refused_when_it_is_built(order, message: str) -> None:
    register(Rule(name="wrong", order=order))
    try:
        with pytest.raises(PlanError, match=f"(?s){message}"):
            build("wrong", 3, 2)
    finally:
        unregister("wrong")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_check_rule_passes_bpipe_s_own(rule: Rule) -> None:
    for p, m in ((1, 2), (2, 4), (4, 8), (4, 12), (5, 15)):
        if rule.allows(p, m):
            assert check_rule(rule, p, m).name == rule.name


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ({"peak": lambda p, m, v, x: p}, "peaks are 5 4 3 2 slots, but its formula gives 4 4 4 4"),
        ({"peak": lambda p, m, v, x: m}, "peaks are 5 4 3 2 slots, but its formula gives 8 8 8 8"),
        ({"peak": lambda p, m, v, x: 5 if x == 0 else 1}, "peaks are 5 4 3 2 slots, but its formula gives 5 1 1 1"),
        ({"bubble": lambda p, m, v, f, i, w: f}, "bubble is 9 forwards of a stage, but its formula gives 1"),
        ({"bubble": lambda p, m, v, f, i, w: 10 * f}, "bubble is 9 forwards of a stage, but its formula gives 10"),
    ],
)
def test_check_rule_names_a_formula_that_differs(page, formula, message: str) -> None:
    with pytest.raises(PlanError, match=f"rule 'early_1f1b' with p = 4 and m = 8: its {message}"):
        check_rule(replace(page["rule"], **formula), P, M)


def test_a_bubble_may_be_called_a_bound(page) -> None:
    bound = replace(page["rule"], bubble=lambda p, m, v, f, i, w: 10 * f, bubble_text="at most 10F")
    check_rule(bound, P, M)
    with pytest.raises(PlanError, match="bubble is 9 forwards of a stage, but its formula gives 8"):
        check_rule(replace(bound, bubble=lambda p, m, v, f, i, w: 8 * f), P, M)


def test_the_command_line_finds_the_rules_of_installed_packages(tmp_path: Path) -> None:
    """One that is broken, and one whose name is taken, are named in a warning, and hold up nothing."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "early.py").write_text(blocks[0].replace("register(Rule(", "RULE = (Rule("))
    installed = tmp_path / "early-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: early\nVersion: 1.0\n")
    entries = ("early_1f1b = early:RULE", "gone = early:GONE", "taken = early:register")
    (installed / "entry_points.txt").write_text("\n".join(["[bpipe.schedules]", *entries, ""]))
    path = os.pathsep.join([str(tmp_path), str(PAGE.parents[1])])
    command = [sys.executable, "-m", "bpipe", "show", NAME, *SIZES]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"{NAME}: 4 stages, 8 microbatches, peak slots 5 4 3 2")
    warned = [line for line in done.stderr.splitlines() if "left out" in line]
    assert len(warned) == 2 and "'gone' of early" in warned[0] and "got function" in warned[1]


@pytest.mark.parametrize(
    "name, found",
    [
        ("GPIPE", "gpipe"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("ScheduleLoopedBFS", "breadth_first"),
        ("ScheduleDualPipeV", "dualpipe_v"),
        ("BalancedOneFOneB", "balanced_1f1b"),
        ("balanced-1f1b", "balanced_1f1b"),
        ("VHalf", "v_half"),
        ("ZBH1", "zb_h1"),
    ],
)
def test_names_of_classes_and_other_spellings_are_found(name: str, found: str) -> None:
    assert rule_named(name).name == found


def test_every_name_finds_itself_in_capitals() -> None:
    assert [rule_named(name.upper()).name for name in names()] == list(names())


@pytest.mark.parametrize("typo, near", [("1fb1", "1f1b"), ("Schedule1F1BB", "1f1b"), ("interleavd_1f1b", "interleaved_1f1b")])
def test_a_typo_gets_a_suggestion(typo: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no schedule is called '{typo}', did you mean '{near}'"):
        rule_named(typo)
