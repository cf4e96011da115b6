"""Trace files: what is written is what is read, the schema finds nothing wrong with it, and Perfetto reads all of it."""

from __future__ import annotations

import copy
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpipe.errors import BPipeError, ConfigurationError
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import computations_only
from bpipe.plan.action import HOST
from bpipe.schedules import Action, Costs, Destinations, Link, Op, Sizes, build, finish, simulate
from bpipe.simulator.measured import Measured, merged
from bpipe.simulator.timeline import Lane, Timeline
from bpipe.tools.chrome import lines, save_trace
from bpipe.tools.trace_record import Origin, load_trace
from tests.schedules.sized import sized_plans
from tests.schedules.strategies import plans
from tests.tiers import examples
from tests.tools import perfetto
from tests.tools.chrome_schema import violations
from tests.tools.traces import checked

seconds = st.sampled_from([0.0, 1e-9, 1.0]) | st.floats(0, 1e-3) | st.floats(0, 1e4)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A plan's simulated times, under random costs. The last plans gather weights several times, by one name."""
    gathering = st.integers(1, 3).map(lambda p: build("breadth_first", 2 * p, 3))
    plan = draw(plans(max_stages=4, max_microbatches=5) | sized_plans(max_stages=4, max_microbatches=5) | gathering)
    costs = Costs(
        forward_s=[draw(seconds) for _ in range(plan.num_stages)],
        backward_s=draw(seconds),
        saved_bytes=draw(st.integers(0, 2**40)),
        output_bytes=draw(st.integers(0, 2**30)),
        static_bytes=draw(st.integers(0, 2**40)),
        link=Link(latency_s=draw(seconds), bytes_per_s=draw(st.sampled_from([1e9, math.inf]))),
    )
    return simulate(plan, costs)


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    """The same as if it had been measured, with times of a device on some ranks."""
    timeline = draw(timelines())
    ranks = range(timeline.num_ranks)
    spans = [list(timeline.computations(rank)) if draw(st.booleans()) else [] for rank in ranks]
    return Measured(
        plan=timeline.plan,
        actions=timeline.actions,
        served=timeline.served,
        source="measured",
        step=draw(st.integers(0, 10**6)),
        began_s=draw(seconds),
        device=tuple(lane([s.begin_s for s in own], [s.end_s for s in own]) for own in spans),
        clock_error_s=tuple(draw(seconds) for _ in ranks),
    )


def lane(begin_s: list[float], end_s: list[float]) -> Lane:
    return Lane(begin_s=array("d", begin_s), end_s=array("d", end_s))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.json"


@given(st.lists(timelines() | measurements(), max_size=3))
@settings(max_examples=examples(60))
def test_what_is_written_is_read(path, originals):
    save_trace(originals, path)
    trace = json.loads(path.read_text())
    assert violations(trace) == []
    assert load_trace(path) == originals
    assert count(trace, "X") == sum(count_actions(one) for one in originals)
    assert count(trace, "s") == sum(count_arrows(one) for one in originals)


def count(trace: dict[str, Any], phase: str) -> int:
    return sum(event["ph"] == phase for event in trace["traceEvents"])


def count_actions(timeline: Timeline) -> int:
    on_device = sum(len(one.begin_s) for one in timeline.device) if isinstance(timeline, Measured) else 0
    return on_device + sum(len(actions) for actions in (*timeline.plan.actions, *timeline.plan.served))


def count_arrows(timeline: Timeline) -> int:
    """A send or a load each has one that comes in; a return's is the load's second, which a host does not send."""
    actions = [action for lane in (*timeline.plan.actions, *timeline.plan.served) for action in lane]
    return sum((a.op in (Op.RECV_F, Op.RECV_B, Op.ACCEPT, Op.LOAD)) + (a.op is Op.LOAD and a.peer != HOST) for a in actions)


def planned(name: str = "balanced_1f1b", p: int = 4, m: int = 8, **costs: Any) -> Timeline:
    return simulate(build(name, p, m), Costs(**{"saved_bytes": 2**20, "link": Link(latency_s=0.01), **costs}))


def events_of(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in checked(path)["traceEvents"] if event["ph"] == phase]


