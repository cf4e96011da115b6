"""Choose where to cut a model so that its slowest or its fullest rank is as good as possible, given the schedule.

BaPipe (Zhao et al., arXiv 2012.12544) cuts by measured layers and gives each schedule its own condition on memory. Here the
schedule's plan says what each rank holds, so that any schedule, several stages per rank and evictions are counted as they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from bpipe.checks import budgets_of, check_choice, check_count
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.estimate.cut_search import Ends, best_of_all, even, improved, narrowest, pieces
from bpipe.estimate.layers import Chain, LayerCost
from bpipe.partition.choice import StageChoice
from bpipe.partition.holdings import Holdings
from bpipe.schedules import Link, Plan, build, simulate
from bpipe.schedules.registry import rule_named

__all__ = ["choose_stages"]

Objective = Literal["time", "memory"]


def choose_stages(
    layers: Sequence[LayerCost],
    num_stages: int,
    num_microbatches: int,
    *,
    schedule: str = "1f1b",
    num_ranks: int | None = None,
    slots: int | Sequence[int | None] | None = None,
    objective: Objective = "time",
    memory_bytes: int | Sequence[int | None] | None = None,
    link: Link | None = None,
    slices: int = 1,
    slice_lengths: Sequence[float] | None = None,
) -> StageChoice:
    """Choose the stages of a model, given the time and memory that its layers take.

    Where each rank has one stage and keeps no other rank's memory, the choice is optimal. Otherwise all ways to cut are compared
    if they are few, and a search finds a good one if they are many. It needs no torch, runs nothing, and is the same for the
    same numbers: measure on one rank and give the numbers, or the stages, to the others, because no two measurements agree.

    With slices, layers still have the costs of whole microbatches. A slice is taken to keep bytes by its length, and to take 1/k of
    each layer's time, as it does in layers that are alike where lengths are by cost (`bpipe.partition.slice_lengths`). A head's
    time goes by length instead, and gradients that wait for earlier slices are not counted.

    Args:
        layers: in order, as `bpipe.measure_layers` returns them.
        num_stages: of all ranks together; each gets one layer or more.
        num_microbatches: m.
        schedule: a name of `bpipe.schedules.names()`.
        num_ranks: p; default: what the schedule takes.
        slots: the budget in microbatches of one stage (in slices, if there are several), as `build` takes it.
        objective: "time": the slowest rank computes as briefly as possible for a microbatch, and among such cuts the fullest rank
            holds as little as possible; "memory": the other way round.
        memory_bytes: the most bytes that a rank may hold, one number or one for each; default: no limit.
        link: between ranks, for the simulated step; default: free.
        slices: k, for schedules that take slices.
        slice_lengths: of the slices, in positions or as shares of the sequence; default: equal ones.

    Raises:
        ConfigurationError: fewer layers than stages, numbers that the schedule does not take, or not k lengths.
        BudgetError: no cut found is within `memory_bytes`; the message says what the fullest rank needs at least.

    Example:
        >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=1.0 + (i == 5), backward_s=2.0) for i in range(6)]
        >>> choose_stages(layers, 3, 6).stages
        (('layers.0', 'layers.1'), ('layers.2', 'layers.3'), ('layers.4', 'layers.5'))
    """
    check_count("num_stages", num_stages)
    if len(layers) < num_stages:
        raise ConfigurationError(
            f"{len(layers)} layers do not fill {num_stages} stages: ask for fewer stages, or name smaller layers"
        )
    check_choice("objective", objective, get_args(Objective))
    if rule_named(schedule).placement.directions > 1:
        raise ConfigurationError(
            f"{schedule} holds every stage twice: choose the stages of one direction, with schedule='zbv' for instance, and use "
            "them for both"
        )
    plan = build(schedule, num_stages, num_microbatches, num_ranks=num_ranks, slots=slots, slices=slices)
    limits = [float("inf") if one is None else one for one in budgets_of("memory_bytes", memory_bytes, plan.num_ranks)]
    task = Task(Chain(layers), plan, limits, None if slice_lengths is None else _weights(slice_lengths, slices))
    ends = task.best(by_time=objective == "time")
    if task.excess(task.rank_bytes(ends)):
        raise BudgetError(_too_full(task, ends))
    return task.choice(ends, link or Link())


class Task:
    """A chain to be cut for a plan, within limits; slices keep bytes by their weights."""

    def __init__(self, chain: Chain, plan: Plan, limits: Sequence[float], weights: Sequence[int] | None = None) -> None:
        self.chain, self.plan, self.limits, self.weights = chain, plan, limits, weights
        self.holdings = Holdings(plan, weights)

    def best(self, *, by_time: bool) -> Ends:
        """Return the best cuts, or if none is within the limits, those that exceed them least."""
        if self.holdings.are_own:
            return self._exact(by_time)
        score = partial(self.score, by_time=by_time)
        return best_of_all(len(self.chain), self.plan.num_stages, score) or improved(self._starts(), score)

    def score(self, ends: Ends, *, by_time: bool) -> tuple[float, ...]:
        """Score cuts, lower is better: the excess over the limits, the slowest rank, the fullest (or vice versa), then the next."""
        num_bytes = self.rank_bytes(ends)
        largest = sorted(self.rank_s(ends), reverse=True), sorted(num_bytes, reverse=True)
        first, second = largest if by_time else largest[::-1]
        return (self.excess(num_bytes), first[0], second[0], *first[1:], *second[1:])

    def rank_s(self, ends: Ends) -> list[float]:
        """Return the seconds that each rank computes for a microbatch."""
        seconds = [0.0] * self.plan.num_ranks
        for rank, piece in zip(self.plan.stage_ranks, pieces(ends)):
            seconds[rank] += self.chain.seconds(*piece)
        return seconds

    def rank_bytes(self, ends: Ends) -> list[int]:
        """Return the most bytes that each rank holds."""
        saved = [self.chain.saved_bytes(*piece) for piece in pieces(ends)]
        static = [self.chain.static_bytes(*piece) for piece in pieces(ends)]
        return [self.holdings.num_bytes(rank, saved, static) for rank in range(self.plan.num_ranks)]

    def excess(self, num_bytes: Sequence[int]) -> float:
        """Return by how many bytes a rank exceeds its limit, at most; 0 if none does."""
        return max(0.0, *(held - limit for held, limit in zip(num_bytes, self.limits)))

    def _exact(self, by_time: bool) -> Ends:
        """Find the best cuts where each rank holds one stage and nothing else, so that a stage's cost depends on it alone."""
        n, s, costs = len(self.chain), self.plan.num_stages, (self._stage_s, self._stage_bytes)
        first, second = costs if by_time else costs[::-1]
        ends = narrowest(n, s, first, self._stage_fits)
        if ends is None:
            over = narrowest(n, s, lambda *stage: self._stage_bytes(*stage) - self.limits[self.plan.stage_ranks[stage[0]]])
            assert over is not None, "there are as many layers as stages"
            return over
        least = max(first(stage, *piece) for stage, piece in enumerate(pieces(ends)))
        return narrowest(n, s, second, lambda *stage: self._stage_fits(*stage) and first(*stage) <= least) or ends

    def _stage_s(self, stage: int, start: int, end: int) -> float:
        return self.chain.seconds(start, end)

    def _stage_bytes(self, stage: int, start: int, end: int) -> float:
        most = self.holdings.most(self.plan.stage_ranks[stage])
        return self.chain.static_bytes(start, end) + self.holdings.bytes_of(most, self.chain.saved_bytes(start, end))

    def _stage_fits(self, stage: int, start: int, end: int) -> bool:
        return self._stage_bytes(stage, start, end) <= self.limits[self.plan.stage_ranks[stage]]

    def _starts(self) -> list[Ends]:
        """Return the cuts to start a search from: as even as possible in layers, in seconds, and in bytes."""
        n, s = len(self.chain), self.plan.num_stages
        costs = (self._stage_s, lambda stage, *piece: self.chain.static_bytes(*piece) + self.chain.saved_bytes(*piece))
        found = [even(n, s), *(narrowest(n, s, cost) for cost in costs)]
        return [ends for ends in found if ends is not None]

    def choice(self, ends: Ends, link: Link) -> StageChoice:
        """Return the choice that these cuts make, with the costs of its stages and the simulated step."""
        stages = pieces(ends)
        costs = self.chain.costs(stages)
        lengths = None if self.weights is None else [weight / sum(self.weights) for weight in self.weights]
        return StageChoice(
            stages=tuple(self.chain.names(*piece) for piece in stages),
            plan=self.plan,
            costs=costs,
            rank_bytes=tuple(self.rank_bytes(ends)),
            step_s=simulate(self.plan, replace(costs, link=link).of_slices(self.plan, lengths=lengths)).makespan_s,
        )


def _weights(lengths: Sequence[float], slices: int) -> list[int]:
    """Return whole numbers in the proportion of lengths, to a millionth of the sequence."""
    if len(lengths) != slices or not all(length > 0 for length in lengths):
        raise ConfigurationError(f"slice_lengths={list(lengths)}: give {slices} positive numbers, one for each slice")
    return [max(1, round(length / sum(lengths) * 1e6)) for length in lengths]


def _too_full(task: Task, ends: Ends) -> str:
    held = task.rank_bytes(ends)
    rank = max(range(len(held)), key=lambda rank: held[rank] - task.limits[rank])
    return (
        f"no cut found keeps every rank within memory_bytes: the closest needs {held[rank]} bytes on rank {rank}, which may hold "
        f"{task.limits[rank]:.0f}. Take more stages, fewer microbatches at a time, a smaller microbatch, or recompute"
    )
