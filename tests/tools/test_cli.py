"""The command line: what it prints, for people and for scripts, and how it refuses."""

from __future__ import annotations

import getpass
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bpipe.errors import is_printable
from bpipe.extras import how_to_install
from bpipe.flow.shaping import shaped
from bpipe.schedules import Costs, Op, Plan, build, rules, simulate, verify
from bpipe.schedules.by_name import forward_plan
from bpipe.tools.balancing import balanced
from bpipe.tools.chrome import save_trace
from bpipe.tools.cli import COMMANDS, main
from tests.quiet import here


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def data(capsys, *arguments: str):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


SMALL = ("-p", "4", "-m", "8")


def test_show_prints_the_plan_as_python_does(capsys):
    assert run(capsys, "show", "balanced_1f1b", *SMALL) == (0, str(build("balanced_1f1b", 4, 8)) + "\n", "")


def test_show_gives_scripts_the_plan(capsys):
    plan = build("balanced_1f1b", 4, 8)
    found = data(capsys, "show", "balanced_1f1b", *SMALL)
    assert found["peak_slots"] == [3, 3, 2, 3] and found["evicted"] == [len(plan.evicted(rank)) for rank in range(4)]
    assert found["actions"][0].split() == [str(action) for action in plan.actions[0]]


def test_show_draws_a_window(capsys):
    code, out, _ = run(capsys, "show", "1f1b", *SMALL, "--from", "4", "--columns", "3")
    assert code == 0
    assert out.splitlines()[1:] == [
        "rank 0 | .. .. ..",
        "rank 1 | .. .. ..",
        "rank 2 | .. .. B0",
        "rank 3 | B0 b0 F1",
        "columns 4 to 6; --from and --columns show others",
    ]


def test_show_colours_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run(capsys, "show", "1f1b", "-p", "2", "-m", "100")
    assert "\x1b[" in out and "F0" in out
    assert "columns 0 to" in out


def test_show_cuts_nothing_off_in_a_terminal(capsys, monkeypatch):
    """Also where the marks of parts are wider than the computations."""
    how = ("1f1b", "-p", "4", "-m", "12", "--saved", "3GiB", "--budget", "lowest", "--parts", "4", "--host", "only")
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        terminal.setenv("TERM", "xterm-256color")
        terminal.setenv("COLUMNS", "80")
        _, out, _ = run(capsys, "show", *how)
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()]
    last = int(re.search(r"columns 0 to (\d+)", out)[1])
    _, out, _ = run(capsys, "show", *how, "--columns", str(last + 1))
    grid = [line for line in out.splitlines() if " |" in line]
    assert grid == [line for line in shown if " |" in line] and 70 < max(map(len, grid)) <= 80


def test_check_knows_sound_plans_broken_ones_and_what_is_none(capsys, tmp_path: Path):
    plan = build("balanced_1f1b", 4, 8)
    sound, table, broken, other = (tmp_path / name for name in ("sound.txt", "table.csv", "broken.txt", "other.txt"))
    sound.write_text(plan.to_text())
    table.write_text(build("1f1b", 4, 8).to_csv())
    broken.write_text(plan.to_text().replace(" 0F3 ", " ", 1))
    other.write_text("no plan")
    assert run(capsys, "check", str(sound))[0] == 0
    assert run(capsys, "check", str(table))[0] == 0
    code, out, _ = run(capsys, "check", str(broken))
    assert code == 1 and "0F3 is missing" in out.splitlines()[0]
    code, _, err = run(capsys, "check", str(other))
    assert code == 2 and err.startswith(f"bpipe: {other} is not a plan: ") and err.count("\n") == 1


def test_simulate_gives_the_numbers_of_the_timeline(capsys):
    costs = ("--forward", "10ms", "--saved", "1GiB", "--static", "2GiB", "--bandwidth", "1TB/s")
    found = data(capsys, "simulate", "balanced_1f1b", *SMALL, *costs)
    assert found["makespan_s"] == pytest.approx(11 * 0.03)
    assert [rank["device_peak_bytes"] / 2**30 for rank in found["ranks"]] == [5, 5, 4, 5]
    assert [rank["peak_bytes"] / 2**30 for rank in found["ranks"]] == [3, 3, 2, 3]
    assert [(rank["static_bytes"] / 2**30, rank["remote_buffer_bytes"] / 2**30) for rank in found["ranks"]] == [(2, 0)] * 3 + [
        (2, 2)
    ]
    assert found["ranks"][0]["bubble_s"] == pytest.approx(3 * 0.03)
    assert sum(found["critical_path_s"].values()) == pytest.approx(found["makespan_s"])
    code, out, _ = run(capsys, "simulate", "balanced_1f1b", *SMALL, *costs)
    assert code == 0 and "330 ms" in out and out.split().count("5.00") == 3 and "device" in out and "activations" in out


def test_costs_by_stage_nodes_and_slow_links(capsys):
    slow = ("--forward", "1,1,1,2", "--saved", "10", "--output", "2", "--bandwidth", "10")
    near = data(capsys, "simulate", "1f1b", *SMALL, *slow)["makespan_s"]
    far = data(capsys, "simulate", "1f1b", *SMALL, *slow, "--ranks-per-node", "2", "--cross-bandwidth", "1")["makespan_s"]
    assert far > near > 11 * 3


