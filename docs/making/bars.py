"""A chart of bars as SVG, in the colours of the page around it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bars"]

LEFT, STEP, BAR, RIGHT = 70, 26, 18, 60
WIDTH = 640


def bars(values: Sequence[float], others: Sequence[float], name: str, other: str) -> str:
    """Return bars, one for each rank, with the other schedule's as outlines behind them.

    Example:
        >>> "rank 1" in bars([3.0, 2.0], [4.0, 1.0], "balanced_1f1b", "1f1b")
        True
    """
    scale = (WIDTH - LEFT - RIGHT) / max(*values, *others)
    lines = [_of_rank(rank, value, beside, scale) for rank, (value, beside) in enumerate(zip(values, others, strict=True))]
    height = STEP * (len(values) + 1)
    return "\n".join(
        [
            f'<svg class="bars" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="peak of each rank: {name} beside {other}">',
            *lines,
            f'<rect x="{LEFT}" y="{height - BAR}" width="12" height="12" class="own"/>',
            f'<text x="{LEFT + 18}" y="{height - BAR + 11}">{name}</text>',
            f'<rect x="{LEFT + 200}" y="{height - BAR}" width="12" height="12" class="other"/>',
            f'<text x="{LEFT + 218}" y="{height - BAR + 11}">{other}</text>',
            "</svg>",
        ]
    )


def _of_rank(rank: int, value: float, other: float, scale: float) -> str:
    y = STEP * rank
    return (
        f'<text x="0" y="{y + 14}">rank {rank}</text>'
        f'<rect x="{LEFT}" y="{y + 1}" width="{value * scale:.1f}" height="{BAR}" class="own"/>'
        f'<rect x="{LEFT}" y="{y + 1}" width="{other * scale:.1f}" height="{BAR}" class="other"/>'
        f'<text x="{LEFT + max(value, other) * scale + 8:.1f}" y="{y + 14}">{value:.3g}</text>'
    )
