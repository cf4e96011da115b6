"""Pictures are valid files that hold what they should, where it should be, and refusals say what to do."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bpipe.errors import ConfigurationError
from bpipe.extras import how_to_install
from bpipe.schedules import Costs, Op, Span, Timeline
from bpipe.tools.colours import COLOURS, HOST_EVICT, HOST_LOAD, NAMES, POSTED_F
from bpipe.tools.draw import draw
from bpipe.tools.paper import LEFT, RIGHT, Paper
from bpipe.tools.scene import compose
from tests.tools.timelines import BYTES, SLOW, in_parts, interleaved, timeline

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from matplotlib.transforms import Bbox  # noqa: E402

from bpipe.tools import picture  # noqa: E402


def sheet(*shown: Timeline, window: tuple[float, float] | None = None) -> picture._Sheet:
    made = picture._Sheet(compose(shown, window=window))
    picture.FigureCanvasAgg(made.figure).draw()
    return made


def boxes(made: picture._Sheet, op: str) -> list[tuple[float, float, float]]:
    """Begin, end and top of what has an operation's colour, hatched or in the rows of computations."""
    found = []
    for collection in made.axes.collections:
        if isinstance(collection, PolyCollection) and to_hex(collection.get_facecolor()[0]) == COLOURS[op]:
            bounds = [path.get_extents() for path in collection.get_paths()]
            found += [(box.x0, box.x1, box.y0) for box in bounds if collection.get_hatch() or box.height > 0.2]
    return found


def when(span: Span) -> tuple[float, float]:
    return span.begin_s, span.end_s


