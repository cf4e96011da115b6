"""The measurements of `bpipe.profile_slices`, a formula for the seconds of any slice that is fitted to them, and a plan's costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations

from bpipe.checks import check_count, check_positive
from bpipe.errors import ConfigurationError
from bpipe.estimate.columns import columns
from bpipe.plan.action import Op
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs

__all__ = ["SliceMeasurement", "SliceProfile", "costs_of_slices"]

Coefficients = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeasurement:
    """The measured seconds of one slice on a stage, medians.

    Args:
        length: its positions.
        context: the positions of the sequence before it.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward, with what it gives to earlier slices.

    Raises:
        ConfigurationError: a value is not a number, or negative.

    Example:
        >>> SliceMeasurement(length=512, context=1536, forward_s=0.01, backward_s=0.02).length
        512
    """

    length: int
    context: int
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        check_count("length", self.length)
        check_count("context", self.context, least=0)
        check_positive("forward_s", self.forward_s)
        check_positive("backward_s", self.backward_s)

    @property
    def seconds(self) -> float:
        """Seconds of its forward and backward together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class SliceProfile:
    """A stage, measured on slices of several lengths. `str` formats it as a table.

    Args:
        name: the module's class.
        device: where it ran.
        measurements: one for each length and context.

    Raises:
        ConfigurationError: they are not of two lengths or more.

    Example:
        >>> taken = {(l, x): 3.0 + 2.0 * l + 0.5 * l * (2 * x + l) for l in (1, 2, 4) for x in (0, 4)}
        >>> measured = [SliceMeasurement(length=l, context=x, forward_s=s / 3, backward_s=2 * s / 3) for (l, x), s in taken.items()]
        >>> profile = SliceProfile(name="Stage", device="cpu", measurements=tuple(measured))
        >>> round(profile.seconds(3, 8), 6), round(profile.error, 6)
        (37.5, 0.0)
    """

    name: str
    device: str
    measurements: tuple[SliceMeasurement, ...]

    def __post_init__(self) -> None:
        if not self.measurements or not all(isinstance(one, SliceMeasurement) for one in self.measurements):
            raise ConfigurationError("measurements: give a tuple of SliceMeasurement")
        if len({one.length for one in self.measurements}) < 2:
            raise ConfigurationError("slices of one length do not show what length costs: measure two or more, such as [256, 1024]")

    @cached_property
    def coefficients(self) -> Coefficients:
        """The seconds of a slice for itself, for each of its positions, for each before it, and for attention's products.

        None is negative, and the squares of their relative errors add up to as little as possible.
        """
        return self._fitted([one.seconds for one in self.measurements])

    @cached_property
    def _halves(self) -> tuple[Coefficients, Coefficients]:
        """The coefficients of the seconds of a forward, and of those of a backward."""
        both = [one.forward_s for one in self.measurements], [one.backward_s for one in self.measurements]
        return self._fitted(both[0]), self._fitted(both[1])

    def _fitted(self, seconds: Sequence[float]) -> Coefficients:
        rows = [[term / s for term in _terms(one.length, one.context)] for one, s in zip(self.measurements, seconds)]
        known = [place for place, column in enumerate(zip(*rows)) if any(column)]
        found = [_solved(rows, kept) for size in range(1, 1 + len(known)) for kept in combinations(known, size)]
        _, best = min(((error, solution) for error, solution in found if min(solution) >= 0), key=lambda one: one[0])
        return best

    def seconds(self, length: int, context: int) -> float:
        """Return the seconds of a slice, forward and backward, as `bpipe.partition.slice_lengths` takes them.

        Args:
            length: its positions.
            context: the positions before it.
        """
        return _sum(self.coefficients, length, context)

    def forward_s(self, length: int, context: int) -> float:
        """Return the seconds of a slice's forward, from its positions and those before it."""
        return _sum(self._halves[0], length, context)

    def backward_s(self, length: int, context: int) -> float:
        """Return the seconds of a slice's backward, likewise."""
        return _sum(self._halves[1], length, context)

    @cached_property
    def error(self) -> float:
        """The largest relative error of `seconds` at what was measured: 0.05 for 5%."""
        return max(abs(self.seconds(one.length, one.context) / one.seconds - 1) for one in self.measurements)

    def __repr__(self) -> str:
        fit = f"fitted to within {100 * self.error:.0f}%"
        return f"SliceProfile({self.name} on {self.device}: {len(self.measurements)} slices measured, {fit})"

    def __str__(self) -> str:
        rows = [["length", "context", "forward ms", "backward ms", "fitted ms", "us/position"]]
        for one in self.measurements:
            ms = [f"{1e3 * seconds:.3f}" for seconds in (one.forward_s, one.backward_s, self.seconds(one.length, one.context))]
            rows.append([str(one.length), str(one.context), *ms, f"{1e6 * one.seconds / one.length:.3f}"])
        fixed, position, before, pair = self.coefficients
        formula = (
            f"seconds(length, context) = {fixed:.3g} + {position:.3g} length + {before:.3g} context + "
            f"{pair:.3g} length (2 context + length), within {100 * self.error:.0f}% of what was measured"
        )
        return "\n".join([*columns(rows, numbers=range(6)), formula])