def test_compare_takes_the_first_as_one(capsys):
    code, out, _ = run(capsys, "compare", "1f1b", "balanced_1f1b", *SMALL, "--saved", "1GiB", "--bandwidth", "0.25GiB/s")
    assert code == 0
    rows = [line.partition("simulated")[2].split() for line in out.splitlines() if "simulated" in line]
    assert rows[0][2] == "1.000" and float(rows[1][2]) > 1.0
    found = data(capsys, "compare", "gpipe", "1f1b", *SMALL)
    assert [each["name"] for each in found] == ["gpipe", "1f1b"]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_every_schedule_is_shown_simulated_and_drawn(capsys, tmp_path: Path, rule):
    plan = build(rule.name, 4 * rule.default_stages_per_rank, 8)
    assert run(capsys, "show", rule.name, *SMALL) == (0, str(plan) + "\n", "")
    assert run(capsys, "show", rule.name, "--stages", str(plan.num_stages), "-m", "8") == (0, str(plan) + "\n", "")
    found = data(capsys, "simulate", rule.name, *SMALL)
    assert (found["num_stages"], found["num_ranks"]) == (plan.num_stages, 4)
    assert [rank["peak_slots"] for rank in found["ranks"]] == list(plan.peak_slots)
    for suffix in ("svg", "html"):
        assert run(capsys, "plot", rule.name, *SMALL, "--out", str(tmp_path / f"x.{suffix}"))[0] == 0


def test_stages_of_a_rank_are_chosen(capsys):
    plan = build("breadth_first", 12, 8, num_ranks=4)
    for sizes in (("-p", "4", "-v", "3"), ("--stages", "12", "-v", "3"), ("--stages", "12", "-p", "4")):
        assert run(capsys, "show", "breadth_first", "-m", "8", *sizes) == (0, str(plan) + "\n", "")


def test_compare_gives_all_schedules_the_same_ranks(capsys):
    """And --stages-per-rank to those that have a choice."""
    found = data(capsys, "compare", "1f1b", "zbv", "interleaved_1f1b", *SMALL, "-v", "3")
    assert [(one["num_ranks"], one["num_stages"]) for one in found] == [(4, 4), (4, 8), (4, 12)]


def test_costs_are_a_stage_s_or_shared_out_on_request(capsys):
    costs = ("--forward", "12ms", "--saved", "12MiB", "--static", "6MiB", "--output", "1KiB")
    schedules = ("compare", "1f1b", "zbv", "interleaved_1f1b", *SMALL, "-v", "3", *costs)
    each, shared = data(capsys, *schedules), data(capsys, *schedules, "--per-rank")
    assert [one["ranks"][0]["work_s"] for one in each] == pytest.approx([8 * v * 0.036 for v in (1, 2, 3)])
    assert [one["ranks"][0]["work_s"] for one in shared] == pytest.approx([8 * 0.036] * 3)
    mib = [one["ranks"][0]["device_peak_bytes"] / 2**20 for one in shared]
    assert mib == [6 + 12 * k for k in (4, 4, (2 * 4 + 2 * 4 - 1) / 3)]
    assert "--per-rank says that the costs are a rank's" in run(capsys, *schedules)[1]
    assert "--per-rank" not in run(capsys, *schedules, "--per-rank")[1]
    assert "--per-rank" not in run(capsys, "compare", "zbv", "v_half", *SMALL)[1]


def test_what_is_sent_is_no_share(capsys):
    """Two stages on each of two ranks: three boundaries between ranks for an output of 1 byte, at a byte a second."""
    slow = ("breadth_first", "-p", "2", "-m", "1", "--per-rank", "--forward", "0", "--output", "1", "--bandwidth", "1")
    assert data(capsys, "simulate", *slow)["makespan_s"] == 6.0


def test_halves_of_a_backward_are_given_by_the_input_s(capsys):
    """FACTS.md: ZB-H1 waits (p-1)(F+I-W)."""
    found = data(capsys, "simulate", "zb_h1", *SMALL, "--forward", "3", "--backward", "5", "--input", "4")
    assert found["ranks"][0]["bubble_s"] == 3 * (3 + 4 - 1)


def test_peaks_of_several_stages_are_counted_in_whole_microbatches_too(capsys):
    _, out, _ = run(capsys, "compare", "1f1b", "interleaved_1f1b", *SMALL)
    assert re.search(r"rank 0 +- +4 slots", out) and re.search(r"rank 0 +- +5.5 microbatches \(11 slots\)", out)


SIZED = ("1f1b", *SMALL, "--saved", "3GiB,2GiB,2GiB,5GiB")
GIB = 2**30


@pytest.mark.parametrize("more", [(), ("--parts", "4"), ("--host", "only"), ("--static", "1GiB")])
def test_a_schedule_is_shown_as_low_as_it_gets(capsys, more):
    found = data(capsys, "show", *SIZED, "--budget", "lowest", *more)
    static = GIB * ("--static" in more)
    assert found["unbalanced_device_peak_bytes"] == [static + gib * GIB for gib in (12, 6, 4, 5)]
    assert max(found["device_peak_bytes"]) == max(found["budgets"]) == static + max(found["peak_bytes"]) < static + 12 * GIB
    assert max(found["device_peak_bytes"]) <= static + 9 * GIB
    lane = " ".join(found["actions"])
    assert "0EVICT1" in lane and any(found["served"]) == ("--host" not in more)
    _, out, _ = run(capsys, "show", *SIZED, "--budget", "lowest", *more)
    head, told, *grid = out.splitlines()
    assert ", planned: device " in head and "; activations " in head and "; budget " in head and "slots" not in head
    peaks = "13.0 GiB, 7.00 GiB, 5.00 GiB, 6.00 GiB" if static else "12.0 GiB, 6.00 GiB, 4.00 GiB, 5.00 GiB"
    assert f"1f1b moves {sum(found['evicted'])} of 32 microbatches" in told
    assert f"; by the plan, the most on each device was {peaks}, and is" in told
    assert any(("^" if "--host" in more else ">") in line for line in grid) and not any(".4" in line for line in grid)


