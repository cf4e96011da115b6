"""A scene says what its timelines say: every box, every step of memory, on one axis."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.passes.communicate import computations_only
from bpipe.plan.action import COMPUTE
from bpipe.schedules import Amount, Costs, Op, Sizes, Span, StageSizes, Timeline, build, finish, simulate
from bpipe.simulator.timeline import Holding
from bpipe.tools import scene as scenes
from bpipe.tools.paper import Paper
from bpipe.tools.scene import Row, Scene, amount_text, compose, time_unit, without_dips
from tests.schedules.shape_of_plan import reshaped
from tests.tiers import examples
from tests.tools.timelines import BYTES, SLOW, in_parts, interleaved, timeline, timelines

MOVES = (Op.EVICT, Op.LOAD, Op.ACCEPT, Op.RETURN)


def rows(*shown: Timeline) -> tuple[Row, ...]:
    return compose(shown).panels[-1].rows


def boxes(row: Row, kind: str) -> list[Span]:
    """A row's boxes of one kind, in the order of their begins."""
    return sorted(row.spans(kind), key=lambda span: span.begin_s)


def tracks(row: Row, *ops: Op) -> list[tuple[Span, ...]]:
    """A row's moves, of these operations if any are named: what overlaps lies in several."""
    moves = [strip.spans for strip in row.strips if strip.kind == "move"]
    return [track for track in moves if not ops or track[0].action.op in ops]


def layers(scene: Scene) -> list[str]:
    return [entry.role for entry in scene.legend() if entry.kind == "memory"]


def amount_at(row: Row, when: float) -> int:
    """What a row's steps say it holds at a time."""
    return [held for held in row.memory if held.begin_s <= when][-1].device_bytes


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "balanced_1f1b"])
def test_boxes_are_the_computations_one_to_one(name: str) -> None:
    shown = timeline(name, 4, 8)
    for row, actions, lane in zip(rows(shown), shown.plan.actions, shown.actions):
        ran = [Span(*entry) for entry in zip(actions, lane.begin_s, lane.end_s) if entry[0].op in COMPUTE]
        assert boxes(row, "compute") == ran and len(ran) == 16


def test_budgets_in_bytes_have_a_line_and_static_bytes_count() -> None:
    shown = in_parts()
    scene = compose([shown])
    assert scene.slots_each is None
    assert [row.budget for row in scene.panels[0].rows] == list(shown.plan.budgets)
    assert [row.device_peak for row in scene.panels[0].rows] == list(shown.plan.device_peak_bytes)
    assert [row.peak for row in scene.panels[0].rows] == list(shown.plan.activation_peak_bytes)
    assert [row.stays for row in scene.panels[0].rows] == list(shown.plan.sizes.static) == [2**29, 2**28, 0, 0]
    assert [row.memory[-1].device_bytes for row in scene.panels[0].rows] == [shown.plan.idle_bytes(rank) for rank in range(4)]
    assert layers(scene) == ["stays", "activations"]


def test_messages_lie_on_the_activations() -> None:
    stage = StageSizes(parts=(100,), amounts=(Amount("in", 3), Amount("out", 3)))
    sizes = Sizes(stages=(stage,) * 4, static=(1000,) * 4)
    shown = simulate(finish(replace(computations_only(build("1f1b", 4, 8)), sizes=sizes)), Costs())
    scene = compose([shown])
    assert layers(scene) == ["stays", "activations", "messages"] and scene.top == max(shown.plan.device_peak_bytes)
    for row in scene.panels[0].rows:
        assert (row.stays, row.peak, row.device_peak) == (1000, 100 * (4 - row.rank), shown.plan.device_peak_bytes[row.rank])
        assert all(held.device_bytes >= 1000 + held.activation_bytes for held in row.memory)
        assert row.device_peak > 1000 + row.peak


