"""Actions and plans as text, as CSV and as grids: each way there and back, and damaged on the way."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import bpipe.schedules
from bpipe.errors import ConfigurationError, PlanError, is_printable
from bpipe.passes.balance.balance import balance
from bpipe.plan.action import HOST, SHARDING
from bpipe.plan.grid import rows
from bpipe.plan.meter import occupancy
from bpipe.schedules import Action, Destinations, Op, Plan, Sizes, build, finish, from_csv, gpipe, one_f_one_b, rules, verify
from bpipe.torch_private.release import release
from tests.schedules.mutations import ORDERING, STRUCTURAL
from tests.schedules.shape_of_plan import reshaped
from tests.schedules.strategies import plans

NUMBERS = st.integers(0, 10**9 - 1)
ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(sorted(set(Op) - SHARDING)), NUMBERS, NUMBERS, NUMBERS, st.none() | st.just(HOST) | NUMBERS),
    st.builds(Action, st.sampled_from(sorted(SHARDING)), NUMBERS, st.just(0), st.just(0), st.none()),
)
# Characters from which almost-actions and almost-plans are made, a digit that is not ASCII among them.
ALPHABET = '0123456789FBIWSENDRCVLOATUP_@:,-= \n\r\t"\u0662\u2028\x00'


# Actions.


@given(ACTIONS)
def test_action_text_round_trip(action: Action) -> None:
    assert Action.parse(f"{action}{action.at_peer}") == action


NEARLY_ACTIONS = st.builds("{}{}{}".format, NUMBERS, st.sampled_from(Op), st.text(ALPHABET, max_size=4))


@given(st.text() | st.text(ALPHABET, max_size=20) | NEARLY_ACTIONS)
@example("\u0662F0")
@example("2F0@")
@example("2F0@-1")
@example("1000000000F0")
@example("2WAIT_F0")
def test_action_parse_reads_actions_alone(text: str) -> None:
    action = None
    with suppress(PlanError):
        action = Action.parse(text)
    if action is not None:
        assert f"{action}{action.at_peer}" == re.sub(r"\d+", lambda digits: str(int(digits[0])), text.strip())
        assert text.strip().isascii()


@pytest.mark.parametrize("text", ["2F0", "2B0", "2I0", "2W0", "2SEND_F0", "2RECV_F0", "2SEND_B0", "2RECV_B0", "2EVICT0", "2LOAD0"])
def test_actions_are_written_as_the_field_writes_them(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_an_action_s_keys() -> None:
    action = Action.parse("3WAIT_LOAD7.2@1")
    assert (action.key, action.part_key, action.op_key) == ((3, 7), (3, 7, 2), (Op.WAIT_LOAD, 3, 7))
    assert (action.identity, action.start_identity) == ((Op.WAIT_LOAD, 3, 7, 2), (Op.LOAD, 3, 7, 2))


# Plans.


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        ("0F0 0F1 0B0 0B1", [1, 2, 2, 1]),
        ("0F0 0I0 0F1 0W0 0I1 0W1", [1, 1, 2, 2, 1, 1]),
        ("0F0 0EVICT0 0F1 0WAIT_EVICT0 0LOAD0 0B1 0WAIT_LOAD0 0B0", [1, 1, 2, 2, 2, 2, 1, 1]),
        ("0ACCEPT0 0WAIT_ACCEPT0 0RETURN0 0ACCEPT1 0WAIT_RETURN0 0WAIT_ACCEPT1 0RETURN1 0WAIT_RETURN1", [1, 1, 1, 2, 2, 1, 1, 1]),
    ],
)
def test_a_transfer_in_flight_occupies_a_slot_at_both_ends(lane: str, expected: list[int]) -> None:
    assert list(occupancy([*map(Action.parse, lane.split())])) == expected


@given(plans())
def test_plan_text_round_trip(plan: Plan) -> None:
    again = Plan.from_text(plan.to_text())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.fingerprint() == plan.fingerprint()


@given(plans(), st.randoms(use_true_random=False), st.sampled_from(STRUCTURAL + ORDERING))
def test_fingerprints_of_differing_plans_differ(plan: Plan, random: Random, mutation) -> None:
    other = mutation(plan, random)
    assume(other is not None and other != plan)
    assert other.fingerprint() != plan.fingerprint()


def test_fingerprints_of_builds_differ() -> None:
    sizes = [(rule, p, m) for rule in rules() for p in range(1, 6) for m in (1, 2, 3, 5, 8) if rule.allows(p, m)]
    built = [build(rule.name, p * rule.default_stages_per_rank, m) for rule, p, m in sizes]
    assert len({plan.fingerprint() for plan in built}) == len(set(built)) == len(built)
    assert all(re.fullmatch("[0-9a-f]{32}", plan.fingerprint()) for plan in built)


def test_plans_are_frozen() -> None:
    plan = build("1f1b", 2, 2)
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"
    assert {plan: 1}[build("1f1b", 2, 2)] == 1


@given(plans(max_stages=4, max_microbatches=5), st.data())
def test_damaged_text_raises_nothing_but_plan_errors(plan: Plan, data: st.DataObject) -> None:
    text = plan.to_text()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(ALPHABET, max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        read = Plan.from_text(text)
        verify(read)
    except PlanError:
        return
    assert Plan.from_text(read.to_text()) == read  # harmless damage: another name, or another sound plan


@pytest.mark.parametrize("line", [":", " :", "rank", "rank:", "rank :", "rank 7:", "serve 0", "", "rank 0: 0F"])
def test_damaged_line_is_named(line: str) -> None:
    head, *lines = build("1f1b", 2, 2).to_text().splitlines()
    with pytest.raises(PlanError):
        Plan.from_text("\n".join([head, line, *lines]))


@pytest.mark.parametrize("twice", ["static: 1 1", "budgets: 9 9"])
def test_sizes_are_said_once(twice: str) -> None:
    head, *lines = replace(build("1f1b", 2, 2), sizes=Sizes.of([1, 1]), budgets=(9, 9)).to_text().splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith(twice.partition(" ")[0]))
    with pytest.raises(PlanError, match=f"{twice!r} cannot be read"):
        Plan.from_text("\n".join([head, *lines[: at + 1], twice, *lines[at + 1 :]]))


def test_static_bytes_are_no_debt() -> None:
    text = replace(build("1f1b", 2, 2), sizes=Sizes.of([1, 1])).to_text().replace("static: 0 0", "static: 0 -5")
    with pytest.raises(PlanError, match="'-5' is not a whole number"):
        Plan.from_text(text)


@pytest.mark.parametrize("name", ["", "two words", " x", "x\n", "a\u2028b", "\t"])
def test_a_name_that_could_not_be_read_back_is_refused(name: str) -> None:
    plan = build("1f1b", 2, 2)
    with pytest.raises(PlanError, match="is not a single word"):
        verify(replace(plan, name=name))
    with pytest.raises(PlanError, match="is not a single word"):
        from_csv(plan.to_csv(), name)


def test_no_plan_survives_truncation() -> None:
    text = build("balanced_1f1b", 4, 4).to_text().rstrip()
    for end in range(len(text)):
        with pytest.raises(PlanError):
            verify(Plan.from_text(text[:end]))


def test_a_miscounted_plan_is_refused_at_once() -> None:
    plan = reshaped(build("1f1b", 2, 2), num_microbatches=10**9)
    with pytest.raises(PlanError, match="cannot run 2 stages and 1000000000 microbatches"):
        verify(plan)


# CSV.


def torch_runtime(num_stages: int, num_microbatches: int):
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.configure_mock(group_rank=0, group_size=num_stages, num_stages=num_stages, submod=None)
    return _PipelineScheduleRuntime([stage], num_microbatches)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 1), (2, 5), (3, 2), (4, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_torch_loads_the_csv(name: str, num_stages: int, num_microbatches: int, tmp_path: Path) -> None:
    plan = build(name, num_stages, num_microbatches)
    has_waits = release() >= (2, 15)
    (tmp_path / "plan.csv").write_text(plan.to_csv(send_waits=has_waits))
    runtime = torch_runtime(num_stages, num_microbatches)
    runtime._load_csv(str(tmp_path / "plan.csv"), format="compute_comms")
    loaded = [[str(action) for action in runtime.pipeline_order_with_comms[rank]] for rank in range(num_stages)]
    assert loaded == [
        [str(one) for one in lane if not one.op.startswith("WAIT_") or (has_waits and one.op.startswith("WAIT_SEND_"))]
        for lane in plan.actions
    ]


def to_host() -> Plan:
    return finish(balance(build("1f1b", 4, 8), slots=3, to=Destinations(host="only")))


@given(plans())
def test_csv_round_trip(plan: Plan) -> None:
    if any(plan.served):
        with pytest.raises(PlanError, match=r"evicts.*to_text"):
            plan.to_csv()
    else:
        for send_waits in (False, True):
            assert from_csv(plan.to_csv(send_waits=send_waits), name=plan.name) == replace(plan, slots=(None,) * plan.num_ranks)


def test_a_csv_cannot_say_what_no_other_rank_serves() -> None:
    assert not any(to_host().served)
    with pytest.raises(PlanError, match=r"evicts.*to_text"):
        to_host().to_csv()


@pytest.mark.parametrize("with_comms", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_what_torch_writes_is_read(name: str, with_comms: bool) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    lanes = get_schedule_ops(name, 4, 8, with_comms=with_comms and name != "GPipe")
    text = "\n".join(",".join("" if action is None else str(action) for action in lane) for lane in lanes)
    plan = from_csv(text, name)
    verify(plan)
    written = [[str(action) for action in lane if action is not None and action.is_compute_op] for lane in lanes]
    assert [[str(action) for action in plan.compute(rank)] for rank in range(4)] == written


@given(st.text(ALPHABET) | st.text())
@example("")
@example("0F0\r0B0")
@example("0F0,0B0\n1F0")
@example("0F0\n1F0,1B0")
@example("0F0,0F0")
@example('"' + "0" * 200_000)
def test_damaged_csv_raises_nothing_but_plan_errors(text: str) -> None:
    with suppress(PlanError):
        verify(from_csv(text))


@pytest.mark.parametrize(
    "text",
    [
        "{0}\n\n{1}",  # between two ranks
        "\n{0}\n{1}",  # before the first one
        "{0}\n{1}\n\n\n",  # at the end
        "{0}\r\n\r\n{1}\r\n",  # an editor of Windows
        "{0}\n  \t \n{1}",  # spaces and a tab
        "{0}\n,,,\n{1}\n,,,",  # a spreadsheet, which makes all rows equally long
        '{0}\n""\n{1}',  # a cell in quotes that has nothing
        "\nslices=1,{0}\n{1}",  # before the cell that says how many slices there are
    ],
)
def test_blank_rows_of_a_csv_are_no_ranks(text: str) -> None:
    rows = "0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"
    plan = from_csv(text.format(*rows))
    verify(plan)
    assert plan == from_csv("\n".join(rows)) and plan.num_ranks == 2


# Grids.


@pytest.mark.parametrize(("name", "rule"), [("gpipe", gpipe), ("1f1b", one_f_one_b)])
def test_the_grid_in_a_rules_file_is_the_rules(name: str, rule) -> None:
    assert "\n".join(rows(build(name, 4, 4))) in rule.__doc__


@pytest.mark.parametrize("module", [info.name for info in pkgutil.iter_modules(bpipe.schedules.__path__, "bpipe.schedules.")])
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_examples_in_the_packages_docstring() -> None:
    assert doctest.testmod(bpipe.schedules) == (0, 3)


@given(plans(max_stages=4, max_microbatches=6))
def test_grid_shows_every_computation_once(plan: Plan) -> None:
    head, *lines = str(plan).splitlines()
    p, each = plan.num_ranks, plan.num_stages // plan.num_ranks
    stages = f"{p} stage{'s' * (p > 1)}" if each == 1 else f"{p} rank{'s' * (p > 1)} with {each} stages each"
    assert re.match(rf"{plan.name}(, [a-z ]+)?: {stages}, {plan.num_microbatches} microbatch", head)
    cells = [re.findall(r"\d*[FBIW]\d+", line.split("|")[1]) for line in lines if line.startswith("rank")]
    several = plan.num_stages > plan.num_ranks
    expected = [[str(a) if several else f"{a.op}{a.microbatch}" for a in plan.compute(rank)] for rank in range(plan.num_ranks)]
    assert cells == expected
    assert len(re.findall(r">\d", str(plan))) == sum(len(plan.evicted(rank)) for rank in range(plan.num_ranks))


# Names and numbers that make no pipeline.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 2), "did you mean '1f1b'"),
        (("nonsense", 2, 2), "choose one of gpipe, 1f1b, balanced_1f1b"),
        (("1f1b", 0, 2), "num_stages=0"),
        (("1f1b", 2, -1), "num_microbatches=-1"),
        (("1f1b", 2, 1.5), "num_microbatches=1.5"),
        (("1f1b", 2, "2"), "num_microbatches='2'"),
    ],
)
def test_build_refuses(arguments, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        build(*arguments)


def test_the_grid_that_the_docs_explain() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "see-a-schedule.md").read_text()
    assert str(build("balanced_1f1b", num_stages=4, num_microbatches=8)) in page


@pytest.mark.parametrize("name", ["\x1b[31m", "a\x9bb", "a\u202eb", "a\x7f", "a" * 300])
def test_a_name_that_could_control_a_terminal_is_refused(name: str) -> None:
    plan = build("1f1b", 2, 2)
    with pytest.raises(PlanError, match="control a terminal") as caught:
        Plan.from_text(plan.to_text().replace("name=1f1b", f"name={name}"))
    assert is_printable(str(caught.value)) and len(str(caught.value)) < 300
    with pytest.raises(PlanError, match="control a terminal"):
        verify(replace(plan, name=name))


def test_an_unverified_plan_is_asked_for_its_peaks() -> None:
    plan = build("balanced_1f1b", 4, 4)
    with pytest.raises(PlanError, match="does not have"):
        _ = replace(plan, served=()).peak_slots
    sized = replace(plan, sizes=Sizes.of([1], num_ranks=4))
    for ask in (lambda: sized.activation_peak_bytes, lambda: sized.device_peak_bytes, lambda: str(sized)):
        with pytest.raises(PlanError, match="does not have"):
            ask()


@pytest.mark.parametrize("sizes", ["9" * 19, str(2**49), ",".join(["1"] * 1024)])
def test_sizes_beyond_all_memory_are_refused(sizes: str) -> None:
    text = replace(build("1f1b", 2, 2), sizes=Sizes.of([1, 1])).to_text().replace("size 0: 1 ", f"size 0: {sizes} ")
    with pytest.raises(PlanError, match=r"sizes in .* cannot be read") as caught:
        Plan.from_text(text)
    assert len(str(caught.value)) < 500
