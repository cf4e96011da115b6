"""Draw a scene as a picture for print: PNG, SVG or PDF, by matplotlib without its global state.

One pair of axes holds all panels. Its y axis counts inches downwards, so that heights are what `paper` calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Op, Span
from bpipe.simulator.timeline import Holding
from bpipe.tools.colours import (
    COLOURS,
    HOST_EVICT,
    HOST_LOAD,
    LAYERS,
    MEMORY_EDGE,
    NAMES,
    WAIT_NAMES,
    WAITING,
    Role,
    ink,
    role,
    shade,
    wait_colour,
)
from bpipe.tools.paper import ABOVE, BELOW, LEFT, POINTS, RIGHT, TITLE, Band, Paper, Strip, strips
from bpipe.tools.scene import SENT, Row, Scene, amount_text, time_unit, without_dips

__all__: list[str] = []

DPI = 160
MAX_LABELS = 6_000  # a text takes matplotlib about a millisecond

# Inches
LEGEND_LINE, LEGEND_ENTRY = 0.22, 1.65
LABELLED = ("compute", "move")
HALO = [withStroke(linewidth=1.6, foreground="white")]  # makes a number readable on hatching
LEAST = {"move": 0.04, "send": 0.012}  # transfers in next to no time are still seen
LEAST_DIP = 0.01  # memory that is given back and taken again within this distance is not seen

OUT, IN = "/////", "\\\\\\\\\\"
HATCHES: dict[Role, str] = {Op.EVICT: OUT, HOST_EVICT: OUT, Op.ACCEPT: OUT, Op.LOAD: IN, HOST_LOAD: IN, Op.RETURN: IN}
DARK, GREY, FAINT, OUTLINE = "#222222", "#777777", "#eeeeee", "#404040"
BUDGET: dict[str, Any] = {"color": "#000000", "linewidth": 0.9, "linestyle": (0, (4, 2))}

# Any: matplotlib 3.11 types each key, earlier ones take a plain dictionary.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bpipe",  # the same timeline makes the same file
    "pdf.fonttype": 42,
}
NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}

Polygon = list[tuple[float, float]]


def render(scene: Scene, form: str) -> bytes:
    """Draw a scene and return the file's bytes, in the format "png", "svg" or "pdf"."""
    file = BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's style is for the user's figures
        matplotlib.rcParams.update(STYLE)
        figure = _Sheet(scene).figure
        FigureCanvasAgg(figure)
        figure.savefig(file, format=form, dpi=DPI, metadata=NO_DATE[form])
    return file.getvalue()


class _Look(NamedTuple):
    """The fill, outline and hatching that some boxes share."""

    colour: str
    edge: str = "none"
    hatch: str | None = None
    zorder: int = 1


