"""The verdict of a check: passed, failed or not applicable, with its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

MOST_CHARACTERS = 600  # of a reason: the rest of a traceback does not help in a table
PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@%-]+)+[/\\]([\w.+@%-]+)")


class Outcome(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the page."""

    check: str  # what was checked, in a few words
    outcome: Outcome  # how it ended
    meaning: str = ""  # what it means that it passed
    reason: str = ""  # why it failed, or why it does not apply
    numbers: Mapping[str, Any] = field(default_factory=dict)  # what was measured; the ends of names say their units: `_bytes`, `_s`

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": self.outcome.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        return cls(**{**data, "outcome": Outcome(data["outcome"])})


def judged(check: str, meaning: str, problems: list[str], numbers: Mapping[str, Any]) -> Verdict:
    """Return a verdict that a check failed with the problems that were found, or passed if there are none."""
    outcome = Outcome.FAILED if problems else Outcome.PASSED
    return Verdict(check=check, outcome=outcome, meaning=meaning, reason=public("; ".join(problems)), numbers=numbers)


def not_applicable(check: str, reason: str, numbers: Mapping[str, Any] | None = None) -> Verdict:
    """Return a verdict that says why a check cannot be run here."""
    return Verdict(check=check, outcome=Outcome.NOT_APPLICABLE, reason=public(reason), numbers=numbers or {})


def failed(check: str, reason: str) -> Verdict:
    """Return a verdict that a check failed because it did not come to an end."""
    return Verdict(check=check, outcome=Outcome.FAILED, reason=public(reason))


def public(text: str) -> str:
    """Shorten a text to one line without the name of the machine and without folders, because strangers will read it.

    Example:
        >>> public("RuntimeError in /a/b/some.py:\\n  no memory")
        'RuntimeError in some.py: no memory'
    """
    import platform

    clean = PATH.sub(r"\1", " ".join(text.split()))
    name = platform.node()
    if name:
        clean = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "this machine", clean)
    return clean if len(clean) <= MOST_CHARACTERS else f"{clean[: MOST_CHARACTERS // 2]} ... {clean[-MOST_CHARACTERS // 2 :]}"
