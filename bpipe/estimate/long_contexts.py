"""What long contexts do to schedules: attention's share of a forward, and the orders that its long backward slows down.

Attention's core, queries by keys and scores by values, has no weights: all of its backward is for inputs. So the longer the
context, the longer is I, and the shorter is W beside F and I.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.estimate.flops import core_flops, layer_flops
from bpipe.estimate.transformer import Transformer
from bpipe.schedules import Op, Timeline, names
from bpipe.schedules.registry import rule_named

__all__ = ["UnevenHalves", "halves", "uneven_halves"]

BACKWARD = 2.5  # forwards of fused attention: five products of matrices instead of two (Dao, arXiv 2307.08691, section 4.1)
SLICED, SLICES = "seq_1f1b", 4  # the way out, and its usual number of slices
V_SHAPES = ("v_half", "v_min")
NOTICED = 0.01  # a step that is longer by less counts as equal: costs are no more accurate than that


def attention_share(model: Transformer) -> float:
    """Return the part of a layer's forward that attention's core takes, by operations."""
    return core_flops(model, 1) / layer_flops(model, 1)


def halves(attention: float) -> tuple[float, float]:
    """Return the two halves of a backward, I for inputs and W for weights, in forwards.

    Args:
        attention: the part of a forward that attention's core takes.

    Raises:
        ConfigurationError: it is not a part.

    Example:
        >>> halves(0.4)
        (1.6, 0.6)
    """
    if not 0 <= attention <= 1:
        raise ConfigurationError(f"an attention share of {attention}: give the part of a forward that attention takes, 0 to 1")
    return 1 - attention + BACKWARD * attention, 1 - attention


def too_long(attention: float) -> bool:
    """Return whether the cycles of V-Half and V-Min take longer than what a rank computes, for any 4 ranks or more.

    On an odd number of ranks V-Half has a cycle of 4I + W, half of which is longer than F + I + W where 2I > W + 2F. With W <= F,
    as here, the cycles of V-Half on even numbers, and of V-Min, are too long then as well, and begin to be so earlier.

    Example:
        >>> too_long(0.24), too_long(0.26)  # I = 1 + 1.5a and W = 1 - a, so that the bound is a = 1/4
        (False, True)
    """
    i, w = halves(attention)
    return w + 2 < 2 * i


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenHalves:
    """A schedule whose order fits F, I and W of equal length, with others. `str` says so in a line.

    Args:
        schedule: its name.
        forward_s: F, seconds that a rank computes of a microbatch's forward.
        input_s: likewise I, of the backward for inputs.
        weight_s: likewise W, of the backward for weights.
        period_s: seconds from one microbatch to the next, in the long run.
        times: the step over what a rank computes in it.
        slices: k.
        sliced_times: the same of `seq_1f1b` with k slices of equal cost.

    Example:
        >>> halves = UnevenHalves(
        ...     schedule="zb_h1", forward_s=1.0, input_s=2.0, weight_s=0.5, period_s=4.0, times=1.25, slices=4, sliced_times=1.05
        ... )
        >>> halves.period_s
        4.0
    """

    schedule: str
    forward_s: float
    input_s: float
    weight_s: float
    period_s: float
    times: float
    slices: int
    sliced_times: float

    @property
    def work_s(self) -> float:
        """Seconds that a rank computes of a microbatch."""
        return self.forward_s + self.input_s + self.weight_s

    def __str__(self) -> str:
        why = ", as with long contexts (attention has no weights)" if self.input_s > self.weight_s else ""
        return (
            f"{self.schedule} is slow here: its order fits F = I = W, but they are {self.forward_s:.3g}, {self.input_s:.3g} and "
            f"{self.weight_s:.3g} s{why}, and so a microbatch takes {self.period_s:.3g} s instead of the {self.work_s:.3g} s that "
            f"a rank computes. The step takes {self.times:.3f} times its computations; 1F1B in slices would take "
            f"{self.sliced_times:.3f} ({SLICED} in {self.slices} slices of equal cost)"
        )


def uneven_halves(timeline: Timeline, *, slices: int = SLICES) -> UnevenHalves | None:
    """Return what slows a step down if its schedule's order does not fit its F, I and W, as in V-Half and V-Min; else None.

    Args:
        timeline: simulated or measured.
        slices: k, of the 1F1B that it is compared with.

    Raises:
        ConfigurationError: `slices` is not a whole number of at least 1.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> costs = Costs(forward_s=0.5, backward_s=1.1, input_s=0.8)  # of a stage; attention is 40% of a forward
        >>> found = uneven_halves(simulate(build("v_half", 16, 32), costs))
        >>> round(found.times, 3), round(found.sliced_times, 3)
        (1.347, 1.055)
        >>> uneven_halves(simulate(build("zbv", 16, 32), costs))
    """
    check_count("slices", slices)
    plan, ranks = timeline.plan, timeline.ranks
    if plan.name not in names():
        return None
    seconds = dict.fromkeys((Op.F, Op.I, Op.W), 0.0)
    for span in (span for rank in ranks for span in timeline.spans(rank)):
        if span.action.op in seconds:
            seconds[span.action.op] += span.seconds
    p, m = plan.num_ranks, plan.num_microbatches
    f, i, w = (total / max(1, len(ranks) * m) for total in seconds.values())
    period_s, work_s = rule_named(plan.name).period(p, f, i, w), f + i + w
    if not w or period_s <= (1 + NOTICED) * work_s:
        return None
    bubble = rule_named(SLICED).with_slices(slices).bubble
    assert bubble is not None, "1F1B in slices has an exact bubble"
    return UnevenHalves(
        schedule=plan.name,
        forward_s=f,
        input_s=i,
        weight_s=w,
        period_s=period_s,
        times=timeline.makespan_s / (m * work_s),
        slices=slices,
        sliced_times=1 + bubble(p, m, 1, f, i, w) / (m * work_s),
    )


def slowed(schedule: str, num_ranks: int, attention: float) -> float:
    """Return how many times longer than a rank computes a microbatch takes in a schedule, in the long run.

    Args:
        schedule: its name.
        num_ranks: p.
        attention: the part of a forward that attention's core takes.

    Example:
        >>> round(slowed("v_min", 8, 0.4), 2), slowed("zbv", 8, 0.4)
        (1.5, 1.0)
    """
    seconds = 1.0, *halves(attention)
    return rule_named(schedule).period(num_ranks, *seconds) / sum(seconds)
