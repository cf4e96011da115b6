"""Advice as data: the candidates, what each of them takes, and a verdict. It prints as a table and is written as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from bpipe.estimate import huang
from bpipe.estimate.columns import columns
from bpipe.estimate.devices import GIB
from bpipe.estimate.huang import Estimate

__all__ = ["Advice", "Candidate"]

MOST_FITTING, MOST_OTHERS, WIDTH = 12, 6, 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a step, simulated.

    Args:
        schedule: its name for `bpipe.schedules.build`.
        slots: the budget in microbatches, or in slices, to build it with, if it is balanced; None if it is not.
        num_stages: p.
        microbatch_size: b, in sequences.
        num_microbatches: m.
        slices: k, of each microbatch.
        recomputation: "none", "selective", "full" or "as measured".
        step_s: predicted seconds of a step.
        times_plain: step_s over that of the same candidate without balancing; None if it is not balanced.
        sequences_per_s: of all pipelines together.
        sequence_s: seconds of F and B of the slowest stage, for one sequence.
        stage_mfu: the share of the devices' peak that this stage reaches alone, without what it recomputes; None if measured.
        device_peak_bytes: predicted for each rank: everything that its device holds.
        peak_bytes: of that, the most that is activations: what microbatches save, and remote activations.
        working_bytes: what a backward that recomputes makes again, not counted in the peaks.
        fits: whether every rank has enough memory.
        reason: why it fits or not, with the rank that needs most.
        exposed_s: seconds that the worst rank waits for evictions and loads.
        hides_at_bytes_per_s: the link that moves every evicted microbatch within one forward of its stage; None without evictions.
        idle_s: seconds in which each rank waits for others.
        fillable_s: of these, the seconds that a fill job would use whose pieces take a tenth of a forward.
        idle_free_bytes: for each rank the least that its device has free while it waits, beside what is set aside.

    Example:
        >>> from bpipe import advise
        >>> best = advise("gpt3-1.3b", device="a100-80gb", num_stages=4, batch=8).candidates[0]
        >>> best.schedule, best.num_stages, best.fits
        ('1f1b', 4, True)
    """

    schedule: str
    slots: int | None
    num_stages: int
    microbatch_size: int
    num_microbatches: int
    slices: int
    recomputation: str
    step_s: float
    times_plain: float | None
    sequences_per_s: float
    sequence_s: float
    stage_mfu: float | None
    device_peak_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    working_bytes: int
    fits: bool
    reason: str
    exposed_s: float
    hides_at_bytes_per_s: float | None
    idle_s: tuple[float, ...]
    fillable_s: tuple[float, ...]
    idle_free_bytes: tuple[int, ...]

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"Candidate({self.name}: {self.step_s:.4g} s, at most {gib(max(self.device_peak_bytes))} GiB, {fits})"

    @property
    def is_balanced(self) -> bool:
        """Whether activations move."""
        return self.slots is not None

    @property
    def label(self) -> str:
        """The schedule, and whether it is balanced."""
        name, unit = (f"{self.schedule} in {self.slices} slices", "slices") if self.slices > 1 else (self.schedule, "slots")
        return f"{name} balanced, {self.slots} {unit}" if self.is_balanced else name

    @property
    def name(self) -> str:
        """Everything that distinguishes it from the others."""
        recomputation = "" if self.recomputation == "as measured" else f", recomputation {self.recomputation}"
        stages = f"{self.num_stages} stage{'s' * (self.num_stages > 1)}"
        return f"{self.label}, {stages}, microbatch {self.microbatch_size}{recomputation}"

    def gain_over(self, other: Candidate) -> float:
        """Return the speed-up over another candidate: 0.35 for 1.35 times."""
        return other.step_s / self.step_s - 1

    def estimate_over(self, other: Candidate) -> Estimate:
        """Return Huang et al.'s estimates of going from another candidate with as many stages to this one."""
        shares = None if other.stage_mfu is None or self.stage_mfu is None else (other.stage_mfu, self.stage_mfu)
        return huang.estimate(
            self.microbatch_size * self.num_microbatches,
            self.num_stages,
            (other.microbatch_size, self.microbatch_size),
            stage_s=(other.sequence_s * other.microbatch_size, self.sequence_s * self.microbatch_size),
            stage_mfu=shares,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result of `bpipe.advise`.

    Args:
        title: the model, the devices and the batch.
        decision: "balance", "don't", "no need" (nothing fits only balanced), "nothing to balance" (no plan differs) or
            "nothing fits".
        verdict: the same in words; the first line stands alone.
        breaks_even_bytes_per_s: the link between the ranks of a pair from where balancing starts to be faster; None if no link
            makes it more than 1% faster, or nothing fits plain.
        candidates: those that fit first, each group sorted by predicted time for the same number of sequences.
        estimate: Huang et al.'s estimate, if there is something to compare.
        memory_bytes: the memory of a device.
        reserved_bytes: of these, set aside.
        link_bytes_per_s: between ranks of a node; None if unlimited.
        assumptions: what all of this rests on.

    Example:
        >>> from bpipe import advise
        >>> advice = advise("gpt3-1.3b", device="a100-80gb", num_stages=4, batch=8)
        >>> advice.decision
        'no need'
    """

    title: str
    decision: str
    verdict: str
    breaks_even_bytes_per_s: float | None
    candidates: tuple[Candidate, ...]
    estimate: Estimate | None
    memory_bytes: int
    reserved_bytes: int
    link_bytes_per_s: float | None
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return best_of(self.candidates)

    @property
    def best_plain(self) -> Candidate | None:
        """The fastest that fits and moves nothing."""
        return best_of([candidate for candidate in self.candidates if not candidate.is_balanced])

    @property
    def best_balanced(self) -> Candidate | None:
        """The fastest that fits and moves activations."""
        return best_of([candidate for candidate in self.candidates if candidate.is_balanced])

    @property
    def gain(self) -> float | None:
        """The speed-up of the best balanced candidate over the best plain one; None if one is missing."""
        plain, balanced = self.best_plain, self.best_balanced
        return balanced.gain_over(plain) if plain and balanced else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain numbers, strings, lists and dicts; `best`, `best_plain` and `best_balanced` are names."""
        best = {name: getattr(self, name) for name in ("best", "best_plain", "best_balanced")}
        names = {name: None if one is None else one.name for name, one in best.items()}
        fields = {"decision": self.decision, "gain": self.gain, **names, **asdict(self)}
        fields["candidates"] = [{"name": one.name, **asdict(one)} for one in self.candidates]
        return fields

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        best = "nothing fits" if self.best is None else f"best: {self.best.name}"
        return f"Advice({self.title}: {self.decision}; {best}; {len(self.candidates)} candidates)"

    def __str__(self) -> str:
        parts = [_wrapped([self.title]), _wrapped(self.verdict.splitlines()), _table(self.candidates)]
        return "\n\n".join([*parts, "Assumed:\n" + _wrapped(self.assumptions, "- ")])


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the first candidate that fits; None if none does."""
    return next((candidate for candidate in candidates if candidate.fits), None)


def gib(num_bytes: float) -> str:
    """Format bytes in GiB; small numbers keep three digits."""
    value = num_bytes / GIB
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3g}"


def gb_per_s(bytes_per_s: float) -> str:
    """Format a bandwidth in GB/s = 1e9 bytes per second."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if isfinite(bytes_per_s) else "unlimited"


def _wrapped(lines: Sequence[str], bullet: str = "") -> str:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, lines))


def _table(candidates: Sequence[Candidate]) -> str:
    fitting = [one for one in candidates if one.fits]
    others = [one for one in candidates if not one.fits]
    shown = [*fitting[:MOST_FITTING], *others[:MOST_OTHERS]]
    how = ("sequences/s", "step s", "schedule", "stages", "microbatch", "recomputation")
    head = (*how, "device GiB by rank", "activations GiB", "fits")
    lines = columns([head, *map(_row, shown)])
    left = len(candidates) - len(shown)
    return "\n".join([*lines, f"and {left} more in .candidates"] if left else lines)


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        f"{one.sequences_per_s:.4g}",
        f"{one.step_s:.4g}",
        one.label,
        str(one.num_stages),
        str(one.microbatch_size),
        one.recomputation,
        _peaks(one.device_peak_bytes),
        _peaks(one.peak_bytes),
        f"{'yes' if one.fits else 'no'}: {one.reason}",
    )


def _peaks(peak_bytes: Sequence[int]) -> str:
    if len(peak_bytes) > 8:
        return f"{gib(min(peak_bytes))} to {gib(max(peak_bytes))}"
    return " ".join(f"{peak / GIB:.0f}" if max(peak_bytes) >= 10 * GIB else gib(peak) for peak in peak_bytes)
