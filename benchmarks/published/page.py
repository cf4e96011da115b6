"""docs/published.md: all claims in a table, and a section for each that has figures of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published import balance_claims, order_claims, other_claims
from benchmarks.published.breadth_first import BREADTH_FIRST
from benchmarks.published.choices import CHOICES
from benchmarks.published.claim import COMMAND, Claim, line, section
from benchmarks.tables import table

PAGE = Path(__file__).parents[2] / "docs" / "published.md"

CLAIMS = (
    balance_claims.BPIPE,
    balance_claims.MEMORY,
    balance_claims.HUANG,
    balance_claims.SLOW_LINKS,
    balance_claims.PIPEOFFLOAD,
    BREADTH_FIRST,
    order_claims.BITPIPE,
    order_claims.TERAPIPE,
    order_claims.SEQ_1F1B,
    order_claims.ZERO_BUBBLE,
    order_claims.V_SHAPES,
    order_claims.LONG_CONTEXT,
    order_claims.DUALPIPE,
    other_claims.PIPEFILL,
    other_claims.SWARM,
    other_claims.LOCAL_LEARNING,
    other_claims.VOCABULARY,
    CHOICES,
)

COLUMNS = ("claim", "source", "how bpipe shows it", "what bpipe shows", "command")

HEAD = f"""# What is published, and what bpipe's plans show of it

Written by `{COMMAND} --write`; no figure of bpipe's in here was typed by hand, and
`tests/test_published_page.py` compares the page with the functions that it comes from. Each command prints its part of this page,
in seconds and without torch; run it in a checkout, with `.venv/bin/python`.

The figures of others were measured on GPUs that are not here. bpipe simulates its own plans of the same schedules: the plan that is
verified and runs, on a cost model of computations, bytes and links. Where a claim needs a number that its source does not give,
such as a stage's efficiency, the simulation is solved for it: the page says which number would make the claim true. Steps are
given as ratios. The second column says what was read of each source; where only an abstract could be read, the setting is an
assumption that the section states.
"""


def section_of(claim: Claim) -> str:
    """Return a claim's own section, or its line where it has none."""
    return "\n".join(section(claim)) or "\n".join(table(COLUMNS, [line(claim)]))


def page() -> str:
    """Return the whole page."""
    overview = "\n".join(table(COLUMNS, [line(claim) for claim in CLAIMS]))
    sections = ["\n".join(section(claim)) for claim in CLAIMS]
    return "\n".join([HEAD, overview, "", *filter(None, sections)])