def test_moves_are_the_transfers_of_saved_bytes() -> None:
    shown = timeline("balanced_1f1b", 8, 16)
    for row in rows(shown):
        moved = Counter(span for span in shown.transfers(row.rank) if span.action.op in MOVES)
        assert Counter(row.spans("move")) == moved
        leaving, arriving = tracks(row, Op.EVICT, Op.RETURN), tracks(row, Op.ACCEPT, Op.LOAD)
        assert all(span.action.op in (Op.EVICT, Op.RETURN) for track in leaving for span in track)
        assert all(span.action.op in (Op.ACCEPT, Op.LOAD) for track in arriving for span in track)
        assert [*leaving, *arriving] == tracks(row)
    assert any(tracks(row) for row in rows(shown))


def test_moves_that_overlap_lie_in_tracks() -> None:
    """As measured ones do, which are under way from when they were posted."""
    shown = timeline("balanced_1f1b", 8, 16)
    lanes = tuple(replace(lane, end_s=array("d", (end + 1.0 for end in lane.end_s))) for lane in shown.served)
    moves = tracks(rows(replace(shown, served=lanes))[7])
    assert len(moves) > 2 and sum(map(len, moves)) == len(shown.plan.served[7]) / 2
    assert all(a.end_s <= b.begin_s for track in moves for a, b in pairwise(track))
    crowded = tuple(replace(lane, end_s=array("d", (99.0 for _ in lane.end_s))) for lane in shown.served)
    row = rows(replace(shown, served=crowded))[7]
    assert len(tracks(row, Op.RETURN)) == scenes.MAX_TRACKS and len(tracks(row)) == 2 * scenes.MAX_TRACKS


def test_sends_are_drawn_where_they_take_time() -> None:
    shown = timeline("1f1b", 3, 5)
    assert [len(boxes(row, "send")) for row in rows(shown)] == [5, 10, 5]
    assert not any(boxes(row, "send") for row in rows(timeline("1f1b", 3, 5, Costs())))


@pytest.mark.parametrize("costs", [BYTES, SLOW])
def test_memory_strips_show_the_peak_and_what_every_computation_holds(costs: Costs) -> None:
    shown = timeline("balanced_1f1b", 8, 16, costs)
    for row in rows(shown):
        lane = shown.actions[row.rank]
        assert max(held.device_bytes for held in row.memory) == row.device_peak == shown.device_peak_bytes(row.rank)
        assert max(held.activation_bytes for held in row.memory) == row.peak == row.device_peak - lane.static_bytes
        idle = lane.static_bytes + lane.remote_buffer_bytes
        for action, begin, end, own in zip(shown.plan.actions[row.rank], lane.begin_s, lane.end_s, lane.activation_bytes):
            if action.op in COMPUTE:
                assert amount_at(row, (begin + end) / 2) == idle + own


def test_without_bytes_memory_is_in_slots_beside_the_budget() -> None:
    shown = timeline("balanced_1f1b", 8, 16, Costs())
    assert tuple(row.peak for row in rows(shown)) == shown.plan.peak_slots
    assert tuple(row.budget for row in rows(shown)) == shown.plan.slots
    assert compose([shown]).slots_each == 1
    assert all(row.budget is None for row in rows(timeline("balanced_1f1b", 8, 16)))


def test_slots_are_counted_where_one_of_two_has_no_bytes() -> None:
    scene = compose([timeline("1f1b"), timeline("balanced_1f1b", costs=Costs())])
    assert scene.slots_each == 1 and scene.top == 4
    assert [row.peak for row in scene.panels[0].rows] == [4, 3, 2, 1]


def test_an_evaluation_holds_no_slots() -> None:
    plan = build("1f1b", 2, 4)
    forwards = tuple(tuple(a for a in lane if a.op in (Op.F, Op.SEND_F, Op.RECV_F) or "_F" in a.op) for lane in plan.actions)
    shown = simulate(reshaped(replace(plan, actions=forwards), has_backward=False), Costs())
    assert [row.peak for row in rows(shown)] == [0, 0]


