"""The sentences of a verdict. Each first line stands alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bpipe.estimate.advice import Candidate, gb_per_s, gib
from bpipe.estimate.huang import Estimate
from bpipe.estimate.long_contexts import SLICES

__all__: list[str] = []

HIDDEN = 0.01  # waits of at most this share of a step count as none
EQUAL = 0.0005  # what is shown as "0.0%" or "1.000 times"


def nothing_fits(candidates: Sequence[Candidate]) -> str:
    """Say that no candidate fits, and how to need less memory."""
    least = min(candidates, key=lambda one: max(one.device_peak_bytes) + one.working_bytes)
    return (
        f"Nothing fits: {least.name} needs least, and {least.reason}.\n"
        "To need less memory: more stages or tensor parallelism; recomputation (selective, then full) or fused attention, if it "
        "is not among the candidates; an optimizer sharded over replicas (fewer bytes per parameter); shorter sequences."
    )


def nothing_to_balance(candidates: Sequence[Candidate], plain: Candidate) -> str:
    """Say that no schedule has a balanced form."""
    stages = max(one.num_stages for one in candidates)
    why = "3 stages or fewer leave no slot to gain" if stages < 4 else "too few microbatches for ranks to differ"
    return f"Nothing to balance: {why}. The best is {plain.name}: {_numbers(plain)}."


def only_balanced(balanced: Candidate, link_bytes_per_s: float) -> str:
    """Say that no plain candidate fits."""
    first = f"Balance: nothing fits without it. The best is {balanced.name}: {_numbers(balanced)}."
    return f"{first}\n{link(balanced, link_bytes_per_s)}"


def not_needed(plain: Sequence[Candidate]) -> str:
    """Say that everything that fits balanced also fits plain."""
    largest = max(one.microbatch_size for one in plain if _way(one) == _way(plain[0]))
    recomputation = "" if plain[0].recomputation == "as measured" else f" with recomputation {plain[0].recomputation}"
    return (
        f"Don't balance, there is no need: microbatch {largest} fits plain{recomputation}, and every candidate that fits balanced "
        f"also fits plain.\nThe best is {plain[0].name}: {_numbers(plain[0])}."
    )


def balance(plain: Candidate, balanced: Candidate, even: float | None) -> str:
    """Say that balancing is faster."""
    breaks_even = "" if even is None else f"; balancing breaks even at {gb_per_s(even)}"
    return f"Balance: {_percent(balanced.gain_over(plain))} more sequences per second: {_trade(plain, balanced)}{breaks_even}."


def dont(plain: Candidate, balanced: Candidate) -> str:
    """Say that balancing would not be faster over any link."""
    return f"Don't balance: {_trade(plain, balanced)}."


def pays_from(plain: Candidate, balanced: Candidate, share: Callable[[int], float | None]) -> str:
    """Say how fast a stage has to be with the balanced candidate's microbatches for a step that is as short; "" if sizes are equal.

    The step is as many times as long as the stage is slower: messages and evictions do not count.

    Args:
        share: of the peak that a stage reaches with a microbatch size; it is None if stages were measured.
    """
    size, times = balanced.microbatch_size, balanced.step_s / plain.step_s
    if size == plain.microbatch_size or balanced.num_stages != plain.num_stages:
        return ""
    after, before = share(size), share(plain.microbatch_size)
    if after is None or before is None:
        needed, now = balanced.sequence_s * size / times, balanced.sequence_s * size
        return f"It pays if the slowest stage takes at most {needed:.3g} s for a microbatch of {size}; it takes {now:.3g} s."
    needed = after * times
    if needed > 1:
        return f"It pays for no efficiency: microbatch {size} would have to reach {needed:.0%} of the peak."
    compared = f"microbatch {plain.microbatch_size} reaches {before:.0%}"
    return f"It pays if microbatch {size} reaches at least {needed:.0%} of the peak, where {compared}."


def slow_link(plain: Candidate, balanced: Candidate, link_bytes_per_s: float, ideal_gain: float, even: float) -> str:
    """Say that balancing would be faster over another link."""
    gain, hides_at = balanced.gain_over(plain), balanced.hides_at_bytes_per_s
    hides = "B" if hides_at is None else f"They hide at {gb_per_s(hides_at)}, and b"
    result = "nothing" if abs(gain) < EQUAL else f"a loss of {_percent(-gain)}" if gain < 0 else _percent(gain)
    return (
        f"Don't balance over this link: at {gb_per_s(link_bytes_per_s)} evictions turn a gain of {_percent(ideal_gain)}, that of "
        f"an unlimited link, into {result}. {hides}alancing breaks even at {gb_per_s(even)}.\nBalancing: {_trade(plain, balanced)}."
    )


def numbers(plain: Sequence[Candidate], balanced: Candidate, estimate: Estimate | None) -> str:
    """Say what is compared, with Huang et al.'s estimate of it, and whether plain fits larger microbatches than its best choice."""
    best = plain[0]
    text = f"The best plain: {best.name}, {_numbers(best)}. With balance: {balanced.name}, {_numbers(balanced)}."
    largest = max((one.microbatch_size for one in plain if _way(one) == _way(balanced)), default=0)
    if largest > best.microbatch_size:
        text += f" Plain fits microbatches up to {largest} with recomputation {balanced.recomputation}."
    return text if estimate is None else f"{text} {estimate}"


