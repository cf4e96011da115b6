"""Plans with skips on the command line: they are built, drawn, simulated, and balanced in bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bpipe.schedules import build
from bpipe.tools.cli import main
from tests.tools.test_slices import said

SIZE = ("-p", "4", "-m", "8")
SKIPS = ((0, 3), (1, 2, 3))


def test_commands_build_plans_with_skips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = build("1f1b", 4, 8, skips=SKIPS)
    assert said(capsys, "show", "1f1b", *SIZE, "--skips", "0:3,1:2:3") == f"{plan}\n"
    found = json.loads(said(capsys, "show", "1f1b", *SIZE, "--skips", "0:3,1:2:3", "--json"))
    assert " 0SEND_F0>3 " in found["actions"][0]
    file = tmp_path / "plan.txt"
    file.write_text(plan.to_text())
    assert said(capsys, "show", str(file)) == f"{plan}\n"


def test_skips_count_as_much_as_their_stages_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--forward", "1s", "--backward", "2s", "--saved", "100MiB", "--output", "10MiB")
    of_skips = [("--skips", "0:3,1:2:3"), ()]
    plain = [json.loads(said(capsys, "simulate", "1f1b", *SIZE, *costs, *skips, "--json")) for skips in of_skips]
    assert plain[0]["makespan_s"] == plain[1]["makespan_s"] == 33.0
    lowest = ("--budget", "lowest")
    balanced = [json.loads(said(capsys, "simulate", "1f1b", *SIZE, *costs, *lowest, *skips, "--json")) for skips in of_skips]
    with_skips, without = (max(rank["device_peak_bytes"] for rank in found["ranks"]) for found in balanced)
    assert without < with_skips <= without + 8 * 2 * 10 * 2**20


@pytest.mark.parametrize(
    ("skips", "message"),
    [("x", "'x' names no skips: give stages"), ("3:0", "a skip (3, 0): expected a stage, then later ones"), ("0:9", "up to 3")],
)
def test_skips_that_no_plan_can_have(capsys: pytest.CaptureFixture[str], skips: str, message: str) -> None:
    assert main(["show", "1f1b", *SIZE, "--skips", skips]) == 2
    assert message in capsys.readouterr().err
