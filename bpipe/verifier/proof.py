"""Verify a plan before the first transfer: a table of rules, and one error with every violation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import MESSAGES, SHARDING, Action, Op
from bpipe.plan.grid import excerpt
from bpipe.plan.meter import SLOTS, Meter, occupancy
from bpipe.plan.plan import Plan
from bpipe.plan.text import wrong_with_name
from bpipe.verifier.order_rules import ordered, overlapped, recomputed, sharded, sums
from bpipe.verifier.plan_rules import RULES_OF_ALL
from bpipe.verifier.presence_rules import EXCHANGE, IN_PARTS, belongs, complete, whole
from bpipe.verifier.rank_index import Finding, Place, RankIndex, Rule

__all__ = ["Violation", "verify"]

MOST_SHOWN = 20


def affordable(own: RankIndex) -> Iterator[Finding]:
    """Check that a rank never occupies more than its budgets of slots and of bytes, buffers for remote activations included."""
    plan, rank = own.plan, own.rank
    yield from _within(own, SLOTS, sum(map(len, plan.remote_buffers(rank).values())), plan.slots[rank], "slots")
    if plan.sizes is not None and plan.budgets is not None:
        yield from _within(own, plan.meter(), plan.idle_bytes(rank), plan.budgets[rank], "bytes")


def _within(own: RankIndex, meter: Meter, idle: int, budget: int | None, unit: str) -> Iterator[Finding]:
    if budget is None:
        return
    rank, limit = own.rank, budget - idle
    if max(occupancy(own.plan.actions[rank], meter), default=limit) > limit:
        over = next((i, live) for i, live in enumerate(occupancy(own.plan.actions[rank], meter)) if live > limit)
        yield (
            own.place(over[0]),
            f"rank {rank} occupies {over[1]} {unit} of its own and {idle} for remote activations and static bytes, over its "
            f"budget of {budget}",
        )
    elif limit < 0:
        yield None, f"rank {rank} reserves {idle} {unit} for remote activations and static bytes, over its budget of {budget}"


RULES_OF_A_RANK: dict[str, Rule] = {
    "belongs": belongs,
    "complete": complete,
    "ordered": ordered,
    "whole": whole,
    "overlapped": overlapped,
    "sharded": sharded,
    "sums": sums,
    "recomputed": recomputed,
    "affordable": affordable,
}


class Violation(NamedTuple):
    """A violation of a rule by a plan: the rule, the place, and a description."""

    rule: str
    place: Place | None
    text: str


def verify(plan: Plan) -> None:
    """Prove that a plan is complete, in order and free of deadlock, with its messages matched and its memory within budget.

    It takes a few microseconds per action: the plan of 64 stages and 1024 microbatches with evictions has 750,000 of them.

    Raises:
        PlanError: every violation of every rule (the first 20 in full), with the place of the first one.

    Example:
        >>> from bpipe.schedules import build
        >>> text = build("1f1b", 2, 2).to_text()
        >>> verify(Plan.from_text(text))
        >>> try:
        ...     verify(Plan.from_text(text.replace("1F0 1RECV_F1 1B0", "1B0 1RECV_F1 1F0")))
        ... except PlanError as error:
        ...     print(str(error).splitlines()[0])
        plan '1f1b' breaks 1 rule: 1B0 stands before 1F0
    """
    violations = sorted(violations_of(plan), key=lambda violation: _TURN[violation.rule])
    if violations:
        lines = [f"plan {plan.name!r} breaks {len(violations)} rule{'s' * (len(violations) > 1)}: {violations[0].text}"]
        lines += [f"  {v.rule}: {_at(v.place)}{v.text}" for v in violations[:MOST_SHOWN]]
        lines += [f"  ... and {len(violations) - MOST_SHOWN} more"] * (len(violations) > MOST_SHOWN)
        place = next((v.place for v in violations if v.place is not None), None)
        if place is not None:
            lines += ["", excerpt(plan, *place)]
        raise PlanError("\n".join(lines))


def violations_of(plan: Plan) -> Iterator[Violation]:
    """Yield every violation of every rule.

    The rules that involve several ranks are checked only if each rank is complete by itself, and all only if the shape is sound.
    """
    shape = [Violation("shape", None, text) for text in _shape(plan)]
    yield from shape
    if shape:
        return
    violations: list[Violation] = []
    held: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for stage, rank in enumerate(plan.stage_ranks):
        held[rank].append(stage)
    for rank, stages in enumerate(held):
        own = RankIndex(plan, rank, stages)
        if _names_others(own):
            yield from (Violation("shape", place, text) for place, text in _outside(plan))
            return
        violations += (Violation(name, *found) for name, rule in RULES_OF_A_RANK.items() for found in rule(own))
    yield from violations
    if not any(violation.rule in ("belongs", "complete", "overlapped") for violation in violations):
        for name, whole in RULES_OF_ALL.items():
            yield from (Violation(name, place, text) for place, text in whole(plan))


def _at(place: Place | None) -> str:
    return "" if place is None else f"rank {place[0]}, {'served' if place[1] else 'action'} {place[2]}: "


def _shape(plan: Plan) -> Iterator[str]:
    p, ranks, flow = plan.num_stages, range(plan.num_ranks), plan.flow
    if wrong := wrong_with_name(plan.name):
        yield wrong
    if wrong := flow.problem:
        yield wrong
        return
    count = sum(map(len, plan.actions))
    if 2 * count < len(flow.routes) * plan.num_units:  # far from complete: the rules need not list what is missing, one by one
        yield f"{count} actions cannot run {p} stages and {_microbatches(plan)}"
    if len(plan.served) != plan.num_ranks or len(plan.slots) != plan.num_ranks:
        yield f"{plan.num_ranks} compute lanes, {len(plan.served)} served, {len(plan.slots)} budgets"
    if plan.sizes is not None and (len(plan.sizes.stages), len(plan.sizes.static)) != (p, plan.num_ranks):
        yield f"sizes of {len(plan.sizes.stages)} stages and {len(plan.sizes.static)} ranks, for {p} and {plan.num_ranks}"
    elif plan.sizes is not None and (wrong := plan.sizes.wrong_with(plan.units)):
        yield wrong
    for stage, unit in sorted(plan.overlapped):
        if not (0 <= stage < p and 0 <= unit < plan.num_units):
            yield f"{plan.show(Action(Op.F, stage, unit))}, a forward of a pair, is outside {p} stages and {_microbatches(plan)}"
    if plan.budgets is not None and (plan.sizes is None or len(plan.budgets) != plan.num_ranks):
        yield f"{len(plan.budgets)} budgets in bytes need sizes, and one for each of {plan.num_ranks} ranks"
    for stage, rank in enumerate(plan.stage_ranks):
        if rank not in ranks:
            yield f"stage {stage} is on rank {rank}, but the ranks are 0 to {plan.num_ranks - 1}"


def _microbatches(plan: Plan) -> str:
    return f"{plan.num_microbatches} microbatches" + plan.units.parts


def _names_others(own: RankIndex) -> bool:
    """Return whether a rank names stages, microbatches or parts that do not exist, as `_outside` tells one by one."""
    plan, units = own.plan, set(range(own.plan.num_units))
    return any(
        not (0 <= stage < plan.num_stages and found.keys() <= units)
        or not 0 <= part <= _most_parts(plan, op, stage)
        or (op in SHARDING and any(found))
        for (op, stage, part), found in own.at.items()
    )


NAMING_STAGES = MESSAGES | EXCHANGE  # operations whose part is a stage


def _most_parts(plan: Plan, op: Op, stage: int) -> int:
    """Return the highest part that an action may name."""
    return plan.num_stages if op in NAMING_STAGES else plan.num_parts(stage) if op in IN_PARTS else 0


def _outside(plan: Plan) -> Iterator[tuple[Place, str]]:
    """Yield actions that name stages, microbatches or parts that do not exist."""
    p, num_units = plan.num_stages, plan.num_units
    for served, lanes in ((False, plan.actions), (True, plan.served)):
        for rank, lane in enumerate(lanes):
            for position, (op, stage, microbatch, part, _) in enumerate(lane):
                if not (0 <= stage < p and 0 <= microbatch < num_units):
                    yield (rank, served, position), f"{plan.show(lane[position])} is outside {p} stages and {_microbatches(plan)}"
                elif not 0 <= part <= _most_parts(plan, op, stage):
                    what = f"a part that does not exist: a microbatch of this stage has {plan.num_parts(stage)}"
                    what = f"a stage that does not exist: there are {p}" if op in NAMING_STAGES else what
                    yield (rank, served, position), f"{plan.show(lane[position])} names {what}"
                elif microbatch and op in SHARDING:
                    yield (
                        (rank, served, position),
                        f"{lane[position]} concerns a whole stage but names microbatch {microbatch}",
                    )


_TURN = {rule: turn for turn, rule in enumerate(("shape", *RULES_OF_A_RANK, *RULES_OF_ALL))}
