"""Huang et al.'s estimate of whether a larger microbatch pays (arXiv 2401.02088), from the bubble and one stage's efficiency.

Letters: B sequences per step and pipeline, b per microbatch, p stages, T(b) seconds of one stage's F and B, F_stage its operations
for one sequence, P_peak the operations per second of the devices of a stage together.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASSUMPTIONS", "Estimate", "estimate"]

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

    def __str__(self) -> str:
        steps = f"a step of {self.step_s[0]:.4g} s becomes one of {self.step_s[1]:.4g} s"
        shares = ""
        if self.stage_mfu is not None and self.mfu is not None:
            (x, y), (before, after) = self.stage_mfu, self.mfu
            shares = f"; a stage alone reaches {y:.1%} of the peak, after {x:.1%}, and the pipeline {after:.1%}, after {before:.1%}"
        return f"Huang et al.'s estimate, for equal stages: {self.speed_up:.3f} times as fast; {steps}{shares}."


def estimate(
    batch: int,
    num_stages: int,
    microbatch_sizes: tuple[int, int],
    *,
    stage_s: tuple[float, float],
    stage_mfu: tuple[float, float] | None = None,
) -> Estimate:
    """Compute all four estimates from what one stage takes before and after.

    A microbatch of b sequences takes part of the batch B, so that the pipeline runs as long as for B + b (p - 1) sequences:
    E1 = (B + b (p - 1)) T(b) / b, E3 = E2 B / (B + b (p - 1)), and E4 is the ratio of both E1.

    Args:
        batch: B.
        num_stages: p.
        microbatch_sizes: x and y, of which microbatches make up the batch.
        stage_s: T(x) and T(y), of the slowest stage.
        stage_mfu: E2 of both, b F_stage / (P_peak T(b)), if the operations are known.

    Example:
        >>> ratio_of_142 = estimate(128, 8, (1, 2), stage_s=(1.0, 2 / 1.42))
        >>> round(ratio_of_142.bubble_factor, 4), round(ratio_of_142.speed_up, 2)
        (0.9507, 1.35)
    """
    x, y = microbatch_sizes
    before, after = (batch + size * (num_stages - 1) for size in microbatch_sizes)
    ratio = (stage_s[0] / x) / (stage_s[1] / y)
    return Estimate(
        microbatch_sizes=microbatch_sizes,
        step_s=(before // x * stage_s[0], after // y * stage_s[1]),
        stage_mfu=stage_mfu,
        mfu=stage_mfu and (stage_mfu[0] * batch / before, stage_mfu[1] * batch / after),
        stage_ratio=ratio,
        bubble_factor=before / after,
        speed_up=before / after * ratio,
    )
