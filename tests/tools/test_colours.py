"""The colours are told apart in grey print and by the colour-blind."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from bpipe.schedules import Op
from bpipe.tools.colours import COLOURS, HOST_EVICT, HOST_LOAD, ink, lighten, luminance, shade

ROLES = (Op.F, Op.B, Op.I, Op.W, Op.EVICT, Op.LOAD, Op.ACCEPT, Op.RETURN, HOST_EVICT, HOST_LOAD)

# What is left of a colour's linear red, green and blue: Machado, Oliveira and Fernandes 2009, severity 1.
SIGHT = {
    "full": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)

Vector = tuple[float, ...]


def linear(colour: str) -> Vector:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def times(matrix: tuple[Vector, ...], vector: Vector) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector)) for row in matrix)


def lab(rgb: Vector) -> Vector:
    """CIELAB, in which a distance of 2 is just seen and one of 10 at a glance."""
    ratios = [value / white for value, white in zip(times(TO_XYZ, tuple(min(max(part, 0.0), 1.0) for part in rgb)), WHITE)]
    x, y, z = (ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116 for ratio in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_every_two_roles_differ_at_a_glance(sight: str) -> None:
    seen = {op: lab(times(SIGHT[sight], linear(COLOURS[op]))) for op in ROLES}
    distances = {(a, b): sum((u - v) ** 2 for u, v in zip(seen[a], seen[b])) ** 0.5 for a, b in combinations(ROLES, 2)}
    assert min(distances.values()) > 15, min(distances, key=lambda pair: distances[pair])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_forward_has_the_grey_of_a_backward(stages: int) -> None:
    forward, backward = ([luminance(shade(op, place, stages)) for place in range(stages)] for op in (Op.F, Op.B))
    assert min(forward) - max(backward) > 0.1


def test_the_stages_of_a_rank_differ() -> None:
    shades = [luminance(shade(Op.B, place, 4)) for place in range(4)]
    assert shades == sorted(shades) and min(b - a for a, b in pairwise(shades)) > 0.03


@pytest.mark.parametrize("role", ROLES)
def test_what_is_written_on_a_colour_can_be_read(role: str) -> None:
    low, high = sorted((luminance(COLOURS[role]), luminance(ink(COLOURS[role]))))
    assert (high + 0.05) / (low + 0.05) > 4.5  # WCAG 2.2, level AA


def test_luminance_is_that_of_the_standard() -> None:
    assert (luminance("#000000"), luminance("#ffffff")) == pytest.approx((0, 1))
    assert luminance("#ff0000") == pytest.approx(0.2126)
    assert (lighten("#123456", 0), lighten("#123456", 1)) == ("#123456", "#ffffff")