def test_static_bytes_alone_do_not_say_what_activations_are(capsys):
    _, out, _ = run(capsys, "simulate", "1f1b", *SMALL, "--static", "2GiB")
    assert re.search(r"rank 0 .* - +4 slots", out) and "0 B" not in out and "give --static" not in out
    assert not data(capsys, "simulate", "1f1b", *SMALL, "--static", "2GiB")["knows_bytes"]
    assert data(capsys, "simulate", "1f1b", *SMALL, "--static", "2GiB", "--saved", "1GiB")["knows_bytes"]


def test_a_balanced_plan_without_static_bytes_says_so(capsys, tmp_path: Path):
    _, without, _ = run(capsys, "show", *SIZED, "--budget", "lowest")
    _, with_static, _ = run(capsys, "show", *SIZED, "--budget", "lowest", "--static", "1GiB")
    assert "optimizer states): give --static\n" in without and "static memory" not in with_static


def test_what_is_level_is_said_to_be(capsys):
    _, out, _ = run(capsys, "show", "gpipe", *SMALL, "--saved", "1GiB", "--budget", "lowest")
    assert "gpipe is level already: nothing moves; by the plan, the most on each device is 8.00 GiB\n" in out
    assert (
        "1f1b fits: nothing moves; by the plan, the most on each device is 4.00 GiB, 3.00"
        in run(capsys, "show", "1f1b", *SMALL, "--saved", "1GiB", "--budget", "4GiB")[1]
    )


def test_messages_and_static_bytes_are_in_the_peak(capsys):
    """Of messages at most an input and the next one, an output, and the gradients of both sides."""
    found = data(capsys, "show", "1f1b", *SMALL, "--saved", "100", "--output", "1", "--static", "10,20,30,40", "--budget", "lowest")
    plain = [saved + static for saved, static in zip((400, 300, 200, 100), (10, 20, 30, 40))]
    assert all(1 <= peak - bare <= 5 for peak, bare in zip(found["unbalanced_device_peak_bytes"], plain))


def test_a_budget_is_simulated_drawn_and_compared(capsys, tmp_path: Path):
    costs = ("--saved", "3GiB", "--forward", "100ms", "--bandwidth", "20GB/s", "--budget", "10GiB", "--parts", "2")
    found = data(capsys, "simulate", "1f1b", *SMALL, *costs)
    assert found["budgets"] == [10 * GIB] * 4 and max(rank["device_peak_bytes"] for rank in found["ranks"]) <= 10 * GIB
    both = data(capsys, "compare", "1f1b", "balanced_1f1b", *SMALL, *costs)
    assert [{**one, "name": ""} for one in both] == [{**found, "name": "", "file": None}] * 2
    _, out, _ = run(capsys, "compare", "gpipe", "1f1b", *SMALL, *costs[:-4], "--budget", "lowest")
    assert "gpipe is level already" in out and "1f1b moves" in out and "1f1b within 9.00 GiB" in out
    assert "1f1b moves" in run(capsys, "plot", "1f1b", *SMALL, *costs, "--out", str(tmp_path / "x.html"))[1]
    assert f'"budget":{10 * GIB}' in (tmp_path / "x.html").read_text()


def test_the_host_s_link_is_its_own(capsys):
    costs = ("--saved", "3GiB", "--forward", "100ms", "--budget", "lowest", "--host", "only")
    slow, fast = (data(capsys, "simulate", "1f1b", *SMALL, *costs, *more) for more in (("--host-bandwidth", "4GB/s"), ()))
    assert slow["makespan_s"] > fast["makespan_s"] == pytest.approx(3.3)
    assert max(rank["host_bytes"] for rank in slow["ranks"]) >= 3 * GIB
    assert "on its host" in run(capsys, "simulate", "1f1b", *SMALL, *costs)[1]


def test_a_plan_in_bytes_is_checked_and_balanced_anew(capsys, tmp_path: Path):
    _, out, _ = run(capsys, "show", *SIZED, "--budget", "lowest")
    found = data(capsys, "show", *SIZED, "--budget", "lowest")
    plan = balanced(build("1f1b", 4, 8), Costs(saved_bytes=[3 * GIB, 2 * GIB, 2 * GIB, 5 * GIB]), "lowest")
    path = tmp_path / "plan.txt"
    path.write_text(plan.to_text())
    code, checked, _ = run(capsys, "check", str(path))
    assert code == 0 and checked.splitlines()[:2] == out.splitlines()[:2]
    known = data(capsys, "check", str(path))
    for key in ("device_peak_bytes", "peak_bytes", "budgets"):
        assert known[key] == found[key] is not None
    again = data(capsys, "show", str(path), "--saved", "1GiB", "--budget", "lowest")
    assert again["unbalanced_device_peak_bytes"] == [gib * GIB for gib in (4, 3, 2, 1)]


def test_costs_come_from_a_trace_of_parts(capsys, tmp_path: Path):
    """A microbatch saves what the plan says."""
    costs = ("--saved", "3GiB", "--forward", "100ms", "--static", "1GiB")
    path = tmp_path / "trace.json"
    run(capsys, "simulate", "1f1b", *SMALL, *costs, "--budget", "lowest", "--parts", "4", "--out", str(path))
    given, measured = (data(capsys, "simulate", "1f1b", *SMALL, *more) for more in (costs, ("--measured", str(path))))
    assert measured["makespan_s"] == pytest.approx(given["makespan_s"])
    for key in ("peak_bytes", "device_peak_bytes"):
        assert [rank[key] for rank in measured["ranks"]] == [rank[key] for rank in given["ranks"]]


