"""The rules of the verifier, as a table."""

from __future__ import annotations

import re

from bpipe.verifier.plan_rules import RULES_OF_ALL
from bpipe.verifier.proof import RULES_OF_A_RANK

__all__ = ["table"]

SHAPE = "The numbers fit together: of stages, ranks, microbatches, lists, sizes and budgets."


def table() -> str:
    """Return a row for each rule that a plan must keep, with what its function says of itself."""
    rows = ["| rule | what holds | looks at |", "|---|---|---|", f"| shape | {SHAPE} | the whole plan |"]
    for rules, place in ((RULES_OF_A_RANK, "each rank"), (RULES_OF_ALL, "all ranks together")):
        rows += [f"| {name} | {_said(rule.__doc__ or '')} | {place} |" for name, rule in rules.items()]
    return "\n".join(rows)


def _said(docstring: str) -> str:
    """Return the first sentence of a docstring, `Check that`, as a statement."""
    sentence = re.sub(r"\s+", " ", docstring.strip().split("\n\n")[0]).removeprefix("Check that ")
    return sentence[:1].upper() + sentence[1:]
