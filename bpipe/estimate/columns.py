"""Rows of text, as lines with aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__: list[str] = []


def columns(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Return a line for each row; the columns that are `numbers` are aligned to the right.

    Example:
        >>> columns([("rank", "step"), ("0", "12 ms")], numbers=[1])
        ['rank   step', '0     12 ms']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    justify = [str.rjust if at in numbers else str.ljust for at in range(len(widths))]
    return ["  ".join(how(cell, width) for how, cell, width in zip(justify, row, widths)).rstrip() for row in rows]
