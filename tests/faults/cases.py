"""The fault suite's cases, by name."""

from __future__ import annotations

from tests.faults import disagreements, filling, locally, misuse, pairing, processes, raises, works
from tests.faults.case import Case

GROUPS: dict[str, list[Case]] = {
    "Errors in the user's code": raises.CASES,
    "Processes that end, stop or are slow": processes.CASES,
    "Ranks that disagree": disagreements.CASES,
    "Calls that do not fit together": misuse.CASES,
    "In a fill job": filling.CASES,
    "In a pair of a forward and a backward": pairing.CASES,
    "In local learning": locally.CASES,
    "What looks like a fault and works": works.CASES,
}

CASES = {case.name: case for cases in GROUPS.values() for case in cases}
