"""A page needs nothing from outside, holds the timeline's numbers, and its script finds and draws every box."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from bpipe.plan.action import COMPUTE, HOST
from bpipe.plan.amounts import show_bytes
from bpipe.plan.grid import plan_title
from bpipe.schedules import Action, Costs, Op, Span, Timeline
from bpipe.tools.draw import draw
from bpipe.tools.page import as_data, render
from bpipe.tools.scene import compose
from tests.tiers import examples
from tests.tools.timelines import SLOW, SLOW_LINK, in_parts, interleaved, timeline, timelines

NODE = shutil.which("node")
HERE = Path(__file__).parent
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """A page taken apart: its tags, those still open, its attributes, and the text of each element by id or name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.key = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.key = dict(attrs).get("id") or tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.key = ""

    def handle_data(self, data: str) -> None:
        self.texts[self.key] = self.texts.get(self.key, "") + data


def page(*shown: Timeline, title: str | None = None) -> str:
    return render(compose(shown, title=title))


def embedded(text: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(text).texts["data"])
    return data


def spans(data: dict[str, Any], row: dict[str, Any], kind: str) -> list[Span]:
    """The boxes of a row's strips as the spans they were made of."""
    flat = [number for strip in row["strips"] if strip["kind"] == kind for number in strip["boxes"]]
    found = []
    for role, stage, microbatch, part, peer, begin, end in zip(*[iter(flat)] * 7, strict=True):
        op, _, host = data["roles"][role].partition("@")
        action = Action(Op(op), stage, microbatch, part, HOST if host else None if peer < 0 else peer)
        found.append(Span(action, begin, end))
    return found


def rounded(some: Any) -> list[Span]:
    return [Span(action, round(begin, 9), round(end, 9)) for action, begin, end in some]


@pytest.mark.parametrize(
    "shown",
    [timeline(), timeline("balanced_1f1b", 8, 16, SLOW), interleaved(), in_parts(), in_parts("only")],
    ids=["four", "slow", "several", "parts", "host"],
)
def test_the_data_in_the_page_are_the_timelines(shown: Timeline) -> None:
    data = embedded(page(shown))
    (panel,) = data["panels"]
    assert panel["name"] == plan_title(shown.plan) and data["microbatches"] == shown.plan.num_microbatches
    assert [row["rank"] for row in panel["rows"]] == list(range(shown.num_ranks))
    for rank, row in enumerate(panel["rows"]):
        assert spans(data, row, "compute") == rounded(compose([shown]).panels[0].rows[rank].spans("compute"))
        assert sorted(spans(data, row, "wait")) == sorted(rounded(shown.waits(rank)))
        moves = [s for s in shown.transfers(rank) if s.action.op in (Op.EVICT, Op.LOAD, Op.ACCEPT, Op.RETURN)]
        assert sorted(spans(data, row, "move")) == sorted(rounded(moves))
        assert max(row["memory"][1::3]) == shown.peak_bytes(rank) and max(row["memory"][2::3]) == shown.device_peak_bytes(rank)
        peaks = [f"device {show_bytes(shown.device_peak_bytes(rank))}", f"activations {show_bytes(shown.peak_bytes(rank))}"]
        assert row["peaks"] == peaks


@settings(max_examples=examples(40), deadline=None)
@given(shown=timelines())
def test_every_timeline_makes_a_page(shown: Timeline) -> None:
    text = page(shown)
    parsed = Page(text)
    assert parsed.open == [] and parsed.tags.count("script") == 2
    data = embedded(text)
    assert data == json.loads(json.dumps(as_data(compose([shown]))))
    for row, actions in zip(data["panels"][0]["rows"], shown.plan.actions):
        ended = [action for action in actions if action.op in COMPUTE]
        assert len(spans(data, row, "compute")) == len(ended)
        assert 0 == row["band"][0] <= row["band"][1] <= row["band"][2] <= row["band"][3] <= row["band"][4] <= 1
        assert {op for op, *_ in (s.action for s in spans(data, row, "compute"))} <= set(data["fills"][str(len(row["stages"]))])


def test_the_legend_has_a_colour_for_each_thing_and_the_budget() -> None:
    data = embedded(page(timeline("balanced_1f1b", 4, 8, SLOW_LINK)))
    fills = data["fills"]["1"]
    for move, wait in (("EVICT", "WAIT_EVICT"), ("LOAD", "WAIT_LOAD")):
        assert fills[move][0][0] != fills[wait][0][0]
    budgets = [
        [name for kind, _, name in embedded(page(shown))["legend"] if kind == "budget"]
        for shown in (in_parts(), timeline("1f1b"), timeline(costs=SLOW_LINK), timeline(costs=Costs()))
    ]
    assert budgets == [["budget 3.50 GiB"], [], [], ["budget 3 slots"]]  # the third plan counts slots, and the page bytes
    assert ["send", fills["SEND_F"][0][0], "send forward"] in data["legend"]
    assert ["wait", "var(--wait)", "wait for another rank"] in data["legend"]


