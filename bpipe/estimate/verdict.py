"""The verdict, in words: whether to balance, with the numbers that say why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from bpipe.estimate import huang
from bpipe.estimate.advice import Candidate, Estimate, best_of, gb_per_s, gib
from bpipe.estimate.evaluate import Evaluator

__all__: list[str] = []

SMALLEST_GAIN = 0.01  # a step's difference below this is called none: the model is no better than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The words, and the estimate that they rest on."""

    text: str
    estimate: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the verdict is about.

    Args:
        candidates: ranked.
        evaluator: simulates them with other links.
    """

    candidates: Sequence[Candidate]
    evaluator: Evaluator

    def plain(self, like: Candidate | None = None) -> Candidate | None:
        """The best that fits and moves nothing; of the same stages and schedule as another, if asked."""
        return best_of(
            [
                one
                for one in self.candidates
                if not one.is_balanced and (like is None or (one.num_stages, one.schedule) == (like.num_stages, like.schedule))
            ]
        )

    def unlocked(self, plain: Candidate | None) -> Candidate | None:
        """The best that fits only because it is balanced, and recomputes no more than the best plain one."""
        order = list(self.evaluator.workload.recomputations)
        fits_plain = {_twin(one) for one in self.candidates if one.fits and not one.is_balanced}
        found = [one for one in self.candidates if one.fits and one.is_balanced and _twin(one) not in fits_plain]
        if plain is not None:
            found = [one for one in found if order.index(one.recomputation) <= order.index(plain.recomputation)]
        return best_of(found)


def _twin(one: Candidate) -> tuple[str, int, int, str]:
    return (one.schedule, one.num_stages, one.microbatch_size, one.recomputation)


def verdict_on(case: Case) -> Verdict:
    """Say whether to balance, and why."""
    plain = case.plain()
    unlocked = case.unlocked(plain)
    if best_of(case.candidates) is None:
        return Verdict(text=_nothing_fits(case), estimate=None)
    if not any(one.is_balanced for one in case.candidates):
        assert plain is not None
        return Verdict(text=_lines(_nothing_to_balance(case, plain), case.evaluator.workload.caveat), estimate=None)
    if unlocked is None:
        assert plain is not None
        return Verdict(text=_lines(_not_needed(case, plain), case.evaluator.workload.caveat), estimate=None)
    before = case.plain(like=unlocked)
    estimate = None if before is None else estimate_of(before, unlocked)
    if plain is None:
        text = f"Balance: only so does anything fit. {_sentence(unlocked)}"
    else:
        text = _compared(case, plain, unlocked, estimate)
    return Verdict(text=_lines(text, _link_text(case, unlocked), case.evaluator.workload.caveat), estimate=estimate)


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def estimate_of(before: Candidate, after: Candidate) -> Estimate:
    """E4 between two candidates of as many stages."""
    x, y, batch = before.microbatch_size, after.microbatch_size, after.microbatch_size * after.num_microbatches
    ratio = before.sequence_s / after.sequence_s
    return Estimate(
        microbatch_sizes=(x, y),
        stage_ratio=ratio,
        bubble_factor=huang.bubble_factor(batch, after.num_stages, x, y),
        speed_up=huang.speed_up(batch, after.num_stages, x, y, ratio),
        assumptions=huang.ASSUMPTIONS,
    )


def _nothing_fits(case: Case) -> str:
    least = min(case.candidates, key=lambda one: max(one.peak_bytes) + one.working_bytes)
    return (
        f"Nothing fits: {least.name} needs least, and {least.reason}.\n"
        "What makes it less: more stages or tensor parallelism; recomputation (selective, then full) or fused attention, where it "
        "is not among the candidates; an optimizer sharded over replicas (fewer bytes a parameter); shorter sequences."
    )


def _nothing_to_balance(case: Case, plain: Candidate) -> str:
    stages = max(one.num_stages for one in case.candidates)
    why = "3 stages or fewer leave no slot to gain" if stages < 4 else "too few microbatches for ranks to differ"
    return f"Nothing to balance: {why}. The best is {plain.name}: {_numbers(plain)}."


def _not_needed(case: Case, plain: Candidate) -> str:
    largest = max(
        one.microbatch_size
        for one in case.candidates
        if one.fits and not one.is_balanced and (one.num_stages, one.recomputation) == (plain.num_stages, plain.recomputation)
    )
    return (
        f"Don't balance, there is no need: microbatch {largest} fits plain, and no larger one fits balanced.\n"
        f"The best is {plain.name}: {_numbers(plain)}."
    )


def _compared(case: Case, plain: Candidate, unlocked: Candidate, estimate: Estimate | None) -> str:
    gain = plain.step_s / unlocked.step_s - 1
    allows = f"it allows {_difference(plain, unlocked)}"
    trade = _trade(plain, unlocked)
    numbers = f"The best plain: {plain.name}, {_numbers(plain)}. With balance: {unlocked.name}, {_numbers(unlocked)}."
    bound = "" if estimate is None else f" Huang et al.'s E4, an upper bound: {estimate.speed_up:.3f}x."
    if gain > SMALLEST_GAIN:
        first = f"Balance: {_percent(gain)} more sequences a second: {allows}; {trade}{_breaks_even(case, plain, unlocked)}."
        return f"{first}\n{numbers}{bound}"
    ideal_gain = plain.step_s / case.evaluator.step_s(unlocked, inf) - 1
    if ideal_gain > SMALLEST_GAIN:
        return f"{_slow_link(case, plain, unlocked, gain, ideal_gain)}\nOtherwise {allows}; {trade}. {numbers}{bound}"
    return f"Don't balance: {allows}; {trade}.\n{numbers}{bound}{_fits_up_to(case, plain, unlocked)}"


def _slow_link(case: Case, plain: Candidate, unlocked: Candidate, gain: float, ideal_gain: float) -> str:
    """Evictions that show turn a gain into a loss: say at which bandwidth they would not."""
    assert unlocked.hides_at_bytes_per_s is not None
    now, result = case.evaluator.eviction_bytes_per_s(unlocked), f"a loss of {_percent(-gain)}" if gain < 0 else _percent(gain)
    return (
        f"Don't balance over this link: at {gb_per_s(now)} evictions turn a gain of {_percent(ideal_gain)} into {result}. "
        f"They hide at {gb_per_s(unlocked.hides_at_bytes_per_s)}{_breaks_even(case, plain, unlocked)}."
    )


def _breaks_even(case: Case, plain: Candidate, unlocked: Candidate) -> str:
    even = case.evaluator.breaks_even_at(unlocked, plain.step_s)
    return "" if even is None else f"; balancing breaks even at {gb_per_s(even)}"


def _difference(plain: Candidate, unlocked: Candidate) -> str:
    differences = [
        (f"microbatch {unlocked.microbatch_size}", str(plain.microbatch_size), unlocked.microbatch_size != plain.microbatch_size),
        (f"recomputation {unlocked.recomputation}", plain.recomputation, unlocked.recomputation != plain.recomputation),
        (f"{unlocked.num_stages} stages", str(plain.num_stages), unlocked.num_stages != plain.num_stages),
    ]
    return " and ".join(f"{new} instead of {old}" for new, old, differs in differences if differs) or f"{unlocked.schedule} to fit"


def _trade(plain: Candidate, unlocked: Candidate) -> str:
    """What a stage gains and the bubble costs."""
    if plain.num_stages != unlocked.num_stages:
        return f"together {_signed(plain.step_s / unlocked.step_s - 1)} sequences a second"
    estimate = estimate_of(plain, unlocked)
    larger = "the larger microbatch" if unlocked.recomputation == plain.recomputation else "that"
    gain = f"{larger} {_gains(estimate.stage_ratio - 1)} a stage"
    if unlocked.microbatch_size == plain.microbatch_size:
        return gain
    return f"{gain} and {'costs' if estimate.bubble_factor < 1 else 'saves'} {_percent(abs(1 - estimate.bubble_factor))} in bubble"


def _fits_up_to(case: Case, plain: Candidate, unlocked: Candidate) -> str:
    """Where plain fits more than its best choice, say so: the verdict must not claim more for balancing than there is."""
    same = [one for one in case.candidates if one.fits and not one.is_balanced and one.recomputation == unlocked.recomputation]
    largest = max((one.microbatch_size for one in same if one.num_stages == unlocked.num_stages), default=plain.microbatch_size)
    return "" if largest <= plain.microbatch_size else f" Plain fits microbatches up to {largest}."


def _link_text(case: Case, one: Candidate) -> str:
    assert one.hides_at_bytes_per_s is not None
    speed, needed = gb_per_s(case.evaluator.eviction_bytes_per_s(one)), gb_per_s(one.hides_at_bytes_per_s)
    need = f"Evictions need {needed} to hide behind a forward"
    if one.exposed_s <= SMALLEST_GAIN * one.step_s:
        return f"{need}, and hide over the link's {speed}."
    return f"{need}; over the link's {speed} a rank waits {one.exposed_s:.3g} s a step for them."


def _sentence(one: Candidate) -> str:
    return f"The best is {one.name}: {_numbers(one)}."


def _numbers(one: Candidate) -> str:
    return f"{one.step_s:.4g} s a step, {gib(max(one.peak_bytes))} GiB"


def _gains(value: float) -> str:
    if abs(value) < 0.0005:
        return "gains nothing"
    return f"gains {_percent(value)}" if value > 0 else f"loses {_percent(-value)}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}%"