def link(one: Candidate, bytes_per_s: float) -> str:
    """Say whether evictions hide, and what they cost if they do not."""
    assert one.times_plain is not None
    need = (
        ""
        if one.hides_at_bytes_per_s is None
        else f"Evictions need {gb_per_s(one.hides_at_bytes_per_s)} to hide behind a forward. "
    )
    over = f"Over the link's {gb_per_s(bytes_per_s)} "
    if one.exposed_s <= HIDDEN * one.step_s:
        how = f"they hide: the step is {one.times_plain:.3f} times that of the same microbatches without them."
    else:
        free = ", as they wait within the bubble" if abs(one.times_plain - 1) < EQUAL else ""
        how = f"a rank waits {one.exposed_s:.3g} s per step for them, and the step is {one.times_plain:.3f} times that of the same "
        how += f"microbatches without them{free}."
    return f"{need}{over}{how}"


def idle(one: Candidate, other: Candidate | None) -> str:
    """Say what a fill job could use, and how much memory it would find; `other` runs the same microbatches with other memory."""
    most, least = one.idle_s.index(max(one.idle_s)), one.idle_free_bytes.index(min(one.idle_free_bytes))
    free = f"while rank {least} waits, {gib(one.idle_free_bytes[least])} GiB are free at least"
    if other is not None:
        free += f" ({gib(min(other.idle_free_bytes))} on the fullest rank of {other.label})"
    return (
        f"Idle: with {one.label}, rank {most} waits {one.idle_s[most]:.4g} s of the step's {one.step_s:.4g}; a fill job whose "
        f"pieces take a tenth of a forward (docs/fill.md) would use {one.fillable_s[most]:.4g} s of them; {free}."
    )


def long_context(attention: float, times: Mapping[str, float], num_stages: int, slices: int) -> str:
    """Say that attention makes backwards for inputs too long for some schedules, and what to take instead.

    Args:
        attention: the part of a forward that it takes.
        times: how many times longer than a rank computes a microbatch takes, by schedule.
        num_stages: p.
        slices: that were ranked.
    """
    slow = " and ".join(f"{time:.2f} with {name}" for name, time in times.items())
    out = f"with {slices} it is ranked here" if slices > 1 else f"slices={SLICES} or --slices {SLICES} ranks it too"
    return (
        f"A long context: attention takes {_percent(attention)} of a layer's forward and has no weights, so W + 2F < 2I, for which "
        f"schedules that save memory by halving backwards have no room: on {num_stages} ranks a microbatch takes {slow} times what "
        f"a rank computes. 1F1B in slices of the sequence has no such limit: {out}."
    )


def _trade(plain: Candidate, balanced: Candidate) -> str:
    """Say what balancing allows, what a stage gains by it and what the bubble costs."""
    allows = f"it allows {_difference(plain, balanced)}; "
    if plain.num_stages != balanced.num_stages or max(plain.slices, balanced.slices) > 1:
        return f"{allows}together {100 * balanced.gain_over(plain):+.1f}% sequences per second"
    estimate = balanced.estimate_over(plain)
    is_larger = balanced.microbatch_size > plain.microbatch_size and balanced.recomputation == plain.recomputation
    gain = f"{allows}{'the larger microbatch' if is_larger else 'that'} {_gains(estimate.stage_ratio - 1)} per stage"
    if balanced.microbatch_size == plain.microbatch_size:
        return gain
    return f"{gain} and {'costs' if estimate.bubble_factor < 1 else 'saves'} {_percent(abs(1 - estimate.bubble_factor))} in bubble"


def _difference(plain: Candidate, balanced: Candidate) -> str:
    differences = [
        (f"microbatch {balanced.microbatch_size}", str(plain.microbatch_size), balanced.microbatch_size != plain.microbatch_size),
        (f"recomputation {balanced.recomputation}", plain.recomputation, balanced.recomputation != plain.recomputation),
        (f"{balanced.slices} slices", str(plain.slices), balanced.slices != plain.slices),
        (f"{balanced.num_stages} stages", str(plain.num_stages), balanced.num_stages != plain.num_stages),
    ]
    texts = [f"{new} instead of {old}" for new, old, differs in differences if differs]
    return " and ".join(texts) or f"{balanced.label} instead of {plain.label}"


def _way(one: Candidate) -> tuple[int, str]:
    return one.num_stages, one.recomputation


def _numbers(one: Candidate) -> str:
    return f"{one.step_s:.4g} s per step, {gib(max(one.device_peak_bytes))} GiB"


def _gains(value: float) -> str:
    if abs(value) < EQUAL:
        return "gains nothing"
    return f"gains {_percent(value)}" if value > 0 else f"loses {_percent(-value)}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
