"""Claims about what a pipeline does beside its order: idle time that is filled, slow networks, losses on stages, a large "
"vocabulary."""

from __future__ import annotations

from benchmarks.published import scenarios
from benchmarks.published.claim import Claim, Shown
from benchmarks.published.order_claims import step, timeline
from benchmarks.published.scenarios import PLAIN, outcome
from bpipe.estimate.execution import Execution
from bpipe.estimate.models import model_named
from bpipe.estimate.square_cube import IN_8_BITS, hides_from
from bpipe.estimate.workload import DEFAULT_EFFICIENCY
from bpipe.schedules import Op, Timeline, fill_gaps

GPUS, WORTH = 8.0, 2.6  # thousands: those of the job, and what was filled
FILLED = 0.63  # of the main job's work
UNLIMITED_BYTES = 2**48


def published_idle() -> tuple[float, float]:
    """Return the idle share of the published job, and the share of its idle time that was filled.

    The job's work is `WORTH / FILLED` of its `GPUS`, the rest is idle.
    """
    idle = 1 - WORTH / FILLED / GPUS
    return idle, WORTH / GPUS / idle


def idle_share(one: Timeline) -> float:
    """Return the share of a step in which rank 0 waits."""
    return one.bubble_s(0) / one.makespan_s


def filled_gain(one: Timeline, piece_s: float) -> float:
    """Return the work of a fill job's pieces over that of the main job, on all ranks."""
    ranks = range(one.num_ranks)
    used_s = sum(fill_gaps(one, rank, piece_s, budget=UNLIMITED_BYTES).used_s for rank in ranks)
    return used_s / sum(map(one.work_s, ranks))


def show_pipefill() -> Shown:
    idle, share = published_idle()
    rows = []
    for m in (16, 32, 64, 128):
        one = timeline("1f1b", 16, m)
        gains = [filled_gain(one, piece_s) for piece_s in (0.1, 2.0, 5.0)]
        limited = share * idle_share(one) / (1 - idle_share(one))
        rows.append([str(m), f"{idle_share(one):.0%}", *(f"+{gain:.0%}" for gain in gains), f"+{limited:.0%}"])
    return Shown(
        brief=(
            f"63% and 2.6K of 8K GPUs make {idle:.0%} idle, of which {share:.0%} are filled; 1F1B of 16 stages is idle for "
            f"{rows[0][1]} at 16 microbatches, where short pieces add {rows[0][2][1:]} and pieces of five forwards {rows[0][4][1:]}"
        ),
        columns=(
            "m",
            "idle",
            "work added by pieces of a tenth of a forward",
            "of two forwards",
            "of five forwards",
            f"if {share:.0%} of the idle time is used",
        ),
        rows=rows,
        text=(
            f"It follows from the abstract's two figures that the job was idle for {idle:.0%} and that {share:.0%} of that was "
            "filled. That is the bubble of 1F1B with as many microbatches as stages. bpipe's own pieces, which follow the waits of "
            "the plan, add more, because they can be short; what memory leaves free, and how efficient a fill job's kernels are in "
            "short pieces, is not in here. The published 5 to 15% at small scale are the last column at many microbatches."
        ),
    )


PIPEFILL = Claim(
    name="pipefill",
    title="PipeFill",
    published="other jobs in the bubbles add up to 63% (2.6K of 8K GPUs), 5% to 15% at small scale",
    source="Arfeen et al., arXiv 2410.07192 (abstract read)",
    reach="simulated, memory aside; waits are filled for real in `tests/fill/`",
    assumed="1F1B on 16 stages, a backward takes two forwards; the paper's numbers of stages and microbatches were not read.",
    show=show_pipefill,
)

T4_FLOPS_PER_S, SLOW_BYTES_PER_S = 65e12, 200e6 / 8


def hidden_from(element_bytes: float | None) -> int:
    """Return the width from which messages hide between 3 stages of 13 layers on T4, over 200 Mb/s."""
    return hides_from(
        model_named("gpt3-13b"),
        Execution(),
        layers=13,
        flops_per_s=T4_FLOPS_PER_S * DEFAULT_EFFICIENCY,
        bytes_per_s=SLOW_BYTES_PER_S,
        element_bytes=element_bytes,
    )


def show_swarm() -> Shown:
    return Shown(
        brief=(
            f"between stages of 13 layers on T4, messages hide from h = {hidden_from(None):,} on, in 8 bits from "
            f"{hidden_from(IN_8_BITS):,}: GPT-3 13B, h = 5,120, hides them in 8 bits"
        )
    )


SWARM = Claim(
    name="swarm",
    title="SWARM",
    published="1B shared parameters (13B before sharing) on T4 with less than 200 Mb/s, in 8 bits: the square-cube law",
    source="Ryabinin et al., arXiv 2301.11913 (abstract read)",
    reach="by formula; replicas that end are tested in `tests/relaxed/`",
    show=show_swarm,
)


def show_local_learning() -> Shown:
    gains = [step("1f1b", 4, m) / step("local_learning", 4, m) for m in (8, 32)]
    return Shown(brief=f"4 stages: {gains[0]:.2f}x of 1F1B at 8 microbatches and {gains[1]:.2f}x at 32, holding one microbatch")


LOCAL_LEARNING = Claim(
    name="local-learning",
    title="Local learning (PPLL)",
    published="1.25x (ViT) and 0.85x (ResNet) of pipelines with gradients, 4 GPUs",
    source="Guo et al., arXiv 2411.12780 (abstract read)",
    reach="simulated; accuracy, and convolutions whose auxiliary heads cost much, are out of reach",
    show=show_local_learning,
)


def show_vocabulary() -> Shown:
    even, moved = (outcome(scenarios.VOCABULARY, way, 1).step_s for way in (PLAIN, *scenarios.VOCABULARY.ways))
    costs, p = scenarios.VOCABULARY.case(1, "none").costs, scenarios.VOCABULARY.num_ranks
    microbatch_s = sum(costs.seconds(op, stage, 0) for op in (Op.F, Op.B) for stage in range(p))
    least = scenarios.VOCABULARY.batch * microbatch_s / p
    return Shown(
        brief=(
            f"5B, 8 stages: moving all layers off the last one gains {even / moved:.2f}x; a cut that were even to the last "
            f"operation, without any bubble, {even / least:.2f}x"
        )
    )


VOCABULARY = Claim(
    name="vocabulary",
    title="Vocabulary parallelism",
    published="5% to 51% over an even cut of layers, balanced for any vocabulary",
    source="Yeung et al., arXiv 2411.05288 (abstract read)",
    reach="simulated; bpipe moves layers and does not split the head, so that balance for any vocabulary is out of its reach",
    show=show_vocabulary,
)