def test_a_trace_in_bytes_says_what_messages_take(capsys, tmp_path: Path):
    """Also what of a microbatch cannot move. A simulated plan that counts slots does not say it, and the command line says that."""
    costs = ("--saved", "3GiB", "--movable", "2GiB", "--output", "1GiB", "--forward", "100ms", "--static", "1GiB")
    path, link = tmp_path / "trace.json", ("--bandwidth", "20GB/s")
    run(capsys, "simulate", "1f1b", *SMALL, *costs, *link, "--budget", "15GiB", "--out", str(path))
    for name, *rest in (("gpipe",), ("1f1b", "--budget", "lowest")):
        given, measured = (
            data(capsys, "simulate", name, *SMALL, *rest, *more) for more in ((*costs, *link), ("--measured", str(path)))
        )
        assert measured["makespan_s"] == pytest.approx(given["makespan_s"])
        for key in ("peak_bytes", "device_peak_bytes"):
            assert [rank[key] for rank in measured["ranks"]] == [rank[key] for rank in given["ranks"]]
    assert run(capsys, "simulate", "gpipe", *SMALL, "--measured", str(path))[2] == ""
    slower = data(capsys, "simulate", "gpipe", *SMALL, "--measured", str(path), "--bandwidth", "5GB/s")
    assert slower["makespan_s"] > 1.1 * data(capsys, "simulate", "gpipe", *SMALL, "--measured", str(path))["makespan_s"]
    run(capsys, "simulate", "1f1b", *SMALL, *costs, "--out", str(path))
    _, out, told = run(capsys, "simulate", "gpipe", *SMALL, "--measured", str(path))
    assert told.startswith("bpipe: note: gpipe: the traced plan counts slots and says nothing of messages") and told not in out


def test_advise_speaks_of_options(capsys):
    machine = ("--device", "a100-80gb", "--stages", "4", "--batch", "16", "--effort", "0", "--schedules", "1f1b")
    _, out, _ = run(capsys, "advise", "gpt3-13b", *machine)
    words = " ".join(out.split())
    assert "--efficiency 1=0.33,2=0.47" in words and "efficiency={" not in words and ".candidates" not in words
    assert "To run it: --out plan.txt writes the plan" in words and "E1" not in words
    assert "76.0 GiB to use per device (80.0 GiB less 4.0 set aside)" in words and "of 76.0 GiB" in words


def test_a_plan_without_a_limit_says_why_nothing_moves(capsys):
    _, out, _ = run(capsys, "show", "1f1b", *SMALL, "--saved", "1GiB", "--budget=-,-,-,-")
    assert "1f1b has no limit to keep, because none was given: nothing moves;" in out


@pytest.mark.parametrize("name", ["1F1B", "OneFOneB", "Schedule1F1B", "1f1b"])
def test_schedules_have_the_names_of_their_classes_too(capsys, name):
    assert run(capsys, "show", name, *SMALL)[1] == str(build("1f1b", 4, 8)) + "\n"


def test_no_limit_on_the_first_rank(capsys):
    assert data(capsys, "show", "gpipe", *SMALL, "--slots", "-,5,11,11")["slots"] == [None, 5, 11, 11]
    sized = data(capsys, "show", "gpipe", *SMALL, "--saved", "1GiB", "--budget", "-,5GiB,11GiB,11GiB")
    assert sized["budgets"] == [None, 5 * GIB, 11 * GIB, 11 * GIB]
    assert run(capsys, "show", "gpipe", *SMALL, "-,3")[0] == 2


def test_a_budget_that_cannot_be_met_names_one_that_can(capsys):
    code, out, told = run(capsys, "show", *SIZED, "--budget", "3GiB")
    assert (code, out, told.count("\n")) == (2, "", 1)
    enough = re.search(r"The smallest budget that works here is --budget (\d+)", told)[1]
    assert run(capsys, "show", *SIZED, "--budget", enough)[0] == 0


def test_what_can_be_hidden_is_evicted_first_where_that_is_no_higher(capsys):
    """20 GB/s: 3 GiB take longer than a forward; evicted when they must be, they would be seen."""
    costs = ("--saved", "3GiB", "--forward", "100ms", "--budget", "lowest")
    slow = data(capsys, "simulate", "1f1b", *SMALL, *costs, "--bandwidth", "20GB/s")
    fast = data(capsys, "simulate", "1f1b", *SMALL, *costs)
    assert slow["budgets"] == fast["budgets"] and slow["makespan_s"] == pytest.approx(fast["makespan_s"])


def test_the_lowest_is_no_higher_for_a_slow_link(capsys):
    slow, fast = (
        data(capsys, "show", "1f1b", "-p", "8", "-m", "32", "--saved", "3GiB", "--forward", "100ms", "--budget", "lowest", *more)
        for more in (("--bandwidth", "20GB/s"), ())
    )
    assert slow["budgets"] == fast["budgets"] == [15 * GIB] * 8


def test_the_docs_table_is_the_list_of_schedules(capsys):
    code, out, _ = run(capsys, "schedules", "--markdown")
    assert code == 0 and out in (Path(__file__).parents[2] / "docs" / "table-of-schedules.md").read_text()
    assert out.count("\n") == 2 + len(rules())


def test_schedules_are_listed_for_people_and_scripts(capsys):
    code, out, _ = run(capsys, "schedules")
    assert code == 0 and all(f"{rule.name}: {rule.title}\n" in out and f"  peak {rule.peak_text}\n" in out for rule in rules())
    assert [one["name"] for one in data(capsys, "schedules")] == [rule.name for rule in rules()]


