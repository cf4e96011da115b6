"""`bpipe search`, and the plan that it writes, which runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bpipe
from bpipe.schedules import Op, Plan, verify
from bpipe.tools.cli import main
from tests.models import batch_of, modules_of, mse, single_process

SMALL = ("-p", "4", "-m", "8")
UNEVEN = (*SMALL, "--forward", "1,1.5,1,2", "--input", "1.25,2,1,2.5", "--saved", "65536", "--bandwidth", "60kB/s")
FEW = ("--effort", "100000")


def test_a_plan_that_evicts_and_is_made_to_measure_runs_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.txt"
    costs = ("--forward", "1,1.1,1.2,1", "--saved", "65536", "--output", "655", "--bandwidth", "131kB/s", "--latency", "50ms")
    assert main(["search", "1f1b", *SMALL, *costs, "--budget", "203000", "--by", "evict", *FEW, "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "an order made for these costs, from 1f1b" in out and "by evictions" in out and f"wrote {path}" in out
    plan = Plan.from_text(path.read_text())
    verify(plan)
    assert plan.name == "made_to_measure" and any(action.op is Op.EVICT for lane in plan.actions for action in lane)
    modules, loopback = modules_of("quiet", 4), bpipe.Loopback(4)
    stages = [bpipe.PipelineStage(module, rank, 4, "cpu", loopback.rank(rank)) for rank, module in enumerate(modules)]
    schedules = [bpipe.FromPlan(stage, plan, loss_fn=mse) for stage in stages]
    x, y = batch_of("quiet", 16, 0)
    loopback.step(schedules, x, target=y)
    for module, gradients in zip(modules, single_process("quiet", 4, 8, steps=1).gradients, strict=True):
        assert all(map(torch.equal, [parameter.grad for parameter in module.parameters()], gradients))


def test_what_scripts_get(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "1f1b", "gpipe", "zb_h1", *UNEVEN, "--budget", "200000", *FEW, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [one["step_s"] for one in found if one["step_s"] is not None]
    assert steps == sorted(steps) and {"1f1b", "gpipe", "zb_h1"} <= {one["name"] for one in found}
    assert all(max(one["device_peak_bytes"]) <= 200000 for one in found if one["step_s"] is not None)
    assert found[0]["name"] == "made_to_measure" and found[0]["made_from"] == ["zb_h1"]


def test_a_budget_that_nothing_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "1f1b", *UNEVEN, "--budget", "1000", *FEW]) == 1
    out = capsys.readouterr().out
    assert "1f1b" in out and "none found" in out and "an order made" not in out


@pytest.mark.parametrize(
    "more, says",
    [
        (["--budget", "lowest"], "give --budget in bytes"),
        (["--slots", "3"], "leave --slots and --overlapped out"),
        (["--budget", "1,2,3"], "--budget=(1, 2, 3): give a whole number of at least 1, or one for each of 4 ranks"),
        (["--overlapped"], "leave --slots and --overlapped out"),
        (["--effort", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_bad_input(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "1f1b", *UNEVEN, *more]) == 2
    assert says in capsys.readouterr().err


def test_replicas_and_local_learning_have_no_orders_to_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "local_learning", *UNEVEN]) == 2
    assert "orders are searched for plans whose microbatches pass all stages and come back" in capsys.readouterr().err