def png_size(data: bytes) -> tuple[int, int]:
    """The size that a PNG's header says, its checksum tested."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    assert zlib.crc32(data[12:29]) == struct.unpack(">I", data[29:33])[0]
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def svg_texts(path: Path) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_png_is_as_large_as_its_paper(tmp_path: Path) -> None:
    shown = timeline()
    draw(shown, tmp_path / "picture.PNG")
    paper = Paper.of(compose([shown]))
    width, height = png_size((tmp_path / "picture.PNG").read_bytes())
    assert width == pytest.approx((LEFT + paper.width + RIGHT) * picture.DPI, abs=1) and paper.width == pytest.approx(8.75)
    assert paper.height * picture.DPI < height < (paper.height + 2) * picture.DPI


def test_an_svg_holds_its_words_as_text(tmp_path: Path) -> None:
    draw(timeline(), str(tmp_path / "picture.svg"), title="What <moves> & when")
    texts = svg_texts(tmp_path / "picture.svg")
    assert {"What <moves> & when", "balanced_1f1b", "rank 0", "rank 3", "device 3.00 GiB", "activations 3.00 GiB"} <= set(texts)
    assert {"time in s", "forward", "evict", "activations"} <= set(texts)
    assert any("p = 4, m = 8" in text and "simulated" in text for text in texts)
    assert [texts.count(str(microbatch)) >= 8 for microbatch in range(8)] == [True] * 8


def test_a_pdf_is_one(tmp_path: Path) -> None:
    draw(timeline(), tmp_path / "picture.pdf")
    data = (tmp_path / "picture.pdf").read_bytes()
    assert data.startswith(b"%PDF-") and data.rstrip().endswith(b"%%EOF")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "html"])
def test_the_same_timeline_makes_the_same_file(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        draw(timeline(), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


@pytest.mark.parametrize("op", [Op.F, Op.B, Op.EVICT, Op.LOAD, Op.ACCEPT, Op.RETURN])
def test_every_box_is_where_and_when_it_ran(op: Op) -> None:
    shown = timeline("balanced_1f1b", 4, 8)
    spans = [span for rank in range(4) for span in (*shown.spans(rank), *shown.served_spans(rank)) if span.action.op is op]
    drawn = sorted(boxes(sheet(shown), op))
    assert [time for box in drawn for time in box[:2]] == pytest.approx(
        [time for span in sorted(spans, key=when) for time in when(span)]
    )
    assert len({round(top, 6) for *_, top in drawn}) == len({span.action.stage for span in spans})  # each on its rank's row


@pytest.mark.parametrize(("role", "op"), [(HOST_EVICT, Op.EVICT), (HOST_LOAD, Op.LOAD)])
def test_moves_to_and_from_the_host_have_colours_of_their_own(role: str, op: Op) -> None:
    shown = in_parts("only")
    made = sheet(shown)
    spans = [span for rank in range(4) for span in shown.spans(rank) if span.action.op is op]
    assert len(boxes(made, role)) == len(spans) > 0 and not boxes(made, op)
    assert NAMES[role] in [text.get_text() for text in made.figure.legends[0].get_texts()]


def test_two_timelines_are_on_one_axis() -> None:
    plain, balanced = timeline("1f1b", 4, 8, SLOW), timeline("balanced_1f1b", 4, 8, SLOW)
    made = sheet(plain, balanced)
    assert len(made.figure.axes) == 1
    assert made.axes.get_xlim() == pytest.approx((0, 1e3 * balanced.makespan_s), rel=1e-2)  # milliseconds
    drawn = boxes(made, Op.B)
    ran = [span for shown in (plain, balanced) for rank in range(4) for span in shown.spans(rank) if span.action.op is Op.B]
    assert sorted(begin for begin, *_ in drawn) == pytest.approx(sorted(1e3 * span.begin_s for span in ran))
    assert len({round(top, 6) for *_, top in drawn}) == 8


def test_a_transfer_in_no_time_is_still_seen() -> None:
    made = sheet(timeline(costs=Costs()))
    drawn = boxes(made, Op.EVICT)
    assert len(drawn) == 3 and all(end - begin > 0.03 * made.paper.seconds_an_inch for begin, end, _ in drawn)


@pytest.mark.parametrize(
    "shown",
    [
        (timeline("1f1b", 4, 8, Costs()),),
        (timeline("balanced_1f1b", 8, 32, SLOW),),
        (timeline("balanced_1f1b", 16, 16, SLOW),),
        (timeline("1f1b", 8, 12), timeline("balanced_1f1b", 8, 12)),
        (interleaved(),),
        (timeline("gpipe", 2, 200),),
        (in_parts("last"), timeline("1f1b")),
        (replace(timeline(costs=SLOW), source="measured"), timeline(costs=SLOW)),
    ],
    ids=["1f1b", "slow", "many-ranks", "two", "interleaved", "many-microbatches", "parts", "measured"],
)
def test_no_text_lies_on_another_or_leaves_the_paper(shown: tuple[Timeline, ...]) -> None:
    made = sheet(*shown)
    renderer = picture.FigureCanvasAgg(made.figure).get_renderer()
    legend = made.figure.legends[0].get_texts()
    begin, end = made.axes.get_xlim()
    ticks = [tick for tick in made.axes.get_xticklabels() if begin <= tick.get_position()[0] <= end]
    written = (*made.axes.texts, *legend, *ticks, made.axes.xaxis.label)
    extents = [(text, text.get_window_extent(renderer)) for text in written if text.get_text()]
    paper = Bbox.from_bounds(0, 0, made.figure.bbox.width, made.figure.bbox.height)
    for text, extent in extents:
        assert paper.x0 <= extent.x0 and extent.x1 <= paper.x1 and paper.y0 <= extent.y0 and extent.y1 <= paper.y1, text
    lines: dict[int, list[tuple[Text, Bbox]]] = {}
    for text, extent in extents:
        for line in range(int(extent.y0 // 8), int(extent.y1 // 8) + 1):
            lines.setdefault(line, []).append((text, extent))
    for neighbours in lines.values():
        for (a, first), (b, second) in combinations(neighbours, 2):
            assert Bbox.intersection(first, second) is None or not first.overlaps(second), (a, b)


def test_labels_are_the_microbatches_and_vanish_where_boxes_are_narrow() -> None:
    def labels(made: picture._Sheet) -> list[str]:
        return [text.get_text() for text in made.axes.texts if text.get_text().isdigit()]

    assert sorted(labels(sheet(timeline("1f1b", 2, 4))), key=int) == [str(m) for m in range(4) for _ in range(4)]
    assert labels(sheet(timeline("1f1b", 2, 2000))) == []
    assert labels(sheet(timeline("1f1b", 2, 2000), window=(100.0, 101.0))) != []
    assert "4B0" in [text.get_text() for text in sheet(interleaved()).axes.texts]


def test_what_moves_has_its_microbatch_on_it() -> None:
    shown = timeline("balanced_1f1b", 4, 8)
    ops = (Op.EVICT, Op.LOAD, Op.ACCEPT, Op.RETURN)
    moves = [span for rank in range(4) for span in shown.transfers(rank) if span.action.op in ops]
    written = [text.get_text() for text in sheet(shown).axes.texts if text.get_path_effects()]
    assert sorted(written) == sorted(str(span.action.microbatch) for span in moves) != []


def test_measured_sends_do_not_look_like_a_busy_link() -> None:
    """A rank knows when it posted a send and when it was complete, and not how long the link was busy with it."""
    made = sheet(replace(timeline(), source="measured"))
    colours = {to_hex(one.get_facecolor()[0]) for one in made.axes.collections if isinstance(one, PolyCollection)}
    legend = [text.get_text() for text in made.figure.legends[0].get_texts()]
    assert COLOURS[POSTED_F] in colours and "send forward, from posting to completion" in legend and "send forward" not in legend
    assert "send forward" in [text.get_text() for text in sheet(timeline()).figure.legends[0].get_texts()]


def test_the_numbers_beside_a_long_name_fit() -> None:
    shown = timeline("1f1b", 4, 8)
    long = replace(shown, plan=replace(shown.plan, name="an_order_with_a_name_of_its_own"))
    made = sheet(long)
    edge = made.figure.get_window_extent().x1
    assert all(text.get_window_extent().x1 <= edge for text in made.axes.texts)


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9.0, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        draw(timeline(), tmp_path / "picture.svg")
        assert dict(matplotlib.rcParams) == before


def test_a_users_style_does_not_show(tmp_path: Path) -> None:
    draw(timeline(), tmp_path / "plain.png")
    style = {
        "axes.facecolor": "black",
        "text.color": "red",
        "lines.linewidth": 9.0,
        "savefig.facecolor": "black",
        "font.size": 30.0,
    }
    with matplotlib.rc_context(style):
        draw(timeline(), tmp_path / "styled.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


@pytest.mark.parametrize("path", ["picture.jpeg", "picture", ".png", "picture.png.gz"])
def test_an_unknown_suffix_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"end it in \.png, \.svg, \.pdf, \.html"):
        draw(timeline(), path)


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write the picture to .*no/such.*: No such file or directory") as refusal:
        draw(timeline(), tmp_path / "no" / f"such{suffix}")
    assert isinstance(refusal.value.__cause__, FileNotFoundError)


def test_without_matplotlib_it_says_what_to_install_and_pages_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bpipe.tools.picture")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=re.escape(how_to_install("plot"))):
        draw(timeline(), tmp_path / "picture.svg")
    draw(timeline(), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_window_and_another_timeline_reach_the_picture(tmp_path: Path) -> None:
    draw(timeline("1f1b"), tmp_path / "both.svg", other=timeline("balanced_1f1b", costs=BYTES), window=(1.0, 1.2))
    texts = svg_texts(tmp_path / "both.svg")
    assert {"1f1b", "balanced_1f1b", "time in ms", "1000", "1200"} <= set(texts)
    with pytest.raises(ConfigurationError, match="shows nothing"):
        draw(timeline("1f1b"), tmp_path / "none.svg", window=(50.0, 60.0))