class _Sheet:
    """The figure of a scene while it is being drawn."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.paper, self.labels_left = scene, Paper.of(scene), MAX_LABELS
        handles = _legend(scene)
        width = LEFT + self.paper.width + RIGHT
        least = -(-len(handles) // int((self.paper.width + LEFT) / LEGEND_ENTRY / self.paper.scale))
        lines = _legend_lines(handles, self.paper.scale, least, width)
        foot = (BELOW + LEGEND_LINE * lines) * self.paper.scale
        self.figure = Figure(figsize=(width, ABOVE + self.paper.height + foot), facecolor="white")
        self.axes = self._empty_axes(foot)
        self._draw()
        _add_legend(self.figure, handles, self.paper.scale, lines)

    def _empty_axes(self, foot: float) -> Axes:
        """Make axes that show nothing but the time."""
        paper, (width, height) = self.paper, self.figure.get_size_inches()
        axes = self.figure.add_axes((LEFT / width, foot / height, paper.width / width, paper.height / height))
        axes.set_xlim(paper.x(self.scene.begin_s), paper.x(self.scene.end_s))
        axes.set_ylim(paper.height, 0)
        unit, _ = time_unit(self.scene.end_s - self.scene.begin_s)
        axes.set_xlabel(f"time in {unit}", fontsize=9 * paper.scale, color=DARK)
        axes.tick_params(axis="x", labelsize=9 * paper.scale, colors=DARK)
        axes.yaxis.set_visible(False)
        axes.set_facecolor("none")
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        return axes

    def _draw(self) -> None:
        scale = self.paper.scale
        if self.scene.title:
            self._write(-0.9 * LEFT, TITLE / 2, self.scene.title, fontsize=13 * scale)
        ticks = [tick for tick in self.axes.get_xticks() if self.axes.get_xlim()[0] <= tick <= self.axes.get_xlim()[1]]
        for panel, head, bands in self.paper.panels():
            name = self._write(0, head, panel.name, fontsize=11 * scale, weight="bold", va="baseline")
            beside: Any = (name, self.axes.transData)
            style: dict[str, Any] = {"textcoords": "offset points", "va": "baseline", "color": GREY}
            style["fontsize"] = self.paper.facts_font(panel)
            self.axes.annotate(panel.facts, (1, head), xytext=(12, 0), xycoords=beside, **style)
            self.axes.vlines(ticks, bands[0].top, bands[-1].bottom, colors=FAINT, linewidth=0.6, zorder=0)
            self._draw_boxes(panel.rows, bands)
            for row, band in zip(panel.rows, bands):
                self._draw_memory(row, band)
                self._draw_names(row, band)
                self._draw_labels(row, band)

    def _write(self, x: float, y: float, text: str, **style: Any) -> Any:
        """Write a text whose place does not depend on the times shown, `x` inches right of where the time axis begins."""
        where = self.axes.get_yaxis_transform()
        return self.axes.text(x / self.paper.width, y, text, transform=where, **{"va": "center", "color": DARK, **style})

    def _draw_boxes(self, rows: tuple[Row, ...], bands: list[Band]) -> None:
        """Draw all boxes that look alike at once: thousands of them take no longer than a few."""
        boxes: dict[_Look, list[Polygon]] = {}
        for row, band in zip(rows, bands):
            for look, polygon in self._boxes(row, band):
                boxes.setdefault(look, []).append(polygon)
        edge = min(0.7, 0.1 * POINTS * self.paper.inches(self.paper.short_s))  # thinner where boxes are narrow
        for look, polygons in boxes.items():
            style: dict[str, Any] = {"edgecolors": look.edge, "linewidths": edge * (look.edge != "none"), "hatch": look.hatch}
            style["zorder"] = look.zorder
            self.axes.add_collection(PolyCollection(polygons, facecolors=look.colour, **style), autolim=False)

    def _boxes(self, row: Row, band: Band) -> Iterator[tuple[_Look, Polygon]]:
        """Yield how each box of a row looks and where it is."""
        for strip in strips(row, band):
            least = LEAST.get(strip.kind, 0.0) * self.paper.seconds_an_inch
            for span in strip.spans:
                yield _look(strip.kind, span, row), self._box(span, strip, least)

    def _box(self, span: Span, strip: Strip, least_s: float) -> Polygon:
        left, right = self.paper.x(span.begin_s), self.paper.x(max(span.end_s, span.begin_s + least_s))
        return [(left, strip.top), (right, strip.top), (right, strip.bottom), (left, strip.bottom)]

    def _draw_memory(self, row: Row, band: Band) -> None:
        """Draw all that a rank's device holds, in steps: what stays, activations on it, messages on top; and the budget's line."""
        inches = (band.bottom - band.memory) / self.scene.top
        steps = without_dips(row.memory, LEAST_DIP * self.paper.seconds_an_inch)
        layers = {
            "messages": [step.device_bytes for step in steps],
            "activations": [row.stays + step.activation_bytes for step in steps],
            "stays": [row.stays for _ in steps],
        }
        for name, amounts in layers.items() if steps else ():  # each reaches to the bottom, where the next one covers it
            area = self._area(steps, [band.bottom - inches * amount for amount in amounts], band.bottom)
            self.axes.add_collection(PolyCollection([area], facecolors=LAYERS[name], linewidths=0), autolim=False)
            if name == "messages":
                self.axes.add_collection(LineCollection([area], colors=MEMORY_EDGE, linewidths=0.7), autolim=False)
        self.axes.axhline(band.bottom, color=MEMORY_EDGE, linewidth=0.5)
        if row.budget is not None:
            self.axes.axhline(band.bottom - inches * row.budget, **BUDGET)

    def _area(self, steps: Sequence[Holding], heights: Sequence[float], bottom: float) -> Polygon:
        """Return the outline of steps with these heights."""
        ends = [step.begin_s for step in steps[1:]] + [self.scene.end_s]
        begins = [max(step.begin_s, self.scene.begin_s) for step in steps]
        line = [(self.paper.x(second), y) for *when, y in zip(begins, ends, heights) for second in when]
        return [(line[0][0], bottom), *line, (line[-1][0], bottom)]

    def _draw_names(self, row: Row, band: Band) -> None:
        """Write the rank, its stages and its peaks to the left of its row."""
        font = min(9.0, 12 * self.paper.shrink)
        if font < 3:
            return
        self._write(-0.08, (band.top + band.moves) / 2, f"rank {row.rank}", ha="right", fontsize=font, weight="bold")
        if len(row.stages) > 1:
            y = (band.moves + band.memory) / 2 if band.memory - band.moves > 0.1 * self.paper.shrink else band.moves
            self._write(-0.08, y, row.places, ha="right", fontsize=font - 1.5)
        peaks = ["holds " * (self.scene.slots_each == 1) + amount_text(row.peak, "slots", self.scene.slots_each)]
        if self.scene.unit == "bytes":
            peaks = [f"{name} {show_bytes(peak)}" for name, peak in (("device", row.device_peak), ("activations", row.peak))]
        step = (band.bottom - band.memory) / len(peaks)
        for line, peak in enumerate(peaks):
            self._write(-0.08, band.memory + step * (line + 0.5), peak, ha="right", fontsize=font - 1)

    def _draw_labels(self, row: Row, band: Band) -> None:
        """Write the microbatches into the boxes that are wide enough."""
        if self.paper.font < 4:
            return
        for strip in (strip for strip in strips(row, band) if strip.kind in LABELLED):
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            style["fontsize"] = self.paper.font * min(1.0, 1.5 * (strip.bottom - strip.top) / (band.moves - band.top))
            if strip.kind == "move":
                size = min(self.paper.font, 0.9 * (strip.bottom - strip.top) * POINTS)
                style |= {"va": "center", "path_effects": HALO, "fontsize": size}
            for span in strip.spans:
                text = self.paper.label(span, row)
                if text and self.labels_left > 0:
                    self.labels_left -= 1
                    x, y = self.paper.x(sum(self.paper.seen(span)) / 2), (strip.top + strip.bottom) / 2
                    colour = ink(_fill(span, row)) if strip.kind == "compute" else DARK
                    self.axes.text(x, y, text, color=colour, **style)


def _look(kind: str, span: Span, row: Row) -> _Look:
    """Return how a box of a strip looks."""
    if kind == "compute":
        return _Look(_fill(span, row), "white")
    if kind == "wait":
        return _Look(wait_colour(role(span.action)), zorder=2)
    if kind == "fill":
        return _Look(COLOURS[Op.FILL], "white", zorder=3)
    return _move_look(role(span.action)) if kind == "move" else _Look(COLOURS[role(span.action, row.is_measured)])


def _fill(span: Span, row: Row) -> str:
    return shade(span.action.op, row.stages.index(span.action.stage), len(row.stages))


def _move_look(role: Role) -> _Look:
    return _Look(COLOURS[role], OUTLINE, HATCHES[role])


def _add_legend(figure: Figure, handles: list[Patch | Line2D], scale: float, lines: int) -> Legend:
    columns = -(-len(handles) // lines)
    return figure.legend(
        handles=handles, ncols=columns, loc="lower center", frameon=False, fontsize=8 * scale, columnspacing=1.6
    )


def _legend_lines(handles: list[Patch | Line2D], scale: float, least: int, width: float) -> int:
    """Return how many lines a legend has, so many at least that it is no wider than a figure, in inches."""
    for lines in range(least, len(handles)):
        figure = Figure()
        renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
        if _add_legend(figure, handles, scale, lines).get_window_extent(renderer).width <= width * figure.dpi:
            return lines
    return len(handles)


def _legend(scene: Scene) -> list[Patch | Line2D]:
    """Return a legend entry for each thing that can be seen in the picture."""
    rows = [row for panel in scene.panels for row in panel.rows]
    each = ((row, spans) for row in rows for spans in (row.computations, row.waits, row.fills, row.sends, *row.moves))
    seen = {role(span.action, row.is_measured) for row, spans in each for span in spans}
    several = ", lighter on a rank's later stages" if any(len(row.stages) > 1 for row in rows) else ""
    if any(row.slices > 1 for row in rows):
        several += ", 1/2: of slice 2 of microbatch 1"
    handles: list[Patch | Line2D] = []
    for op, name in NAMES.items():
        if op in seen and op.partition("@")[0] in SENT:
            handles.append(Line2D([], [], color=COLOURS[op], linewidth=2, label=name))
        elif op in seen:
            look = _move_look(op) if op in HATCHES else _Look(COLOURS[op])
            style: dict[str, Any] = {"facecolor": look.colour, "edgecolor": look.edge, "linewidth": 0.5, "hatch": look.hatch}
            handles.append(Patch(label=name + several * (op is Op.F), **style))
    waits = {wait_colour(op): name for op, name in WAIT_NAMES.items() if op in seen}
    for colour, name in waits.items():
        handles.append(Line2D([], [], color=colour, linewidth=3 if colour == WAITING else 5, label=name))
    handles += [Patch(facecolor=LAYERS[layer], edgecolor=MEMORY_EDGE, label=name) for layer, name in scene.layers().items()]
    if scene.budget:
        handles.append(Line2D([], [], label=scene.budget, **BUDGET))
    return handles
