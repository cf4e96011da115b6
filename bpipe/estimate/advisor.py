"""Rank 1F1B and GPipe, plain and balanced, and say whether balancing helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isinf

from bpipe.api.options import ASIDE, Options, options_for
from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.estimate import advise_inputs, huang, words
from bpipe.estimate.advice import Advice, Candidate, gb_per_s, gib
from bpipe.estimate.candidates import SCHEDULES
from bpipe.estimate.decision import verdict_on
from bpipe.estimate.devices import Device
from bpipe.estimate.evaluate import Evaluator
from bpipe.estimate.execution import RECOMPUTATIONS
from bpipe.estimate.long_contexts import NOTICED, SLICED, V_SHAPES, slowed, too_long
from bpipe.estimate.measurement import Profile
from bpipe.estimate.square_cube import say_from_where
from bpipe.estimate.stages import split_layers
from bpipe.estimate.transformer import Transformer
from bpipe.estimate.workload import ModelWorkload

__all__ = ["advise"]

MOST_MICROBATCHES = 512  # simulating more takes longer than a few seconds

ASSUMPTIONS = (
    "Ranked are 1f1b and gpipe, plain and, where that needs less memory, with whole microbatches evicted; `bpipe compare` "
    "simulates the other schedules, and parts of microbatches.",
    "Memory is static memory, saved activations and the buffers for remote activations. What an action needs only while it runs "
    "(gradients of activations, buffers of collectives) must fit in what is set aside.",
    "Each direction between two ranks carries one transfer at a time, at full bandwidth and without latency, and does not slow "
    "computations down. Reducing gradients over replicas and the optimizer's step are not counted.",
    huang.ASSUMPTIONS,
)


def advise(
    model: str | Transformer | Profile | Sequence[Profile],
    *,
    batch: int,
    num_stages: int | Sequence[int] | None = None,
    device: str | Device | None = None,
    memory_bytes: int | None = None,
    num_devices: int | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = True,
    sequence: int | None = None,
    attention: str = "flash",
    precision: str = "bf16",
    recomputations: Sequence[str] = RECOMPUTATIONS,
    microbatch_sizes: Sequence[int] | None = None,
    efficiency: float | Mapping[int, float] | None = None,
    layers: Sequence[int] | None = None,
    slices: int = 1,
    link: str | float | None = None,
    cross_link: str | float | None = None,
    nodes: Sequence[int] | None = None,
    options: Options | None = None,
) -> Advice:
    """Rank 1F1B and GPipe, plain and balanced, with every microbatch size and recomputation, and say whether to balance.

    Each candidate's real plan is built and simulated: the simulated makespan is its predicted step, the simulated peaks its
    memory. Balancing is advised where the best that fits is balanced and more than 1% faster than the best that is not. Pure
    Python; takes seconds.

    Args:
        model: a name, a `Transformer`, or what `bpipe.profile` measured: one `Profile` for all stages, or one for each.
        batch: sequences per step: of one pipeline, or of all pipelines on `num_devices`.
        num_stages: p, one or several to compare; default: as many as there are profiles.
        device: a name, or a `Device`. Profiles need none where `memory_bytes` is given.
        memory_bytes: the memory of a device; default: that of `device`.
        num_devices: of all pipelines together, each with its share of the batch; default: one pipeline of the most
            stages. It makes different numbers of stages comparable.
        tensor_parallel: t, devices of a stage.
        sequence_parallel: whether norms and dropout are cut over them too.
        sequence: tokens; default: the model's.
        attention: "materialised" or "flash" (any fused kernel).
        precision: of activations, "bf16", "fp16" or "fp32".
        recomputations: the ones to try, of "none", "selective" and "full".
        microbatch_sizes: the ones to try; default: all that something is known about, or else those that divide the batch into 2
            microbatches or more. Of these, sizes that make more than 512 take long and gain no more than a bubble of p - 1 in
            512, so they are tried only with recomputations that let no larger size fit plain.
        efficiency: the share of the device's peak that one stage reaches, a number or one for each microbatch size; it decides
            whether a larger microbatch pays. Default: 0.45, an assumption that the verdict mentions.
        layers: layers of each stage; default: as even as possible.
        slices: k; if more than 1, Seq1F1B is ranked too, with each microbatch cut into k slices of equal cost along its sequence.
        link: between ranks of a node, a name ("nvlink3", "pcie4") or bytes per second and direction; default: the device's. If it
            is given, the verdict says from which width of a model messages between stages hide.
        cross_link: between nodes, which needs `nodes`; default: `link`.
        nodes: the node of each rank, for one number of stages; default: all on one.
        options: `reserve_bytes`, `bytes_per_parameter` and `progress`.

    Returns:
        An `Advice`: print it, read its `verdict` and `candidates`, or write `to_json()`.

    Raises:
        ConfigurationError: an unknown name (the message names the nearest), sizes that do not fit together, or an invalid number.

    Example:
        >>> advice = advise("gpt3-96b", batch=128, num_stages=8, tensor_parallel=4, device="a100-80gb", microbatch_sizes=[1, 2])
        >>> print(advice.verdict.splitlines()[0])
        Don't balance: it allows microbatch 2 instead of 1; the larger microbatch gains nothing per stage and costs 4.9% in bubble.
    """
    check_count("tensor_parallel", tensor_parallel)
    check_count("slices", slices)
    if slices > 1 and attention != "flash":
        raise ConfigurationError(f"slices={slices} with attention={attention!r}: slices are estimated for attention='flash' only")
    options = options_for("advise", options, (*ASIDE, "progress"))
    found, stages = advise_inputs.device_of(device), advise_inputs.stages_of(num_stages, len(advise_inputs.profiles_in(model)))
    memory = advise_inputs.memory_of(found, memory_bytes)
    links = advise_inputs.links_of(found, link, cross_link, nodes, stages)
    workload = advise_inputs.workload_of(
        model,
        found,
        max(stages),
        sequence=sequence,
        attention=attention,
        precision=precision,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        recomputations=recomputations,
        efficiency=efficiency,
        bytes_per_parameter=options.bytes_per_parameter,
        layers=layers,
    )
    batches = advise_inputs.batches_of(batch, stages, tensor_parallel, num_devices)
    sizes = {p: advise_inputs.sizes_of(microbatch_sizes, batches[p], workload.microbatch_sizes) for p in stages}
    many = MOST_MICROBATCHES if microbatch_sizes is None and workload.microbatch_sizes is None else batch
    reserved = advise_inputs.reserved_of(memory, options.reserve_bytes)
    evaluator = Evaluator(workload, links, batch, batches, sizes, memory, reserved, many, slices)
    title = _title(evaluator, "" if found is None else f" on {found.name}", tensor_parallel)
    return _advice(title, evaluator, evaluator.ranked(options.progress), says_messages=link is not None)


def _title(evaluator: Evaluator, on: str, tensor_parallel: int) -> str:
    """Return what the advice is about: the model, the devices that it runs `on`, and the batch."""
    workload, stages, memory, reserved = evaluator.workload, evaluator.batches, evaluator.memory_bytes, evaluator.reserved_bytes
    cut = f" x tensor parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    return (
        f"{workload.name}{on}: {' or '.join(map(str, stages))} stage{'s' * (max(stages) > 1)}{cut}, {evaluator.batch} sequences "
        f"per step, {gib(memory - reserved)} GiB to use per device ({gib(memory)} GiB less {gib(reserved)} set aside), links of "
        f"{gb_per_s(evaluator.links.link.bytes_per_s)}"
    )


def _advice(title: str, evaluator: Evaluator, candidates: tuple[Candidate, ...], *, says_messages: bool) -> Advice:
    """Judge the ranked candidates, and put the advice together."""
    messages = _messages(evaluator) if says_messages else []
    workload, link_bytes_per_s, verdict = evaluator.workload, evaluator.links.link.bytes_per_s, verdict_on(candidates, evaluator)
    caveat = "" if verdict.decision == "nothing fits" else workload.caveat
    return Advice(
        title=title,
        decision=verdict.decision,
        verdict="\n".join(text for text in (verdict.text, caveat, _long_context(evaluator), *messages) if text),
        breaks_even_bytes_per_s=verdict.breaks_even_bytes_per_s,
        candidates=candidates,
        estimate=verdict.estimate,
        memory_bytes=evaluator.memory_bytes,
        reserved_bytes=evaluator.reserved_bytes,
        link_bytes_per_s=None if isinf(link_bytes_per_s) else link_bytes_per_s,
        assumptions=(*workload.assumptions, *ASSUMPTIONS, *_ranked_too(candidates)),
    )


def _ranked_too(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield a line that names the ranked schedules that are not bpipe's own, and one on the schedule of slices."""
    if added := dict.fromkeys(one.schedule for one in candidates if one.schedule not in (*SCHEDULES, SLICED)):
        yield f"Ranked too, because they are registered: {', '.join(added)}."
    for sliced in [one for one in candidates if one.slices > 1][:1]:
        yield (
            f"Ranked too is {sliced.schedule} with {sliced.slices} slices of equal cost, in which kernels are taken to be as "
            "efficient as on a whole sequence, and whose keys and values to move with the rest; not with full recomputation, as "
            "later slices read them."
        )


def _messages(evaluator: Evaluator) -> list[str]:
    """Return a line for each number of stages on the width from which messages hide over the link that was given."""
    workload = evaluator.workload
    if not isinstance(workload, ModelWorkload) or not isfinite(evaluator.links.link.bytes_per_s):
        return []
    model, reached = workload.model, workload.flops_per_s(min(workload.microbatch_sizes or (1,)))
    rates = {"flops_per_s": reached, "bytes_per_s": evaluator.links.link.bytes_per_s}
    least = {p: min(split_layers(model.num_layers, p, workload.layers_by_stage)) for p in evaluator.batches}
    return [say_from_where(model, workload.execution, num_stages=p, layers=n, **rates) for p, n in least.items() if n]


def _long_context(evaluator: Evaluator) -> str:
    """Return a line if the backward for inputs is too long for V-Half and V-Min, to which one would turn for memory; else ""."""
    attention, p = evaluator.workload.attention, max(evaluator.batches)
    if attention is None or not too_long(attention):
        return ""
    times = {name: time for name in V_SHAPES if (time := slowed(name, p, attention)) > 1 + NOTICED}
    return words.long_context(attention, times, p, evaluator.slices) if times else ""
