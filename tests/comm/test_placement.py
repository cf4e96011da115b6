"""Pairs of stages share a node, in the closed form of FACTS.md."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe import pair_adjacent, place
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


class Row:
    """What `place` asks of a mesh: a row of processes, of which this is one."""

    ndim = 1

    def __init__(self, processes: Sequence[int], here: int) -> None:
        self.mesh, self._here = torch.tensor(processes), here

    def get_local_rank(self) -> int:
        return [*self.mesh].index(self._here)

    def get_group(self) -> str:
        return "the group"


def indices(processes: Sequence[int], **options: Any) -> list[int]:
    return [place(Row(processes, here), **options).index for here in processes]


@pytest.mark.parametrize(
    ("processes", "ranks_per_node", "expected"),
    [
        (range(8), 4, pair_adjacent(8, 4)),
        (range(8), 8, [*range(8)]),
        (range(8), None, [*range(8)]),
        (range(1, 16, 2), 8, pair_adjacent(8, 4)),  # every second process: tensor ranks between them
        (range(8, 16), 4, pair_adjacent(8, 4)),  # the second of two pipelines
        (range(0, 32, 4), 8, pair_adjacent(8, 2)),
    ],
)
def test_pairs_share_a_node(processes: Sequence[int], ranks_per_node: int | None, expected: list[int]) -> None:
    assert indices(processes, ranks_per_node=ranks_per_node) == expected


@pytest.mark.parametrize(("processes", "ranks_per_node"), [(range(4), 1), (range(6), 3), (range(6), 4), ([0, 2, 1, 3], 2)])
def test_pairs_that_cannot_share_a_node(processes: Sequence[int], ranks_per_node: int, caplog: pytest.LogCaptureFixture) -> None:
    assert indices(processes, ranks_per_node=ranks_per_node) == [*range(len(processes))]
    assert "pairs of ranks x and p-1-x cannot share a node" in caplog.text


def test_torchrun_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert indices(range(8)) == pair_adjacent(8, 4)


@pytest.mark.parametrize(
    ("rule", "stages_per_rank", "expected"),
    [("1f1b", None, (1,)), ("interleaved_1f1b", None, (1, 5)), ("interleaved_1f1b", 3, (1, 5, 9)), ("zbv", None, (1, 6))],
)
def test_stages_of_a_rank(rule: str, stages_per_rank: int | None, expected: tuple[int, ...]) -> None:
    found = place(Row(range(4), 1), rule=rule, stages_per_rank=stages_per_rank)
    assert (found.stages, found.num_stages, found.num_ranks) == (expected, 4 * len(expected), 4)
    assert found.group == "the group"


def test_places_that_there_are_not() -> None:
    with pytest.raises(ConfigurationError, match="1f1b takes one stage per rank"):
        place(Row(range(4), 1), stages_per_rank=2)
    with pytest.raises(ConfigurationError, match="nothing"):
        place(Row(range(4), 1), rule="nothing")
    two = SimpleNamespace(ndim=2)
    with pytest.raises(ConfigurationError, match=r"a pipeline needs a mesh of one dimension, .* such as mesh\['pp'\]"):
        place(two)
