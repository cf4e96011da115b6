"""A rank's report to the others before they make one plan: its stages' sizes, its static bytes and its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from bpipe.comm.wire.codec import decode, encode
from bpipe.engine.run import Run
from bpipe.errors import CommError
from bpipe.plan.sizes import Amount, StageSizes

__all__: list[str] = []


class RankSizes(NamedTuple):
    """What a step takes on this rank: its stages' sizes by slice, the gradients that each exchanges, and what it holds besides."""

    stages: Mapping[int, tuple[StageSizes, ...]] = {}
    exchanged: Mapping[int, tuple[Amount, ...]] = {}
    held_bytes: int = 0  # that microbatches have saved, and others own, too
    returned_bytes: int = 0  # of outputs and losses

    @classmethod
    def of(cls, run: Run, returned_bytes: int) -> RankSizes:
        """Return what a step has taken whose actions have all run."""
        return cls(run.evictions.settled(), run.exchanges.exchanged, run.evictions.ledger.held_bytes, returned_bytes)


class Report(NamedTuple):
    """The report of one rank."""

    rank: int  # its number in the plan
    stages: Mapping[int, tuple[StageSizes, ...]]  # the bytes of each slice of a microbatch, by stage
    static: int = 0  # bytes of the rank besides microbatches
    budget: int | None = None  # the bytes that it may use; None for no limit, or for as low as possible
    refusal: str = ""  # why it cannot go on; empty if it can
    states: int = 0  # the bytes of optimizer states among the static bytes

    def pack(self) -> bytes:
        return encode(self)

    @classmethod
    def unpack(cls, data: bytes, sender: int) -> Report:
        """Read what `pack` wrote."""
        try:
            report = decode(cls, data, "report", math.inf)
            numbers = (report.rank, report.static, report.budget or 0, report.states)
            if not all(0 <= number < 2**63 for number in numbers):
                raise CommError(f"{numbers}")
            return report
        except CommError as error:
            raise CommError(f"rank {sender} sent an unreadable report of its sizes: {error!s:.200}") from error
