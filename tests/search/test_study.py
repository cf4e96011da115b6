"""The study of the search measures each table once, and sums up what was kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search_study import SMALL, TABLES, extend, known, measured, of_small, of_tables
from benchmarks.study import Row


def test_only_new_tables_are_measured(tmp_path: Path) -> None:
    path, seen = tmp_path / SMALL.name, list[int]()

    def measure(index: int) -> list[Row]:
        seen.append(index)
        over = 0.06 if index == 2 else 0.01
        return [{"index": index, "family": "V", "budget": 2, "proven": index != 1, "over_exact": over, "over_bound": 0.1}]

    extend(path, measure, range(2))
    extend(path, measure, range(4))
    assert seen == [0, 1, 2, 3]
    rows = of_small(known(path))
    assert [row["what"] for row in rows] == ["exactly: V", "exactly: all"]
    assert (rows[1]["cases"], rows[1]["proven"], rows[1]["near"], rows[1]["largest_over"]) == (4, 3, 0.75, 0.06)
    assert rows[1]["near_proven"] == pytest.approx(2 / 3)


def test_tables_are_summed_up(tmp_path: Path) -> None:
    path = tmp_path / TABLES.name
    rows = {
        0: {"p": 2, "named_fits": True, "found": True, "not_worse": True, "replays": True, "made": True, "gain": "0.2"},
        1: {"p": 2, "named_fits": True, "found": True, "not_worse": False, "replays": False, "made": False, "gain": "-0.1"},
        2: {"p": 4, "named_fits": False, "found": True, "not_worse": True, "replays": True, "made": True, "gain": ""},
        3: {"p": 4, "named_fits": False, "found": False, "not_worse": True},
    }
    extend(path, lambda index: [{"index": index, **rows[index]}], rows)
    two, four, every = of_tables(known(path))
    assert (two["what"], two["cases"], two["worse"], two["unlike"], two["made"]) == ("p = 2", 2, 1, 1, 0.5)
    assert two["median_gain"] == pytest.approx(0.05) and two["median_made"] == two["largest_gain"] == 0.2
    assert (four["cases"], four["worse"], four["unlike"], four["unnamed"], four["median_gain"]) == (2, 0, 0, 1, None)
    assert every["what"] == "all" and every["cases"] == 4 and every["gains"] == [0.2, -0.1]


def test_a_table_is_measured() -> None:
    (row,) = measured(3)
    assert row["found"] and row["not_worse"] and row["replays"] and float(row["gain"]) >= 0
