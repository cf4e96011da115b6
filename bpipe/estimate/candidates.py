"""The plans that could run: schedules with one stage per rank and whole backwards, plain and balanced.

To add a schedule, name it in `SCHEDULES`; to add another place for activations (the host's memory, say), add it to those in
`variants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bpipe.errors import PlanError
from bpipe.plan.destinations import mirror_pairs
from bpipe.schedules import Op, Placement, Plan, build
from bpipe.schedules.registry import added_rules

__all__ = ["Variant", "roomier", "variants"]


SLICED = "seq_1f1b"
SCHEDULES = ("1f1b", "gpipe", "balanced_1f1b")  # the first's name is kept where several are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A schedule, and where it moves activations for which a rank has no memory."""

    schedule: str  # its name for `build`
    destination: str  # "" if activations stay, "pair" if they move to rank p-1-x
    plan: Plan  # the finished plan

    @property
    def slots(self) -> int | None:
        """The budget of each rank in microbatches or slices of one stage, for `build(schedule, ..., slots=slots)`."""
        budgets = [slots for slots in self.plan.slots if slots is not None]
        return max(budgets) if self.destination and budgets else None


def variants(num_stages: int, num_microbatches: int, slices: int = 1) -> Iterator[Variant]:
    """Yield each different way to run `num_microbatches` on `num_stages` ranks, balanced ones with the least memory.

    With several slices, Seq1F1B comes after those of whole microbatches.

    Example:
        >>> [(one.schedule, one.destination) for one in variants(4, 8)]
        [('1f1b', ''), ('1f1b', 'pair'), ('gpipe', '')]
    """
    seen = set()
    whole = [(schedule, 1) for schedule in (*SCHEDULES, *added(num_stages, num_microbatches))]
    for schedule, k in (*whole, *[(SLICED, slices)] * (slices > 1)):
        plain = build(schedule, num_stages, num_microbatches, slices=k)
        if evicts(plain):  # it is another schedule, balanced
            continue
        for destination, plan in (("", plain), ("pair", _to_pairs(schedule, plain))):
            if plan is not None and (key := (plan.stage_ranks, plan.actions, plan.served)) not in seen:
                seen.add(key)
                yield Variant(schedule=schedule, destination=destination, plan=plan)


def added(num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Return the names of registered schedules that can be ranked too, as `SCHEDULES` are: one stage per rank, whole backwards.

    A schedule whose gradients stay in their stage learns something else, and is no choice beside the others.
    """
    whole = {Op.F, Op.B}
    return tuple(
        rule.name
        for rule in added_rules()
        if rule.placement is Placement.ONE
        and not rule.local
        and rule.allows(num_stages, num_microbatches)
        and {action.op for lane in rule.order(num_stages, num_microbatches, 1) for action in lane} <= whole
    )


def roomier(variant: Variant) -> tuple[Variant, ...]:
    """Return a variant with larger budgets, which move less, starting from the largest that still moves anything.

    Example:
        >>> [one.slots for one in roomier(next(one for one in variants(8, 16) if one.destination))]
        [7, 6]
    """
    found: list[Variant] = []
    plan, slots = variant.plan, variant.slots or 0
    while slots and evicts(plan):
        slots += 1
        try:
            plan = build(variant.schedule, plan.num_ranks, plan.num_microbatches, slots=slots, slices=plan.slices)
        except PlanError:  # this budget cannot be met
            continue
        found.append(replace(variant, plan=plan))
    return tuple(reversed(found[:-1]))


def evicts(plan: Plan) -> bool:
    """Return whether any activations move."""
    return any(plan.served)


def _to_pairs(schedule: str, plain: Plan) -> Plan | None:
    """Return the plan with the smallest budget that works, if it is below what the plain schedule occupies.

    A pair cannot get below half of the slots that its ranks occupy together, plus one slot for the transfer in flight.
    """
    peaks = plain.peak_slots
    least = max((peaks[rank] + peaks[pair] + 2) // 2 for rank, pair in enumerate(mirror_pairs(len(peaks))))
    for slots in range(least, max(peaks)):
        try:
            return build(schedule, plain.num_ranks, plain.num_microbatches, slots=slots, slices=plain.slices)
        except PlanError:  # this budget cannot be met
            continue
    return None
