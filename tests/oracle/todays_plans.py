"""Ask this checkout's bpipe for plans, and write them in neutral words: the one file of the oracle that knows today's classes.

As a program it reads a request a line, `{"case": ..., "costs": ...}`, and prints an answer a line, both in JSON; PYTHONPATH says
which checkout's bpipe it asks. A redesign may change all of it but the words: `tests/oracle/__init__.py` explains those.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from bpipe.errors import BPipeError, BudgetError
from bpipe.passes.balance.balance import balance, by_count
from bpipe.passes.balance.problem import Choice
from bpipe.passes.communicate import computations_only
from bpipe.passes.encoder import with_encoder
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.passes.overlap import overlap
from bpipe.passes.recompute import recompute, recompute_by_count
from bpipe.passes.setting import Setting
from bpipe.plan.action import BETWEEN_STAGES, HOST, SENDS, SHARDING, START_OF, Action, Op, Purpose
from bpipe.plan.destinations import Destinations
from bpipe.plan.issue_order import issue_orders
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Amount, Sizes, StageSizes
from bpipe.schedules.by_name import build, finish, forward_plan
from bpipe.search.fastest import searched
from bpipe.search.work import Family
from bpipe.simulator.costs import Costs, Link
from bpipe.simulator.gaps import fill_gaps
from bpipe.simulator.simulation import simulate

Case = dict[str, Any]

WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for inputs",
    Op.W: "backward for weights",
    Op.R: "forward again",
    Op.SEND_F: "send output",
    Op.RECV_F: "receive output",
    Op.SEND_B: "send gradient",
    Op.RECV_B: "receive gradient",
    Op.EVICT: "evict",
    Op.LOAD: "load",
    Op.ACCEPT: "accept",
    Op.RETURN: "return",
    Op.UNSHARD: "gather weights",
    Op.RESHARD: "free weights",
    Op.REDUCE_GRAD: "reduce gradients",
}
CONTENTS = {
    Purpose.FORWARD: "outputs",
    Purpose.BACKWARD: "gradients",
    Purpose.EVICT: "evictions",
    Purpose.RETURN: "loads",
    Purpose.TWIN: "twins' gradients",
}


def answer(case: Case, costs: dict[str, Case]) -> dict[str, Any]:
    """The plan of a case and its steps at some costs; or that it is refused, with the smallest budget that would not be."""
    try:
        plan = plan_of(case)
    except BudgetError as error:
        return {"refused": True, "smallest budget": list(error.smallest or ())}
    except BPipeError:
        return {"refused": True}
    return {**_lists(plan), **_amounts(plan), **_times(plan, costs)}


# From a case to a plan.


def plan_of(case: Case) -> Plan:
    plan = _shape(case)
    if "bytes" in case:
        plan = replace(computations_only(plan), sizes=sizes_of(case["bytes"], plan))
    if "keep" in case:
        plan = _kept(plan, case)
    elif "bytes" in case:
        plan = finish(plan)
    return forward_plan(plan) if case.get("forward only") else plan


def _shape(case: Case) -> Plan:
    plan = _routed(case) if "speeds" in case else _scheduled(case)
    if case.get("side by side") == "wherever":
        plan = finish(overlap(plan))
    if encoder := case.get("encoder"):
        costs = Costs(forward_s=_series(encoder["forward"], plan.num_stages + encoder["pieces"]))
        plan = finish(with_encoder(plan, encoder["pieces"], costs, rank=encoder["rank"], most=encoder.get("most")))
    return plan


def _scheduled(case: Case) -> Plan:
    return build(
        case["schedule"],
        case["ranks"] * case["stages a rank"],
        case["microbatches"],
        num_ranks=case["ranks"],
        slices=case.get("slices", 1),
        skips=case.get("skips", ()),
        overlapped=case.get("side by side") == "in the steady state",
    )


def _routed(case: Case) -> Plan:
    if case["schedule"] != "replicas" or {"slices", "skips"} & case.keys():
        raise BPipeError("paths have no place for these")
    from bpipe.relaxed.paths import routed_plan  # imports torch, which takes longer than most plans together

    return routed_plan(case["microbatches"], case["speeds"])


def _kept(plan: Plan, case: Case) -> Plan:
    """The plan within the budget that a case keeps, in the case's way."""
    keep, sizes, to = case["keep"], plan.sizes, Destinations(**case.get("to", {}))
    costs = costs_of(keep["costs"], plan) if "costs" in keep else None
    if sizes is None:
        return finish(_kept_by_count(plan, keep, to, costs))
    budgets = _budgets(keep["budget"], max(finish(plan).device_peak_bytes), plan.num_ranks)
    if keep["by"] == "eviction":
        return finish(balance(plan, sizes=sizes, budgets=budgets, to=to, costs=costs))
    if keep["by"] == "recomputation":
        return finish(recompute(plan, sizes=sizes, budgets=budgets))
    assert budgets is not None and costs is not None, "cases of these ways have both"
    if keep["by"] == "either":
        return finish(evict_or_recompute(plan, sizes=sizes, budgets=budgets, costs=costs, to=to))
    starts = (plan, *(_shape({**case, "schedule": name}) for name in keep["orders like"]))
    able = {"evicts": keep["only"] != "recomputation", "recomputes": keep["only"] != "eviction"}
    setting = Setting(costs=costs, sizes=sizes, budgets=tuple(budgets), to=to, **able)
    found = searched([Family(starts=starts, setting=setting)], effort=keep["effort"])[0].kept
    if found is None:
        raise BPipeError("no order that was tried keeps the budget")
    return found.plan