def test_measured_sends_have_a_role_of_their_own() -> None:
    data = embedded(page(replace(timeline(), source="measured")))
    strips = [strip for row in data["panels"][0]["rows"] for strip in row["strips"] if strip["kind"] == "send"]
    sent = {data["roles"][strip["boxes"][0]] for strip in strips}
    assert sent == {"SEND_F@posted", "SEND_B@posted"} <= set(data["names"])


def test_nothing_comes_from_outside() -> None:
    text = page(timeline())
    attributes = Page(text).attributes
    assert not {name for name, _ in attributes} & {"src", "href", "srcset", "action", "onload"}
    assert not re.search(r"https?:|//\w+\.\w|url\(|@import|\bimport\b|fetch\(|XMLHttpRequest|WebSocket|innerHTML|eval\(", text)
    policy = next(value for name, value in attributes if name == "content" and "default-src" in str(value))
    assert policy == "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def test_no_name_ends_the_script_or_becomes_a_tag() -> None:
    name = "</script><b>&amp;{{data}}<!--"
    shown = timeline("1f1b", 2, 2)
    text = page(replace(shown, plan=replace(shown.plan, name=name)), title=name)
    parsed = Page(text)
    assert parsed.tags.count("script") == 2 and "b" not in parsed.tags and parsed.open == []
    assert embedded(text)["title"] == embedded(text)["panels"][0]["name"] == parsed.texts["title"].strip() == name


