"""The command line: what it prints, for people and for scripts, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bpipe.schedules import Op, Plan, build
from bpipe.schedules.build import forward_plan
from bpipe.tools.chrome import save_trace
from bpipe.tools.cli import COMMANDS, main


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
    assert code == 2 and err.startswith(f"bpipe: {other} is no plan: ") and err.count("\n") == 1


def test_simulate_gives_the_numbers_of_the_timeline(capsys):
    costs = ("--forward", "10ms", "--saved", "1GiB", "--static", "2GiB", "--bandwidth", "1TB/s")
    found = data(capsys, "simulate", "balanced_1f1b", *SMALL, *costs)
    assert found["makespan_s"] == pytest.approx(11 * 0.03)
    assert [rank["peak_bytes"] / 2**30 for rank in found["ranks"]] == [5, 5, 4, 5]
    assert found["ranks"][0]["bubble_s"] == pytest.approx(3 * 0.03)
    assert sum(found["critical_path_s"].values()) == pytest.approx(found["makespan_s"])
    code, out, _ = run(capsys, "simulate", "balanced_1f1b", *SMALL, *costs)
    assert code == 0 and "330 ms" in out and "5.00 GiB" in out


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
    machine = ("--device", "a100-80gb", "--stages", "8", "--tensor-parallel", "4", "--microbatch-sizes", "1,2")
    code, out, _ = run(capsys, "advise", "gpt3-96b", *machine, "--batch", "128", "--efficiency", "1=0.3,2=0.426")
    assert code == 0 and "Balance" in out and "Assumed:" in out
    assert data(capsys, "advise", "gpt3-96b", *machine, "--batch", "128")["candidates"]
    code, *_ = run(capsys, "advise", "gpt3-175b", "--device", "v100-32gb", "--stages", "8", "--batch", "64")
    assert code == 1


def test_advise_takes_dimensions(capsys):
    sizes = ("--layers", "24", "--hidden", "2048", "--heads", "16", "--sequence", "1024", "--vocabulary", "50257")
    found = data(capsys, "advise", *sizes, "--device", "h100", "--stages", "4,8", "--num-devices", "8", "--batch", "32")
    assert {each["num_stages"] for each in found["candidates"]} == {4, 8}


def test_env_names_what_is_here(capsys):
    found = data(capsys, "env")
    assert found["torch"].startswith("2.") and "gloo" in found["backends"] and found["cpu_cores"] >= 1
    code, out, _ = run(capsys, "env")
    assert code == 0 and "gloo" in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["shwo"], "did you mean 'show'"),
        (["show", "balanced_1f1"], "did you mean 'balanced_1f1b'"),
        (["show", "1f1b"], "--stages 4 --microbatches 8"),
        (["show", "1f1b", "-p", "0", "-m", "8"], "'0' is no whole number of at least 1"),
        (["show", "1f1b", "-p", "four", "-m", "8"], "'four' is no whole number"),
        (["show", "1f1b", "--from", "-1", *SMALL], "--from -1"),
        (["show", "balanced_1f1b", *SMALL, "--slots", "2"], "smallest budget that works here is slots=3"),
        (["show", "balanced_1f1b", *SMALL, "--slots", "1,x"], "'x' is no whole number"),
        (["show", "1f1b", *SMALL, "--colour"], "unrecognized arguments"),
        (["simulate", "1f1b", *SMALL, "--forward", "3parsecs"], "'3parsecs' is no number of seconds"),
        (["simulate", "1f1b", *SMALL, "--saved", "1e"], "'1e' is no number of bytes"),
        (["simulate", "1f1b", *SMALL, "--forward", "1,2"], "forward_s has 2 entries"),
        (["simulate", "1f1b", *SMALL, "--forward", "-1"], "'-1' is no number of seconds"),
        (["simulate", "1f1b", *SMALL, "--bandwidth", "0"], "bytes_per_s"),
        (["simulate", "1f1b", *SMALL, "--ranks-per-node", "3"], "4 stages do not fill nodes of 3"),
        (["simulate", "1f1b", *SMALL, "--out", "picture.bmp"], ".bmp"),
        (["simulate", "1f1b", "-p", "64", "-m", "9999999", "--out", "picture.bmp"], ".html, .json"),
        (["simulate", "1f1b", "-p", "64", "-m", "9999999", "--out", "missing/picture.svg"], "there is no folder missing"),
        (["simulate", "1f1b", *SMALL, "--forward", "1e308"], "forward_s=1e+308"),
        (["simulate", "1f1b", *SMALL, "--saved", "1e308"], "saved_bytes="),
        (["simulate", "1f1b", *SMALL, "--saved", "1", "--movable", "2"], "stage 0 would move 2 bytes and saves 1"),
        (["simulate", "1f1b", *SMALL, "--latency", "1,2"], "'1,2' is no number of seconds"),
        (["simulate", "1f1b", *SMALL, "--bandwidth=--"], "--bandwidth=-- gives no value"),
        (["simulate", "1f1b", *SMALL, "--cross-bandwidth", "1GB/s"], "--cross-bandwidth needs --ranks-per-node"),
        (["simulate", "1f1b", *SMALL, "--step", "3"], "--step is of a trace"),
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
    assert code == 0 if command[0] == "show" else (code == 2 and "pip install 'bpipe[cli]'" in err)


def test_pictures_say_what_they_need(capsys, monkeypatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib" or name == "bpipe.tools.picture"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "plot", "1f1b", *SMALL, "--out", str(tmp_path / "x.svg"))
    assert code == 2 and "pip install 'bpipe[plot]'" in err and err.count("\n") == 1
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


def test_starts_without_torch_and_quickly():
    """Half a second at most, of which most is Python's own; the best of three, because the machine is shared."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        code = (
            "import sys; from bpipe.tools.cli import main; main(['show', '1f1b', '-p4', '-m8']); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert b"rank 3" in done.stdout
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_64_stages_and_1024_microbatches_take_seconds(capsys, command: str):
    """0.7 million actions: 4 and 7 seconds of CPU time when this was written, on a machine that others use too."""
    start = time.process_time()
    assert run(capsys, command, "balanced_1f1b", "-p", "64", "-m", "1024")[0] == 0
    assert time.process_time() - start < 20


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m bpipe show 1f1b -p 32 -m 500 | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_quantities_are_read_as_they_are_shown():
    from bpipe.tools.quantities import bytes_of, seconds_of, show_bytes, show_seconds

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
    assert [again.peak_bytes(rank) for rank in range(4)] == [known.peak_bytes(rank) for rank in range(4)] == [121, 92, 43, 94]
    assert calibrated(steps, build("gpipe", 2, 5)).seconds(Op.F, 0, 4) == 7.0  # of 1 1 9 2 2 18 7 7 63
    with pytest.raises(ConfigurationError, match="the trace is of 2 stages, and the plan has 4"):
        calibrated(steps, build("1f1b", 4, 8))
    idle = Plan(name="idle", num_microbatches=3, stage_ranks=(0, 1), actions=((), ()), served=((), ()), slots=(None, None))
    evaluation = simulate(forward_plan(balanced), Costs(forward_s=100.0))
    assert calibrated([evaluation, known], balanced) == calibrated([known], balanced)
    with pytest.raises(ConfigurationError, match="the trace has no training steps"):
        calibrated([evaluation], balanced)
    with pytest.raises(ConfigurationError, match="the trace has no F of stage 0"):
        calibrated([simulate(idle, Costs())], plan)
