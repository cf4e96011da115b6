"""The ways to run a step: each schedule with each layout of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import get_args

from bpipe.api import policy
from bpipe.checks import check_choice
from bpipe.chooser.question import Question, StageLayout, is_placed_as
from bpipe.chooser.reasons import Spent
from bpipe.errors import ConfigurationError
from bpipe.passes.communicate import communicate
from bpipe.passes.setting import Setting
from bpipe.plan.action import Op
from bpipe.plan.plan import Plan
from bpipe.schedules.by_name import computations_of
from bpipe.schedules.registry import rule_named, rules
from bpipe.schedules.rule import Rule

__all__: list[str] = []

ONLY_SLICED = ("seq_1f1b", "tera_pipe")  # of whole microbatches they are 1f1b and gpipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user allows, and how hard to search. All ranks have the same.

    Raises:
        ConfigurationError: an unknown way to keep the memory.
    """

    schedules: tuple[str, ...] | None  # of `named_schedules`
    by: policy.Way
    effort: int
    seed: int

    def __post_init__(self) -> None:
        check_choice("by", self.by, get_args(policy.Way))


class Way:
    """A named schedule with a layout, as an order of computations."""

    def __init__(self, rule: Rule, layout: StageLayout) -> None:
        self.rule, self.layout = rule, layout

    @cached_property
    def least_s(self) -> float:
        """No step of this layout is shorter: each rank computes all of its own, after the first microbatch has reached it."""
        costs, m, p = self.layout.costs, self.layout.num_microbatches, self.layout.num_ranks
        rank_s, begin_s, before_s = [0.0] * p, [-1.0] * p, 0.0
        for stage, rank in enumerate(self.layout.stage_ranks):
            if begin_s[rank] < 0:
                begin_s[rank] = before_s
            forward_s = costs.seconds(Op.F, stage, 0)
            halves_s = costs.seconds(Op.I, stage, 0) + costs.seconds(Op.W, stage, 0)
            rank_s[rank] += m * (forward_s + min(costs.seconds(Op.B, stage, 0), halves_s))
            before_s += forward_s / self.rule.slices
        return max(map(float.__add__, rank_s, begin_s))

    @cached_property
    def order(self) -> Plan:
        """The computations, with the layout's sizes."""
        return self.setting.order_of(self._computations)

    @cached_property
    def plain(self) -> Plan:
        """The order with its messages, if nothing is done about memory."""
        return communicate(self.order)

    @cached_property
    def setting(self) -> Setting:
        """What the plan is searched for."""
        return self.layout.setting(self._computations)

    @cached_property
    def spent(self) -> Spent:
        """What the order spends its step on, if memory is no matter."""
        return Spent.of_order(self.order, self.setting.costs)

    @property
    def _computations(self) -> Plan:
        layout = self.layout
        plan = _computations(self.rule, len(layout.stage_ranks), layout.num_microbatches, layout.num_ranks)
        return replace(plan, flow=layout.flow(plan.flow))


@cache
def _computations(rule: Rule, num_stages: int, num_microbatches: int, num_ranks: int) -> Plan:
    return computations_of(rule, num_stages, num_microbatches, num_ranks)


def ways_of(question: Question) -> Iterator[Way]:
    """Yield all ways to run a question's step.

    Raises:
        ConfigurationError: a schedule that was asked for learns something else, or needs the model twice.
    """
    for rule in _rules(question):
        if question.num_ranks > 1 or rule.name == "1f1b" or question.schedules is not None:
            for layout in question.layouts(rule):
                yield Way(rule, layout)


def named_schedules(schedules: object) -> tuple[str, ...] | None:
    """Return the names of schedules to choose from; None for all of them.

    Raises:
        ConfigurationError: it is no list of names, or a schedule is unknown, learns something else, or needs the model twice.
    """
    if schedules is None:
        return None
    if isinstance(schedules, str):
        raise ConfigurationError(f"schedules={schedules!r}: give a list of names, such as [{schedules!r}]")
    names = tuple(schedules) if isinstance(schedules, Iterable) else (schedules,)
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"schedules={schedules!r}: give a list of names, such as ['1f1b', 'zbv']")
    if not names:
        raise ConfigurationError("schedules is empty: give names to choose from, or None for all")
    for rule in map(rule_named, names):
        if wrong := _wrong_with(rule):
            raise ConfigurationError(f"{rule.name} {wrong}: leave it out of schedules=")
    return names


def check_placed(schedules: Sequence[str], plan: Plan) -> None:
    """Raise unless one of the schedules has its stages where a plan has them, and takes as many microbatches and slices.

    Raises:
        ConfigurationError: none does.
    """
    p, m, v = plan.num_ranks, plan.num_microbatches, plan.num_stages // plan.num_ranks
    if not any(is_placed_as(rule, plan.stage_ranks, p, m) and _takes(rule, plan.slices) for rule in map(rule_named, schedules)):
        raise ConfigurationError(
            f"schedules={list(schedules)}: none of them runs {m} microbatches of {plan.slices} slice{'s' * (plan.slices > 1)} over "
            f"{p} ranks with {v} stage{'s' * (v > 1)} each, placed as for {plan.name}: name others, or give start= and stages of "
            "theirs"
        )


def _rules(question: Question) -> Iterator[Rule]:
    """Yield the rules to choose from, for each number of slices that they take."""
    asked = question.schedules
    for rule in rules() if asked is None else map(rule_named, asked):
        if asked is None and (_wrong_with(rule) or rule.slots is not None):  # what is balanced already is chosen by its order
            continue
        yield from (rule.with_slices(k) for k in question.slices if _takes(rule, k))


def _takes(rule: Rule, slices: int) -> bool:
    return rule.name not in ONLY_SLICED if slices == 1 else rule.sliced is not None


def _wrong_with(rule: Rule) -> str:
    if rule.local:
        return "learns something else, because gradients stay in their stages"
    if rule.placement.directions > 1:
        return "needs each stage on two ranks, with the memory for that, which is not weighed here"
    return ""
