"""What people see of slices: commands, pictures, pages and traces name microbatches and slices, and count both in microbatches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bpipe.errors import ConfigurationError
from bpipe.estimate.calibrate import calibrated
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Costs, Op, Sizes, Timeline, build, finish, simulate
from bpipe.tools.chrome import save_trace
from bpipe.tools.cli import main
from bpipe.tools.paper import Paper
from bpipe.tools.scene import compose
from bpipe.tools.trace_record import load_trace
from tests.tools.test_page import MIDDLES, page, run

SIZE = ("-p", "4", "-m", "4")


def sliced(k: int = 4, slots: int | None = None) -> Timeline:
    return simulate(build("seq_1f1b", 4, 4, slices=k, slots=slots), Costs(forward_s=1 / k))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_show_prints_slices(capsys: pytest.CaptureFixture[str]) -> None:
    plan = build("seq_1f1b", 4, 4, slices=4)
    assert said(capsys, "show", "seq_1f1b", *SIZE, "--slices", "4") == f"{plan}\n"
    found = json.loads(said(capsys, "show", "seq_1f1b", *SIZE, "--slices", "4", "--json"))
    assert (found["num_microbatches"], found["slices"]) == (4, 4)
    assert found["actions"][0].startswith("0F0/0 0SEND_F0/0 0F0/1 ")


def test_costs_are_of_a_whole_microbatch(capsys: pytest.CaptureFixture[str]) -> None:
    """So the same costs compare schedules with and without slices."""
    costs = ("--slices", "4", "--forward", "1s", "--saved", "4GiB", "--output", "8MiB", "--static", "1GiB")
    one, four = json.loads(said(capsys, "compare", "1f1b", "seq_1f1b", *SIZE, *costs, "--json"))
    assert (one["slices"], four["slices"]) == (1, 4)
    assert (one["makespan_s"], four["makespan_s"]) == (21.0, 14.25)
    peaks = [[rank["peak_bytes"] / 2**30 for rank in found["ranks"]] for found in (one, four)]
    assert peaks == [[16, 12, 8, 4], [7, 6, 5, 4]]
    assert {rank["static_bytes"] for found in (one, four) for rank in found["ranks"]} == {2**30}
    text = said(capsys, "compare", "1f1b", "seq_1f1b", *SIZE, "--slices", "4")
    assert "1.75 microbatches (7 slices)" in text and "seq_1f1b in 4 slices" in text
    text = said(capsys, "simulate", "seq_1f1b", *SIZE, *costs, "--budget", "lowest", "--parts", "2")
    assert "slices of a stage" in text and "evicted slices" in text


def test_slices_are_for_schedules_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "gpipe", "1f1b", *SIZE, "--slices", "4"]) == 2
    assert "--slices: none of gpipe, 1f1b takes slices; seq_1f1b does" in capsys.readouterr().err
    assert main(["show", "1f1b", *SIZE, "--slices", "4"]) == 2
    assert "1f1b runs whole microbatches, not slices=4 of each" in capsys.readouterr().err


def test_a_plan_of_slices_is_read_from_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = build("seq_1f1b", 4, 4, slices=4, slots=6)
    (tmp_path / "plan.txt").write_text(plan.to_text())
    (tmp_path / "plan.csv").write_text(build("tera_pipe", 2, 2, slices=3).to_csv())
    assert "sound" in said(capsys, "check", str(tmp_path / "plan.txt"))
    assert said(capsys, "show", str(tmp_path / "plan.txt")) == f"{plan}\n"
    assert "2 microbatches of 3 slices" in said(capsys, "show", str(tmp_path / "plan.csv"))
    assert main(["show", str(tmp_path / "plan.txt"), "--slices", "4"]) == 2
    assert "leave --slices out" in capsys.readouterr().err


def test_a_picture_counts_memory_in_microbatches() -> None:
    scene = compose([simulate(build("1f1b", 4, 4), Costs()), sliced(4, slots=6), sliced(3)])
    assert scene.slots_each == 12
    assert [entry.name for entry in scene.legend() if entry.kind == "memory"] == ["activations, in microbatches"]
    whole, four, three = ([row.peak / 12 for row in panel.rows] for panel in scene.panels)
    assert whole == [4, 3, 2, 1] and four == [1.5, 1.5, 1.25, 1.5] and three == pytest.approx([2, 5 / 3, 4 / 3, 1])
    assert [panel.rows[0].budget for panel in scene.panels] == [None, 18, None]
    assert "m = 4 of k = 4 slices" in scene.panels[1].facts and "fullest rank 0: 1.5 microbatches" in scene.panels[1].facts


def test_a_box_is_labelled_with_its_slice() -> None:
    scene = compose([sliced()])
    paper, row = Paper.of(scene), scene.panels[0].rows[0]
    assert [paper.label(span, row) for span in row.spans("compute")][:7] == ["0/0", "0/1", "0/2", "0/3", "1/0", "1/1", "1/2"]


def test_a_page_names_slices_and_follows_microbatches(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        page(simulate(build("1f1b", 4, 4), Costs()), sliced()),
        MIDDLES
        + """
        drawn.length = 0; choose(3);
        const names = middles("compute").filter(({ box }) => box.microbatch === 3).map(({ box }) => name(box));
        const bright = drawn.filter(([, , , , colour, alpha]) => alpha === 1 && colour === data.fills[1].F[0][0]).length;
        return [names.filter((one) => one.startsWith("0F")), bright, amount(data.slots_each), amount(7), elements.slider.max];
        """,
    )
    assert found == [["0F3", "0F3/0", "0F3/1", "0F3/2", "0F3/3"], 4 + 16, "1 microbatch", "1.75 microbatches", 3]


def test_a_trace_names_slices_and_is_read_back(tmp_path: Path) -> None:
    plain = build("seq_1f1b", 4, 4, slices=3)
    sizes = Sizes.of([9] * 4, num_parts=2)
    timeline = simulate(finish(balance(computations_only(plain), sizes=sizes)), Costs(forward_s=1 / 3))
    save_trace([timeline], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    first = next(event for event in events if event.get("name") == "2F3/1")
    assert (first["args"]["microbatch"], first["args"]["slice"]) == (3, 1)
    (again,) = load_trace(tmp_path / "trace.json")
    assert again.plan == timeline.plan and again.makespan_s == pytest.approx(timeline.makespan_s)


def test_costs_from_a_trace_are_of_slices() -> None:
    plan = build("seq_1f1b", 2, 3, slices=2)
    costs = Costs(forward_s=[[1.0, 2.0], [3.0, 4.0]], backward_s=5.0)
    traced = simulate(plan, costs)
    for other in (plan, build("tera_pipe", 2, 5, slices=2)):
        found = calibrated([traced], other)
        assert [found.seconds(Op.F, stage, unit) for stage in (0, 1) for unit in (2, 3)] == [1, 2, 3, 4]
    whole = calibrated([simulate(build("1f1b", 2, 3), Costs(forward_s=4.0))], plan)
    assert whole.seconds(Op.F, 0, 0) == 2.0 and whole.seconds(Op.B, 1, 5) == 4.0
    with pytest.raises(ConfigurationError, match="the trace is of 2 slices per microbatch, and the plan has 1"):
        calibrated([traced], build("1f1b", 2, 3))
