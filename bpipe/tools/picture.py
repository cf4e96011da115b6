"""Draw a scene as a picture for print: PNG, SVG or PDF, by matplotlib without its global state.

One pair of axes holds all panels. Its y axis counts inches downwards, so that heights are what `paper` calls them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from bpipe.schedules import Op
from bpipe.simulator.timeline import Holding
from bpipe.tools.colours import COLOURS, HOST_EVICT, HOST_LOAD, LAYERS, MEMORY_EDGE, WAITING, Role, ink
from bpipe.tools.paper import ABOVE, BELOW, LEFT, POINTS, RIGHT, TITLE, Band, Paper
from bpipe.tools.scene import Entry, Row, Scene, time_unit, without_dips

__all__: list[str] = []

DPI = 160
MAX_LABELS = 6_000  # a text takes matplotlib about a millisecond

# Inches
LEGEND_LINE, LEGEND_ENTRY = 0.22, 1.65
HALO = [withStroke(linewidth=1.6, foreground="white")]  # makes a number readable on hatching
LEAST = {"move": 0.04, "send": 0.012}  # transfers in next to no time are still seen
LEAST_DIP = 0.01  # memory that is given back and taken again within this distance is not seen

OUT, IN = "/////", "\\\\\\\\\\"
HATCHES: dict[Role, str] = {Op.EVICT: OUT, HOST_EVICT: OUT, Op.ACCEPT: OUT, Op.LOAD: IN, HOST_LOAD: IN, Op.RETURN: IN}
DARK, GREY, FAINT, OUTLINE = "#222222", "#777777", "#eeeeee", "#404040"
EDGES = {"compute": "white", "fill": "white", "move": OUTLINE}
LAYER_OF = {"wait": 2, "fill": 3}  # of boxes, on those in the first
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


class _Sheet:
    """The figure of a scene while it is being drawn."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.paper, self.labels_left = scene, Paper.of(scene), MAX_LABELS
        handles = [_handle(entry, scene) for entry in scene.legend()]
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
        boxes: dict[tuple[str, str, str | None], list[Polygon]] = defaultdict(list)
        for row, band in zip(rows, bands):
            for strip in row.strips:
                top, bottom = band.place(strip)
                least_s = LEAST.get(strip.kind, 0.0) * self.paper.seconds_an_inch
                for span in strip.spans:
                    left, right = self.paper.x(span.begin_s), self.paper.x(max(span.end_s, span.begin_s + least_s))
                    box = [(left, top), (right, top), (right, bottom), (left, bottom)]
                    boxes[strip.kind, row.colour(span), HATCHES.get(row.role(span))].append(box)
        edge = min(0.7, 0.1 * POINTS * self.paper.inches(self.paper.short_s))  # thinner where boxes are narrow
        for (kind, colour, hatch), polygons in boxes.items():
            style: dict[str, Any] = {"facecolors": colour, "hatch": hatch, "zorder": LAYER_OF.get(kind, 1)}
            style |= {"edgecolors": EDGES.get(kind, "none"), "linewidths": edge * (kind in EDGES)}
            self.axes.add_collection(PolyCollection(polygons, **style), autolim=False)

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
        peaks = self.scene.peaks(row)
        step = (band.bottom - band.memory) / len(peaks)
        for line, peak in enumerate(peaks):
            self._write(-0.08, band.memory + step * (line + 0.5), peak, ha="right", fontsize=font - 1)

    def _draw_labels(self, row: Row, band: Band) -> None:
        """Write the microbatches into the boxes that are wide enough."""
        if self.paper.font < 4:
            return
        for strip in (strip for strip in row.strips if strip.kind in ("compute", "move")):
            top, bottom = band.place(strip)
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            style["fontsize"] = self.paper.font * min(1.0, 1.5 * (bottom - top) / (band.moves - band.top))
            if strip.kind == "move":
                style |= {"va": "center", "path_effects": HALO, "fontsize": min(self.paper.font, 0.9 * (bottom - top) * POINTS)}
            for span in strip.spans:
                text = self.paper.label(span, row)
                if text and self.labels_left > 0:
                    self.labels_left -= 1
                    colour = DARK if strip.kind == "move" else ink(row.colour(span))
                    x = self.paper.x(sum(self.paper.seen(span)) / 2)
                    self.axes.text(x, (top + bottom) / 2, text, color=colour, **style)


def _add_legend(figure: Figure, handles: list[Patch | Line2D], scale: float, lines: int) -> Legend:
    columns = -(-len(handles) // lines)
    return figure.legend(handles=handles, ncols=columns, loc="lower center", frameon=False, fontsize=8 * scale, columnspacing=1.6)


def _legend_lines(handles: list[Patch | Line2D], scale: float, least: int, width: float) -> int:
    """Return how many lines a legend has, so many at least that it is no wider than a figure, in inches."""
    for lines in range(least, len(handles)):
        figure = Figure()
        renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
        if _add_legend(figure, handles, scale, lines).get_window_extent(renderer).width <= width * figure.dpi:
            return lines
    return len(handles)


def _handle(entry: Entry, scene: Scene) -> Patch | Line2D:
    """Return an entry of the legend as matplotlib takes it; what it says of all computations stands beside the name of forwards."""
    name, colour, hatch = entry.name, COLOURS.get(entry.role), HATCHES.get(entry.role)
    if entry.kind == "budget":
        return Line2D([], [], label=name, **BUDGET)
    if entry.kind == "memory":
        return Patch(facecolor=LAYERS[entry.role], edgecolor=MEMORY_EDGE, label=name)
    if entry.kind in ("send", "wait"):
        width = 2 if entry.kind == "send" else 3 if colour == WAITING else 5
        return Line2D([], [], color=colour, linewidth=width, label=name)
    if entry.role is Op.F:
        rows = [row for panel in scene.panels for row in panel.rows]
        name += ", lighter on a rank's later stages" * any(len(row.stages) > 1 for row in rows)
        name += ", 1/2: of slice 2 of microbatch 1" * any(row.units.are_slices for row in rows)
    return Patch(facecolor=colour, edgecolor=OUTLINE if hatch else "none", linewidth=0.5, hatch=hatch, label=name)
