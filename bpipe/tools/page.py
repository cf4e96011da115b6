"""Write a scene as one HTML page that needs nothing else: its data as JSON, and the script of page.html that draws it."""

from __future__ import annotations

import html
import json
from importlib import resources
from itertools import chain

from bpipe.plan.action import COMPUTE
from bpipe.schedules import Span
from bpipe.tools.colours import COLOURS, NAMES, WAITING, ink, shade
from bpipe.tools.paper import Band, band_at, row_height
from bpipe.tools.scene import Entry, Panel, Row, Scene, Strip

__all__: list[str] = []

ROLES = {role: index for index, role in enumerate(NAMES)}
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
    numbers = {len(row.stages) for panel in scene.panels for row in panel.rows}
    return {
        "title": scene.title,
        "begin": scene.begin_s,
        "end": scene.end_s,
        "slots_each": scene.slots_each,
        "top": scene.top,
        "legend": [(entry.kind, _colour(entry), entry.name) for entry in scene.legend()],
        "microbatches": scene.num_microbatches,
        "roles": list(ROLES),
        "names": NAMES,
        "fills": {num: _fills(num) for num in sorted({1, *numbers})},
        "panels": [_panel(panel, scene) for panel in scene.panels],
    }


def _colour(entry: Entry) -> str:
    """Return the colour of an entry of the legend; the page has its own for memory and for grey waits, which may be dark."""
    if entry.kind == "memory":
        return f"var(--{entry.role})"
    return "var(--wait)" if COLOURS.get(entry.role) == WAITING else COLOURS.get(entry.role, "")


def _fills(num_stages: int) -> dict[str, list[tuple[str, str]]]:
    """Return each role's colours on a rank's stages, with those of the text on them; the page chooses grey by itself."""
    roles = [role for role, colour in COLOURS.items() if colour != WAITING]
    fills = {role: [shade(role, place, num_stages) for place in range(num_stages if role in COMPUTE else 1)] for role in roles}
    return {role: [(colour, ink(colour)) for colour in colours] for role, colours in fills.items()}


def _panel(panel: Panel, scene: Scene) -> Data:
    height, band = row_height(panel), band_at(panel, 0.0)
    rows = [
        {
            "rank": row.rank,
            "slices": row.units,
            "stages": row.stages,
            "places": row.places,
            "peaks": scene.peaks(row),
            "band": [round(y / height, 4) for y in band],
            "strips": [_strip(strip, row, height, band) for strip in row.strips],
            "memory": [number for held in row.memory for number in (round(held.begin_s, DECIMALS), *held[1:])],
            "stays": row.stays,
            "budget": row.budget,
        }
        for row in panel.rows
    ]
    return {"name": panel.name, "facts": panel.facts, "rows": rows}


def _strip(strip: Strip, row: Row, height: float, band: Band) -> Data:
    top, bottom = (round(y / height, 4) for y in band.place(strip))
    boxes = chain.from_iterable(_box(span, row) for span in strip.spans)
    return {"kind": strip.kind, "top": top, "bottom": bottom, "boxes": list(boxes)}


def _box(span: Span, row: Row) -> tuple[float, ...]:
    _, stage, microbatch, part, peer = span.action
    begin, end = round(span.begin_s, DECIMALS), round(span.end_s, DECIMALS)
    return ROLES[row.role(span)], stage, microbatch, part, -1 if peer is None else peer, begin, end