def test_the_picture(path):
    save_trace(planned(static_bytes=2**22), path)
    names = {(e["pid"], e["args"]["name"]) for e in events_of(path, "M") if e["name"] in ("process_name", "thread_name")}
    assert {(rank + 1, f"rank {rank}") for rank in range(4)} <= names
    assert {
        (1, "compute"),
        (1, "transfers"),
        (1, "evictions"),
        (4, "remote activations"),
        (4, "waits for remote activations"),
    } <= names
    assert not {(2, "evictions"), (1, "remote activations"), (1, "device")} & names
    slices = {(e["pid"], e["name"]): e for e in events_of(path, "X")}
    forward = slices[2, "1F0"]
    assert (forward["ts"], forward["dur"], forward["cat"]) == (1_010_000, 1_000_000, "compute")
    assert forward["args"] == {
        "action": "1F0", "stage": 1, "microbatch": 0, "then": "it has run forward, and its activations are here", "step": 0,
        "timeline": 0, "activation_bytes": 2**20, "message_bytes": 0
    }  # fmt: skip
    counters = [(event["name"], event["args"]["bytes"]) for event in events_of(path, "C") if event["pid"] == 1]
    for name, stays in (("activations", 0), ("device", 2**22)):
        memory = [num_bytes - stays for of, num_bytes in counters if of == name]
        assert max(memory) == 3 * 2**20 and memory[0] == 2**20 and memory[-1] == 0


def test_arrows_bind_to_the_right_slices(path):
    save_trace([planned(), planned(link=Link()), planned("gpipe")], path)
    pairs = set(bound(checked(path)["traceEvents"]))
    expected = {
        ("0SEND_F3", "1RECV_F3"),
        ("1SEND_B3", "0RECV_B3"),
        ("0EVICT1", "0ACCEPT1"),
        ("0RETURN1", "0LOAD1"),
        ("0EVICT1", "0LOAD1"),
    }
    assert expected <= pairs
    number = re.compile(r"(\d+)([A-Z_]+?)(?:_[FB])?(\d+)")
    partners = {("SEND", "RECV"), ("EVICT", "ACCEPT"), ("RETURN", "LOAD"), ("EVICT", "LOAD")}
    for tail, head in pairs:
        (_, sends, a), (_, receives, b) = number.fullmatch(tail).groups(), number.fullmatch(head).groups()
        assert (sends, receives) in partners and a == b


