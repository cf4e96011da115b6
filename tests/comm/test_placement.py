"""Pairs of stages share a node, in the closed form of FACTS.md."""

from __future__ import annotations

import pytest

from bpipe import pair_adjacent
from bpipe.errors import ConfigurationError

SIZES = [(p, r) for p in range(2, 33) for r in range(2, p + 1) if p % r == 0 and (r % 2 == 0 or r == p)]


@pytest.mark.parametrize(("p", "r"), SIZES)
def test_every_stage_once_and_pairs_on_one_node(p: int, r: int) -> None:
    stages = pair_adjacent(p, r)
    assert sorted(stages) == list(range(p))
    node_of = {stage: rank // r for rank, stage in enumerate(stages)}
    assert all(node_of[stage] == node_of[p - 1 - stage] for stage in range(p))


@pytest.mark.parametrize(("p", "r"), [(p, r) for p, r in SIZES if r < p])
def test_formula(p: int, r: int) -> None:
    """With n nodes and q = p/(2n), node j holds stages jq..(j+1)q-1 and their mirrors."""
    n = p // r
    q = p // (2 * n)
    for j in range(n):
        early = set(range(j * q, (j + 1) * q))
        assert set(pair_adjacent(p, r)[j * r : (j + 1) * r]) == early | {p - 1 - stage for stage in early}


def test_sixteen_stages_on_two_nodes() -> None:
    assert pair_adjacent(16, 8) == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("p", "r", "message"),
    [
        (8, 3, "^8 stages do not fill nodes of 3 ranks"),
        (8, 16, "^8 stages do not fill nodes of 16 ranks"),
        (8, 0, "^8 stages do not fill nodes of 0 ranks"),
        (8, -2, "^8 stages do not fill nodes of -2 ranks"),
        (0, 2, "^0 stages do not fill nodes of 2 ranks"),
        (-4, 2, "^-4 stages do not fill nodes of 2 ranks"),
        (8, 1, "^a node of 1 ranks would split a pair"),
        (9, 3, "^a node of 3 ranks would split a pair"),
    ],
)
def test_what_cannot_be_placed(p: int, r: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pair_adjacent(p, r)
