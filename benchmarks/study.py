"""A study: what is measured, kept as JSON beside its picture, and told in a table."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import bpipe
from benchmarks.intervals import Interval
from benchmarks.tables import table

RESULTS = Path(__file__).parent / "results"

Row = Mapping[str, Any]  # what a case gave


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that has to be reached.

    Args:
        what: the figure, in words.
        target: the most it may be, or the least where `is_least`.
        value: what was measured; a median of many has its interval.
        is_least: whether more is better.
        why: where it was not reached, the reason.
    """

    what: str
    target: float
    value: float | Interval
    is_least: bool = False
    why: str = ""

    @classmethod
    def of(cls, row: Row, key: str, what: str, target: float, **options: Any) -> Claim:
        """Claim what a row has under a key."""
        return cls(what, target, Interval.of(row, key), **options)

    @property
    def interval(self) -> Interval:
        """The value, with its ends."""
        return self.value if isinstance(self.value, Interval) else Interval(self.value, self.value, self.value)

    @property
    def verdict(self) -> str:
        """Whether the value reaches the target, or only its interval does."""
        median, low, high = self.interval
        value, best = (-median, -high) if self.is_least else (median, low)
        target = -self.target if self.is_least else self.target
        reached = "yes" if value <= target else "within the interval" if best <= target else "no"
        return f"{reached}: {self.why}" if reached == "no" and self.why else reached


def sizes(row: Row) -> str:
    """A case by the numbers p, m, k that it has."""
    return ", ".join(f"{key} = {row[key]}" for key in "pmk" if key in row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One question, and how it is answered.

    Args:
        name: of its files.
        title: the question.
        text: what was done, for a reader of the table.
        works: what is measured one after the other; each takes about as long.
        measure: measures one of them.
        columns: of the table: the key in a row, the heading and the format.
        claims: the figures that its rows have to reach.
        draw: a picture of its rows.
        name_of: a case in words, from its work or from one of its rows.
        needs: what it takes that is not here; empty where it can be measured.
    """

    name: str
    title: str
    text: str
    works: Sequence[Any]
    measure: Callable[[Any], Sequence[Row]]
    columns: Sequence[tuple[str, str, str]]
    claims: Callable[[Sequence[Row]], Sequence[Claim]]
    draw: Callable[[Sequence[Row]], Figure]
    name_of: Callable[[Row], str] = sizes
    needs: Callable[[], str] = str

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def run(self, advance: Callable[[str], None]) -> None:
        """Measure all cases, and keep what they gave.

        Args:
            advance: called with each case's name, before it is measured.
        """
        rows: list[Row] = []
        began = time.perf_counter()
        for work in self.works:
            advance(self.name_of(work._asdict()))
            rows.extend(self.measure(work))
        kept = {"study": self.name, **conditions(), "took_s": round(time.perf_counter() - began), "rows": rows}
        RESULTS.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def save_picture(self) -> None:
        """Draw what was kept, if anything was."""
        known = self.known()
        if known is not None:
            self.draw(known["rows"]).savefig(RESULTS / f"{self.name}.png", dpi=110)

    def known(self) -> dict[str, Any] | None:
        """What was kept of the latest run."""
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else None


def write_csv(name: str, rows: Iterable[Sequence[Any]]) -> None:
    """Keep a table in benchmarks/results, its heading first."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def conditions() -> dict[str, str]:
    """Where and with what something is measured."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores{gpu}",
        "versions": f"bpipe {bpipe.__version__} ({_commit()}), torch {torch.__version__}, Python {platform.python_version()}",
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit, and whether any code is not as it was there. Results of other runs are no code."""
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{commit}{'-dirty' if _git('status', '--porcelain', '--', '*.py') else ''}" if commit else "no git"


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def section(study: Study) -> Iterator[str]:
    """A study in RESULTS.md, line by line."""
    known = study.known()
    yield from (f"## {study.title}", "", study.text, "")
    if known is None:
        yield from (f"Not measured here: `make bench STUDIES={study.name}`.", "")
        return
    yield from (f"{known['date']}, {known['machine']}; {known['versions']}; took {known['took_s']} s.", "")
    yield from claims_table(study.claims(known["rows"]))
    yield from (f"![{study.title}](results/{study.name}.png)", "")
    rows = ([_cell(row.get(key), form) for key, _, form in study.columns] for row in known["rows"])
    yield from (*table([heading for _, heading, _ in study.columns], rows), "")


def claims_table(claims: Sequence[Claim]) -> Iterator[str]:
    """What had to be reached, and whether it was."""
    if claims:
        yield from (*table(("must reach", "measured (95% interval)", "reached"), map(_cells, claims)), "")


def _cells(claim: Claim) -> list[str]:
    bound = f"{'at least' if claim.is_least else 'at most'} {claim.target:.3f}"
    return [f"{claim.what}: {bound}", "{:.3f} ({:.3f} to {:.3f})".format(*claim.interval), claim.verdict]


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