def test_a_page_is_small(tmp_path: Path) -> None:
    draw(timeline("1f1b", 16, 64, SLOW), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 350_000  # some 7,000 boxes


def run(tmp_path: Path, text: str, checks: str) -> Any:
    """What JavaScript returns that runs in a page."""
    if NODE is None:
        pytest.skip("no node here to run the page's script")
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "checks.js").write_text(checks)
    command = [NODE, str(HERE / "page_test.js"), str(tmp_path / "page.html"), str(tmp_path / "checks.js")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


MIDDLES = """
    const middles = (kind) => places.panels.flatMap(({ panel, rows }) => rows.flatMap((place) => place.row.strips
      .filter((strip) => strip.kind === kind).flatMap((strip) => strip.boxes.filter((_, i) => i % STRIDE === 0).map((_, index) => {
        const box = unpack(place.row, strip.boxes, index * STRIDE);
        return { panel, place, box, px: x((box.begin + box.end) / 2), py: place.top + (strip.top + strip.bottom) / 2 * place.step };
      }))));
"""


def test_the_script_draws_every_computation_and_finds_it_under_the_pointer(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        page(timeline("1f1b", 4, 8), timeline("balanced_1f1b", 4, 8)),
        MIDDLES
        + """
        drawn.length = 0; draw();
        const all = middles("compute");
        return [all.length, all.filter(({ box, place, px, py }) => {
          const seen = hit(px, py);
          return seen.place === place && seen.box.op === box.op && seen.box.begin === box.begin;
        }).length, drawn.filter(([, , , , colour]) => colour === data.fills[1].B[0][0]).length];
        """,
    )
    assert found[:2] == [128, 128]
    sends = 2 * 3 * 8
    assert found[2] == 64 + sends


def test_a_point_just_inside_a_box_finds_it_rather_than_its_neighbour(tmp_path: Path) -> None:
    missed = run(
        tmp_path,
        page(timeline("1f1b", 4, 8)),
        MIDDLES
        + """
        return middles("compute").filter(({ box, py }) =>
          [hit(x(box.begin) + 0.5, py), hit(x(box.end) - 0.5, py)].some((seen) => seen.box.begin !== box.begin)).length;
        """,
    )
    assert missed == 0


def test_what_is_said_of_a_box(tmp_path: Path) -> None:
    shown = timeline("balanced_1f1b", 4, 8)
    evicted = next(span for span in shown.transfers(0) if span.action.op is Op.EVICT)
    said = run(
        tmp_path,
        page(shown),
        MIDDLES
        + """
        const { px, py } = middles("move").find(({ box }) => box.op === "EVICT");
        const event = { clientX: px, clientY: py };
        elements.canvas.listeners.pointermove(event);
        const other = otherEnd(view.found);
        const idle = describe(hit(x(0.7), places.panels[0].rows[0].top + 2));
        return [elements.tip.textContent, other.row.rank, other.box.op, other.box.microbatch, idle];
        """,
    )
    lines = said[0].split("\n")
    assert lines[0] == f"rank 0: {evicted.action}, evict" and lines[1] == f"other end: rank {evicted.action.peer}"
    assert lines[2] == "0.2 s to 0.2536871 s: 53.69 ms" and lines[3] == "rank 0 then holds device 3.00 GiB, activations 3.00 GiB"
    assert said[1:4] == [evicted.action.peer, "ACCEPT", evicted.action.microbatch]
    assert said[4] == ["rank 0 at 0.7 s", "holds device 3.00 GiB, activations 3.00 GiB"]


def test_what_is_said_of_a_part_that_goes_to_the_host(tmp_path: Path) -> None:
    shown = in_parts("only")
    evicted = next(span for span in shown.transfers(0) if span.action.op is Op.EVICT)
    lines, other = run(
        tmp_path,
        page(shown),
        MIDDLES
        + """
        const found = middles("move").find(({ box }) => box.op === "EVICT");
        return [describe({ ...found, when: found.box.begin }), otherEnd(found)];
        """,
    )
    assert lines[:2] == [f"rank 0: {evicted.action}, evict to the host", "other end: this rank's host"] and other is None
    assert evicted.action.part


def test_every_part_leads_to_its_own_other_end(tmp_path: Path) -> None:
    ends = run(
        tmp_path,
        page(in_parts()),
        MIDDLES
        + """
        return middles("move").map(({ panel, box }) => [box.part, otherEnd({ panel, box }).box.part]);
        """,
    )
    assert len({part for part, _ in ends}) > 1 and all(part == other for part, other in ends)


def test_every_transfer_leads_to_its_other_end(tmp_path: Path) -> None:
    ends = run(
        tmp_path,
        page(timeline("balanced_1f1b", 4, 8)),
        MIDDLES
        + """
        return [...middles("move"), ...middles("send")].map(({ panel, place, box }) => {
          const { row, box: other } = otherEnd({ panel, box });
          return [box.op, other.op, box.peer === row.rank, box.microbatch === other.microbatch, other.begin - box.begin];
        });
        """,
    )
    pairs = {("EVICT", "ACCEPT"), ("ACCEPT", "EVICT"), ("LOAD", "RETURN"), ("RETURN", "LOAD"), ("SEND_F", "F"), ("SEND_B", "B")}
    assert {(op, other) for op, other, *_ in ends} == pairs
    assert all(peer and microbatch and later >= 0 for *_, peer, microbatch, later in ends)


def test_one_microbatch_stands_out(tmp_path: Path) -> None:
    bright, text, everything = run(
        tmp_path,
        page(timeline("1f1b", 4, 8)),
        """
        const slider = elements.slider;
        drawn.length = 0;
        slider.listeners.input({ target: { value: "3" } });
        const fills = Object.values(data.fills[1]).flat(2);
        const boxes = drawn.filter(([, , , height, colour]) => height > 10 && fills.includes(colour));
        const result = [boxes.filter((box) => box[5] === 1).length, elements.chosen.textContent];
        elements.canvas.listeners.keydown({ key: "Escape", preventDefault() {} });
        return [...result, elements.chosen.textContent];
        """,
    )
    assert (bright, text, everything) == (8, "3", "all")  # F and B on four ranks


def test_zooming_keeps_what_is_under_the_pointer_and_stays_within_the_step(tmp_path: Path) -> None:
    shown = timeline("1f1b", 4, 8)
    kept, out, left, keys = run(
        tmp_path,
        page(shown),
        """
        const wheel = (event) => elements.canvas.listeners.wheel({ preventDefault() {}, deltaX: 0, ...event });
        const before = seconds(500);
        wheel({ clientX: 500, deltaY: -900 });
        const kept = [before, seconds(500), view.end - view.begin];
        wheel({ clientX: 500, deltaY: 90000 });
        const out = [view.begin, view.end];
        zoom(0.1); pan(-100);
        const left = [view.begin, view.end];
        elements.canvas.listeners.keydown({ key: "0", preventDefault() {} });
        return [kept, out, left, [view.begin, view.end]];
        """,
    )
    begin, end = 0.0, compose([shown]).end_s
    assert kept[0] == pytest.approx(kept[1]) and kept[2] < (end - begin) / 3
    assert out == keys == pytest.approx([begin, end])
    assert left == pytest.approx([begin, begin + (end - begin) / 10])


def test_the_canvas_tells_those_who_cannot_see_it(tmp_path: Path) -> None:
    said = run(tmp_path, page(timeline("1f1b", 2, 4)), 'return elements.canvas["aria-label"];')
    assert "1f1b: p = 2, m = 4" in said and "Rank 0 peaks at device 2.00 GiB, activations 2.00 GiB." in said
    assert "Rank 1 peaks at device 1.00 GiB, activations 1.00 GiB." in said


def test_a_page_shows_another_scene_in_place_of_its_own(tmp_path: Path) -> None:
    other = as_data(compose([timeline("balanced_1f1b", 4, 8), timeline("1f1b", 4, 8)]))
    shown = run(
        tmp_path,
        page(timeline("1f1b", 2, 12)),
        f"""
        choose(11);
        const before = elements.legend.children.length;
        zoom(0.1);
        show({json.dumps(other)});
        const names = places.panels.map(({{ panel }}) => panel.name);
        return [names, [view.begin, view.end], view.microbatch, elements.slider.max, before, elements.legend.children.length];
        """,
    )
    assert shown[:4] == [["balanced_1f1b", "1f1b"], [other["begin"], other["end"]], 7, 7]
    assert shown[4] < shown[5]  # evictions and loads are new; nothing of the first legend stays

    again = run(tmp_path, page(timeline("1f1b", 2, 12)), "show(data); show(data); return elements.legend.children.length;")
    assert again == shown[4]