def bound(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The names of the slices at the ends of each arrow, as Perfetto binds them: to the last slice begun on the lane."""
    latest: dict[tuple[int, int], str] = {}
    tails: dict[int, str] = {}
    for event in sorted((e for e in events if e["ph"] in "Xsf"), key=lambda e: (round(e["ts"] * 1000), e["ph"] != "X")):
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            latest[place] = event["name"]
        elif event["ph"] == "s":
            tails[event["id"]] = latest[place]
        else:
            yield tails[event["id"]], latest[place]


def test_parts_and_the_host(path):
    """Arrows go from part to part; what moves to the host has a lane of its own, and no other end."""
    plan = replace(computations_only(build("1f1b", 4, 8)), sizes=Sizes.of([4] * 4, num_parts=2))
    plans = [finish(balance(plan, sizes=plan.sizes, to=Destinations(host=host))) for host in ("no", "only")]
    save_trace([simulate(plan, Costs(host_link=Link(bytes_per_s=8.0))) for plan in plans], path)
    slices = [(event["args"]["timeline"], event["cat"], event["name"]) for event in events_of(path, "X")]
    moved = {name for _, lane, name in slices if lane == "evictions"}
    assert {"0EVICT1.1", "0LOAD1.1"} < moved
    assert {name for number, lane, name in slices if lane == "host"} == {
        str(action) for lane in plans[1].actions for action in lane if action.op in (Op.EVICT, Op.LOAD)
    }
    pairs = [tuple(map(Action.parse, pair)) for pair in bound(checked(path)["traceEvents"]) if "EVICT" in pair[0]]
    assert {tail.part for tail, _ in pairs} == {1, 2} and all(tail[1:4] == head[1:4] for tail, head in pairs)
    parts = {event["name"]: event["args"].get("part") for event in events_of(path, "X")}
    assert parts["0EVICT1.2"] == 2 and parts["0SEND_F0"] is None


def test_an_arrow_that_the_clocks_turn_backwards_is_left_out(path):
    timeline = planned("1f1b", 2, 1)
    early = lane([begin - 100 for begin in timeline.actions[1].begin_s], [end - 100 for end in timeline.actions[1].end_s])
    shifted = Timeline(plan=timeline.plan, actions=(timeline.actions[0], early), served=timeline.served)
    save_trace(shifted, path)
    assert [event["name"] for event in events_of(path, "s")] == ["backward"]


def test_steps_follow_each_other(path):
    save_trace([planned(), planned("1f1b"), planned()], path)
    begins = [min(e["ts"] for e in events_of(path, "X") if e["args"]["timeline"] == number) for number in range(3)]
    ends = [max(e["ts"] + e["dur"] for e in events_of(path, "X") if e["args"]["timeline"] == number) for number in range(3)]
    assert begins[0] == 0 and begins[1] == pytest.approx(ends[0]) and begins[2] == pytest.approx(ends[1])


# Files of several ranks


def part(timeline: Timeline, rank: int, step: int = 0, began_s: float = 1.0) -> Measured:
    """What one rank would have recorded."""

    def only(lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
        return tuple(own if other == rank else lane([], []) for other, own in enumerate(lanes))

    return Measured(
        plan=timeline.plan,
        actions=only(timeline.actions),
        served=only(timeline.served),
        source="measured",
        step=step,
        began_s=began_s,
        device=(lane([], []),) * timeline.num_ranks,
        clock_error_s=tuple(i / 1000 for i in range(timeline.num_ranks)),
    )


def write(folder: Path, rank: int, parts: list[Measured], run: str = "ab", is_complete: bool = True) -> None:
    (folder / f"rank-{rank}.json").write_text("".join(lines(parts, Origin(run=run, is_complete=is_complete))))
    checked(folder / f"rank-{rank}.json")


def steps_of(rank: int, count: int, timeline: Timeline | None = None) -> list[Measured]:
    return [part(timeline or planned(), rank, step, began_s=1.0 + 100 * step) for step in range(count)]


def test_files_of_ranks_are_one_trace(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, steps_of(rank, 2))
    (tmp_path / "whole.json").write_text("of no rank")
    read = load_trace(tmp_path)
    for step, one in enumerate(read):
        assert one == merged([steps_of(rank, 2)[step] for rank in range(4)])
    assert [(one.step, one.began_s) for one in read] == [(0, 1.0), (1, 101.0)]
    assert Timeline(plan=read[0].plan, actions=read[0].actions, served=read[0].served) == planned()
    save_trace(read, tmp_path / "whole.json")
    assert load_trace(tmp_path / "whole.json") == read


def test_ranks_that_began_at_different_times():
    late = part(planned(), 1, began_s=1.5)
    both = merged([part(planned(), 0), late, part(planned(), 2), part(planned(), 3)])
    assert both.began_s == 1.0
    assert both.actions[1].begin_s == array("d", [0.5 + begin for begin in late.actions[1].begin_s])
    assert both.clock_error_s == (0.0, 0.001, 0.002, 0.003)


def test_after_an_error_the_common_steps_are_read(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, steps_of(rank, 2 + (rank == 0)), is_complete=rank == 0)
    assert [one.step for one in load_trace(tmp_path)] == [0, 1]


def spoil_missing(folder: Path) -> None:
    (folder / "rank-2.json").unlink()


def spoil_run(folder: Path) -> None:
    write(folder, 2, steps_of(2, 2), run="cd")


def spoil_plan(folder: Path) -> None:
    write(folder, 2, steps_of(2, 2, planned("1f1b")))


def spoil_step(folder: Path) -> None:
    write(folder, 2, steps_of(2, 3)[1:])


def spoil_count(folder: Path) -> None:
    write(folder, 2, steps_of(2, 1))


def spoil_twice(folder: Path) -> None:
    write(folder, 3, steps_of(2, 2))


def spoil_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "spoil, said",
    [
        (spoil_missing, "step 0 has no times of rank 2 of 4"),
        (spoil_run, "rank-2.json is not of the same run as .*rank-0.json"),
        (spoil_plan, "parts of different steps: step 0 of balanced_1f1b with 4 ranks and step 0 of 1f1b"),
        (spoil_step, "parts of different steps: step 0 .* and step 1"),
        (spoil_count, "rank-2.json has 1 steps and .*rank-0.json has 2"),
        (spoil_twice, "rank 2 is there twice"),
        (spoil_all, "has no files rank-0.json"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, spoil, said):
    for rank in range(4):
        write(tmp_path, rank, steps_of(rank, 2))
    spoil(tmp_path)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_trace(tmp_path)
    assert "\n" not in str(caught.value)


# Damaged files


def a_trace() -> dict[str, Any]:
    text = "".join(lines([part(planned(p=2, m=2), 0), planned(m=4)], Origin(run="ab")))
    trace: dict[str, Any] = json.loads(text)
    return trace


def first(trace: dict[str, Any], phase: str = "X") -> dict[str, Any]:
    return next(event for event in trace["traceEvents"] if event["ph"] == phase)


Damage = Callable[[dict[str, Any]], object]


def put(*place: Any, to: Any) -> Damage:
    """Put a value into the record, at a place such as ("timelines", 0)."""

    def damage(trace: dict[str, Any]) -> None:
        *above, last = place
        holder: Any = trace["record"]
        for key in above:
            holder = holder[key]
        holder[last] = to

    return damage


# A timeline is its type's name, plan, source, step, lanes, served lanes and measurement; a lane its begins, ends, and bytes.
FIRST, LANES, MEASUREMENT = ("timelines", 0), ("timelines", 0, 4), ("timelines", 0, 6)
DAMAGES: list[tuple[str, Damage]] = [
    ("wrote, 'bpipe-trace 4'", lambda trace: trace.pop("record")),
    ("'bpipe-trace 4': trace .* again", put("format", to="bpipe-trace 3")),
    ("not a plan: the first line is", put("plans", to=["1f1b"])),
    ("damaged", put("plans", 0, to=3)),
    ("there is no plan 7 among 2", put(*FIRST, 1, to=7)),
    ("it is 'guessed', neither", put(*FIRST, 2, to="guessed")),
    ("damaged", lambda trace: trace["record"].pop("timelines")),
    ("damaged", put(*FIRST, to=3)),
    ("damaged", put(*LANES, 0, 0, 0, to="soon")),
    ("damaged", put(*LANES, 0, 0, 0, to=math.nan)),
    ("damaged", put(*LANES, 0, 0, 0, to=math.inf)),
    ("a time of rank 0 is not one of at most", put(*LANES, 0, 0, 0, to=2**40)),
    ("a time of rank 0 is not known", put(*LANES, 0, 0, 0, to=None)),
    ("a time of what rank 3 serves is not known", put("timelines", 1, 5, 3, 0, 0, to=None)),  # its end is known
    ("damaged", put(*LANES, 0, 2, 0, to=2**64)),
    ("another number of ranks", lambda trace: trace["record"]["timelines"][0][4].pop()),
    ("another number of ranks", put(*MEASUREMENT, 2, to=[])),
    ("times or bytes of rank 0 are missing", put(*LANES, 0, 1, to=[])),
    ("times or bytes of rank 0 are missing", lambda trace: trace["record"]["timelines"][0][4][0][2].pop()),
    ("times or bytes of rank 0 are missing", put(*LANES, 0, 6, to=[1.0])),  # a piece of a fill job without an end
    ("bytes of the device of rank 1 are missing", put(*MEASUREMENT, 1, 1, to=[[1.0], [2.0], [], [], 0, 0, []])),
    ("of other stages or slices", put(*MEASUREMENT, 3, to={"9": [[[1], 0, None, []]]})),
]


@pytest.mark.parametrize("said, damage", DAMAGES)
def test_damaged_files(path, said, damage):
    trace = a_trace()
    damage(trace)
    path.write_text(json.dumps(trace))
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b'"trace"', b"\xff\xfe", b"[" * 10**5, b'{"traceEvents": []}'])
def test_files_that_are_no_traces(path, text):
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="not a trace"):
        load_trace(path)


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(inner, (*place, key))


PLACES = list(places_in(a_trace()["record"]))


@given(st.sampled_from(PLACES), st.sampled_from([None, "", "x", -1, 10**30, 0.5, math.nan, [], {}, [1], {"a": 1}, True, ...]))
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_ends_in_another_error(path, place, value):
    trace = a_trace()
    holder: Any = trace["record"]
    for key in place[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    path.write_text(json.dumps(trace))
    assert "\n" not in what_is_wrong_with(path)


def what_is_wrong_with(path: Path) -> str:
    try:
        load_trace(path)
    except BPipeError as error:
        return str(error)
    return ""


# The schema


def overlap(trace: dict[str, Any]) -> None:
    one = first(trace)
    trace["traceEvents"].append({**one, "ts": one["ts"] + one["dur"] / 2})


def backwards(trace: dict[str, Any]) -> None:
    flow = first(trace, "s")
    finish = next(e for e in trace["traceEvents"] if e["ph"] == "f" and e["id"] == flow["id"])
    flow.update({key: finish[key] for key in ("pid", "tid", "ts")})
    finish.update(ts=finish["ts"] - 1)


WRONGS: list[tuple[str, Damage]] = [
    ("a list traceEvents", lambda trace: trace.pop("traceEvents")),
    ("displayTimeUnit", lambda trace: trace.update(displayTimeUnit="s")),
    ("otherData is an object", lambda trace: trace.update(otherData=[])),
    ("expected an object whose 'ph'", lambda trace: trace["traceEvents"].append([])),
    ("expected an object whose 'ph'", lambda trace: trace["traceEvents"].append({})),
    ("expected an object whose 'ph'", lambda trace: first(trace).update(ph="Z")),
    ("has no 'dur'", lambda trace: first(trace).pop("dur")),
    ("'dur' of a 'X' event", lambda trace: first(trace).update(dur=-1.0)),
    ("'ts' of a 'X' event", lambda trace: first(trace).update(ts=-0.001)),
    ("'ts' of a 'X' event", lambda trace: first(trace).update(ts=math.nan)),
    ("'ts' of a 'X' event", lambda trace: first(trace).update(ts=math.inf)),
    ("'ts' of a 'X' event", lambda trace: first(trace).update(ts="1")),
    ("'ts' of a 'X' event", lambda trace: first(trace).update(ts=True)),
    ("'pid' of a 'X' event", lambda trace: first(trace).update(pid="rank 0")),
    ("'tid' of a 'X' event", lambda trace: first(trace).update(tid=1.5)),
    ("'name' of a 'X' event", lambda trace: first(trace).update(name="")),
    ("'args' of a 'X' event", lambda trace: first(trace).update(args=3)),
    ("'args' of a 'C' event", lambda trace: first(trace, "C").update(args={})),
    ("'args' of a 'C' event", lambda trace: first(trace, "C").update(args={"bytes": "many"})),
    ("'bp' of a 'f' event", lambda trace: first(trace, "f").update(bp="x")),
    ("has no 'id'", lambda trace: first(trace, "s").pop("id")),
    ("no metadata that readers know", lambda trace: first(trace, "M").update(name="colour")),
    ("no metadata that readers know", lambda trace: first(trace, "M").update(args={"name": 3})),
    ("overlaps", overlap),
    ("starts 0 times", lambda trace: trace["traceEvents"].remove(first(trace, "s"))),
    ("finishes 0 times", lambda trace: trace["traceEvents"].remove(first(trace, "f"))),
    ("starts 2 times", lambda trace: trace["traceEvents"].append(first(trace, "s"))),
    ("flow 1 is both", lambda trace: first(trace, "s").update(name="another")),
    ("does not finish after it starts", backwards),
    ("no slice to bind to", lambda trace: first(trace, "f").update(ts=10**9)),
    ("no slice to bind to", lambda trace: first(trace, "f").update(tid=999)),
    ("given twice", lambda trace: trace["traceEvents"].append(first(trace, "M"))),
    ("process 1 has no name", lambda trace: trace["traceEvents"].remove(first(trace, "M"))),
    ("thread 999 has no name", lambda trace: first(trace, "C").update(tid=999)),
]


def test_the_schema_has_nothing_against_a_sound_trace():
    assert violations(a_trace()) == []


@pytest.mark.parametrize("said, damage", WRONGS)
def test_the_schema_catches(said, damage):
    trace = copy.deepcopy(a_trace())
    damage(trace)
    assert [wrong for wrong in violations(trace) if said in wrong]


@pytest.mark.parametrize("trace", [None, [], 3, {"traceEvents": {}}])
def test_the_schema_refuses_what_is_no_trace(trace):
    assert violations(trace) == ["a trace is an object with a list traceEvents"]


# Perfetto itself

QUERIES = {
    "slices": "select count(*) as n from slice",
    "arrows": "select a.name as tail, b.name as head from flow join slice a on a.id = slice_out join slice b on b.id = slice_in",
    "troubles": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    "processes": "select name from process where name is not null order by name",
    "busy": "select sum(dur) as ns from slice where category = 'compute' and name not like '%WAIT%'",
    "memory": "select max(value) as most from counter",
    "lanes": "select distinct thread.name as name from slice join thread_track t on track_id = t.id join thread using (utid)",
}


@pytest.mark.parametrize("engine", perfetto.ENGINES)
def test_perfetto_reads_all_of_it(engine, tmp_path):
    """Passes or skips for each of Perfetto's builds: the result says which one ran, or why the schema was the only check."""
    originals = [planned(), planned(link=Link()), planned("gpipe", 3, 16), planned("1f1b", output_bytes=10**9)]
    path = tmp_path / "trace.json"
    save_trace(originals, path)
    try:
        answers = dict(zip(QUERIES, perfetto.ask(engine, path, list(QUERIES.values())), strict=True))
    except perfetto.MissingError as reason:
        pytest.skip(f"this trace was checked by our schema only: {reason}")
    trace = checked(path)
    assert answers["troubles"] == []
    assert answers["slices"] == [(count(trace, "X"),)]
    assert sorted(answers["arrows"]) == sorted(bound(trace["traceEvents"]))
    assert answers["processes"] == [(f"rank {rank}",) for rank in range(4)]
    work_s = sum(one.work_s(rank) for one in originals for rank in range(one.num_ranks))
    assert answers["busy"] == [(round(work_s * 1e9),)]
    assert answers["memory"] == [(max(one.device_peak_bytes(rank) for one in originals for rank in range(one.num_ranks)),)]
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {name for (name,) in answers["lanes"]} == lanes


def test_a_device_that_lags_behind_its_host_moves_no_step(tmp_path):
    """Rank 0's device takes 40 ms a step and its host starts one each millisecond: steps stay where the hosts began them."""
    plan = build("1f1b", 2, 1)
    one = simulate(plan, Costs(forward_s=1e-4))
    for rank in range(2):
        steps = []
        for step in range(3):
            keep = [lane if other == rank else Lane(begin_s=array("d"), end_s=array("d")) for other, lane in enumerate(one.actions)]
            device = [lane([0.04 * step, 0.04 * step + 0.02], [0.04 * step + 0.02, 0.04 * step + 0.04]), lane([], [])]
            steps.append(
                Measured(
                    plan=plan,
                    actions=tuple(keep),
                    served=one.served,
                    device=tuple(device if rank == 0 else [lane([], [])] * 2),
                    source="measured",
                    step=step,
                    began_s=0.001 * step,
                    clock_error_s=(0.0, 0.0),
                )
            )
        (tmp_path / f"rank-{rank}.json").write_text("".join(lines(steps, Origin(run="one"))))
        assert violations(json.loads((tmp_path / f"rank-{rank}.json").read_text())) == []
    for step, read in enumerate(load_trace(tmp_path)):
        assert read.began_s == pytest.approx(0.001 * step, abs=2e-9)
        assert [read.actions[rank].begin_s[0] for rank in range(2)] == pytest.approx([one.actions[r].begin_s[0] for r in range(2)])
        assert read.span_s(0) == pytest.approx((0.04 * step, 0.04 * (step + 1)), abs=1e-8)  # the device's