@pytest.mark.parametrize("schedule", ["zbv", "breadth_first"])
def test_traces_of_several_stages_are_read_again(capsys, tmp_path: Path, schedule: str):
    """Also where a stage's weights are gathered twice: those actions have one name."""
    path = tmp_path / "trace.json"
    costs = ("--forward", "1ms", "--output", "1MiB", "--bandwidth", "10GB/s")
    assert run(capsys, "simulate", schedule, *SMALL, *costs, "--out", str(path))[0] == 0
    again, before = (data(capsys, "simulate", one, *rest) for one, rest in ((str(path), ()), (schedule, (*SMALL, *costs))))
    assert again["makespan_s"] == pytest.approx(before["makespan_s"], abs=1e-8)
    assert [rank["peak_slots"] for rank in again["ranks"]] == [rank["peak_slots"] for rank in before["ranks"]]


def test_plans_come_from_files_too(capsys, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text(build("balanced_1f1b", 4, 8).to_text())
    assert data(capsys, "simulate", str(path)) == data(capsys, "simulate", "balanced_1f1b", *SMALL)


@pytest.mark.parametrize("suffix", ["png", "svg", "html", "json"])
def test_pictures_and_traces_are_written(capsys, tmp_path: Path, suffix: str):
    path = tmp_path / f"out.{suffix}"
    code, out, _ = run(capsys, "simulate", "balanced_1f1b", *SMALL, "--forward", "1ms", "--out", str(path))
    assert code == 0 and f"wrote {path}" in out and path.stat().st_size > 1000
    if suffix == "json":
        again = data(capsys, "simulate", str(path))
        assert again["makespan_s"] == pytest.approx(0.033) and again["ranks"][0]["peak_slots"] == 3
        assert run(capsys, "trace", str(path))[0] == 0
        assert run(capsys, "plot", str(path), "--out", str(tmp_path / "again.svg"))[0] == 0


def test_measured_times_predict_other_plans(capsys, tmp_path: Path):
    """A trace of plain 1F1B with 8 microbatches gives the times for the balanced plan, and for another number of them."""
    path = tmp_path / "trace.json"
    run(capsys, "simulate", "1f1b", *SMALL, "--forward", "1ms,2ms,3ms,4ms", "--out", str(path))
    measured = data(capsys, "simulate", "balanced_1f1b", *SMALL, "--measured", str(path))
    expected = data(capsys, "simulate", "balanced_1f1b", *SMALL, "--forward", "1ms,2ms,3ms,4ms")
    assert measured["makespan_s"] == pytest.approx(expected["makespan_s"], rel=1e-4)
    more = data(capsys, "simulate", "gpipe", "-p", "4", "-m", "12", "--measured", str(path))
    expected = data(capsys, "simulate", "gpipe", "-p", "4", "-m", "12", "--forward", "1ms,2ms,3ms,4ms")
    assert more["makespan_s"] == pytest.approx(expected["makespan_s"], rel=1e-4)


def test_advise_answers_and_its_exit_code_is_the_answer(capsys):
    machine = ("--device", "a100-80gb", "--stages", "8", "--tensor-parallel", "4", "--microbatch-sizes", "1,2", "--effort", "0")
    code, out, _ = run(capsys, "advise", "gpt3-96b", *machine, "--batch", "128", "--efficiency", "1=0.3,2=0.426")
    assert code == 0 and "Balance" in out and "Assumed:" in out
    assert data(capsys, "advise", "gpt3-96b", *machine, "--batch", "128")["candidates"]


def test_advise_chooses_and_writes_what_it_chose(capsys, tmp_path):
    machine = ["--device", "a100-80gb", "--stages", "2,4", "--num-devices", "4", "--batch", "16", "--effort", "0"]
    arguments = ["advise", "gpt3-13b", *machine, "--recomputations", "none", "--schedules", "1f1b,zb_h1,zbv"]
    code, out, _ = run(capsys, *arguments, "--out", str(tmp_path / "plan.txt"))
    plan = Plan.from_text((tmp_path / "plan.txt").read_text())
    verify(plan)
    assert code == 0 and out.startswith(f"Run {plan.name}, ") and "The best of the other kinds" in out
    found = data(capsys, *arguments, "--cache", str(tmp_path / "kept"))
    assert found["choice"]["plan"] == plan.to_text() and len(list((tmp_path / "kept").iterdir())) == 1  # two ranks are too few
    assert found["decision"] and found["choice"]["step_s"] <= min(one["step_s"] for one in found["candidates"] if one["fits"])


def test_advise_without_a_plan_that_fits(capsys):
    machine = ("--device", "v100-32gb", "--stages", "8", "--microbatch-sizes", "1", "--effort", "0")
    code, out, _ = run(capsys, "advise", "gpt3-175b", *machine, "--batch", "64")
    assert code == 1 and out.startswith("No plan fits: ")


def test_advise_takes_dimensions(capsys):
    sizes = ("--layers", "24", "--hidden", "2048", "--heads", "16", "--sequence", "1024", "--vocabulary", "50257")
    machine = ("--device", "h100", "--stages", "4,8", "--num-devices", "8")
    found = data(capsys, "advise", *sizes, *machine, "--batch", "32", "--effort", "0")
    assert {each["num_stages"] for each in found["candidates"]} == {4, 8}


def test_env_names_what_is_here(capsys):
    found = data(capsys, "env")
    assert found["torch"].startswith("2.") and "gloo" in found["backends"] and found["cpu_cores"] >= 1
    code, out, _ = run(capsys, "env")
    assert code == 0 and "gloo" in out


def test_env_can_be_pasted_into_an_issue(capsys, monkeypatch):
    """It says which variables are set and not to what, names no machine, user or path, and needs no extra."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("BPIPE_SECRET", "do-not-tell")
    found, (_, out, _) = data(capsys, "env"), run(capsys, "env")
    assert found["torch"] == torch.__version__ and {"ortools", "flash-attn-4", "transformers"} <= set(found)
    assert "BPIPE_SECRET" in found["variables"] and "BPIPE_SECRET" in out
    assert "do-not-tell" not in out and "/" not in out
    assert not {platform.node(), getpass.getuser()} & set(out.split())


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["shwo"], "did you mean 'show'"),
        (["show", "balanced_1f1"], "did you mean 'balanced_1f1b'"),
        (["show", "1f1b"], "--ranks 4 --microbatches 8"),
        (["show", "zbv", "-m", "8", "-v", "2"], "--ranks 4 --microbatches 8"),
        (["show", "1f1b", *SMALL, "-v", "2"], "1f1b takes one stage per rank: 8 stages on 4 ranks do not fit, 4 would"),
        (["show", "zbv", "--stages", "7", "-m", "8"], "7 stages on 3 ranks do not fit, 6 would"),
        (["show", "zbv", *SMALL, "--stages", "8", "-v", "2"], "leave one out"),
        (["show", "interleaved_1f1b", "-p", "4", "-m", "9"], "takes a multiple of floor(m/p) microbatches"),
        (["simulate", "zbv", *SMALL, "--per-rank", "--forward", "1,2"], "forward_s: --per-rank takes one number"),
        (["simulate", "zbv", *SMALL, "--per-rank", "--measured", "trace.json"], "leave --per-rank out"),
        (["simulate", "setup.py", "-p", "4", "-v", "2"], "leave --ranks, --stages-per-rank out"),
        (["show", "1f1b", *SMALL, "--budget", "lowest"], "say what a microbatch saves, such as --saved"),
        (["show", "1f1b", *SMALL, "--saved", "1GiB"], "--saved: a grid shows costs only with --budget"),
        (["simulate", "1f1b", *SMALL, "--parts", "2", "--host", "last"], "--parts, --host: say the --budget too"),
        (["simulate", *SIZED, "--budget", "lowest", "--slots", "3"], "--slots and --budget"),
        (["simulate", *SIZED, "--budget", "1GiB,2GiB"], "one for each of 4 ranks"),
        (["simulate", *SIZED, "--budget", "low"], "'low' is not a number of bytes"),
        (["simulate", *SIZED, "--budget=-"], "is not a budget: leave it out"),
        (["simulate", *SIZED, "--budget", "lowest", "--parts", "65"], "more than 64 gain nothing more"),
        (["simulate", *SIZED, "--budget", "lowest", "--movable", "4GiB"], "would move"),
        (["simulate", "trace.json", "--budget", "lowest"], "was measured as it is: leave --budget out"),
        (["show", "1f1b", "-p", "0", "-m", "8"], "'0' is not a whole number of at least 1"),
        (["show", "1f1b", "-p", "four", "-m", "8"], "'four' is not a whole number"),
        (["show", "1f1b", "--from", "-1", *SMALL], "--from -1"),
        (["show", "balanced_1f1b", *SMALL, "--slots", "2"], "smallest budget that works here is --slots 3"),
        (["show", "balanced_1f1b", *SMALL, "--slots", "1,x"], "'x' is not a whole number"),
        (["show", "1f1b", *SMALL, "--colour"], "unrecognized arguments"),
        (["simulate", "1f1b", *SMALL, "--forward", "3parsecs"], "'3parsecs' is not a number of seconds"),
        (["simulate", "1f1b", *SMALL, "--saved", "1e"], "'1e' is not a number of bytes"),
        (["simulate", "1f1b", *SMALL, "--forward", "1,2"], "forward_s has 2 entries"),
        (["simulate", "1f1b", *SMALL, "--forward", "-1"], "'-1' is not a number of seconds"),
        (["simulate", "1f1b", *SMALL, "--bandwidth", "0"], "bytes_per_s"),
        (["simulate", "1f1b", *SMALL, "--ranks-per-node", "3"], "4 stages do not fill nodes of 3"),
        (["simulate", "1f1b", *SMALL, "--out", "picture.bmp"], ".bmp"),
        (["simulate", "1f1b", "-p", "64", "-m", "9999999", "--out", "picture.bmp"], ".html, .json"),
        (["simulate", "1f1b", "-p", "64", "-m", "9999999", "--out", "missing/picture.svg"], "there is no folder missing"),
        (["simulate", "1f1b", *SMALL, "--forward", "1e308"], "forward_s=1e+308"),
        (["simulate", "1f1b", *SMALL, "--saved", "1e308"], "saved_bytes="),
        (["simulate", "1f1b", *SMALL, "--saved", "1", "--movable", "2"], "stage 0 would move 2 bytes but saves only 1"),
        (["simulate", "1f1b", *SMALL, "--latency", "1,2"], "'1,2' is not a number of seconds"),
        (["simulate", "1f1b", *SMALL, "--bandwidth=--"], "--bandwidth=-- gives no value"),
        (["simulate", "1f1b", *SMALL, "--cross-bandwidth", "1GB/s"], "--cross-bandwidth needs --ranks-per-node"),
        (["simulate", "1f1b", *SMALL, "--step", "3"], "--step selects a step of a trace"),
        (["show", "setup.py", *SMALL], "says its own sizes"),
        (["simulate", "missing/plan.txt"], "missing/plan.txt"),
        (["compare", "1f1b", *SMALL], "two schedules or more"),
        (["plot", "1f1b", *SMALL], "-o/--out"),
        (["compare", "gpipe", "1f1b", *SMALL, "--out", "both.json"], ".html"),
        (["plot", "1f1b", *SMALL, "--out", "one.json"], ".html"),
        (["trace", "missing"], "missing"),
        (["check", "."], "."),
        (["advise", "lama-65b", "--device", "h100", "--stages", "8", "--batch", "8"], "did you mean 'llama-65b'"),
        (["advise", "llama-65b", "--device", "h10", "--stages", "8", "--batch", "8"], "did you mean 'h100'"),
        (["advise", "--layers", "3", "--batch", "8"], "--hidden --heads"),
        (["advise", "gtp2", "--batch", "8"], "did you mean 'gpt2'"),
        (["advise", "gpt2", "--gated", "--batch", "8", "--stages", "4"], "dimensions without a name"),
        (["advise", "gpt2", "--batch", "8"], "--stages 8"),
        (["advise", "gpt2", "--batch", "8", "--stages", "4"], "--device a100-80gb"),
        (["advise", "gpt2", "--batch", "8", "--stages", "4", "--device", "h100", "--recomputations", "som"], "som"),
        (["advise", "gpt2", "--batch", "8", "--stages", "4", "--device", "h100", "--bytes-per-parameter", "1e308"], "bytes_per_p"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments: list[str], says: str):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("bpipe: ") and err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(capsys, command: str):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and f"bpipe {command}" in out and "--json" in out


def test_malformed_traces_are_one_line(capsys, tmp_path: Path):
    path = tmp_path / "trace.json"
    for text in ("", "{", "[]", '{"traceEvents": 3}', '{"traceEvents": []}'):
        path.write_text(text)
        code, _, err = run(capsys, "trace", str(path))
        assert code == 2 and err.count("\n") == 1, err


@pytest.mark.parametrize("command", [("show", "1f1b", *SMALL), ("simulate", "1f1b", *SMALL), ("compare", "gpipe", "1f1b", *SMALL)])
def test_data_need_no_rich(capsys, monkeypatch, command: tuple[str, ...]):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert data(capsys, *command)
    code, _, err = run(capsys, *command)
    assert code == 0 if command[0] == "show" else (code == 2 and how_to_install("cli") in err)


def test_pictures_say_what_they_need(capsys, monkeypatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib" or name == "bpipe.tools.picture"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "plot", "1f1b", *SMALL, "--out", str(tmp_path / "x.svg"))
    assert code == 2 and how_to_install("plot") in err and err.count("\n") == 1
    assert run(capsys, "plot", "1f1b", *SMALL, "--out", str(tmp_path / "x.html"))[0] == 0


def test_what_takes_no_time_is_no_division(capsys):
    assert data(capsys, "simulate", "1f1b", *SMALL, "--forward", "0")["makespan_s"] == 0
    assert run(capsys, "compare", "gpipe", "1f1b", *SMALL, "--forward", "0")[0] == 0


def test_a_rank_without_computations_is_shown(capsys, tmp_path: Path):
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0B0\n\n1F0,1B0\n")
    if run(capsys, "check", str(path))[0] == 0:
        assert run(capsys, "simulate", str(path))[0] == 0
        assert run(capsys, "plot", str(path), "--out", str(tmp_path / "x.svg"))[0] == 0


def test_compare_names_the_budgets(capsys):
    _, out, _ = run(capsys, "compare", "1f1b", "balanced_1f1b", *SMALL)
    assert "1f1b, simulated" in out and "balanced_1f1b within 3 slots, simulated" in out


def test_a_closed_standard_output_is_no_error():
    command = f"{sys.executable} -m bpipe show 1f1b -p 4 -m 8 >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["check", "simulate", "trace"])
def test_a_trace_without_steps_is_one_line(capsys, tmp_path: Path, command: str):
    save_trace([], tmp_path / "empty.json")
    code, _, err = run(capsys, command, str(tmp_path / "empty.json"))
    assert code == 2 and "the trace has no steps" in err and err.count("\n") == 1


SHOW = "import sys; from bpipe.tools.cli import main; main(['show', '1f1b', '-p4', '-m8']); sys.exit('torch' in sys.modules)"


def test_starts_without_torch():
    done = subprocess.run([sys.executable, "-c", SHOW], check=True, capture_output=True)
    assert b"rank 3" in done.stdout


def test_starts_quickly():
    """Half a second at most, of which most is Python's own; the best of three, because the machine is shared."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", SHOW], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < here(0.5), seconds


@pytest.mark.parametrize(
    ("command", "p", "m", "seconds"),
    [("show", 32, 512, 5), ("simulate", 64, 1024, 20)],
)
def test_many_stages_and_microbatches_take_seconds(capsys, command: str, p: int, m: int, seconds: int):
    """0.2 and 0.7 million actions: 1 and 7 seconds of CPU time when this was written, on a machine that others use too."""
    start = time.process_time()
    assert run(capsys, command, "balanced_1f1b", "-p", str(p), "-m", str(m))[0] == 0
    assert time.process_time() - start < here(seconds)


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m bpipe show 1f1b -p 32 -m 500 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_quantities_are_read_as_they_are_shown():
    from bpipe.plan.amounts import show_bytes
    from bpipe.tools.quantities import bytes_of, seconds_of, show_seconds

    assert bytes_of(show_bytes(1610612736)) == 1610612736
    assert seconds_of(show_seconds(0.0125)) == 0.0125
    assert (bytes_of("25GB/s"), bytes_of("2e3"), seconds_of("5us")) == (25 * 10**9, 2000, pytest.approx(5e-6))


def test_costs_from_a_trace_take_medians(tmp_path: Path):
    from bpipe.errors import ConfigurationError
    from bpipe.estimate.calibrate import calibrated
    from bpipe.schedules import Costs, simulate

    plan = build("1f1b", 2, 3)
    steps = [simulate(plan, Costs(forward_s=[[f, f, 9 * f], [1.0] * 3], backward_s=5.0)) for f in (1.0, 2.0, 7.0)]
    costs = calibrated(steps, plan)
    assert [costs.seconds(Op.F, 0, i) for i in range(3)] == [2.0, 2.0, 18.0]
    balanced = build("balanced_1f1b", 4, 8)
    known = simulate(balanced, Costs(saved_bytes=[40, 30, 20, 10], static_bytes=[1, 2, 3, 4]))
    again = simulate(balanced, calibrated([known], balanced))
    peaks = [[(one.device_peak_bytes(rank), one.peak_bytes(rank)) for rank in range(4)] for one in (again, known)]
    assert peaks == [[(121, 120), (92, 90), (43, 40), (94, 90)]] * 2
    assert calibrated(steps, build("gpipe", 2, 5)).seconds(Op.F, 0, 4) == 7.0  # of 1 1 9 2 2 18 7 7 63
    with pytest.raises(ConfigurationError, match="the trace is of 2 stages, and the plan has 4"):
        calibrated(steps, build("1f1b", 4, 8))
    idle = Plan(name="idle", flow=shaped(None, "chain", (0, 1), 3), actions=((), ()), served=((), ()), slots=(None, None))
    evaluation = simulate(forward_plan(balanced), Costs(forward_s=100.0))
    assert calibrated([evaluation, known], balanced) == calibrated([known], balanced)
    with pytest.raises(ConfigurationError, match="the trace has no training steps"):
        calibrated([evaluation], balanced)
    with pytest.raises(ConfigurationError, match="the trace has no F of stage 0"):
        calibrated([simulate(idle, Costs())], plan)


EVIL = "\x1b[2J\x9b31m\u202e"


def test_a_plan_cannot_control_the_terminal(capsys, tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text(build("1f1b", 2, 2).to_text().replace("name=1f1b", f"name={EVIL}"))
    code, out, err = run(capsys, "check", str(path))
    assert code == 2 and "control a terminal" in err and is_printable(out + err)


def test_a_file_name_cannot_control_the_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(f"{EVIL}.txt")
    code, out, err = run(capsys, "check", str(path))
    assert code == 2 and r"\x1b[2J" in err and is_printable(out + err)
    path.write_text(build("1f1b", 2, 2).to_text())
    code, out, err = run(capsys, "compare", str(path), "1f1b", "-p2", "-m2")
    assert code == 0 and r"\x1b[2J" in out and is_printable(out + err)


def test_a_plan_cannot_write_markup(capsys, tmp_path):
    path = tmp_path / "plan.txt"
    path.write_text(build("1f1b", 2, 2).to_text().replace("name=1f1b", "name=[/x][bold]me"))
    code, out, _ = run(capsys, "compare", str(path), "1f1b", "-p2", "-m2")
    assert code == 0 and "[/x][bold]me" in out


def test_two_directions_count_a_microbatch_in_the_stages_of_one(capsys):
    code, out, _ = run(capsys, "simulate", "bitpipe", "-p", "4", "-m", "8")
    assert code == 0 and "4 microbatches (8 slots)" in out
    code, out, _ = run(capsys, "compare", "zbv", "bitpipe_zb", "-p", "4", "-m", "8", "--per-rank", "--forward", "1s")
    assert code == 0 and "25.5 s" in out and "24.5 s" in out  # 3m and 1.5, and 0.5


def test_pairs(capsys):
    pairs = ("-p", "4", "-m", "12", "--overlapped")
    assert run(capsys, "show", "dualpipe_v", *pairs) == (0, str(build("dualpipe_v", 8, 12, overlapped=True)) + "\n", "")
    seconds = [data(capsys, "simulate", "dualpipe_v", *pairs, "--overlapped-share", share)["makespan_s"] for share in ("0%", "30%")]
    assert seconds[1] < 0.85 * seconds[0]
    code, _, err = run(capsys, "simulate", "1f1b", *pairs)
    assert code == 2 and "1f1b runs no forward side by side with a backward" in err
    both = data(capsys, "compare", "1f1b", "interleaved_1f1b", *pairs)
    assert "OVERLAP_F_B" not in json.dumps(both) and run(capsys, "compare", "1f1b", "interleaved_1f1b", *pairs)[0] == 0


def test_costs_of_what_ran_alone():
    """A forward and a backward that ran side by side share their time, which says nothing of either; halves tell of the whole."""
    from bpipe.estimate.calibrate import calibrated

    plan = build("interleaved_1f1b", 4, 8, num_ranks=2, overlapped=True)
    costs = calibrated([simulate(plan, Costs(overlapped_share=0.3))], plan)
    assert all(costs.seconds(op, stage, 3) == pytest.approx(s) for op, s in ((Op.F, 1), (Op.B, 2)) for stage in range(4))
    plan = build("dualpipe_v", 8, 12, overlapped=True)
    costs = calibrated([simulate(plan, Costs(input_s=1.25, weight_s=0.5, overlapped_share=0.3))], plan)
    assert [costs.seconds(op, 0, 3) for op in (Op.I, Op.W, Op.B)] == pytest.approx([1.25, 0.5, 1.75])
