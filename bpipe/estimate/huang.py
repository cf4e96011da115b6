"""Huang et al.'s estimate of whether a larger microbatch pays (arXiv 2401.02088), from the bubble and one stage's efficiency.

Letters: B sequences per step and pipeline, b per microbatch, p stages, T(b) seconds of one stage's F and B, F_stage its operations
for one sequence, P_peak the operations per second of the devices of a stage together. A microbatch size that does not divide the
batch is a ConfigurationError in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.errors import ConfigurationError
from bpipe.estimate.checks import check_count, check_positive

__all__ = ["ASSUMPTIONS", "Estimate", "bubble_factor", "estimate", "mfu", "speed_up", "stage_mfu", "step_s"]

ASSUMPTIONS = (
    "Huang et al.'s estimates (arXiv 2401.02088) take all stages to be as slow as the slowest, 1F1B, a bubble of p - 1 "
    "microbatches, and neither transfers nor balancing to cost anything: for equal stages an upper bound. Recomputed operations do "
    "not count in MFU."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Huang et al.'s estimates of going from one microbatch size to another; pairs are before and after.

    Args:
        microbatch_sizes: in sequences.
        step_s: E1, seconds of a step.
        stage_mfu: E2, the share of the peak that one stage reaches alone; None if it was measured.
        mfu: E3, the share of the peak that the pipeline reaches; None if it was measured.
        stage_ratio: how much faster a stage runs a sequence.
        bubble_factor: what the bubble leaves of the speed.
        speed_up: E4, their product.
        assumptions: in words.

    Example:
        >>> from bpipe import advise
        >>> asked = {"num_stages": 8, "batch": 16, "tensor_parallel": 4, "recomputations": ["none"], "microbatch_sizes": [1, 2]}
        >>> advice = advise("gpt3-96b", device="a100-80gb", efficiency={1: 0.33, 2: 0.47}, **asked)
        >>> round(advice.estimate.stage_ratio, 2), round(advice.estimate.bubble_factor, 2)
        (1.42, 0.77)
    """

    microbatch_sizes: tuple[int, int]
    step_s: tuple[float, float]
    stage_mfu: tuple[float, float] | None
    mfu: tuple[float, float] | None
    stage_ratio: float
    bubble_factor: float
    speed_up: float
    assumptions: str

    def __str__(self) -> str:
        steps = f"a step of {self.step_s[0]:.4g} s becomes one of {self.step_s[1]:.4g} s"
        shares = ""
        if self.stage_mfu is not None and self.mfu is not None:
            (x, y), (before, after) = self.stage_mfu, self.mfu
            shares = f"; a stage alone reaches {y:.1%} of the peak, after {x:.1%}, and the pipeline {after:.1%}, after {before:.1%}"
        return f"Huang et al.'s estimate, for equal stages: {self.speed_up:.3f} times as fast; {steps}{shares}."


def step_s(batch: int, microbatch_size: int, num_stages: int, stage_s: float) -> float:
    """Compute E1, the seconds of a step: (B/b + p - 1) T(b)."""
    check_sizes(batch, num_stages, microbatch_size)
    return (batch // microbatch_size + num_stages - 1) * stage_s


def stage_mfu(microbatch_size: int, sequence_flops: float, stage_s: float, peak_flops_per_s: float) -> float:
    """Compute E2, the share of the peak that one stage reaches alone: b F_stage / (P_peak T(b))."""
    check_positive("stage_s", stage_s)
    check_positive("peak_flops_per_s", peak_flops_per_s)
    return microbatch_size * sequence_flops / (peak_flops_per_s * stage_s)


def mfu(batch: int, microbatch_size: int, num_stages: int, of_stage: float) -> float:
    """Compute E3, the share of the peak that the pipeline reaches: MFU_stage(b) B / (B + b (p - 1))."""
    check_sizes(batch, num_stages, microbatch_size)
    return of_stage * batch / (batch + microbatch_size * (num_stages - 1))


def bubble_factor(batch: int, num_stages: int, x: int, y: int) -> float:
    """Compute what the bubble alone leaves of the speed from microbatch x to y: [B + x (p - 1)] / [B + y (p - 1)].

    Example:
        >>> round(bubble_factor(128, 8, 1, 2), 4)
        0.9507
    """
    check_sizes(batch, num_stages, x, y)
    return (batch + x * (num_stages - 1)) / (batch + y * (num_stages - 1))


def speed_up(batch: int, num_stages: int, x: int, y: int, stage_ratio: float) -> float:
    """Compute E4, the speed-up of microbatch y over x.

    Args:
        batch: B.
        num_stages: p.
        x: sequences of the microbatch before.
        y: sequences of the microbatch after.
        stage_ratio: MFU_stage(y) / MFU_stage(x), or (T(x) / x) / (T(y) / y).

    Example:
        >>> round(speed_up(128, 8, 1, 2, stage_ratio=1.42), 2)
        1.35
    """
    check_positive("stage_ratio", stage_ratio)
    return bubble_factor(batch, num_stages, x, y) * stage_ratio


def estimate(
    batch: int,
    num_stages: int,
    microbatch_sizes: tuple[int, int],
    *,
    stage_s: tuple[float, float],
    stage_mfu: tuple[float, float] | None = None,
) -> Estimate:
    """Compute all four estimates from what one stage takes before and after.

    Args:
        batch: B.
        num_stages: p.
        microbatch_sizes: x and y.
        stage_s: T(x) and T(y), of the slowest stage.
        stage_mfu: E2 of both, if the operations are known.
    """
    (x, y), (x_s, y_s) = microbatch_sizes, stage_s
    ratio = (x_s / x) / (y_s / y)
    return Estimate(
        microbatch_sizes=(x, y),
        step_s=(step_s(batch, x, num_stages, x_s), step_s(batch, y, num_stages, y_s)),
        stage_mfu=stage_mfu,
        mfu=stage_mfu and (mfu(batch, x, num_stages, stage_mfu[0]), mfu(batch, y, num_stages, stage_mfu[1])),
        stage_ratio=ratio,
        bubble_factor=bubble_factor(batch, num_stages, x, y),
        speed_up=speed_up(batch, num_stages, x, y, ratio),
        assumptions=ASSUMPTIONS,
    )


def check_sizes(batch: int, num_stages: int, *microbatch_sizes: int) -> None:
    """Raise unless microbatches of these sizes make up a batch."""
    check_count("batch", batch)
    check_count("num_stages", num_stages)
    for size in microbatch_sizes:
        check_count("microbatch size", size)
        if batch % size:
            raise ConfigurationError(f"a batch of {batch} sequences does not divide into microbatches of {size}")
