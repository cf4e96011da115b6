"""The rule of a schedule: the placement of its stages, the order of each rank's computations, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import count

from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped, sliced
from bpipe.plan.action import Action, MicrobatchKey

__all__ = ["Placement", "Rule"]

Order = Callable[[int, int, int], list[list[Action]]]
Peak = Callable[[int, int, int, int], Fraction | int]
Bubble = Callable[[int, int, int, float, float, float], float]
Pairs = Callable[[int, int, int], frozenset[MicrobatchKey]]
Period = Callable[[int, float, float, float], float]


class Placement(Enum):
    """The rank of each stage."""

    ONE = "one stage per rank"
    LOOPED = "two or more stages per rank, in a loop"
    V = "two stages per rank, in a V"
    BOTH_WAYS = "two stages per rank, one of each direction"
    TWO_VS = "four stages per rank, in a V of each direction"

    def stage_ranks(self, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Return the rank of each stage: s mod p, or in a V down the ranks and up again; the other direction on the ranks reversed.

        Example:
            >>> Placement.LOOPED.stage_ranks(3, 2), Placement.V.stage_ranks(3, 2)
            ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
            >>> Placement.BOTH_WAYS.stage_ranks(3, 2)
            (0, 1, 2, 2, 1, 0)
        """
        if self.directions == 2:
            one_way = Placement.V if self is Placement.TWO_VS else Placement.ONE
            down = one_way.stage_ranks(num_ranks, stages_per_rank // 2)
            return (*down, *(num_ranks - 1 - rank for rank in down))
        stages = range(num_ranks * stages_per_rank)
        if self is Placement.V:
            return tuple(min(stage, 2 * num_ranks - 1 - stage) for stage in stages)
        return tuple(stage % num_ranks for stage in stages)

    def flow(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Flow:
        """Return what is computed in a step."""
        ranks = self.stage_ranks(num_ranks, stages_per_rank)
        depth = len(ranks) // self.directions
        flow = shaped(None, "chain", ranks[:depth], num_microbatches)
        if self.directions > 1:
            flow = shaped(flow, "alternatives", ranks, (tuple(range(depth)), tuple(range(depth, 2 * depth))), True)
        return flow

    @property
    def directions(self) -> int:
        """The number of streams of microbatches, each of which has stages of its own."""
        return 2 if self in (Placement.BOTH_WAYS, Placement.TWO_VS) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A schedule before it is built for p ranks, m microbatches and v stages per rank.

    Args:
        name: its name for `build`.
        order: `order(p, m, v)`: each rank's computations, and the gathering and freeing of weights if the rule controls it.
        placement: the rank of each stage; default: one stage per rank.
        runs_as: the class of `bpipe` that runs it; default: a subclass of `Schedule` that you write, with `rule = "its name"`.
        title: its published name, and its source.
        peak: `peak(p, m, v, rank)`: the peak of a rank, in microbatches of all of its stages (of those of one direction, if there
            are two); exact for the fullest rank.
        bubble: `bubble(p, m, v, forward_s, input_s, weight_s)`: seconds of the makespan in which a rank does not compute,
            given those that all stages of a rank take for a microbatch; `bubble_text` says when it is exact.
        period: `period(p, forward_s, input_s, weight_s)`: seconds from one microbatch to the next in the long run, given those
            that all stages of a rank take for one; default: as long as a rank computes.
        peak_text: the formula of `peak`, for people, with x for the rank.
        bubble_text: the formula of `bubble`, for people, with F, I, W, and B = I + W.
        allows: `allows(p, m)`: whether it can run m microbatches on p ranks; default: any.
        allows_text: the same for people.
        slots: `slots(p)`: the budget within which it is balanced; default: not balanced.
        slices: k, the slices of each microbatch, which the order counts then (`Plan` says how); peak and bubble count microbatches.
        sliced: `sliced(k)`: the same rule for microbatches of k slices; default: it takes only whole microbatches.
        overlapped: the same rule for forwards and backwards that run side by side; default: it has no such pairs.
        pairs: `pairs(p, m, v)`: of such a rule, the forwards, by stage and unit, that run side by side with the backward behind
            them; default: none.
        local: whether gradients stay in their stage, each of which has a loss of its own; such a rule changes what is learned.

    Example:
        >>> from bpipe.schedules import rules
        >>> zbv = next(rule for rule in rules() if rule.name == "zbv")
        >>> zbv.peak(8, 32, 2, 0), zbv.bubble(8, 32, 2, 1.0, 1.0, 1.0)
        (8, 3.5)
    """

    name: str
    order: Order
    placement: Placement = Placement.ONE
    runs_as: str = "Schedule"
    title: str = ""
    peak: Peak | None = None
    bubble: Bubble | None = None
    period: Period = lambda p, f, i, w: f + i + w
    peak_text: str = "not given"
    bubble_text: str = "not given"
    allows: Callable[[int, int], bool] = lambda p, m: True
    allows_text: str = "any"
    slots: Callable[[int], int] | None = None
    slices: int = 1
    sliced: Callable[[int], Rule] | None = None
    overlapped: Rule | None = None
    pairs: Pairs | None = None
    local: bool = False

    def flow(self, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Flow:
        """Return what is computed in a step, and who needs it."""
        flow = sliced(self.placement.flow(num_ranks, num_microbatches, stages_per_rank), self.slices)
        return shaped(flow, "local") if self.local else flow

    def with_slices(self, slices: int) -> Rule:
        """Return the rule for microbatches of k slices.

        Raises:
            ConfigurationError: it takes only whole microbatches.
        """
        if slices == self.slices:
            return self
        if self.sliced is None:
            raise ConfigurationError(
                f"{self.name} runs whole microbatches, not slices={slices} of each: leave slices out, or choose a schedule such as "
                "seq_1f1b, whose slices of a sequence follow each other"
            )
        return self.sliced(slices)

    def with_pairs(self) -> Rule:
        """Return the rule for forwards and backwards that run side by side.

        Raises:
            ConfigurationError: it has no such pairs.
        """
        if self.overlapped is None:
            raise ConfigurationError(
                f"{self.name} runs no forward side by side with a backward: leave overlapped out, or choose a schedule that does, "
                "dualpipe_v or interleaved_1f1b"
            )
        return self.overlapped

    @property
    def default_stages_per_rank(self) -> int:
        """The default of v."""
        return {Placement.ONE: 1, Placement.TWO_VS: 4}.get(self.placement, 2)

    def check(self, num_stages: int, num_microbatches: int, num_ranks: int) -> None:
        """Raise unless the rule can run these numbers of stages, microbatches and ranks.

        Raises:
            ConfigurationError: it cannot place these stages on these ranks, or run this number of microbatches.
        """
        self.check_placement(num_stages, num_ranks)
        if not self.allows(num_ranks, num_microbatches):
            enough = next(m for m in count(num_microbatches) if self.allows(num_ranks, m))
            raise ConfigurationError(
                f"{self.name} takes {self.allows_text} microbatches: {num_microbatches} on p = {num_ranks} ranks do not fit, "
                f"{enough} would"
            )

    def check_placement(self, num_stages: int, num_ranks: int) -> None:
        """Raise unless the rule can place these stages.

        Raises:
            ConfigurationError: it cannot place this number of stages on this number of ranks.
        """
        if not self._fits(num_stages, num_ranks):
            fitting = num_ranks * self.default_stages_per_rank
            would = f"{fitting} would" if self._takes(num_ranks) else "nor do others: the number of ranks must be even"
            raise ConfigurationError(
                f"{self.name} takes {self.placement.value}: {num_stages} stages on {num_ranks} ranks do not fit, {would}"
            )

    def _takes(self, num_ranks: int) -> bool:
        """Return whether the rule runs on this number of ranks: two directions meet in the middle of two ranks."""
        return num_ranks % self.placement.directions == 0

    def _fits(self, num_stages: int, num_ranks: int) -> bool:
        if self.placement is Placement.LOOPED:
            return num_stages % num_ranks == 0 and num_stages > num_ranks
        return num_stages == num_ranks * self.default_stages_per_rank and self._takes(num_ranks)