def costs_of_slices(profiles: Sequence[SliceProfile], lengths: Sequence[int], costs: Costs, plan: Plan) -> Costs:
    """Compute the costs of a plan whose slices were measured.

    Args:
        profiles: one for each stage, in order.
        lengths: of the slices of a sequence, in positions, as `bpipe.partition.slice_lengths` returns them.
        costs: of whole microbatches, as `costs_of` computes them: slices get their share of the bytes by their lengths. A split
            backward of a slice has halves in the proportion that they have here.
        plan: gives the number of slices.

    Raises:
        ConfigurationError: there is no profile for a stage, no length for a slice, or a length is no number of positions.

    Example:
        >>> from bpipe.schedules import build
        >>> taken = {(l, x): 1.0 + 2.0 * l + 0.5 * l * (2 * x + l) for l in (1, 2, 4) for x in (0, 4)}
        >>> measured = [SliceMeasurement(length=l, context=x, forward_s=s, backward_s=2 * s) for (l, x), s in taken.items()]
        >>> profile = SliceProfile(name="Stage", device="cpu", measurements=tuple(measured))
        >>> sliced = costs_of_slices([profile] * 2, [6, 2], Costs(saved_bytes=80), build("seq_1f1b", 2, 4, slices=2))
        >>> [round(sliced.seconds(Op.F, 0, slice_), 6) for slice_ in (0, 1)], sliced.saved(0, 1)
        ([31.0, 19.0], 20)
    """
    if len(profiles) != plan.num_stages:
        raise ConfigurationError(f"{len(profiles)} profiles for {plan.num_stages} stages: give one for each")
    for length in lengths:
        check_count("length", length)
    places = list(zip(lengths, accumulate(lengths, initial=0)))
    backward_s = [[profile.backward_s(*place) for place in places] for profile in profiles]
    halves: dict[Op, list[list[float]]] = {}
    for op in (Op.I, Op.W):
        shares = [costs.seconds(op, stage, 0) / (costs.seconds(Op.B, stage, 0) or 1.0) for stage in range(plan.num_stages)]
        halves[op] = [[share * seconds for seconds in of_stage] for share, of_stage in zip(shares, backward_s)]
    return replace(
        costs.of_slices(plan, lengths=[length / sum(lengths) for length in lengths]),
        forward_s=[[profile.forward_s(*place) for place in places] for profile in profiles],
        backward_s=backward_s,
        input_s=halves[Op.I],
        weight_s=halves[Op.W],
    )


def _sum(coefficients: Coefficients, length: int, context: int) -> float:
    return float(sum(one * term for one, term in zip(coefficients, _terms(length, context))))


def _terms(length: int, context: int) -> tuple[float, float, float, float]:
    return 1.0, float(length), float(context), float(length * (2 * context + length))


def _solved(rows: Sequence[Sequence[float]], kept: Iterable[int]) -> tuple[float, Coefficients]:
    """Return the least squares solution for some of the columns, with ones on the right, and its error; the others are 0."""
    import numpy as np  # not above: what needs no profile starts sooner

    matrix, columns, solution = np.array(rows), list(kept), np.zeros(4)
    scales = matrix[:, columns].max(axis=0)
    solution[columns] = np.linalg.lstsq(matrix[:, columns] / scales, np.ones(len(matrix)), rcond=None)[0] / scales
    a, b, c, d = map(float, solution)
    return float(np.square(matrix @ solution - 1).sum()), (a, b, c, d)
