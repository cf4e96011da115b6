"""The figures of the concept pages: `python -m docs.making.figures` writes them into docs/concepts/, and a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bpipe.schedules import Costs, Link, Op, Span, Timeline, build, simulate

__all__ = ["FIGURES", "FOLDER"]

FOLDER = Path(__file__).parents[1] / "concepts"
BLUE, ORANGE, PURPLE, GREEN, GREY, INK = "#9ecae1", "#e6935a", "#bc80bd", "#a6d49f", "#e0e0e0", "#222222"


def plan() -> str:
    """Show how a rule becomes a plan, and what uses it."""
    made = [("rule", "1F1B, ZBV, ...", GREY), ("order", "of F and B", BLUE), ("balance", "evict, load", PURPLE)]
    made += [("communicate", "send, receive", BLUE), ("verify", "a table of rules", GREEN), ("Plan", "one object", ORANGE)]
    parts = [_box(10 + 125 * i, 60, 105, 50, *one) for i, one in enumerate(made)]
    parts += [_arrow(115 + 125 * i, 85, 133 + 125 * i, 85) for i in range(5)]
    for i, one in enumerate((("run", "the engine"), ("draw", "grid, timeline"), ("simulate", "a cost model"))):
        parts += [_box(790, 5 + 58 * i, 110, 46, *one, GREY), _arrow(740, 85, 788, 28 + 58 * i)]
    return _svg(910, 175, "A rule becomes a plan in five steps; the plan is run, drawn and simulated", parts)


def eviction() -> str:
    """Show an eviction and its load, as the simulator times them."""
    timeline = simulate(
        build("balanced_1f1b", 4, 4), Costs(forward_s=1.0, saved_bytes=1, output_bytes=0, link=Link(bytes_per_s=1.0))
    )
    end, left, scale = timeline.makespan_s, 90, 36
    parts = []
    for row, rank in enumerate((0, 3)):
        parts.append(_text(8, 42 + 120 * row, f"rank {rank}", weight="bold"))
        parts += [_span(span, left, scale, 22 + 120 * row) for span in timeline.computations(rank)]
        parts += _memory(timeline, rank, left, scale, 92 + 120 * row)
    moves = [span for span in timeline.transfers(0) if span.action.op in (Op.EVICT, Op.LOAD)]
    for span in moves:
        leaves = span.action.op is Op.EVICT
        x, to = left + scale * span.begin_s, left + scale * span.end_s
        parts.append(_arrow(x, 54 if leaves else 140, to, 140 if leaves else 54, PURPLE, 3))
        parts.append(_text((x + to) / 2 + 10, 108, f"{'evict' if leaves else 'load'} {span.action.microbatch}"))
    return _svg(round(left + scale * end + 20), 240, "Rank 0 evicts a microbatch to rank 3 and loads it back", parts)


def memory() -> str:
    """Show what a device holds, and which statistic counts it."""
    layers = [
        ("messages between stages", 24, GREEN),
        ("activations: what autograd saved for this rank's microbatches", 66, BLUE),
        ("space for microbatches of other ranks (remote_buffer_bytes)", 40, PURPLE),
        ("activations that cannot move (held_bytes)", 28, ORANGE),
        ("parameters, gradients, optimizer states, buffers", 70, GREY),
    ]
    parts, y = [], 12
    for name, height, colour in layers:
        parts += [_rect(150, y, 430, height, colour), _text(160, y + height / 2 + 4, name)]
        y += height
    parts += [_bracket(140, 12, y, "device_peak_bytes"), _bracket(590, 36, 36 + 134, "peak_bytes", right=True)]
    parts += [_line(120, 4, 600, 4, "6 3"), _text(606, 9, "budget")]
    return _svg(720, y + 12, "The layers of a device's memory, and the statistics that count them", parts)


def failing() -> str:
    """Show who learns of an error, and what it raises."""
    ranks = [("rank 0", "waits for rank 1", GREY), ("rank 1", "ValueError in 1F2", ORANGE), ("rank 2", "computes", GREY)]
    ends = [("RankFailedError", "names rank 1"), ("ValueError", "with a note"), ("RankFailedError", "names rank 1")]
    parts = []
    for i, (one, last) in enumerate(zip(ranks, ends)):
        parts += [_box(20 + 240 * i, 20, 150, 54, *one), _box(20 + 240 * i, 150, 150, 54, *last, PURPLE)]
        parts.append(_arrow(95 + 240 * i, 74, 95 + 240 * i, 148))
    parts += [_arrow(258, 47, 174, 47, ORANGE, 3), _arrow(412, 47, 496, 47, ORANGE, 3)]
    parts += [_text(178, 38, "it failed"), _text(424, 38, "it failed")]
    parts += [_text(104, 116, "at once"), _text(584, 116, "when its computation ends")]
    return _svg(760, 220, "Rank 1 raises, tells the others, and all three raise", parts)


FIGURES: dict[str, Callable[[], str]] = {"plan": plan, "eviction": eviction, "memory": memory, "failing-together": failing}


def _memory(timeline: Timeline, rank: int, left: float, scale: float, base: float) -> list[str]:
    """Return the memory that a rank uses, as a strip of steps, with the number of microbatches in it."""
    parts = []
    for step, following in zip(held := list(timeline.memory(rank)), [*held[1:], None]):
        x, until = left + scale * step.begin_s, left + scale * (timeline.makespan_s if following is None else following.begin_s)
        if until > x and step.activation_bytes:
            height = 8 * step.activation_bytes
            parts.append(_rect(x, base - height, until - x, height, GREY, stroke="none"))
            parts.append(_text((x + until) / 2 - 3, base - 2, str(step.activation_bytes), size=9))
    return [*parts, _text(8, base - 2, "holds", size=11)]


def _span(span: Span, left: float, scale: float, y: float) -> str:
    x, width = left + scale * span.begin_s, scale * (span.end_s - span.begin_s)
    forward = span.action.op is Op.F
    name = f"{span.action.op.value}{span.action.microbatch}"
    return _rect(x, y, width, 30, BLUE if forward else ORANGE) + _text(x + width / 2 - 8, y + 19, name)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="13" fill="{INK}">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0L10 5L0 10z" fill="context-stroke"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _box(x: float, y: float, width: float, height: float, name: str, below: str, colour: str) -> str:
    middle = x + width / 2
    return (
        _rect(x, y, width, height, colour)
        + _text(middle, y + height / 2 - 3, name, weight="bold", anchor="middle")
        + _text(middle, y + height / 2 + 14, below, size=11, anchor="middle")
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, stroke: str = INK) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{stroke}" stroke-width="0.6"/>'


def _text(x: float, y: float, text: str, *, size: int = 13, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{text}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float, colour: str = INK, width: float = 1.5) -> str:
    return (
        f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="{width:g}" fill="none" marker-end="url(#tip)"/>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, dashes: str) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{INK}" stroke-dasharray="{dashes}"/>'


def _bracket(x: float, y: float, to_y: float, name: str, *, right: bool = False) -> str:
    tick = -6 if right else 6
    path = f'<path d="M{x + tick:g} {y:g}L{x:g} {y:g}L{x:g} {to_y:g}L{x + tick:g} {to_y:g}" stroke="{INK}" fill="none"/>'
    return path + _text(x + 6 if right else x - 6, (y + to_y) / 2 + 4, name, anchor="start" if right else "end")


if __name__ == "__main__":
    for name, figure in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(figure(), encoding="utf-8")
