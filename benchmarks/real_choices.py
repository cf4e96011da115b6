"""The plan that is predicted to be the fastest, beside all others that could have been chosen, as each of them really runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from math import inf
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import bpipe
from benchmarks.alternate import Taken, Turns, in_turns
from benchmarks.device_layers import wake_in_time
from benchmarks.intervals import Interval, as_they_are, columns, interval
from benchmarks.pictures import points
from benchmarks.real_models import MODELS, Cut, Model
from benchmarks.study import Claim, Row, Study
from bpipe.estimate.calibrate import calibrated
from bpipe.estimate.cut_search import even, pieces
from bpipe.estimate.layers import Chain
from bpipe.partition import LayerCost, choose_stages
from bpipe.passes.evict_or_recompute import kept_within
from bpipe.passes.setting import Setting
from bpipe.schedules import Amount, Costs, Link, Plan, build, simulate
from bpipe.search.fastest import searched
from bpipe.search.work import Family
from bpipe.tools.balancing import sizes_of
from tests.ranks import run_ranks

P = 4
NAMED = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zbv": 2, "v_half": 2}  # stages of a rank
MADE_FROM = ("1f1b", "zb_h1", "interleaved_1f1b", "zbv")  # of whole backwards or of halves, with one stage a rank or with two
BY = {"as it is": (False, False), "evicting": (True, False), "recomputing": (False, True), "both": (True, True)}
WITHIN = {"no": "without a budget", "yes": "within a budget"}
BUDGETS = tuple(WITHIN)
CHOSEN = "choose_plan"
MOST_OVER_BEST, MOST_WRONG = 1.03, 1.10


class Work(NamedTuple):
    """One case.

    Args:
        model: of `MODELS`.
        m: microbatches.
        speed: of the devices, times theirs.
        seconds: of alternating steps.
        fewest_rounds: of these.
        is_short: whether there are few candidates: of named schedules two, and orders made to measure only if bpipe chooses none.
        effort: of each search.
    """

    model: str
    m: int = 8
    speed: float = 1.0
    seconds: float = 150.0
    fewest_rounds: int = 7
    is_short: bool = False
    effort: int = 2_000_000

    @property
    def named(self) -> list[str]:
        """The named schedules among the candidates."""
        return ["1f1b", "zbv"] if self.is_short else list(NAMED)


class Candidate(NamedTuple):
    """A plan that can be chosen.

    Args:
        name: what it is.
        budget: whether it keeps a budget of memory.
        plan: it.
        cut: its stages.
        step_s: the predicted step.
    """

    name: str
    budget: str
    plan: Plan
    cut: Cut
    step_s: float


class Known(NamedTuple):
    """What is known of a model before anything is chosen: its layers, and the link between ranks."""

    layers: tuple[LayerCost, ...]
    link: Link


class Stages(NamedTuple):
    """A cut of a model for a named schedule, and what its stages cost."""

    cut: Cut
    plan: Plan
    costs: Costs
    result_bytes: int  # the last stage's output

    def setting(self, budget: int | None, **ways: bool) -> Setting:
        """These stages within a budget of each rank."""
        sizes = sizes_of(self.plan, self.costs, 1)
        last = sizes.stages[-1].with_amounts(Amount("out", self.result_bytes))
        return Setting(costs=self.costs, sizes=replace(sizes, stages=(*sizes.stages[:-1], last)), budgets=(budget,) * P, **ways)


def candidates(model: Model, known: Known, work: Work) -> list[Candidate]:
    """All that could be chosen, without a budget of memory and within one."""
    best = {name: stages_of(model, known, work.m, name, is_even=False) for name in work.named}
    evenly = {name: stages_of(model, known, work.m, name, is_even=True) for name in work.named}
    plain = best["1f1b"]
    budget = round(model.budget_share * max(plain.setting(None).order_of(plain.plan).device_peak_bytes))
    found = [*_free({"even": evenly, "by cost": best}), *_within(model, best, budget)]
    if model.skips or not work.is_short:
        found += _made(model, best, budget, work.effort)
    if not model.skips:
        found += [_chosen(model, known, work, most) for most in (None, budget)]
    return found


def stages_of(model: Model, known: Known, m: int, name: str, *, is_even: bool) -> Stages:
    """Cut a model for a named schedule: into as many layers for each stage, or as its costs say."""
    num_stages, chain = P * NAMED[name], Chain(known.layers)
    if is_even:
        cut = pieces(even(len(chain), num_stages))
    else:
        cut = cut_of(choose_stages(known.layers, num_stages, m, schedule=name, num_ranks=P).stages)
    plan = build(name, num_stages, m, num_ranks=P, skips=model.stage_skips(cut).values())
    return Stages(cut, plan, costs_of(known, cut), chain.layers[-1].output_bytes)


def cut_of(stages: Sequence[Sequence[str]]) -> Cut:
    """The layers of stages that are known by name."""
    ends = list(accumulate(map(len, stages)))
    return list(zip([0, *ends], ends))


def costs_of(known: Known, cut: Cut) -> Costs:
    """What the stages of a cut cost."""
    return Chain(known.layers).costs(cut, link=known.link)


def _free(cuts: dict[str, dict[str, Stages]]) -> Iterator[Candidate]:
    """Yield named plans without a budget, of each cut."""
    for how, of_each in cuts.items():
        for name, stages in of_each.items():
            setting = stages.setting(None)
            kept = kept_within(setting.order_of(stages.plan), setting)
            assert kept is not None, "nothing limits it"
            yield Candidate(f"{name}, {how}", BUDGETS[0], kept.plan, stages.cut, kept.step_s)


def _within(model: Model, best: dict[str, Stages], budget: int) -> Iterator[Candidate]:
    """Yield named plans within a budget, each in all ways that differ."""
    for name, stages in best.items():
        found: list[Plan] = []
        for how, (evicts, recomputes) in BY.items():
            setting = stages.setting(budget, evicts=evicts, recomputes=recomputes)
            kept = None if recomputes and model.skips else kept_within(setting.order_of(stages.plan), setting)
            if kept is not None and kept.plan.actions not in [plan.actions for plan in found]:
                found.append(kept.plan)
                yield Candidate(f"{name}, {how}", BUDGETS[1], kept.plan, stages.cut, kept.step_s)


def _made(model: Model, best: dict[str, Stages], budget: int, effort: int) -> Iterator[Candidate]:
    """Yield the fastest orders that are made to measure, without a budget and within one."""
    for (has_budget, most), name in product(zip(BUDGETS, (None, budget)), MADE_FROM):
        if name in best:
            stages = best[name]
            family = Family(starts=(stages.plan,), setting=stages.setting(most, recomputes=not model.skips))
            made = [one.kept for one in searched([family], effort=effort) if one.is_made and one.kept is not None]
            if made:
                yield Candidate(f"made from {name}", has_budget, made[0].plan, stages.cut, made[0].step_s)


def _chosen(model: Model, known: Known, work: Work, budget: int | None) -> Candidate:
    """What bpipe itself chooses; its step is predicted as that of all others is."""
    rows = len(model.batch(1)[0])
    choice = bpipe.choose_plan(
        {rows: known.layers},
        batch=rows * work.m,
        num_ranks=P,
        memory_bytes=budget,
        options=bpipe.Options(reserve_bytes=0),
        link=None if known.link.bytes_per_s == inf else known.link.bytes_per_s,
    )
    cut = cut_of(choice.stages)
    step_s = simulate(choice.plan, costs_of(known, cut)).makespan_s
    return Candidate(f"{CHOSEN}: {choice.plan.name}", BUDGETS[budget is not None], choice.plan, cut, step_s)


def known_of(model: Model, rank: int, work: Work) -> Known:
    """Measure a model's layers, on one rank, and the link, from a trace of a plan that evicts, too. Collective."""
    layers = _from_first(model.measured(repeats=2 if work.is_short else 5) if rank == 0 else None)
    cut = stages_of(model, Known(layers, Link()), work.m, "1f1b", is_even=True).cut
    plan = build("balanced_1f1b", P, work.m, skips=model.stage_skips(cut).values())
    schedule = schedule_of(model, rank, Candidate("", BUDGETS[0], plan, cut, 0.0))
    x, target = model.batch(work.m)
    schedule.step(x, target=target, return_outputs=False)
    with bpipe.trace(schedule) as trace:
        for _ in range(1 if work.is_short else 3):
            schedule.step(x, target=target, return_outputs=False)
    costs = calibrated(trace.gather(), plan)
    schedule.close()
    return Known(layers, _from_first(costs.link))


