"""The plan: the actions of every rank, their order, and their memory. The only description of a schedule."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bpipe.errors import BPipeError
from bpipe.plan import grid, text
from bpipe.plan.plan_data import PlanData, looking_up

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanData):
    """A complete schedule: it is verified, executed, drawn and simulated without changes.

    Args:
        name: the rule that made it.
        flow: what is computed, who needs it, and on which stages and ranks it runs.
        actions: one list per rank, the compute lane: forwards, backwards, transfers and their completions.
        served: one list per rank, the acceptor's lane: the actions for one peer form a chain, independent of the computations.
        slots: the budget of each rank in microbatches of one stage, or in slices of one; None for no budget.
        sizes: the bytes of a microbatch, or of a slice; None if only slots are counted: numbers of bytes then raise a PlanError.
        budgets: the budget of each rank in bytes, static ones included; None for no budget. Needs `sizes`.
        overlapped: the forwards, by stage and unit, that run side by side with the backward that follows them in their lane, of
            another microbatch: such a pair gets all its inputs before it begins, and sends its results when both have ended. It
            is written as torch writes it, `(0F7;7B3)OVERLAP_F_B`.

    Example:
        >>> from bpipe.schedules import build
        >>> build("balanced_1f1b", num_stages=4, num_microbatches=8).peak_slots
        (3, 3, 2, 3)
    """

    def fingerprint(self) -> str:
        """Return a short hash of everything in the plan, equal on two ranks exactly when they will run the same plan."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:32]

    def to_text(self) -> str:
        """Write the plan as lines that `Plan.from_text` reads back unchanged."""
        return text.to_text(self)

    @classmethod
    def from_text(cls, lines: str) -> Plan:
        """Read the text of `to_text`.

        Raises:
            PlanError: the text is not a plan. Call `verify` to check whether the plan is sound.
        """
        return text.from_text(lines, cls)

    def to_csv(self, *, send_waits: bool = False) -> str:
        """Write the compute lane as torch.distributed.pipelining's `compute_comms` CSV: one row per rank.

        Args:
            send_waits: whether to write where a send's memory is given back: torch 2.15 and newer need it, older ones refuse it.

        Raises:
            PlanError: the plan evicts, recomputes or computes in pieces, which that format cannot express; `to_text` can.
        """
        return text.to_csv(self, send_waits=send_waits)

    def __repr__(self) -> str:
        try:
            return f"Plan({grid.short_head(self)})"
        except (ArithmeticError, BPipeError, LookupError, TypeError, ValueError):  # one that breaks rules
            return f"Plan({self.name!r}, which does not hold together: verify() shows where)"

    def __str__(self) -> str:
        with looking_up(self):
            return grid.draw(self)