def test_two_timelines_share_the_axis_and_the_scale_of_memory() -> None:
    plain, balanced = timeline("1f1b", 4, 8), timeline("balanced_1f1b", 4, 16)
    scene = compose([plain, balanced])
    assert (scene.begin_s, scene.end_s) == (0.0, compose([balanced]).end_s)
    assert scene.top == 4 * 2**30 and scene.num_microbatches == 16
    assert [panel.name for panel in scene.panels] == ["1f1b", "balanced_1f1b"]


def test_the_facts_of_a_panel() -> None:
    shown = replace(timeline("1f1b", 4, 8, Costs(forward_s=1e-3)), source="measured", step=7)
    facts = compose([shown]).panels[0].facts
    assert [fact.strip() for fact in facts.split("·")] == [
        "p = 4, m = 8", "makespan 33.0 ms", "largest bubble 27.3%", "fullest rank 0: 4 slots", "measured in step 7",
    ]  # fmt: skip
    uneven = timeline("1f1b", 2, 2, Costs(forward_s=(1.0, 2.0), backward_s=(2.0, 4.0)))
    assert f"bubble {uneven.bubble_s(0) / uneven.makespan_s:.1%}" in compose([uneven]).panels[0].facts
    assert uneven.bubble_s(0) > uneven.bubble_s(1)
    heavy = compose([timeline("1f1b", 4, 8, Costs(saved_bytes=2**20, static_bytes=(0, 0, 0, 2**23)))]).panels[0].facts
    assert "fullest rank 3: device 9.00 MiB" in heavy  # though rank 0 has the most activations
    assert "p = 2, 3 stages each, m" in compose([interleaved()]).panels[0].facts


def test_a_window_shows_what_reaches_into_it() -> None:
    shown = timeline("balanced_1f1b", 4, 8)
    begin, end = 1.0, rows(shown)[0].memory[-2].begin_s  # where a step is
    scene = compose([shown], window=(begin, end))
    assert (scene.begin_s, scene.end_s) == (begin, end)
    for row, whole in zip(scene.panels[0].rows, rows(shown)):
        assert boxes(row, "compute") == [s for s in boxes(whole, "compute") if s.end_s >= begin and s.begin_s <= end]
        assert amount_at(row, begin) == amount_at(whole, begin) and amount_at(row, end) == amount_at(whole, end)
        assert row.peak == whole.peak and row.memory[-1].begin_s <= end


@pytest.mark.parametrize("window", [(2.0, 1.0), (1.0, 1.0), (float("nan"), 1.0), (0.0, float("inf")), (99.0, 100.0), (-2.0, -1.0)])
def test_a_window_that_shows_nothing_is_refused(window: tuple[float, float]) -> None:
    with pytest.raises(ConfigurationError, match="window="):
        compose([timeline()], window=window)


def test_too_many_boxes_are_refused_and_a_window_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = timeline("1f1b", 4, 64)
    monkeypatch.setattr(scenes, "MAX_BOXES", 600)
    with pytest.raises(ConfigurationError, match=r"more than the 600 boxes .* window=\(from, to\) .* --from and --to"):
        compose([shown])
    assert compose([shown], window=(2.0, 3.0)).panels[0].rows[0].strips
    monkeypatch.setattr(scenes, "MAX_BOXES", sum(row.num_boxes for row in rows(timeline("1f1b", 4, 8))))
    compose([timeline("1f1b", 4, 8)])
    with pytest.raises(ConfigurationError):
        compose([timeline("1f1b", 4, 8), timeline("1f1b", 4, 8)])


