"""The plans that could run: schedules with one stage per rank and whole backwards, plain and balanced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property

from bpipe.errors import PlanError
from bpipe.estimate.long_contexts import SLICED
from bpipe.plan.destinations import mirror_pairs
from bpipe.schedules import Op, Placement, Plan, build
from bpipe.schedules.registry import added_rules

__all__ = ["Variants", "variants"]

SCHEDULES = ("1f1b", "gpipe")  # the first's name is kept where several are the same


class Variants:
    """A schedule's finished plans: plain, and balanced within fewer slots than that occupies, where activations move to rank p-1-x.

    Example:
        >>> one = Variants(build("1f1b", num_stages=8, num_microbatches=16))
        >>> max(one.plain.peak_slots), max(one.tight.slots), [max(plan.slots) for plan in one.roomier]
        (8, 5, [7, 6])
    """

    def __init__(self, plain: Plan) -> None:
        self.plain = plain

    @cached_property
    def tight(self) -> Plan | None:
        """The plan with the smallest budget that works; None if there is none below what the plain one occupies.

        A pair cannot get below half of the slots that its ranks occupy together, plus one slot for the transfer in flight.
        """
        peaks = self.plain.peak_slots
        least = max((peaks[rank] + peaks[pair] + 2) // 2 for rank, pair in enumerate(mirror_pairs(len(peaks))))
        return next(self._within(range(least, max(peaks))), None)

    @cached_property
    def roomier(self) -> tuple[Plan, ...]:
        """The plans with larger budgets than the tight one, starting from the largest that still moves anything."""
        return tuple(self._within(range(max(self.plain.peak_slots) - 1, self.tight.slots[0] or 0, -1) if self.tight else ()))

    @property
    def plain_and_tight(self) -> tuple[Plan, ...]:
        """The plans that need most and least memory."""
        return (self.plain,) if self.tight is None else (self.plain, self.tight)

    def _within(self, budgets: Iterable[int]) -> Iterator[Plan]:
        """Yield the plans with these budgets, but for those that cannot be met."""
        plain = self.plain
        for slots in budgets:
            with suppress(PlanError):
                yield build(plain.name, plain.num_ranks, plain.num_microbatches, slots=slots, slices=plain.slices)


def variants(num_stages: int, num_microbatches: int, slices: int = 1) -> tuple[Variants, ...]:
    """Return the different schedules that run `num_microbatches` on `num_stages` ranks; with several slices, Seq1F1B is the last.

    Registered schedules are ranked, too, if they have one stage per rank and whole backwards. One whose gradients stay in their
    stage learns something else, and is no choice beside the others; one that moves activations is another schedule, balanced.

    Example:
        >>> [(plan.name, plan.slots[0]) for one in variants(4, 8) for plan in one.plain_and_tight]
        [('1f1b', None), ('1f1b', 3), ('gpipe', None)]
    """
    sizes = num_stages, num_microbatches
    able = [one for one in added_rules() if one.placement is Placement.ONE and not one.local and one.allows(*sizes)]
    added = [one.name for one in able if {action.op for lane in one.order(*sizes, 1) for action in lane} <= {Op.F, Op.B}]
    found: dict[object, Variants] = {}
    for schedule, k in [*((name, 1) for name in (*SCHEDULES, *added)), *[(SLICED, slices)] * (slices > 1)]:
        plain = build(schedule, *sizes, slices=k)
        if not any(plain.served):
            found.setdefault(plain.actions, Variants(plain))
    return tuple(found.values())