def _kept_by_count(plan: Plan, keep: Case, to: Destinations, costs: Costs | None) -> Plan:
    slots = _budgets(keep["budget"], max(plan.peak_slots), plan.num_ranks)
    if keep["by"] == "recomputation":
        return recompute_by_count(plan) if slots is None else recompute(plan, slots=slots)
    rule: Choice = "eager" if keep["by"] == "eager eviction" else "fewest"
    return by_count(plan, to) if slots is None else balance(plan, slots=slots, to=to, rule=rule, costs=costs)


def _budgets(percent: Any, highest: int, num_ranks: int) -> list[int | None] | None:
    """The budget of each rank, given in percent of the highest peak, rounded down; None if it is to be as low as possible."""
    if percent == "lowest":
        return None
    each = _series(percent, num_ranks)
    return [None if one is None else highest * one // 100 for one in each]


def sizes_of(given: Case, plan: Plan) -> Sizes:
    stages = range(plan.num_stages)
    slices = (tuple(_sizes_of_stage(given, plan, stage, slice_) for stage in stages) for slice_ in range(plan.slices))
    return Sizes.of_slices(slices, static=tuple(_at(given, "static", rank) for rank in range(plan.num_ranks)))


def _sizes_of_stage(given: Case, plan: Plan, stage: int, slice_: int) -> StageSizes:
    place, is_last_slice = stage % plan.depth, slice_ == plan.slices - 1
    received, sent, fixed = _at(given, "output", place - 1) if place else 0, _at(given, "output", place), _at(given, "fixed", stage)
    state_gradient = _at(given, "state gradient", stage) if plan.slices > 1 else 0
    (skips,) = plan.flow.arguments("skips") or ((),)
    results = _at(given, "results", stage) if plan.flow.arguments("local") is not None else 0
    return StageSizes(
        parts=tuple(part + _at(given, "more in slice", slice_) for part in _at(given, "parts", stage)),
        fixed=fixed,
        between=_at(given, "between halves", stage),
        amounts=(
            Amount("in", received, min(received, _at(given, "input saved", stage))),
            Amount("out", sent, min(sent, _at(given, "output saved", stage))),
            Amount("state", min(fixed, _at(given, "state", stage)) if plan.slices > 1 else 0),
            Amount("given", state_gradient * (plan.slices - 1) * is_last_slice),
            Amount("collected", state_gradient * (not is_last_slice)),
            Amount("gradients", _at(given, "gradients", place) if _alternatives(plan, are_twins=True) else 0),
            Amount("loss", results, results // 2),
            *(_sizes_of_skip(given, skip, i, place) for i, skip in enumerate(skips) if place in skip),
        ),
    )


def _alternatives(plan: Plan, *, are_twins: bool) -> Sequence[Sequence[int]]:
    """The routes of a plan's microbatches, through twins of two directions or through replicas."""
    _, routes, sums = plan.flow.arguments("alternatives") or ((), (), are_twins)
    found: Sequence[Sequence[int]] = routes if sums is are_twins else ()
    return found


def _sizes_of_skip(given: Case, skip: Sequence[int], index: int, place: int) -> Amount:
    value, saved = _at(given, "skip", index), _at(given, "skip saved", index)
    is_joint = place == skip[0] and place + 1 in skip
    gradient = _at(given, "skip gradient", index)
    return Amount("-".join(map(str, skip)), value, kept=saved, joint=(value - saved) * is_joint, gradient=gradient)


def costs_of(given: Case, plan: Plan) -> Costs:
    """The costs of all stages, from series that begin again at their ends."""
    names = {"forward": "forward_s", "backward": "backward_s", "for inputs": "input_s", "for weights": "weight_s"}
    names |= {"saved": "saved_bytes", "output": "output_bytes", "gradients": "exchanged_bytes", "static": "static_bytes"}
    links = {"link": "link", "cross link": "cross_link", "host link": "host_link"}
    options: dict[str, Any] = {name: _series(given[word], plan.num_stages) for word, name in names.items() if word in given}
    options |= {name: Link(latency_s=given[word][0], bytes_per_s=given[word][1]) for word, name in links.items() if word in given}
    if "nodes" in given:
        options["nodes"] = [rank * given["nodes"] // plan.num_ranks for rank in range(plan.num_ranks)]
    return Costs(**options, slowdown=given.get("slowdown", 1.0), overlapped_share=given.get("overlapped share", 0.0))


def _at(given: Case, name: str, place: int) -> Any:
    series = given.get(name) or [0]
    return series[place % len(series)]


def _series(values: Sequence[Any], length: int) -> list[Any]:
    return [values[place % len(values)] for place in range(length)]


# From a plan to neutral words.


def _by_rank(values: Any) -> dict[str, Any]:
    return {f"rank {rank}": value for rank, value in enumerate(values)}


def _lists(plan: Plan) -> dict[str, Any]:
    issued = issue_orders(plan)
    return {
        "ranks of stages": list(plan.stage_ranks),
        "paths": [list(path) for path in _alternatives(plan, are_twins=False)],
        "side by side": [[stage, *plan.slice_of(unit)] for stage, unit in sorted(plan.overlapped)],
        "order": _by_rank([_written(plan, action) for action in plan.compute(rank)] for rank in range(plan.num_ranks)),
        "actions": _by_rank([_written(plan, action) for action in lane] for lane in plan.actions),
        "storing": _by_rank([_written(plan, action) for action in lane] for lane in plan.served),
        "issued": _by_rank(_places(plan, rank, order) for rank, order in enumerate(issued)),
        "channels": {name: [entry for entry, _ in entries] for name, entries in _channels(plan).items()},
    }


def _written(plan: Plan, action: Action) -> list[Any]:
    """What it does, stage, microbatch, slice, part, the stage at the other end, the rank there; without what is None at the end."""
    op, _, unit, part, peer = action
    start = action._replace(op=START_OF.get(op, op))
    name = "exchange gradients" if start.is_exchange else WORDS[start.op]
    words: list[Any] = [f"end of {name}" if op in START_OF else name, action.stage]
    words += [None, None] if op in SHARDING else plan.slice_of(unit)
    words += [None if start.op in BETWEEN_STAGES else part or None, _other_stage(plan, start), "host" if peer == HOST else peer]
    while words[-1] is None:
        words.pop()
    return words


def _other_stage(plan: Plan, start: Action) -> int | None:
    return plan.other_end(start)[1] if start.op in BETWEEN_STAGES or start.is_exchange else None


def _places(plan: Plan, rank: int, order: Sequence[Action]) -> list[list[int]]:
    """The order in which one thread issues all: pieces of a rank's actions and, behind them, what it stores: first, how many."""
    places: defaultdict[Action, deque[int]] = defaultdict(deque)
    for place, action in enumerate((*plan.actions[rank], *plan.served[rank])):
        places[action].append(place)
    runs: list[list[int]] = []
    for action in order:
        place = places[action].popleft()
        if runs and place == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    return runs


def _channels(plan: Plan) -> dict[str, list[tuple[list[Any], Action]]]:
    """The messages of each sender, receiver and purpose in their order: stages of both ends, microbatch, slice, part."""
    found: dict[str, list[tuple[list[Any], Action]]] = {}
    for rank, action in ((rank, a) for lanes in (plan.actions, plan.served) for rank, lane in enumerate(lanes) for a in lane):
        if action.op in SENDS or action.is_exchange:
            purpose = SENDS.get(action.op, Purpose.TWIN)
            name = f"{CONTENTS[purpose]} {rank} to {'host' if action.peer == HOST else action.peer}"
            _, stage, microbatch, slice_, part, other, *_ = (*_written(plan, action), None, None)
            found.setdefault(name, []).append(([stage, other, microbatch, slice_, part], action))
    return dict(sorted(found.items()))


def _amounts(plan: Plan) -> dict[str, Any]:
    peaks = {"activations": _by_rank(plan.peak_slots)}
    budgets = {"activations": _by_rank(plan.slots)}
    if (sizes := plan.sizes) is None:
        return {"budgets": budgets, "peaks": peaks, "bytes": {}}
    ranks = range(plan.num_ranks)
    moved = {op: _by_rank(sum(map(sizes.moved, _of(op, lane))) for lane in plan.actions) for op in (Op.EVICT, Op.LOAD)}
    return {
        "budgets": budgets | {"bytes": _by_rank(plan.budgets or [None] * plan.num_ranks)},
        "peaks": peaks | {"bytes": _by_rank(plan.device_peak_bytes), "saved bytes": _by_rank(plan.activation_peak_bytes)},
        "bytes": {
            "evicted": moved[Op.EVICT],
            "loaded": moved[Op.LOAD],
            "stored for others": _by_rank(map(plan.remote_buffer_bytes, ranks)),
            "stored by the host": _by_rank(map(plan.host_bytes, ranks)),
            "sent": {name: sum(sizes.carried(one, plan.flow) for _, one in entries) for name, entries in _channels(plan).items()},
        },
    }


def _of(op: Op, lane: Sequence[Action]) -> Iterator[Action]:
    return (action for action in lane if action.op is op)


def _times(plan: Plan, costs: dict[str, Case]) -> dict[str, Any]:
    """The makespan at each costs; what each rank then holds, at most; and what pieces of a fill job make of its gaps."""
    steps = {name: simulate(plan, costs_of(given, plan)) for name, given in costs.items()}
    filled = {name: given["fill"] for name, given in costs.items() if "fill" in given}
    return {
        "seconds": {name: step.makespan_s for name, step in steps.items()},
        "simulated peaks": {name: _by_rank(map(step.device_peak_bytes, range(plan.num_ranks))) for name, step in steps.items()},
        "fills": {
            name: {f"rank {rank}": list(fill_gaps(steps[name], rank, *fill)) for rank in steps[name].computing_ranks()}
            for name, fill in filled.items()
        },
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
