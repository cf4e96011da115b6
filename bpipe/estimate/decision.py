"""The verdict: whether to balance, decided by the predicted steps, over the given link and over an unlimited one."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from bpipe.estimate import words
from bpipe.estimate.advice import Candidate, best_of
from bpipe.estimate.evaluate import Evaluator
from bpipe.estimate.huang import Estimate

__all__: list[str] = []

HALVINGS = 8  # of an octave: 1 part in 250
FIRST_BYTES_PER_S, MOST_BYTES_PER_S = 1e9, 1e16
SMALLEST_GAIN = 0.01  # a step's difference below this counts as none: the model is no more accurate than that


class Verdict(NamedTuple):
    """The verdict's part of `Advice`."""

    decision: str
    text: str
    estimate: Estimate | None = None
    breaks_even_bytes_per_s: float | None = None


def verdict_on(candidates: Sequence[Candidate], evaluator: Evaluator) -> Verdict:
    """Say whether to balance, and why, and what could be filled."""
    verdict, best = _decided(candidates, evaluator), best_of(candidates)
    if best is None or max(best.idle_s) == 0:
        return verdict
    others = [one for one in _alike(candidates, best)[1:] if one.fits and one.schedule == best.schedule]
    return verdict._replace(text=f"{verdict.text}\n{words.idle(best, next(iter(others), None))}")


def _decided(candidates: Sequence[Candidate], evaluator: Evaluator) -> Verdict:
    plain, balanced = [[one for one in candidates if one.fits and one.is_balanced is which] for which in (False, True)]
    if not plain and not balanced:
        return Verdict("nothing fits", words.nothing_fits(candidates))
    if not any(one.is_balanced for one in candidates):
        return Verdict("nothing to balance", words.nothing_to_balance(candidates, plain[0]))
    if not plain:
        return Verdict("balance", words.only_balanced(balanced[0], evaluator.links.bytes_per_s))
    if balanced and balanced[0].gain_over(plain[0]) > SMALLEST_GAIN:
        even = _breaks_even(evaluator, plain[:1], _alike(balanced, balanced[0]))
        return _verdict("balance", words.balance(plain[0], balanced[0], even), plain, balanced[0], evaluator, even)
    fits_plain = set(map(_microbatches, plain))
    unlocked = [one for one in balanced if _microbatches(one) not in fits_plain]
    if not unlocked:
        return Verdict("no need", words.not_needed(plain))
    return _dont(plain, _alike(unlocked, _fastest(evaluator, unlocked, inf)[0]), evaluator)


def _dont(plain: Sequence[Candidate], balanced: Sequence[Candidate], evaluator: Evaluator) -> Verdict:
    """Advise not to balance: none is faster over the given link; the first balanced candidate is the best over an unlimited one."""
    rival, rival_s = _fastest(evaluator, plain, inf)
    ideal_gain, even = rival_s / evaluator.step_s(balanced[0], inf) - 1, None
    if ideal_gain > SMALLEST_GAIN:
        even = _breaks_even(evaluator, [plain[0], *[rival] * (rival is not plain[0])], balanced)
    first = words.dont(plain[0], balanced[0])
    if even is not None:
        first = words.slow_link(plain[0], balanced[0], evaluator.links.bytes_per_s, ideal_gain, even)
    return _verdict("don't", first, plain, balanced[0], evaluator, even)


def _verdict(
    decision: str, first: str, plain: Sequence[Candidate], balanced: Candidate, evaluator: Evaluator, even: float | None
) -> Verdict:
    before = best_of([one for one in plain if (one.num_stages, one.schedule) == (balanced.num_stages, balanced.schedule)])
    estimate = None if before is None or balanced.slices > 1 else balanced.estimate_over(before)
    pays = words.pays_from(plain[0], balanced, evaluator.workload.share)
    lines = [first, pays, words.numbers(plain, balanced, estimate), words.link(balanced, evaluator.links.bytes_per_s)]
    return Verdict(decision, "\n".join(filter(None, lines)), estimate, even)


def _microbatches(one: Candidate) -> tuple[int, int, int, str]:
    return one.num_stages, one.microbatch_size, one.slices, one.recomputation


def _alike(candidates: Sequence[Candidate], like: Candidate) -> list[Candidate]:
    """Return a candidate, and those that run the same microbatches."""
    return [like, *(one for one in candidates if one is not like and _microbatches(one) == _microbatches(like))]


def _fastest(evaluator: Evaluator, candidates: Sequence[Candidate], bytes_per_s: float) -> tuple[Candidate, float]:
    """Return the fastest candidate over a link, and the seconds of its step; of equally fast ones, the first."""
    steps = [evaluator.step_s(one, bytes_per_s) for one in candidates]
    return candidates[steps.index(min(steps))], min(steps)


def _breaks_even(evaluator: Evaluator, plain: Sequence[Candidate], balanced: Sequence[Candidate]) -> float | None:
    """Find the least bandwidth that makes one of the balanced candidates take no longer than any plain one, over the same link."""

    def pays(bytes_per_s: float) -> bool:
        return _fastest(evaluator, balanced, bytes_per_s)[1] <= _fastest(evaluator, plain, bytes_per_s)[1]

    high = balanced[0].hides_at_bytes_per_s or FIRST_BYTES_PER_S
    while not pays(high):
        high *= 2
        if high > MOST_BYTES_PER_S:
            return None
    low = high / 2
    while low > 1 and pays(low):
        low, high = low / 2, low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