def schedule_of(model: Model, rank: int, one: Candidate) -> bpipe.Schedule:
    """A rank's end of a pipeline that runs a plan."""
    mine, skips = one.plan.stages_of(rank), model.stage_skips(one.cut)
    modules = model.stages(one.cut, mine)
    stages = [bpipe.PipelineStage(module, index, len(one.cut), "cpu", skips=skips) for module, index in zip(modules, mine)]
    return bpipe.FromPlan(stages, one.plan, loss_fn=model.loss_fn)


def _from_first(value: Any) -> Any:
    """What rank 0 has. Collective."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


class OfRank(NamedTuple):
    """What a rank found out; for each candidate, its steps and its peak."""

    candidates: list[Candidate]
    taken: dict[str, Taken]
    peaks: list[int]


def on_rank(rank: int, work: Work) -> OfRank:
    """Measure, choose, and run each candidate in turns."""
    wake_in_time()
    torch.manual_seed(0)
    model = MODELS[work.model]
    model = replace(model, flops_per_s=work.speed * model.flops_per_s)
    known = known_of(model, rank, work)
    found: list[Candidate] = _from_first(candidates(model, known, work) if rank == 0 else None)
    x, target = model.batch(work.m)
    schedules = [schedule_of(model, rank, one) for one in found]
    steps = {str(index): partial(one.step, x, target=target, return_outputs=False) for index, one in enumerate(schedules)}
    taken = in_turns(steps, seconds=work.seconds, fewest_rounds=work.fewest_rounds)
    peaks = [int(one.stats["device_peak_bytes"]) for one in schedules]
    for one in schedules:
        one.close()
    dist.barrier()
    return OfRank(found, taken, peaks)


def measure(work: Work) -> list[Row]:
    """One model: a row for each candidate."""
    ranks: list[OfRank] = run_ranks(on_rank, P, work, timeout_s=1800.0)
    found, turns = ranks[0].candidates, Turns(rank.taken for rank in ranks)
    seconds = [turns.seconds(str(index)) for index in range(len(found))]
    rows = []
    for budget in BUDGETS:
        of = [index for index, one in enumerate(found) if one.budget == budget]
        best = min(of, key=lambda index: median(seconds[index]))
        chosen = min(of, key=lambda index: found[index].step_s)
        for index in of:
            predicted = interval([taken / found[index].step_s for taken in seconds[index]])
            rows.append(
                {
                    "model": work.model,
                    "budget": budget,
                    "candidate": found[index].name,
                    "is_chosen": "chosen" if index == chosen else "",
                    "num_rounds": len(seconds[index]),
                    "predicted": found[index].step_s / found[chosen].step_s,
                    **turns.time(str(index), str(best)).named("time"),
                    **predicted.named("over_predicted"),
                    "work": sum(turns.cpu_s(str(index))) / sum(seconds[index]) / P,
                    "peak": max(rank.peaks[index] for rank in ranks) / max(found[index].plan.device_peak_bytes),
                }
            )
    return rows


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Of each choice: its step over the best one, and how wrong its prediction was; and of each model, the worst prediction.

    Choices are what is predicted to be the fastest of all, and what bpipe chooses by itself.
    """
    found = []
    for row in rows:
        if row["is_chosen"] or row["candidate"].startswith(CHOSEN):
            at = f"{row['model']}, {WITHIN[row['budget']]} ({row['candidate']})"
            found.append(Claim.of(row, "time", f"chosen over best, {at}", MOST_OVER_BEST))
            found.append(Claim(f"measured or predicted over the other, {at}", MOST_WRONG, wrong(row)))
    for model in dict.fromkeys(row["model"] for row in rows):
        worst = max((row for row in rows if row["model"] == model), key=lambda row: wrong(row).median)
        what = f"measured or predicted over the other, the worst of {model} ({worst['candidate']})"
        found.append(Claim(what, MOST_WRONG, wrong(worst)))
    return found


