"""The ways to run a step: each schedule with each layout of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property

from bpipe.chooser.question import Layout, Question
from bpipe.chooser.reasons import Spent
from bpipe.errors import ConfigurationError
from bpipe.plan.action import Op
from bpipe.plan.plan import Plan
from bpipe.schedules.by_name import computations_of
from bpipe.schedules.registry import rule_named, rules
from bpipe.schedules.rule import Rule
from bpipe.search.setting import Setting

__all__: list[str] = []

ONLY_SLICED = ("seq_1f1b", "tera_pipe")  # of whole microbatches they are 1f1b and gpipe


class Way:
    """A named schedule with a layout, as an order of computations."""

    def __init__(self, question: Question, rule: Rule, layout: Layout) -> None:
        self.question, self.rule, self.layout = question, rule, layout

    @cached_property
    def least_s(self) -> float:
        """No step of this layout is shorter: each rank computes all of its own, after the first microbatch has reached it."""
        costs, m, p = self.question.costs_of(self.layout), self.layout.num_microbatches, self.question.num_ranks
        rank_s, begin_s, before_s = [0.0] * p, [-1.0] * p, 0.0
        for stage, rank in enumerate(self.layout.stage_ranks):
            if begin_s[rank] < 0:
                begin_s[rank] = before_s
            forward_s = costs.seconds(Op.F, stage, 0)
            halves_s = costs.seconds(Op.I, stage, 0) + costs.seconds(Op.W, stage, 0)
            rank_s[rank] += m * (forward_s + min(costs.seconds(Op.B, stage, 0), halves_s))
            before_s += forward_s / self.layout.slices
        return max(map(float.__add__, rank_s, begin_s))

    @cached_property
    def order(self) -> Plan:
        """The computations, with the layout's sizes."""
        return self.setting.order_of(self._computations)

    @cached_property
    def setting(self) -> Setting:
        """What the plan is searched for."""
        return self.question.setting_of(self.layout, self._computations)

    @cached_property
    def spent(self) -> Spent:
        """What the order spends its step on, if memory is no matter."""
        return Spent.of_order(self.order, self.setting.costs)

    @property
    def _computations(self) -> Plan:
        layout = self.layout
        plan = _computations(self.rule, len(layout.stage_ranks), layout.num_microbatches, self.question.num_ranks)
        return replace(plan, skips=layout.skips) if layout.skips else plan


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
                yield Way(question, rule, layout)


def _rules(question: Question) -> Iterator[Rule]:
    """Yield the rules to choose from, for each number of slices that they take."""
    asked = question.schedules
    for rule in rules() if asked is None else map(rule_named, asked):
        wrong = _wrong_with(rule)
        if wrong and asked is not None:
            raise ConfigurationError(f"{rule.name} {wrong}: leave it out of schedules=")
        if wrong or (asked is None and rule.slots is not None):  # what is balanced already is chosen by its order
            continue
        yield from (rule.with_slices(k) for k in question.slices if (rule.name not in ONLY_SLICED if k == 1 else rule.sliced))


def _wrong_with(rule: Rule) -> str:
    if rule.local:
        return "learns something else, because gradients stay in their stages"
    if rule.placement.directions > 1:
        return "needs each stage on two ranks, with the memory for that, which is not weighed here"
    return ""
