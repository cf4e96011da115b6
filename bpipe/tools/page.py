"""Write a scene as one HTML page that needs nothing else: its data as JSON, and the script of page.html that draws it."""

from __future__ import annotations

import html
import json
from importlib import resources
from itertools import chain

from bpipe.plan.action import COMPUTE
from bpipe.schedules import Op, Span
from bpipe.tools.colours import COLOURS, MOVE_WAITS, NAMES, OTHER_ROLES, WAIT_NAMES, Role, ink, role, shade, wait_colour
from bpipe.tools.paper import Strip, band_at, row_height, strips
from bpipe.tools.scene import Panel, Row, Scene

__all__: list[str] = []

ROLES = {role: index for index, role in enumerate((*Op, *OTHER_ROLES))}
DECIMALS = 9  # of seconds: nanoseconds

Data = dict[str, object]


def render(scene: Scene) -> str:
    """Write the page."""
    template = resources.files("bpipe.tools").joinpath("page.html").read_text(encoding="utf-8")
    before, between, after = (part for half in template.split("{{title}}") for part in half.split("{{data}}"))
    title = html.escape(scene.title or " and ".join(panel.name for panel in scene.panels))
    data = json.dumps(as_data(scene), separators=(",", ":"), allow_nan=False)
    return "".join((before, title, between, data.replace("<", "\\u003c"), after))  # no name can end the script


def as_data(scene: Scene) -> Data:
    """Return the data that the page's script reads: times in seconds, places as fractions of a row's height.

    A box is seven numbers in a row: role (an index into `roles`), stage, microbatch, part or 0, peer or -1, begin and end; where a
    row's microbatches have several `slices`, the third is k*microbatch + slice. A step of memory is three: a time, and what is held
    from then on, of activations and in total.
    """
    rows = [row for panel in scene.panels for row in panel.rows]
    return {
        "title": scene.title,
        "begin": scene.begin_s,
        "end": scene.end_s,
        "unit": scene.unit,
        "slots_each": scene.slots_each,
        "top": scene.top,
        "layers": scene.layers(),
        "budget": scene.budget,
        "microbatches": scene.num_microbatches,
        "roles": list(ROLES),
        "names": NAMES | WAIT_NAMES,
        "fills": {num: _fills(num) for num in sorted({1, *(len(row.stages) for row in rows)})},
        "panels": [_panel(panel) for panel in scene.panels],
    }


def _fills(num_stages: int) -> dict[Role, list[tuple[str, str]]]:
    """Return each role's colours on a rank's stages, with those of the text on them; the page chooses grey by itself."""
    fills = {role: [shade(role, place, num_stages) for place in range(num_stages if role in COMPUTE else 1)] for role in COLOURS}
    fills |= {role: [wait_colour(role)] for role in MOVE_WAITS}
    return {role: [(colour, ink(colour)) for colour in colours] for role, colours in fills.items()}


def _panel(panel: Panel) -> Data:
    return {"name": panel.name, "facts": panel.facts, "rows": [_row(row, panel) for row in panel.rows]}


def _row(row: Row, panel: Panel) -> Data:
    band, height = band_at(panel, 0.0), row_height(panel)
    return {
        "rank": row.rank,
        "slices": row.slices,
        "stages": row.stages,
        "places": row.places,
        "band": [round(y / height, 4) for y in band],
        "strips": [_strip(strip, height, row) for strip in strips(row, band) if strip.spans],
        "memory": [number for held in row.memory for number in (round(held.begin_s, DECIMALS), *held[1:])],
        "stays": row.stays,
        "peak": row.peak,
        "device_peak": row.device_peak,
        "budget": row.budget,
    }


def _strip(strip: Strip, height: float, row: Row) -> Data:
    return {
        "kind": strip.kind,
        "top": round(strip.top / height, 4),
        "bottom": round(strip.bottom / height, 4),
        "boxes": list(chain.from_iterable(_box(span, row) for span in strip.spans)),
    }


def _box(span: Span, row: Row) -> tuple[float, ...]:
    _, stage, microbatch, part, peer = span.action
    begin, end = round(span.begin_s, DECIMALS), round(span.end_s, DECIMALS)
    return ROLES[role(span.action, row.is_measured)], stage, microbatch, part, -1 if peer is None else peer, begin, end