@settings(max_examples=examples(80), deadline=None)
@given(shown=st.lists(timelines(), min_size=1, max_size=2))
def test_every_timeline_has_a_scene_in_which_no_boxes_overlap(shown: list[Timeline]) -> None:
    scene = compose(shown)
    assert scene.begin_s < scene.end_s
    for (panel, _, bands), each in zip(Paper.of(scene).panels(), shown):
        for row, band in zip(panel.rows, bands):
            computations, moves = boxes(row, "compute"), tracks(row)
            assert [span.action for span in computations] == each.plan.compute(row.rank)
            for spans in (computations, *(moves if len(moves) < scenes.MAX_TRACKS else ())):
                assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))
            assert all(scene.begin_s <= span.begin_s <= span.end_s <= scene.end_s for span in computations)
            assert max(held.device_bytes for held in row.memory) == row.device_peak <= scene.top
            assert max(held.activation_bytes for held in row.memory) == row.peak <= row.device_peak - row.stays
            places = [band.place(strip) for strip in row.strips]
            assert all(band.top <= top < bottom <= band.memory for top, bottom in places) and all(s.spans for s in row.strips)


def dips_left_out(steps: list[tuple[float, int]], least_s: float = 0.0) -> list[tuple[float, int]]:
    """Of steps of activations alone."""
    return [held[:2] for held in without_dips([Holding(second, amount, amount) for second, amount in steps], least_s)]


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=12).map(
        lambda steps: sorted(steps, key=lambda step: step[0])
    ),
    least=st.integers(0, 3),
)
def test_without_dips_nothing_is_lower_and_only_what_is_short_is_higher(steps: list[tuple[int, int]], least: int) -> None:
    kept = dips_left_out(steps, least)
    assert kept[-1][1] == steps[-1][1] and set(kept) <= set(steps) and all(a[1] != b[1] for a, b in pairwise(kept))
    assert max(amount for _, amount in kept) == max(amount for _, amount in steps)
    for (begin, _), (end, _) in pairwise(steps):
        now, drawn = ([amount for second, amount in some if second <= begin][-1] for some in (steps, kept))
        lasting = min([second for second, amount in steps if second > begin and amount > now], default=99) - begin
        assert drawn == now or (drawn > now and (lasting <= least or end == begin))


def test_a_dip_vanishes_and_a_longer_one_stays() -> None:
    steps = [(0.0, 3), (1.0, 2), (1.0, 3), (2.0, 2), (2.5, 3), (4.0, 1)]
    assert dips_left_out(steps) == [(0.0, 3), (2.0, 2), (2.5, 3), (4.0, 1)]
    assert dips_left_out(steps, 0.5) == [(0.0, 3), (4.0, 1)]


def test_the_most_activations_are_seen_where_messages_hide_them() -> None:
    steps = [Holding(0.0, 5, 10), Holding(1.0, 6, 8), Holding(1.0, 5, 10)]
    assert without_dips(steps) == steps


def test_memory_as_a_person_reads_it() -> None:
    assert amount_text(3 * 2**30 + 2**28) == "3.25 GiB"
    assert [amount_text(n, 1) for n in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
    assert [time_unit(seconds)[0] for seconds in (33.0, 0.0482, 1.5e-6, 0.0)] == ["s", "ms", "µs", "µs"]


def test_two_side_by_side_share_the_height_of_a_row() -> None:
    """Forwards above, the backwards beside them below, and all others in the whole height."""
    plan = build("dualpipe_v", 8, 12, overlapped=True)
    for rank, row in enumerate(rows(simulate(plan, Costs(overlapped_share=0.3)))):
        sides = {strip[2:4]: strip.spans for strip in row.strips if strip.kind == "compute"}
        whole, above, below = (sides.get(side, ()) for side in ((0.0, 1.0), (0.0, 0.5), (0.5, 1.0)))
        lane = plan.actions[rank]
        pairs = [(action, lane[place + 1]) for place, action in enumerate(lane) if plan.begins_pair(action)]
        assert [(one.action, other.action) for one, other in zip(above, below, strict=True)] == pairs
        assert len(whole) == len(boxes(row, "compute")) - 2 * len(pairs)
    for row in rows(simulate(plan, Costs())):  # one after the other
        assert [strip[2:4] for strip in row.strips if strip.kind == "compute"] == [(0.0, 1.0)]
