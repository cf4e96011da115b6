"""Lay out a picture of a scene: how large it is and where each row, strip and label goes, in inches and without matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bpipe.plan.action import COMPUTE
from bpipe.schedules import Span
from bpipe.tools.scene import Panel, Row, Scene, Strip, time_unit

__all__: list[str] = []

POINTS = 72  # to an inch
LETTER, BOLD = 0.56, 0.7  # the mean width of a letter in font heights
DIGIT, MARGIN = 0.64, 0.35  # a digit's width in font heights, and the space that is left free beside digits in digit widths
FONTS = (5.0, 9.0)  # of the labels, in points

WIDTHS, WIDTH_EACH = (10.4, 22.4), 0.19  # of the picture, and of a short computation where there is room
LEFT, RIGHT, ABOVE, BELOW = 1.45, 0.2, 0.05, 0.5
TITLE, HEAD, PANEL_GAP = 0.4, 0.4, 0.25
COMPUTATION, MOVES, SENDS, MEMORY, ROW_GAP = 0.3, 0.2, 0.08, 0.4, 0.16
TALLEST_ROWS, TALLEST = 11.0, 190.0  # beyond the first, rows shrink to half at most; beyond the second, without limit


class Band(NamedTuple):
    """The positions where a row's parts begin, from its top down: its computations, moves, sends and memory."""

    top: float
    moves: float
    sends: float
    memory: float
    bottom: float

    def place(self, strip: Strip) -> tuple[float, float]:
        """Return where a strip begins and ends."""
        top, height = self[strip.part], self[strip.part + 1] - self[strip.part]
        return top + height * strip.top, top + height * strip.bottom


@dataclass(frozen=True, slots=True)
class Paper:
    """The dimensions of one picture."""

    scene: Scene  # what is drawn on it
    short_s: float  # how long a short computation takes: a quarter of them are shorter
    shrink: float  # the height of rows as a fraction of their natural height
    width: float  # of the time axis

    @classmethod
    def of(cls, scene: Scene) -> Paper:
        """Make it wide enough to read the microbatches and high enough for all ranks, within what a page takes."""
        spans = (span for panel in scene.panels for row in panel.rows for span in row.spans("compute"))
        seconds = sorted(span.seconds for span in spans if span.seconds > 0)
        short_s = seconds[len(seconds) // 4] if seconds else scene.end_s - scene.begin_s
        width = min(max(WIDTH_EACH * (scene.end_s - scene.begin_s) / short_s, WIDTHS[0]), WIDTHS[1])
        wanted = sum(row_height(panel) * len(panel.rows) for panel in scene.panels)
        return cls(scene, short_s, min(1.0, max(0.5, TALLEST_ROWS / wanted), TALLEST / wanted), width - LEFT - RIGHT)

    @property
    def height(self) -> float:
        """The height of everything above the time axis."""
        panels = sum(HEAD + len(panel.rows) * row_height(panel) * self.shrink for panel in self.scene.panels)
        return TITLE * bool(self.scene.title) + panels + PANEL_GAP * (len(self.scene.panels) - 1)

    @property
    def scale(self) -> float:
        """The scale of the fonts outside the boxes: larger where the picture is larger."""
        return min(max(self.width / 12, 1.0), 1.4)

    @property
    def font(self) -> float:
        """The size of labels: as large as rows allow, smaller where that lets the short boxes have theirs."""
        tallest = min(FONTS[1], COMPUTATION * self.shrink * POINTS * 0.66)
        units = max(row.units for panel in self.scene.panels for row in panel.rows)
        digits = len(units.text(self.scene.num_microbatches * units - 1))
        fitting = 0.99 * self.inches(self.short_s) * POINTS / DIGIT / (digits + MARGIN)
        return min(tallest, fitting) if fitting >= FONTS[0] else tallest

    def facts_font(self, panel: Panel) -> float:
        """Return the size of a panel's numbers, in points: small enough to stand beside its name."""
        name = len(panel.name) * 11 * self.scale * BOLD / POINTS
        fitting = (self.width + RIGHT - name - 0.2) * POINTS / (max(len(panel.facts), 1) * LETTER)
        return max(min(9 * self.scale, fitting), FONTS[0])

    @property
    def seconds_an_inch(self) -> float:
        return (self.scene.end_s - self.scene.begin_s) / self.width

    def inches(self, seconds: float) -> float:
        return seconds / self.seconds_an_inch

    def x(self, seconds: float) -> float:
        """Return where a time is on the time axis, in the unit that the axis is labelled in."""
        return seconds * time_unit(self.scene.end_s - self.scene.begin_s)[1]

    def panels(self) -> Iterator[tuple[Panel, float, list[Band]]]:
        """Yield each panel with the middle of its head and the bands of its rows, from the top down."""
        y = TITLE * bool(self.scene.title)
        for panel in self.scene.panels:
            top, step = y + HEAD, row_height(panel) * self.shrink
            yield panel, y + HEAD / 2, [band_at(panel, top + index * step, self.shrink) for index in range(len(panel.rows))]
            y = top + len(panel.rows) * step + PANEL_GAP

    def label(self, span: Span, row: Row) -> str:
        """Return a computation's microbatch and slice, with its stage where a rank has several, as far as that fits."""
        room = self.inches(self.seen(span)[1] - self.seen(span)[0]) * POINTS / (self.font * DIGIT) - MARGIN
        is_named = len(row.stages) > 1 and span.action.op in COMPUTE  # what moves is short, and its colour says what it is
        texts = [span.action.text(row.units)] * is_named + [row.units.text(span.action.microbatch)]
        return next((text for text in texts if len(text) <= room), "")

    def seen(self, span: Span) -> tuple[float, float]:
        """Return the begin and the end of a span within the picture."""
        return max(span.begin_s, self.scene.begin_s), min(span.end_s, self.scene.end_s)


def band_at(panel: Panel, top: float, shrink: float = 1.0) -> Band:
    """Return the positions of the parts of a row that begins at `top`: moves and sends take height where a panel has them."""
    parts = {strip.part for row in panel.rows for strip in row.strips}
    moves = top + COMPUTATION * shrink
    sends = moves + MOVES * shrink * (1 in parts)
    memory = sends + SENDS * shrink * (2 in parts)
    return Band(top, moves, sends, memory + 0.04 * shrink, memory + MEMORY * shrink)


def row_height(panel: Panel) -> float:
    """Return the natural height of a row, including the gap below it."""
    return band_at(panel, 0.0).bottom + ROW_GAP