def wrong(row: Row) -> Interval:
    """How many times the measured step is the predicted one, or the other way round, whichever is more, and its interval."""
    found = Interval.of(row, "over_predicted")
    return found if found.median >= 1 else Interval(1 / found.median, 1 / found.high, 1 / found.low)


def draw(rows: Sequence[Row]) -> Figure:
    """Each candidate's measured step over its predicted one, in units of the chosen plan's: the diagonal is what was predicted."""
    figure = points(
        rows,
        itemgetter("model"),
        lambda row: f"{row['is_chosen']} {WITHIN[row['budget']]}".strip(),
        x=("predicted", "predicted step, over the chosen one's"),
        y=("time", "measured step, over the best one's"),
    )
    for axes in figure.axes:
        axes.axline((1.0, 1.0), slope=1.0, color="black", linewidth=0.8)
    return figure


STUDY = Study(
    name="real_choices",
    title="What is chosen, beside all that could have been",
    text=(
        "Three models of layers that cost different amounts, over gloo, in four processes: a language model whose head takes as\n"
        "long as five of its blocks, a U-Net whose skips pass stages, and a language model of long sequences, of whose blocks\n"
        "every third attends to all positions. Each layer computes really, forward and backward, and sleeps until a device that\n"
        "does 2 to 3 thousand million operations a second would be done with what torch's counter counts; `work` is the share\n"
        "of the time in which the ranks really compute. What is predicted comes from bpipe's own tools: `measure_layers` on one\n"
        "rank, and the link from a trace of 1F1B balanced by count; plans of two slices were run up to 18a49c5. Cuts are by\n"
        "`choose_stages`, or into as many layers for each stage. There are named schedules and orders made to measure, without\n"
        "a budget and within one (65% of what 1F1B takes on its fullest rank, or 85% for the U-Net, which cannot recompute\n"
        "there), kept within it by evicting, recomputing or both, and for the other two what `choose_plan` chooses.\n"
        "`chosen` has the shortest predicted step; all are run."
    ),
    works=list(map(Work, MODELS)),
    measure=measure,
    columns=[
        *as_they_are("model", "budget", "candidate"),
        ("is_chosen", "", ""),
        ("num_rounds", "rounds", "d"),
        ("predicted", "predicted step / chosen", ".3f"),
        *columns("time", "step / best"),
        ("over_predicted", "step / predicted", ".3f"),
        ("work", "work", ".3f"),
        ("peak", "peak / predicted", ".3f"),
    ],
    claims=claims,
    draw=draw,
    name_of=itemgetter("model"),
)
