"""Report what the ranks of a pipeline are doing, in words and as a grid, so that a user can find out why it is stuck."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from bpipe.comm.health.activity import WAITS, Activity, State, Status, action_at
from bpipe.plan.action import COMPUTE, SHARDING
from bpipe.plan.grid import where
from bpipe.plan.whereabouts import whereabouts
from bpipe.schedules import Action, Plan

__all__: list[str] = []

MOST_LOOKED_AT = 100_000  # actions, which takes some hundredths of a second
RELOADS = "peers to reload the activations it stores"


def report(own: Activity, statuses: Mapping[int, Status], size: int) -> str:
    """Describe each rank in a line, and draw the grid of those that are in this rank's step.

    Args:
        own: this rank's activity.
        statuses: the statuses of the ranks that answer, by rank of the group.
        size: how many ranks there are.
    """
    lines = [f"rank {rank} {_doing(own, statuses.get(rank))}" for rank in range(size)]
    return "\n".join(f"  {line}" for line in lines + _grid(own, statuses))


def _grid(own: Activity, statuses: Mapping[int, Status]) -> list[str]:
    plan = own.plan
    here = {s.rank: s.position for s in statuses.values() if s.state is State.RUNNING and s.step == own.step}
    if plan is None or not here or own.unit:  # ranks are a tick apart there
        return []
    silent = {rank for rank in own.group_ranks if rank not in statuses}
    return where(plan, here, [f"rank {rank}{' ?' * (rank in silent)}" for rank in own.group_ranks])


def _doing(own: Activity, status: Status | None) -> str:
    if status is None:
        return "does not answer"
    since, plan = f"{status.seconds:.1f} s", own.plan
    if status.filling:
        return f"has been in its fill job {status.filling} for {since}"
    if status.state is State.OUTSIDE:
        return f"has been in user code for {since}, between steps ({status.step} completed)"
    if status.state in (State.AGREEING, State.PREPARING):
        return f"has been preparing step {status.step} for {since}"
    if status.state is State.MEETING:
        return f"has waited {since} for the other ranks to begin step {status.step}"
    if status.state is State.SHARING:
        return f"has waited {since} for other replicas of its stage, in step {status.step}"
    if plan is None or (status.step != own.step and not own.unit):
        return f"has been in step {status.step} for {since}"
    served = "".join(_serving(own, plan, status.rank, *one) for one in status.serving)
    action = action_at(plan, status)
    step = f", in step {status.step}" if own.unit else ""
    return (f"has waited {since} for {RELOADS}" if action is None else _at(own, plan, status, action, since)) + step + served


def _at(own: Activity, plan: Plan, status: Status, action: Action, since: str) -> str:
    if action.op in WAITS:
        there = _whereabouts(plan, status, action)
        return f"has waited {since} in {action} for rank {own.group_rank(action.peer)}" + f" ({there})" * bool(there)
    return f"has been {'computing' if action.op in COMPUTE else 'at'} {action} for {since}"


def _whereabouts(plan: Plan, status: Status, action: Action) -> str:
    """Return where an action's microbatch is, by the latest action for it in the rank's lane; empty if that has none."""
    if action.op in SHARDING:  # which concerns a stage
        return ""
    done = islice(reversed(plan.actions[status.rank][: status.position]), MOST_LOOKED_AT)
    latest = next((one for one in done if one.key == action.key and one.op not in SHARDING), None)
    return "" if latest is None else whereabouts(latest)


def _serving(own: Activity, plan: Plan, rank: int, evictor: int, position: int) -> str:
    chain = plan.chains(rank).get(evictor, ()) if rank < plan.num_ranks else ()
    return f"; its acceptor for rank {own.group_rank(evictor)} is at {chain[position]}" if 0 <= position < len(chain) else ""


def name_ranks(ranks: Collection[int]) -> str:
    """Return the ranks in words."""
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
