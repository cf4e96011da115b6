"""A rank's report to the others before they make one plan: its stages' sizes, its static bytes and its budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from bpipe.errors import BPipeError, CommError, printable
from bpipe.plan.sizes import SkipSizes, StageSizes

__all__: list[str] = []


class Report(NamedTuple):
    """The report of one rank."""

    rank: int  # its number in the plan
    stages: Mapping[int, tuple[StageSizes, ...]]  # the bytes of each slice of a microbatch, by stage
    static: int = 0  # bytes of the rank besides microbatches
    budget: int | None = None  # the bytes that it may use; None for no limit, or for as low as possible
    refusal: str = ""  # why it cannot go on; empty if it can
    states: int = 0  # the bytes of optimizer states among the static bytes

    def pack(self) -> bytes:
        stages = {stage: [asdict(sizes) for sizes in slices] for stage, slices in self.stages.items()}
        return json.dumps({**self._asdict(), "stages": stages}).encode()

    @classmethod
    def unpack(cls, data: bytes, sender: int) -> Report:
        """Read what `pack` wrote."""
        try:
            fields = json.loads(data)
            stages = {
                int(stage): tuple(_sizes(numbers) for numbers in slices)
                for stage, slices in fields.pop("stages").items()
            }
            report = cls(stages=stages, **{**fields, "refusal": printable(fields["refusal"])})
            numbers = (report.rank, report.static, report.budget or 0, report.states)
            if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
                raise ValueError(f"{numbers}")
            return report
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BPipeError) as error:
            raise CommError(f"rank {sender} sent an unreadable report of its sizes: {printable(str(error))[:200]}") from error


def _sizes(numbers: Mapping[str, Any]) -> StageSizes:
    skips = tuple(SkipSizes(*skip) for skip in numbers["skips"])
    return StageSizes(**{**numbers, "parts": tuple(numbers["parts"]), "skips": skips})
