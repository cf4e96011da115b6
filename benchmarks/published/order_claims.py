"""Claims about orders: BitPipe, slices, backwards in halves, a V, a forward beside a backward."""

from __future__ import annotations

from benchmarks.published.claim import Claim, Shown
from benchmarks.published.scenarios import Way, plan_of
from bpipe.estimate.long_contexts import halves
from bpipe.schedules import Costs, Plan, Timeline, build, simulate

UNITS = Costs()  # a forward takes 1, a backward 2, in halves 1 and 1


def of_chunks(stages_per_rank: int) -> Costs:
    """Return the costs of stages that take 1 and 2 together on a rank."""
    return Costs(forward_s=1 / stages_per_rank, backward_s=2 / stages_per_rank)


def timeline(schedule: str, p: int, m: int, stages_per_rank: int = 1) -> Timeline:
    """Simulate a schedule whose rank takes 1 for a microbatch's forward and 2 for its backward; transfers take nothing.

    In a schedule of two directions a rank has the stages of both, each of which takes half of the microbatches.
    """
    plan = build(schedule, p * stages_per_rank, m, num_ranks=p)
    return simulate(plan, of_chunks(plan.depth // plan.num_ranks))


def step(schedule: str, p: int, m: int, stages_per_rank: int = 1) -> float:
    """Return the step of `timeline`."""
    return timeline(schedule, p, m, stages_per_rank).makespan_s


# Two directions.

PEERS = {
    "1F1B": ("1f1b", 1, "1x"),
    "interleaved 1F1B, v = 2": ("interleaved_1f1b", 2, "1x"),
    "Chimera": ("chimera", 2, "2x"),
    "ZB-V": ("zbv", 2, "1x"),
    "BitPipe with backwards in halves": ("bitpipe_zb", 4, "2x"),
}


def bitpipe_gain(peer: str, m: int) -> float:
    """Return how many times as long as BitPipe's the step of a peer is, on 8 ranks."""
    schedule, stages_per_rank, _ = PEERS[peer]
    return step(schedule, 8, m, stages_per_rank) / step("bitpipe", 8, m, 4)


def show_bitpipe() -> Shown:
    gains = {peer: [bitpipe_gain(peer, m) for m in (8, 16)] for peer in PEERS}
    rows = [[peer, PEERS[peer][2], *(f"{gain:.2f}x" for gain in each)] for peer, each in gains.items()]
    looped, plain, zbv = gains["interleaved 1F1B, v = 2"], gains["1F1B"], gains["ZB-V"]
    return Shown(
        brief=(
            f"{looped[1]:.2f}x to {looped[0]:.2f}x over interleaved 1F1B and {plain[1]:.2f}x to {plain[0]:.2f}x over 1F1B by the "
            f"bubble alone; ZB-V, with one copy of the weights, takes {min(zbv):.2f} to {max(zbv):.2f} of its step"
        ),
        columns=("peer", "its copies of the weights (BitPipe: 2x)", "BitPipe's gain, 8 microbatches", "16 microbatches"),
        rows=rows,
        text=(
            "The two settings are those of the authors' example scripts (8 GPUs; BERT with 32 sequences in microbatches of 4, GPT "
            f"with 16 of 1). The published range lies within what the bubble allows, from {looped[1]:.2f}x over the best "
            f"synchronous peer to {plain[0]:.2f}x over the plainest. Messages between more stages and the exchange of gradients "
            "between twins take some of it back on real devices. ZB-V, which is synchronous too, is faster than BitPipe and keeps "
            "the weights once."
        ),
    )


BITPIPE = Claim(
    name="bitpipe",
    title="BitPipe",
    published="1.05x to 1.28x over synchronous peers, GPT and BERT, up to 32 GPUs",
    source="Wu et al., arXiv 2410.19367 (abstract and example scripts read, tables not)",
    reach="simulated; transfers take nothing",
    assumed="8 ranks; a backward takes two forwards, in halves one each.",
    show=show_bitpipe,
)

# Slices.

# Stages, sequences, slices of each sequence, and the gain to explain.
TERAPIPE_SETTINGS = ((48, 2, 20, 5.0), (96, 2, 26, 6.75), (8, 1, 26, 5.0))
TOKENS = 2048


def sliced_gain(p: int, m: int, k: int) -> float:
    """Return how many times as long as that of k slices the step of whole sequences is, if slices lose no efficiency."""
    plan = build("tera_pipe", p, m, slices=k)
    return step("gpipe", p, m) / simulate(plan, UNITS.of_slices(plan)).makespan_s


def overhead_for(gain: float, ideal: float, k: int) -> float:
    """Return the overhead of each slice, in forwards of a whole sequence, that leaves this gain of an ideal one.

    Every action takes 1/k of a sequence's and the overhead, so that the step is 1 + k x overhead times as long.
    """
    return (ideal / gain - 1) / k


def show_terapipe() -> Shown:
    rows, overheads = [], []
    for p, m, k, gain in TERAPIPE_SETTINGS:
        ideal = sliced_gain(p, m, k)
        overheads.append(overhead_for(gain, ideal, k))
        efficiency = 1 / (1 + k * overheads[-1])
        rows.append([str(p), str(m), str(k), f"{ideal:.1f}x", f"{gain}x", f"{overheads[-1]:.1%}", f"{efficiency:.0%}"])
    first, second, alone = overheads
    return Shown(
        brief=(
            f"{rows[0][3]} on 48 stages if slices lost nothing; 5.0x if a slice costs {first:.1%} of a sequence's forward more "
            f"than its share, and 6.75x on 96 stages if it costs {second:.1%}"
        ),
        columns=(
            "p",
            "sequences",
            "slices",
            "gain if slices lose nothing",
            "gain to explain",
            "overhead of a slice that explains it",
            "kernels' efficiency then",
        ),
        rows=rows,
        text=(
            "One microbatch is one sequence, so that without slices 48 stages run two of them almost one after the other. The two "
            f"published gains take nearly the same overhead of a slice, {first:.1%} and {second:.1%} of a whole sequence's "
            f"forward: slices of {TOKENS // TERAPIPE_SETTINGS[0][2]} and {TOKENS // TERAPIPE_SETTINGS[1][2]} of {TOKENS:,} tokens "
            "are too short to fill a V100. Slices cost the same here, and messages nothing. A single sequence on 8 stages gains as "
            f"much at an overhead of {alone:.1%}."
        ),
    )


TERAPIPE = Claim(
    name="terapipe",
    title="TeraPipe",
    published="5.0x for GPT-3 175B on 48 machines of 8 V100; 6.75x in another setting",
    source="Li et al., arXiv 2102.07988 (abstract and code read: 48 or 96 stages, 2 sequences; 6.75x from a summary)",
    reach="simulated, solved for the overhead of a slice",
    assumed="plain is GPipe of whole sequences; the slices are those at which the overhead may be about the largest.",
    show=show_terapipe,
)


def seq_gain(p: int, m: int, k: int) -> tuple[float, float]:
    """Return the gain of 1F1B in slices over 1F1B, and its highest peak in microbatches."""
    plan = build("seq_1f1b", p, m, slices=k)
    return step("1f1b", p, m) / simulate(plan, UNITS.of_slices(plan)).makespan_s, max(plan.peak_slots) / k


def show_seq_1f1b() -> Shown:
    (two, peak2), (four, peak4) = (seq_gain(8, 32, k) for k in (2, 4))
    return Shown(
        brief=(
            f"8 stages, 32 microbatches: {two:.2f}x at {peak2:g} microbatches in 2 slices, {four:.2f}x at {peak4:g} in 4, "
            "where 1F1B holds 8"
        )
    )


SEQ_1F1B = Claim(
    name="seq-1f1b",
    title="Seq1F1B",
    published="1.14x with half of the memory of 1F1B",
    source="Sun et al., arXiv 2406.03488 (abstract read)",
    reach="simulated; measured with stages that sleep (`benchmarks/RESULTS.md`, 1F1B in slices)",
    show=show_seq_1f1b,
)

# Backwards in halves, and a V.


def show_zero_bubble() -> Shown:
    gains = [step("1f1b", 8, m) / step("zbv", 8, m, 2) for m in (16, 24, 32)]
    peak = max(build("zbv", 16, 24).peak_slots) / 2
    return Shown(
        brief=(
            f"ZB-V on 8 ranks at 16, 24 and 32 microbatches: {gains[0]:.2f}x, {gains[1]:.2f}x and {gains[2]:.2f}x, at the {peak:g} "
            "microbatches that 1F1B holds"
        )
    )


ZERO_BUBBLE = Claim(
    name="zero-bubble",
    title="Zero bubble",
    published="up to 30% with similar memory",
    source="Qi et al., arXiv 2401.10241 (the authors' page read)",
    reach="simulated, F = I = W",
    show=show_zero_bubble,
)


def show_v_shapes() -> Shown:
    peaks = {name: [max(build(name, 2 * p, 2 * p).peak_slots) / 2 / p for p in (8, 16)] for name in ("v_half", "v_min")}
    gains = [step("1f1b", 8, 16) / step(name, 8, 16, 2) for name in peaks]
    half, third = ([f"{share:.3f}" for share in shares] for shares in peaks.values())
    return Shown(
        brief=(
            f"V-Half holds {half[0]} of 1F1B's on 8 ranks and {half[1]} on 16, V-Min {third[0]} and {third[1]}; steps on 8 ranks, "
            f"16 microbatches: {gains[0]:.2f}x and {gains[1]:.2f}x"
        )
    )


V_SHAPES = Claim(
    name="v-shapes",
    title="V-Half and V-Min",
    published="half of 1F1B's activations without loss, a third at comparable speed; 7% to 55% faster",
    source="Qi et al., arXiv 2405.15362 (abstract read)",
    reach="simulated, F = I = W",
    show=show_v_shapes,
)


LONG = (Way("1f1b"), Way("balanced_1f1b"), Way("zbv", 2), Way("v_half", 2), Way("v_min", 2), Way("seq_1f1b", 1, 4))


def over_work(plan: Plan, attention: float) -> float:
    """Return a step over what a rank computes in it, if attention's core takes a part of a forward."""
    parts = plan.num_stages // plan.num_ranks * plan.slices
    i, w = (seconds / parts for seconds in halves(attention))
    work_s = plan.num_microbatches * parts * (1 / parts + i + w)
    return simulate(plan, Costs(forward_s=1 / parts, backward_s=i + w, input_s=i)).makespan_s / work_s


def show_long_context() -> Shown:
    shares = (0.0, 0.2, 0.4)
    plans = {way: plan_of(way, 8, 32) for way in LONG}
    found = {way: [over_work(plan, share) for share in shares] for way, plan in plans.items()}
    peaks = {way: max(plan.peak_slots) / way.stages_per_rank / way.slices for way, plan in plans.items()}
    half, balanced, slices = (found[way] for way in (LONG[3], LONG[1], LONG[5]))
    return Shown(
        brief=(
            f"on 8 ranks V-Half takes {half[1]:.2f} of its computations where attention is a fifth of a forward, no less than "
            f"balanced 1F1B within as many microbatches ({balanced[1]:.2f}), and {half[2]:.2f} at two fifths; slices take "
            f"{slices[1]:.2f}"
        ),
        columns=("schedule", "peak in microbatches", *(f"attention {share:.0%} of a forward" for share in shares)),
        rows=[[str(way), f"{peaks[way]:g}", *(f"{one:.2f}" for one in each)] for way, each in found.items()],
        text=(
            "The cells are a step over what a rank computes in it. Attention's core has no weights, and its fused backward takes "
            "2.5 forwards, so that I grows and W shrinks with its share of a forward, to which V-Half's and V-Min's order of equal "
            "halves does not fit. Balanced 1F1B, which holds as many microbatches as V-Half, is the better choice from a fifth on, "
            "and 1F1B in slices of equal cost, which lose no efficiency here, is better than both."
        ),
    )


LONG_CONTEXT = Claim(
    name="long-context",
    title="V-Half in long contexts",
    published="half of the memory without bubbles takes W + 2F >= 2I and W + 2I >= 2F",
    source="Qi et al., arXiv 2405.15362 (the authors' page read)",
    reach="simulated",
    assumed="8 ranks, 32 microbatches; F = 1, I = 1 + 1.5a and W = 1 - a for a share a of attention.",
    show=show_long_context,
)


def dualpipe_bubble(overlapped_share: float) -> float:
    """Return DualPipeV's bubble on 8 ranks in forwards of a stage, with forwards beside backwards."""
    plan = build("dualpipe_v", 16, 32, num_ranks=8, overlapped=True)
    one = simulate(plan, Costs(overlapped_share=overlapped_share))
    return max(map(one.bubble_s, range(8)))


def show_dualpipe() -> Shown:
    none, full = dualpipe_bubble(0.0), dualpipe_bubble(1 / 3)
    return Shown(
        brief=(
            f"DualPipeV, 16 stages on 8 ranks: {none:g} forwards of a stage where F&B takes F + B = 3, and {full:g} where it takes "
            "2, which is the formula in both cases"
        )
    )


DUALPIPE = Claim(
    name="dualpipe",
    title="DualPipe",
    published="a bubble of (PP/2 - 1)(F&B + B - 3W), PP stages",
    source="DeepSeek-AI, the repository's table (read)",
    reach="simulated, F = I = W = 1",
    show=show_dualpipe,
)
