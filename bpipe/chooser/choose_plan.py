"""The public function that chooses: arguments become a question, and its answer is kept in files if that is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bpipe._version import __version__
from bpipe.api.policy import Way
from bpipe.chooser.compare_plans import EFFORT, choose
from bpipe.chooser.layers_of import Layers, as_measured, of_profiles, of_transformer
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.question import Load, ModelQuestion
from bpipe.errors import ConfigurationError
from bpipe.estimate import advise_inputs
from bpipe.estimate.checks import check_count
from bpipe.estimate.devices import Device
from bpipe.estimate.execution import RECOMPUTATIONS
from bpipe.estimate.long_contexts import attention_share
from bpipe.estimate.measurement import Profile
from bpipe.estimate.transformer import Transformer
from bpipe.partition.layers import LayerCost
from bpipe.passes.fit import Budgets
from bpipe.schedules import Link, names

__all__ = ["choose_plan"]

Model = str | Transformer | Profile | Sequence[Profile] | Sequence[LayerCost] | Mapping[int, Sequence[LayerCost]]

HOST_LINK = "pcie4"

ASSUMPTIONS = (
    "Transfers take turns on a link, at full bandwidth, and do not slow computations down; reducing "
    "gradients over replicas and the optimizer's step are not counted.",
    "Memory is static bytes, saved activations, messages, and buffers for activations of other ranks.",
    "Left out are schedules that hold the model twice (Chimera, BitPipe), because that takes another set of static bytes.",
)
MEASURE = (
    "bpipe.measure_layers on one of the devices gives the times and bytes of the real layers.",
    "bpipe.auto measures in its first steps, and chooses again.",
)


def choose_plan(
    model: Model,
    *,
    batch: int,
    num_ranks: int,
    device: str | Device | None = None,
    memory_bytes: int | Sequence[int | None] | None = None,
    reserved_bytes: int | None = None,
    link: str | float | Link | None = None,
    cross_link: str | float | Link | None = None,
    host_link: str | float | Link = HOST_LINK,
    nodes: Sequence[int] | None = None,
    host: bool = False,
    by: Way = "evict_or_recompute",
    parts: int = 1,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = (1, 2),
    slices: Sequence[int] = (1,),
    microbatch_sizes: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = True,
    sequence: int | None = None,
    attention: str = "flash",
    precision: str = "bf16",
    recomputations: Sequence[str] = RECOMPUTATIONS,
    efficiency: float | Mapping[int, float] | None = None,
    bytes_per_parameter: float | None = None,
    effort: int = EFFORT,
    seed: int = 0,
    cache: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Choice:
    """Choose where to cut a model, the schedule, the microbatch size, and what is offloaded or recomputed, for the shortest step.

    Every schedule that learns the same is compared with every load and number of stages a rank, by its simulated step, and as it
    can be kept within the memory: as it is, by offloading activations to other ranks (or the host), by recomputing microbatches,
    or by both. From the fastest, orders are made to measure (`bpipe search`). The same arguments give the same plan, on any
    machine. It needs no torch, and runs nothing.

    Args:
        model: a name, a `Transformer`; or layers, as `bpipe.measure_layers` returns them for a microbatch of one row, or for each
            microbatch size in a dict; or the profiles of stages, which may be joined but not cut, or one for all ranks.
        batch: rows of a step of one pipeline.
        num_ranks: p.
        device: a name or a `Device`, for its memory and links, and for the speed of a model by formulas.
        memory_bytes: of each rank, one number or one for each (None: no limit); default: that of `device`, else no limit.
        reserved_bytes: of these, set aside for what is not counted; default: 5%.
        link: between ranks of a node, a name ("nvlink3", "pcie4"), bytes per second and direction, or a `bpipe.schedules.Link` with
            a latency; default: the device's.
        cross_link: between nodes, which needs `nodes`; default: `link`.
        host_link: between a rank and its host's memory, in each direction.
        nodes: the node of each rank; default: all on one.
        host: whether activations may go to the host's memory where no rank has room.
        by: what keeps the memory: "evict", "recompute" or "evict_or_recompute".
        parts: into which a microbatch may be cut to move.
        schedules: their names; default: all of `bpipe.schedules.names()` that hold the model once and learn the same.
        stages_per_rank: the numbers of stages to try on a rank.
        slices: the numbers of slices to try, with schedules that cut sequences; each stage must take them.
        microbatch_sizes: to try; default: all that something is known about, or that divide the batch into p microbatches or more.
        tensor_parallel: this and the next six for a model by formulas, as in `bpipe.advise`.
        sequence_parallel: whether norms and dropout are cut over these devices too.
        sequence: tokens.
        attention: "flash" or "materialised".
        precision: of activations.
        recomputations: inside layers, to try.
        efficiency: the share of the device's peak that a stage reaches.
        bytes_per_parameter: what stays for each.
        effort: items of work that run while orders are made to measure; 0: named schedules only.
        seed: of the search.
        cache: a directory in which answers are kept, by the fingerprint of what was asked.
        progress: called as `progress(done, total)`.

    Raises:
        ConfigurationError: an unknown name, or numbers that do not fit together.
        BudgetError: nothing that was found keeps the memory.

    Example:
        >>> from bpipe.partition import LayerCost
        >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=0.01, backward_s=0.02, saved_bytes=100) for i in range(8)]
        >>> choice = choose_plan(layers, batch=8, num_ranks=4, memory_bytes=900, reserved_bytes=0, effort=0)
        >>> choice.plan.num_ranks, max(choice.device_peak_bytes) <= 900
        (4, True)
    """
    check_count("num_ranks", num_ranks)
    check_count("batch", batch)
    check_count("effort", effort, least=0)
    check_count("parts", parts)
    for name, numbers in (("slices", slices), ("stages_per_rank", stages_per_rank), ("microbatch_sizes", microbatch_sizes or ())):
        for number in advise_inputs.series(name, numbers) if numbers else ():
            check_count(name, number)
    if isinstance(schedules, str):
        raise ConfigurationError(f"schedules={schedules!r}: give a list of names, such as [{schedules!r}]")
    if by not in get_args(Way):
        raise ConfigurationError(f"by={by!r}: choose 'evict', 'recompute' or 'evict_or_recompute'")
    found = advise_inputs.device_of(device)
    links = advise_inputs.links_of(found, link, cross_link, nodes, (num_ranks,))
    profiles, share = advise_inputs.profiles_in(model), 0.0
    layers: Layers
    working: dict[Load, int] = {}
    if isinstance(model, (str, Transformer)):
        workload = advise_inputs.workload_of(
            model,
            found,
            links,
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            sequence=sequence,
            attention=attention,
            precision=precision,
            recomputations=recomputations,
            efficiency=efficiency,
            bytes_per_parameter=bytes_per_parameter,
        )
        layers, working = of_transformer(workload, _sizes(microbatch_sizes, batch, num_ranks, workload.microbatch_sizes))
        share, assumed = (attention_share(workload.model) if attention == "flash" else 0.0), list(workload.assumptions)
    elif profiles:
        profiles *= num_ranks if len(profiles) == 1 else 1
        known = sorted(set.intersection(*(set(one.microbatch_sizes) for one in profiles)))
        layers = of_profiles(profiles, _sizes(microbatch_sizes, batch, num_ranks, known), bytes_per_parameter)
        assumed = [
            "A stage takes as long in the pipeline as it took alone, and as much memory; joined ones take both. If only one was "
            "measured, all are like it."
        ]
    else:
        layers = as_measured(model, None if microbatch_sizes is None else advise_inputs.series("", microbatch_sizes), batch)
        assumed = ["A layer takes as long in a stage as it took alone, and as much memory."]
        if not isinstance(model, Mapping):
            assumed.append("The layers were measured with microbatches of one row, as they were given without a microbatch size.")
    question = ModelQuestion(
        layers=layers,
        num_ranks=num_ranks,
        batch=batch,
        budgets=_budgets(found, memory_bytes, reserved_bytes, num_ranks),
        links=links,
        host_link=advise_inputs.links_of(None, host_link, None, None, ()).link,
        working_bytes=working,
        schedules=None if schedules is None else tuple(schedules),
        stages_per_rank=advise_inputs.series("stages_per_rank", stages_per_rank),
        slices=advise_inputs.series("slices", slices),
        attention=share,
        parts=parts,
        host=host,
        by=by,
    )
    answer = _cached(question, effort, seed, None if cache is None else Path(cache), progress)
    is_measured = not isinstance(model, (str, Transformer))
    return replace(answer, assumptions=(*assumed, *ASSUMPTIONS), to_measure=MEASURE[is_measured:])


def _cached(
    question: ModelQuestion, effort: int, seed: int, cache: Path | None, progress: Callable[[int, int], None] | None
) -> Choice:
    asked = hashlib.sha256(f"{__version__} {names()} {effort} {seed} {question.fingerprint}".encode()).hexdigest()[:32]
    file = None if cache is None else cache / f"{asked}.json"
    if file is not None and file.exists():
        try:
            return Choice.from_json(file.read_text(encoding="utf-8"))
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}: {error}: remove the file, and the plan is chosen again") from error
    told = (lambda done: None) if progress is None else (lambda done: progress(round(1000 * done), 1000))
    answer = choose(question, effort=effort, seed=seed, told=told)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(answer.to_json(), encoding="utf-8")
        part.replace(file)
    return answer


def _sizes(given: Sequence[int] | None, batch: int, num_ranks: int, known: Sequence[int] | None) -> list[int]:
    """Return the microbatch sizes to try."""
    sizes = advise_inputs.sizes_of(given, batch, known)
    return [size for size in sizes if given is not None or known is not None or batch // size >= num_ranks] or sizes[:1]


def _budgets(
    device: Device | None, memory_bytes: int | Sequence[int | None] | None, reserved_bytes: int | None, num_ranks: int
) -> Budgets:
    if memory_bytes is None and device is None:
        return (None,) * num_ranks
    if memory_bytes is None or not isinstance(memory_bytes, (list, tuple)):
        memory, reserved = advise_inputs.memory_of(device, memory_bytes, reserved_bytes)
        return (memory - reserved,) * num_ranks
    if len(memory_bytes) != num_ranks:
        raise ConfigurationError(
            f"memory_bytes has {len(memory_bytes)} entries: give one number, or one for each of {num_ranks} ranks"
        )
    of_each = [None if one is None else advise_inputs.memory_of(device, one, reserved_bytes) for one in memory_bytes]
    return tuple(None if one is None else one[0] - one[1] for one in of_each)
