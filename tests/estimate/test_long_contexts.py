"""Long contexts: the schedules that they slow down are named, with the numbers and a way out, and no others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.estimate import model_named, uneven_halves
from bpipe.estimate.long_contexts import attention_share, halves, slowed, too_long
from bpipe.schedules import Costs, build, simulate
from bpipe.tools.cli import main

SIZE = ("-p", "8", "-m", "32", "--per-rank", "--forward", "200ms")
ADVISED: dict[str, Any] = {
    "batch": 16,
    "num_stages": 8,
    "tensor_parallel": 8,
    "device": "a100-80gb",
    "microbatch_sizes": [1],
    "recomputations": ["none"],
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def costs_of(attention: float) -> Costs:
    """A rank's forward takes 1, and each of its two stages half of that."""
    i, w = halves(attention)
    return Costs(forward_s=0.5, backward_s=(i + w) / 2, input_s=i / 2)


@pytest.mark.parametrize("p", [5, 6])
@pytest.mark.parametrize("name", ["v_half", "v_min"])
@pytest.mark.parametrize("attention", [0.24, 0.26, 0.5])
def test_what_is_predicted_is_simulated(name: str, p: int, attention: float) -> None:
    """Long steps take so many times longer; where W + 2F < 2I, every number of ranks is slowed down."""
    steps = [simulate(build(name, 2 * p, m), costs_of(attention)).makespan_s for m in (5 * p, 8 * p)]
    times = (steps[1] - steps[0]) / (3 * p) / (1 + sum(halves(attention)))
    assert times == pytest.approx(slowed(name, p, attention), rel=2e-3)
    assert times > 1.001 if too_long(attention) else name == "v_min" or p == 6 or times == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "attention", "times"), [("v_half", 0.4, 1.347), ("v_min", 0.4, 1.635), ("v_half", 0, None), ("zbv", 0.5, None)]
)
def test_only_slow_schedules_are_named(name: str, attention: float, times: float | None) -> None:
    found = uneven_halves(simulate(build(name, 16, 32), costs_of(attention)))
    assert (None if found is None else round(found.times, 3)) == times
    if found is not None:
        sliced = build("seq_1f1b", 8, 32, slices=4)
        step_s = simulate(sliced, Costs(forward_s=1, backward_s=2 + attention / 2).of_slices(sliced)).makespan_s
        assert found.sliced_times == pytest.approx(step_s / (32 * found.work_s))
        assert found.work_s == pytest.approx(3 + attention / 2)


def test_schedules_without_halves_and_with_unknown_names_are_not_named() -> None:
    assert uneven_halves(simulate(build("1f1b", 8, 16), Costs(input_s=1.9))) is None
    own = replace(build("v_half", 16, 32), name="mine")
    assert uneven_halves(simulate(own, costs_of(0.4))) is None


def test_commands_name_slow_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("1f1b", "v_half", "v_min", "zbv", "seq_1f1b")
    text = said(capsys, "compare", *names, *SIZE, "--slices", "8", "--attention-share", "40%")
    slow = [line for line in text.splitlines() if " is slow here" in line]
    assert [line.partition(" ")[0] for line in slow] == ["v_half", "v_min"]
    assert "they are 0.2, 0.32 and 0.12 s" in slow[0] and "1.347 times" in slow[0] and "in 8 slices" in slow[0]
    assert " is slow here" not in said(capsys, "compare", *names, *SIZE, "--slices", "8")
    found = json.loads(said(capsys, "simulate", "v_min", *SIZE, "--attention-share", "0.4", "--json"))
    assert len(found["notes"]) == 1 and "1.635 times" in found["notes"][0]
    assert json.loads(said(capsys, "simulate", "zbv", *SIZE, "--attention-share", "0.4", "--json"))["notes"] == []


def test_a_model_and_a_context_length_say_what_attention_takes(capsys: pytest.CaptureFixture[str]) -> None:
    share = attention_share(model_named("llama2-70b"))
    for given in (("--model", "llama2-70b", "--sequence", "32768"), ("--attention-share", str(8 * share / (1 + 7 * share)))):
        found = json.loads(said(capsys, "compare", "v_half", "seq_1f1b", *SIZE, "--slices", "4", *given, "--json"))
        assert found[0]["makespan_s"] == pytest.approx(32 * 0.2 * (3 + 0.5 * 0.386) * 1.338, rel=2e-3)


def test_first_slices_of_long_contexts_are_longer(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("seq_1f1b", "-p", "8", "-m", "16", "--slices", "4", "--saved", "1000000", "--json")
    even, by_cost = (
        max(rank["peak_bytes"] for rank in json.loads(said(capsys, "simulate", *given, *more))["ranks"]) / 1e6
        for more in ((), ("--attention-share", "0.5"))
    )
    assert even == pytest.approx(2.75, abs=1e-3) and by_cost == pytest.approx(2.98, abs=5e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--sequence", "4096"), "--sequence needs --model"),
        (("--model", "llama2-7b", "--attention-share", "0.4"), "leave one out"),
        (("--attention-share", "0.4", "--input", "1s"), "--input: attention's share"),
        (("--attention-share", "140%"), "'140%' is not a share"),
        (("--model", "nothing"), "no model is called 'nothing'"),
    ],
)
def test_what_contradicts_itself_is_refused(given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "v_half", "-p", "4", "-m", "8", *given]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="an attention share of 2"):
        halves(2)


@pytest.mark.parametrize(("sequence", "is_long"), [(16384, False), (32768, True)])
def test_advice_says_so_on_one_side_of_the_bound(sequence: int, is_long: bool) -> None:
    advice = bpipe.advise("llama2-70b", sequence=sequence, **ADVISED)
    assert ("A long context: attention takes 38.6%" in advice.verdict) == is_long
    assert ("1.21 with v_half and 1.48 with v_min" in advice.verdict) == is_long
    assert ("slices=4 or --slices 4" in advice.verdict) == is_long


def test_advice_with_slices_or_few_ranks() -> None:
    assert "with 4 it is ranked here" in bpipe.advise("llama2-70b", sequence=32768, slices=4, **ADVISED).verdict
    few = bpipe.advise("llama2-70b", sequence=32768, **{**ADVISED, "num_stages": 2})
    assert "A long context" not in few.verdict
