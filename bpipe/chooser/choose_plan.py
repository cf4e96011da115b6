"""The public function that chooses: arguments become a question, and its answer is kept in files if that is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bpipe._version import __version__
from bpipe.api.options import ASIDE, SEARCHING, TO_HOST, Options, options_for, values_of
from bpipe.api.policy import Way
from bpipe.checks import budgets_of, check_count, counts_of
from bpipe.chooser.compare_plans import choose
from bpipe.chooser.layers_of import MeasuredLayers, as_measured
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.question import ModelQuestion
from bpipe.chooser.ways import Wishes, named_schedules
from bpipe.errors import ConfigurationError
from bpipe.estimate import advise_inputs
from bpipe.estimate.devices import Device
from bpipe.estimate.execution import RECOMPUTATIONS
from bpipe.estimate.layers import LayerCost
from bpipe.estimate.measurement import Profile
from bpipe.estimate.transformer import Transformer
from bpipe.estimate.workload import AS_MEASURED, Load, MeasuredWorkload, ModelWorkload
from bpipe.passes.fit import Budgets
from bpipe.schedules import Link, names
from bpipe.whole_file import write_whole

__all__ = ["choose_plan"]

Model = str | Transformer | Profile | Sequence[Profile] | Sequence[LayerCost] | Mapping[int, Sequence[LayerCost]]
AnyWorkload = ModelWorkload | MeasuredWorkload | MeasuredLayers

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
    link: str | float | Link | None = None,
    cross_link: str | float | Link | None = None,
    nodes: Sequence[int] | None = None,
    by: Way = "evict_or_recompute",
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
    cache: str | Path | None = None,
    options: Options | None = None,
) -> Choice:
    """Choose where to cut a model, the schedule, the microbatch size, and what is offloaded or recomputed, for the shortest step.

    Every schedule that learns the same is compared with every load and number of stages a rank, by its simulated step, and as it
    can be kept within the memory: as it is, by offloading activations to other ranks (or the host), by recomputing microbatches,
    or by both. From the fastest, orders are made to measure (`bpipe search`). The same arguments give the same plan, on any
    machine. It needs no torch, and runs nothing.

    Args:
        model: a name, a `Transformer`; or layers, as `bpipe.measure_layers` returns them for a microbatch of one row, or for each
            microbatch size in a dict, with what they make for later layers than the next; or the profiles of stages, which may be
            joined but not cut, or one for all ranks.
        batch: rows of a step of one pipeline.
        num_ranks: p.
        device: a name or a `Device`, for its memory and links, and for the speed of a model by formulas.
        memory_bytes: of each rank, one number or one for each (None: no limit); default: that of `device`, else no limit.
        link: between ranks of a node, a name ("nvlink3", "pcie4"), bytes per second and direction, or a `bpipe.schedules.Link` with
            a latency; default: the device's.
        cross_link: between nodes, which needs `nodes`; default: `link`.
        nodes: the node of each rank; default: all on one.
        by: what keeps the memory: "evict", "recompute" or "evict_or_recompute".
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
        cache: a directory in which answers are kept, by the fingerprint of what was asked.
        options: `parts`, `reserve_bytes`, `host`, `host_link`, `bytes_per_parameter`, `effort`, `seed` and `progress`.

    Raises:
        ConfigurationError: an unknown name, or numbers that do not fit together.
        BudgetError: nothing that was found keeps the memory.

    Example:
        >>> from bpipe.partition import LayerCost
        >>> layers = [LayerCost(names=(f"layers.{i}",), forward_s=0.01, backward_s=0.02, saved_bytes=100) for i in range(8)]
        >>> choice = choose_plan(layers, batch=8, num_ranks=4, memory_bytes=900, options=Options(reserve_bytes=0, effort=0))
        >>> choice.plan.num_ranks, max(choice.device_peak_bytes) <= 900
        (4, True)
    """
    for name, count in (("num_ranks", num_ranks), ("batch", batch)):
        check_count(name, count)
    options = options_for("choose_plan", options, ("parts", *ASIDE, *SEARCHING, *TO_HOST, "progress"))
    wishes = Wishes(schedules=named_schedules(schedules), by=by, **values_of(options, SEARCHING))
    found = advise_inputs.device_of(device)
    links = advise_inputs.links_of(found, link, cross_link, nodes, (num_ranks,), options.host_link)
    workload: AnyWorkload
    if isinstance(model, (str, Transformer)) or advise_inputs.profiles_in(model):
        workload = advise_inputs.workload_of(
            model,
            found,
            num_ranks,
            sequence=sequence,
            attention=attention,
            precision=precision,
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            recomputations=recomputations,
            efficiency=efficiency,
            bytes_per_parameter=options.bytes_per_parameter,
        )
    else:
        workload = as_measured(model)
    question = ModelQuestion(
        model=workload,
        loads=_loads(workload, microbatch_sizes, batch, num_ranks),
        num_ranks=num_ranks,
        batch=batch,
        budgets=_budgets(found, memory_bytes, options.reserve_bytes, num_ranks),
        links=links,
        schedules=wishes.schedules,
        stages_per_rank=tuple(counts_of("stages_per_rank", stages_per_rank)),
        slices=tuple(counts_of("slices", slices)),
        parts=options.parts,
        host=options.host,
        by=by,
    )
    answer = _cached(question, wishes, None if cache is None else Path(cache), options.progress)
    to_measure = MEASURE if isinstance(workload, ModelWorkload) else MEASURE[1:]
    return replace(answer, assumptions=(*workload.assumptions, *ASSUMPTIONS), to_measure=to_measure)


def _loads(workload: AnyWorkload, microbatch_sizes: Sequence[int] | None, batch: int, num_ranks: int) -> tuple[Load, ...]:
    """Return what a microbatch may be; where any size may be tried, those that make fewer microbatches than ranks are not."""
    sizes = advise_inputs.sizes_of(microbatch_sizes, batch, workload.microbatch_sizes)
    if microbatch_sizes is None and workload.microbatch_sizes is None:
        sizes = [size for size in sizes if batch // size >= num_ranks] or sizes[:1]
    return tuple(Load(size, "" if how in ("none", AS_MEASURED) else how) for size in sizes for how in workload.recomputations)


def _cached(question: ModelQuestion, wishes: Wishes, cache: Path | None, progress: Callable[[int, int], None] | None) -> Choice:
    """Return the answer that is kept in a directory, or choose and keep it there."""
    asked = hashlib.sha256(f"{__version__} {names()} {wishes} {question}".encode(errors="replace")).hexdigest()[:32]
    file = None if cache is None else cache / f"{asked}.json"
    if file is not None and file.exists():
        try:
            return Choice.from_json(file.read_text(encoding="utf-8"))
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}: {error}: remove the file, and the plan is chosen again") from error
    answer = choose(question, effort=wishes.effort, seed=wishes.seed, progress=progress)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, answer.to_json())
    return answer


def _budgets(
    device: Device | None, memory_bytes: int | Sequence[int | None] | None, reserve_bytes: int | None, num_ranks: int
) -> Budgets:
    given = device.memory_bytes if memory_bytes is None and device is not None else memory_bytes
    of_each = budgets_of("memory_bytes", given, num_ranks)
    return tuple(None if one is None else one - advise_inputs.reserved_of(one, reserve_bytes) for one in of_each)
