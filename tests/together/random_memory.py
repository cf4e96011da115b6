"""Random models, plans and features: a rank has what its plan says, after every action.

python -m tests.together.random_memory 0 1000    # these seeds; those that differ are printed, with the first action that does
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import bpipe
from bpipe.errors import BudgetError
from bpipe.flow.shape_arguments import directions_of
from bpipe.schedules import Destinations, Plan, finish
from bpipe.schedules.any_flow import computations_for
from bpipe.slices import join
from tests.occupied import Counting, Whose
from tests.together.table import FLOWS, PASSES, shaped

WIDTH, POSITIONS, ROWS = 4, 6, 2
HANDED_ON = "output", "inside", "its own", "input", "fixed", "view"  # what a stage gives to others as a skip
BUDGETS: Sequence[dict[str, Any]] = (
    {"budget": 2**40},
    {"budget": "lowest"},
    {"budget": "lowest", "by": "recompute"},
    {"budget": "lowest", "to": Destinations(host="only")},
    {"budget": "lowest", "options": bpipe.Options(parts=2)},
)


class Stage(nn.Module):
    """Causal attention or a layer of positions, after what skips bring; some carry a mask along, which needs no gradient."""

    def __init__(self, choices: random.Random, made: Sequence[str], kinds: Sequence[str], *, carries: bool) -> None:
        super().__init__()
        self.made = dict(zip(made, choices.sample(kinds, len(made))))
        self.attends, self.end, self.carries = choices.random() < 0.6, choices.choice(("add", "tanh", "linear")), carries
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name, kind in self.made.items() if kind == "its own"})
        self.head = nn.Linear(WIDTH, WIDTH)
        self.is_sliced = self.predicts = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, past: tuple[Any, ...] = (), **skips: Any) -> Any:
        given = x
        for value in skips.values():
            value, factor = value if isinstance(value, tuple) else (value, 1)
            value = value.to(x.dtype)
            x = x + factor * torch.tanh(value) * value.sin()
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.attends:
            keys, values = (join([*(one[i] for one in past), own], 1) for i, own in enumerate((key, value)))
            ahead = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool).triu(1 + keys.shape[1] - query.shape[1])
            inside = torch.tanh((query @ keys.mT).masked_fill(ahead, -torch.inf).softmax(-1) @ values)
        else:
            inside = torch.tanh(query * key + value)
        y = self.out(inside)
        y = x + y if self.end == "add" else torch.tanh(y) if self.end == "tanh" else y
        kinds = {"output": y, "inside": inside, "input": given, "fixed": (y > 0, 3), "view": y[:, :]}
        made = {n: (self.gates[n](inside), 2) if kind == "its own" else kinds[kind] for n, kind in self.made.items()}
        result: Any = (y, y > 0 if mask is None else mask) if self.carries else y
        result = (result, made) if made else result
        result = (result, self.head(x)) if self.predicts else result
        return (result, (key, value) if self.attends else None) if self.is_sliced else result


class Case(NamedTuple):
    """A plan, the stages of a model for it, and how it is balanced."""

    features: Sequence[str]
    plan: Plan
    stages: Sequence[Stage]
    skips: Mapping[str, Sequence[int]]
    how: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> Case:
        choices = random.Random(seed)
        torch.manual_seed(seed)
        p, chunks = choices.choice((1, 2, 2, 3, 4)), choices.choice((1, 1, 2))
        back = tuple(range(p))[:: choices.choice((1, -1))]
        placement = (tuple(range(p)), *[back] * (chunks - 1))
        ranks = tuple(rank for run in placement for rank in run)
        features = choices.sample([*FLOWS, *PASSES], choices.choice((0, 1, 1, 2, 2, 3)))
        cannot = {"paths"} | ({"skips"} if len(ranks) < 3 else set())
        cannot |= {"local"} if chunks > 1 or "directions" in features else set()  # a rank has one stage then
        features = [one for one in features if one not in cannot]
        skips = _skips(choices, len(ranks)) if "skips" in features else {}
        m = choices.choice((1, 2, 3, 4, 6))
        flow = shaped(None, "chain", ranks, m + m % 2 if "directions" in features else m)
        for feature in ("slices", "directions"):
            flow = FLOWS[feature](flow) if feature in features else flow
        flow = shaped(flow, "skips", tuple(sorted(skips.values()))) if skips else flow
        plan = computations_for(flow)
        plan = replace(plan, flow=FLOWS["local"](plan.flow)) if "local" in features else plan
        for feature in ("pairs", "recomputation"):
            try:
                plan = PASSES[feature](plan) if feature in features else plan
            except BudgetError:  # nothing of it can run twice
                features.remove(feature)
        carries = not {"slices", "local"} & {*features} and choices.random() < 0.3
        stages = []
        for part, rank in enumerate(ranks):
            made = [name for name, (source, *_) in skips.items() if source == part]
            too_much = {"input"} if part == 0 or rank in ranks[max(0, part - 1) : part] else set()  # docs/skips.md
            too_much |= {choices.choice(("output", "view"))}  # one storage under two names
            too_much |= {"output", "view"} if carries and rank in ranks[part + 1 : part + 2] else set()
            kinds = [kind for kind in HANDED_ON if kind not in too_much]
            stages.append(Stage(choices, made, kinds, carries=carries).double())
            stages[-1].is_sliced, stages[-1].predicts = "slices" in features, "local" in features and part < len(ranks) - 1
        return cls(features, finish(plan), stages, skips, choices.choice(BUDGETS))


def _skips(choices: random.Random, depth: int) -> dict[str, tuple[int, ...]]:
    """Up to three, none to the same stages as another one."""
    found = set()
    for _ in range(choices.randint(1, 3)):
        source = choices.randrange(depth - 1)
        later = range(source + 1, depth)
        found.add((source, *sorted(choices.sample(later, choices.randint(1, min(3, len(later)))))))
    return {f"s{number}": skip for number, skip in enumerate(sorted(found))}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def differences(seed: int) -> list[str]:
    """Where a rank has another number of bytes than its plan says; empty if it never does.

    Twins set the gradients of earlier steps aside until they sum, and send zeros for those that there are none of: these are static
    bytes, and how many there are at which action is not counted here.
    """
    case, whose = Case.of(seed), Whose()
    plan, loopback = case.plan, bpipe.Loopback(case.plan.num_ranks)
    modules: dict[tuple[int, int], Stage] = {}
    schedules, counts = list[Any](), list[Counting]()
    for rank in range(plan.num_ranks):
        stages = []
        for stage in plan.stages_of(rank):
            part = stage % plan.depth
            module = modules.setdefault((part, rank), deepcopy(case.stages[part]))
            how: dict[str, Any] = {"directions": directions_of(plan.flow), "skips": case.skips}
            stages.append(bpipe.PipelineStage(module, stage, plan.num_stages, "cpu", loopback.rank(rank), **how))
        schedules.append(bpipe.Balanced(bpipe.FromPlan(stages, plan, loss_of), **case.how))
        counts.append(Counting(schedules[-1], whose))
    x, target = torch.randn(2, ROWS * plan.num_microbatches, POSITIONS, WIDTH, dtype=torch.float64)
    for step in range(3):
        for count in counts:
            count.batch, count.looks = (x, target), step == 2
        with whose:
            loopback.step(schedules, x, target=target, return_outputs=False)
    return [text for schedule, count in zip(schedules, counts) for text in _differences(schedule, count, plan)]


def _differences(schedule: Any, count: Counting, plan: Plan) -> list[str]:
    exchanged = {stage for stage, _ in plan.flow.exchanges}
    stages = [one for number, one in schedule.session.context.stages.items() if number in exchanged]
    aside = sum(one.nbytes for one in {id(one): one for stage in stages for one in stage.submod.parameters()}.values())
    found = [f"{m.action}: {m.counted_after} bytes, planned {m.planned_after}" for m in count.moments() if not _is_right(m, aside)]
    used, predicted = (schedule.stats[name] for name in ("device_peak_bytes", "predicted_device_peak_bytes"))
    return found + ([f"a peak of {used} bytes, predicted {predicted}"] if used != predicted else [])


def _is_right(moment: Any, aside: int) -> bool:
    return bool(0 <= moment.counted_after - moment.planned_after <= aside)


if __name__ == "__main__":
    torch.set_num_threads(1)
    num_right, seeds = 0, range(*map(int, sys.argv[1:3]))
    for seed in seeds:
        if found := differences(seed):
            case = Case.of(seed)
            print(f"seed {seed}, {case.features}, {case.how}, stages on ranks {case.plan.stage_ranks}: {found[0]}", flush=True)
        num_right += not found
    print(f"{num_right} of {len(seeds)} are right at every action")
