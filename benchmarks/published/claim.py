"""A published claim, and what bpipe's plans show of it: told in a section of docs/published.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.tables import table

COMMAND = "python -m benchmarks.published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the simulated plans say of a claim.

    Args:
        brief: in a sentence, for the table of all claims.
        columns: the headings of the table of the claim's own section.
        rows: its cells; a claim without rows has no section of its own.
        text: what follows from the table.
    """

    brief: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure that somebody published.

    Args:
        name: for the command line.
        title: for the page.
        published: the claim, in words.
        source: where it stands, and whether it was read there.
        reach: measured, simulated, or out of reach, with the reason.
        assumed: the inputs of the simulation that the source does not give.
        show: builds the plans and simulates them.
    """

    name: str
    title: str
    published: str
    source: str
    reach: str
    show: Callable[[], Shown]
    assumed: str = ""

    @property
    def command(self) -> str:
        return f"`{COMMAND} {self.name}`"


@cache
def shown_of(claim: Claim) -> Shown:
    """Build a claim's plans and simulate them, once."""
    return claim.show()


def line(claim: Claim) -> list[str]:
    """Return the cells of a claim in the table of all claims."""
    return [f"{claim.title}: {claim.published}", claim.source, claim.reach, shown_of(claim).brief, claim.command]


def section(claim: Claim) -> Iterator[str]:
    """Yield the lines of a claim's own section, if its figures need a table."""
    shown = shown_of(claim)
    if shown.rows:
        yield from (f"## {claim.title}", "", f"Published: {claim.published}. Source: {claim.source}.", "")
        if claim.assumed:
            yield from (f"Assumed: {claim.assumed}", "")
        yield from table(shown.columns, shown.rows)
        yield from ("", shown.text, "", f"Shown by {claim.command}.", "")
