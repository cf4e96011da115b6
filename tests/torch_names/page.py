"""docs/torch-pipelining.md: every argument of torch.distributed.pipelining beside bpipe's, from signatures and notes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bpipe
from bpipe.model.of_torch_alone import OPTIONS, SCHEDULE, STAGE
from tests.torch_names.signatures import Signatures, recorded

PAGE = Path(__file__).parents[2] / "docs" / "torch-pipelining.md"
BASES = ("PipelineScheduleSingle", "PipelineScheduleMulti")
ITSELF = "torch's own"
NEWEST = ("PipelineActivationLiveness", "PipelineStageInfo", "analyze_pipeline_activation_liveness")  # which not every torch has
SAME = "the same"

INTRODUCTION = """# Programs written for torch.distributed.pipelining

Change the module that a program imports, and most programs run with bpipe; the rest of this page says which do not, and why:

```python
from bpipe import PipelineStage, ScheduleInterleaved1F1B  # before: from torch.distributed.pipelining import ...
```

`bpipe` has the names of `torch.distributed.pipelining`, and the ones that programs import from its modules `schedules`, `stage`
and `microbatch`. Schedules are bpipe's own classes under torch's names, with torch's order of arguments. `pipeline`, `SplitPoint`
and the others that cut a model or a batch are torch's own objects, and schedules take the stages that they make.

This alone balances nothing. Wrap the schedule: `bpipe.Balanced(schedule, budget="auto", optimizer=optimizer)`
([how](tutorials/budgets.md)).

This page compares the names and arguments of torch {versions}. It is written by
`python -m tests.torch_names --write`; `tests/test_torch_names.py` compares it with the signatures of these versions and of the
torch that is installed.

## What has another meaning

**Gradient accumulation.** A program calls `step` twice without `zero_grad()` in between, with `scale_grads=True`, the default.
bpipe adds the gradients of the second batch to those of the first, as a loop without a pipeline does. torch {versions}
divide everything that is in `.grad` by m at the end of each step, so they divide the first batch's gradients twice. If both steps
have the same batch of m = 4 microbatches, torch 2.13 ends with 0.625 of the gradients of a loop without a pipeline, and bpipe with
all of them. bpipe scales the loss of each microbatch, and never what is in `.grad` already. `scale_grads=False` means the same in
both. So a gradient that does not come through the loss, such as that of an auxiliary loss that a Function brings in, needs
the factor `bpipe.loss_scale()`, where torch divides it with the rest ([how](how-to/accumulate-gradients.md)).

**Without a loss.** A schedule without `loss_fn` only evaluates, in both. torch's `step` leaves the last stage's graph behind its
output, so that a program that calls `loss.backward()` itself trains this stage alone. bpipe's outputs have no graph. In train mode
and with gradients enabled they need a gradient as torch's do, and a backward through them raises a ConfigurationError: give
`loss_fn=`, and `step` runs the backwards of all stages. `eval` returns plain tensors. A `target=`, `target_mbs=` or `losses=` for a
`step` without `loss_fn`, and an `optimizer=` for `Balanced` or `auto`, are refused: torch ignores a target there.

**Shapes.** bpipe learns shapes from the first real microbatch, and again if they change; it never runs a module on made-up inputs.
It compares `input_args` and `output_args` with the first microbatch, once, on the rank that gave them. A difference is a
StageError; torch 2.13 logs a warning, or takes the example's shape without looking.

**DTensors between stages.** A gradient comes back in the placements that its output had. Where the output is replicated, bpipe sums
the gradient over the tensor ranks at the boundary. torch from 2.13 on (torch 2.11 takes no DTensors) hands it on as `Partial`, so
gradients of the stage before may be `Partial` as well, where bpipe's have the placements of their parameters. Whole gradients
(`full_tensor()`) are the same to rounding.

**Orders.** Interleaved orders are torch's. `ScheduleZBVZeroBubble` has torch's order of forwards and of the inputs' halves of
backwards, and computes the weights' halves where a rank would wait. `ScheduleLoopedBFS` runs the backwards of a stage in the order
of its microbatches, which torch's runs in reverse. `ScheduleDualPipeV` runs the forward and the backward of a pair
one after the other, unless it gets `overlapped=True`. bpipe places all transfers itself. `_load_csv` reads both of torch's
formats: it keeps the order of computations, places transfers anew, and proves the result before anything runs. It refuses a file in
which a stage runs the backwards of its microbatches in another order than their forwards, such as torch's own of LoopedBFS.

**Batches.** A keyword argument may have one row for each microbatch, beside a batch of more rows. torch cuts every tensor into m
pieces, whatever its size. bpipe cuts samples, and refuses tensors that have not as many rows as the batch: say that these rows
belong to microbatches, by `kwargs_chunk_spec={{"scale": TensorChunkSpec(0)}}`, or give pieces, `step(kwarg_mbs=...)`
([how batches are cut](batches.md)).

**One stage per rank.** `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble` and `ScheduleLoopedBFS` take two or more stages
per rank, and refuse one, which torch runs. With one stage per rank, use `Schedule1F1B` for the first, which holds fewer
microbatches than torch's interleaved order does, `ZBH1` for the second, and `ScheduleGPipe` for the third.

**Errors.** bpipe raises the types in `bpipe.errors`, among them `ConfigurationError`, which is also a `ValueError`, and
`StageError` and `CommError`, which are also `RuntimeError`s.

## Names and arguments

"{same}" means the same name with the same meaning and, in calls by position, in the same place. What schedules have in common
is listed once.

| name | argument | torch | bpipe |
| --- | --- | --- | --- |
"""

PRIVATE = """
## What programs ask stages and schedules

These names can be read as in torch, and set where the table says so. Names that are private in torch are here because a trainer
uses them, which the table names; bpipe offers no other ones:

| of | name | what it is | used by |
| --- | --- | --- | --- |
"""

REFUSED = """
## What is refused

These names belong to torch's runtime. A program that asks for one gets an AttributeError, and a subclass that overrides one a
ConfigurationError. The message names the way out:

| of | name | instead |
| --- | --- | --- |
"""

TITAN = "torchtitan's `distributed/pipeline_parallel.py`"
NEMO = "NeMo Automodel"
ACCELERATE = "Accelerate's `pipeline_parallel.py`"

ATTRIBUTES = {  # which are public
    ("a stage", "submod, stage_index, num_stages, device, group"): "as given; `submod` may be replaced between steps",
    ("a stage", "group_rank, group_size"): "this process's number in the group, and the group's size",
    ("a stage", "is_first, is_last"): "whether it has the model's inputs, or its outputs",
    ("a stage", "has_backward"): "whether the latest schedule that was made of it trains",
    ("a schedule", "n_local_stages"): "the number of this rank's stages",
    ("a schedule", "scale_grads"): "may be set on all ranks between steps",
    ("a schedule", "rank, pp_group_size, stage_index_to_group_rank"): "this process's number, p, and the rank of each stage",
    ("a schedule", "pipeline_order, pipeline_order_with_comms"): "torch's actions by rank, without idle moments; of a plan with "
    "evictions, torch has no words: use `schedule.plan`",
}

USED_BY = {  # of names that are private in torch: what it is, and the public trainers whose sources use it
    ("`bpipe`", "_PipelineSchedule"): ("`Schedule`, for annotations", f"{TITAN}, {NEMO}"),
    ("`bpipe`", "_PipelineScheduleRuntime"): ("`FromCSV`", f"{TITAN}, {NEMO}"),
    ("a schedule", "_load_csv"): ("`load_csv`", f"{TITAN}, {NEMO}"),
    ("a schedule", "_stage"): ("the stage, of a schedule of one stage per rank", f"{ACCELERATE}, {NEMO}"),
    ("a schedule", "_stages"): ("the list of stages, of the others", f"torchtitan's `models/common/dist_moe`, {NEMO}"),
    ("a schedule", "_n_microbatches"): ("m; if it is set on all ranks, the next step has a plan for it", ACCELERATE),
    ("a schedule", "_loss_fn"): ("may be set on all ranks between steps", f"{ACCELERATE}, {NEMO}"),
    ("a schedule", "_has_backward"): ("if it is set to False on all ranks, `step` evaluates", ACCELERATE),
    ("a schedule", "_args_chunk_spec"): ("may be set between steps", ACCELERATE),
    ("a schedule", "_kwargs_chunk_spec"): ("may be set between steps", f"{ACCELERATE}, {NEMO}"),
}

NOTES = {  # by name, or "step" for a schedule's method, and argument; None for the name itself
    ("PipelineStage", "device"): "the same; if it is left out, where the parameters are",
    ("PipelineStage", "input_args"): "compared with the first microbatch. A group in this place is taken as `group`",
    ("PipelineStage", "output_args"): "compared with the first microbatch",
    ("PipelineStage", "output_grads"): "accepted, not used: gradients have the shapes of the outputs. A group in this place, which "
    "is torch 2.11's, is taken as `group`",
    ("PipelineStage", "input_grads"): "accepted, not used",
    ("PipelineStage", "group"): "the same; also a `DeviceMesh` of one dimension, or a rank of a `Loopback`",
    ("PipelineStage", "dw_builder"): "the same: called behind each backward; its result is called in the microbatch's W, or at "
    "once if the schedule has none",
    ("PipelineStage", "get_mesh"): "the same, but its second argument is None",
    ("PipelineStageInfo", None): "torch's own; with an older torch, bpipe's own like it",
    ("PipelineActivationLiveness", None): "torch's own; with an older torch, an ImportError. `from bpipe import *` leaves it out",
    ("analyze_pipeline_activation_liveness", None): "the same. It takes schedules of bpipe, and sees no evictions",
    ("PipelineStage.register_forward_context", "context_factory"): "the same, with every torch: the context surrounds each slice, "
    "and each forward that runs again. `is_metadata_inference` is always False",
    ("step", "finalize_gradients"): "the same, with every torch: False is FSDP2's `set_requires_gradient_sync(False)` for this "
    "step alone. True leaves that switch as it is, where torch switches it on",
    ("PipelineScheduleSingle", None): "for `issubclass` and `isinstance`, also of bpipe's other classes. It refuses to be "
    "constructed or derived from: write a rule (docs/schedules.md), or give `FromPlan` a plan",
    ("PipelineScheduleMulti", None): "the same as PipelineScheduleSingle, for the schedules that take a list of stages",
    ("_PipelineScheduleRuntime", None): "`FromCSV`, which also has this name",
    ("get_schedule_class", "schedule_name"): "the same; also bpipe's names of schedules",
    ("any schedule", "output_merge_spec"): "the same; with None for a value in it, tensors are concatenated along dimension 0, "
    "and of other values the first is kept, where torch wants equal ones",
    ("any schedule", "scale_grads"): "scales the loss, see above",
    ("any schedule", "use_full_backward"): "accepted, not used, as in torch",
    ("any schedule", "backward_requires_autograd"): "accepted, not used: every backward is autograd's",
    ("any schedule", "defer_pp_recv"): "accepted, not used: the plan has a place for every receive",
    ("_load_csv", "filename"): "the same, or the text of the file",
    ("_load_csv", "format"): "accepted: the order of computations is read from either, and transfers are placed anew",
}


def page() -> str:
    """Return the text of the page."""
    versions = [*recorded()]
    listed = f"{', '.join(versions[:-1])} and {versions[-1]}"
    lines = [f"| {_code(names)} | {_code(arguments)} | {seen} | {here} |" for names, arguments, seen, here in rows()]
    asked = {key: (what, "") for key, what in ATTRIBUTES.items()} | USED_BY
    private = [f"| {of} | {_code(names.split(', '))} | {what} | {who} |" for (of, names), (what, who) in asked.items()]
    tables = (("a stage", STAGE), ("a schedule", SCHEDULE))
    ways = [(of, names, way) for of, names in tables for way in dict.fromkeys(names.values())]
    out = [f"| {of} | {_code([name for name, own in names.items() if own == way])} | {way} |" for of, names, way in ways]
    parts = [INTRODUCTION.format(versions=listed, same=SAME), "\n".join(lines), "\n", PRIVATE, "\n".join(private), "\n", REFUSED]
    return "".join([*parts, "\n".join(out), "\n"])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rows() -> Iterator[tuple[list[str], list[str], str, str]]:
    """Return the names and arguments that are alike, the versions that have them, and what they are here."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    by_name: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, argument, seen, here in entries():
        by_name.setdefault(name, {}).setdefault((seen, here), []).extend([argument] * bool(argument))
    for name, found in by_name.items():
        alike.setdefault(tuple((*key, *arguments) for key, arguments in found.items()), []).append(name)
    for found, names in alike.items():
        for seen, here, *arguments in found:
            yield names, arguments, seen, here


def entries() -> Iterator[tuple[str, str, str, str]]:
    """Return each name and argument, the versions that have it, and what it is here."""
    versions = recorded()
    for name in _shown({name for one in versions.values() for name in one}):
        arguments = list(dict.fromkeys(_bare(one) for found in reversed(versions.values()) for one in found.get(name, ())))
        if not arguments or (shown_as(name), None) in NOTES:
            yield shown_as(name), "", _versions(versions, name), _of_itself(name)
        if name not in BASES:
            for argument in arguments:
                yield shown_as(name), argument, _versions(versions, name, argument), of_argument(name, argument)


def _shown(names: set[str]) -> list[str]:
    """Return the names to compare: a method of schedules once, and no methods of what is torch's own."""
    kept: dict[str, str] = {}
    for name in sorted(names, key=lambda one: (one.partition(".")[0] in BASES, one)):
        if is_compared(name):
            kept.setdefault(shown_as(name), name)
    return sorted(kept.values(), key=lambda one: ("." in one, one.lower()))


def shown_as(name: str) -> str:
    """Return the name in the table: a method of schedules by itself."""
    kind, _, method = name.partition(".")
    return method if method and _is_schedule(kind) else name


def is_compared(name: str) -> bool:
    """Return whether a name stands in the table: all but the methods of what is torch's own."""
    kind, _, method = name.partition(".")
    return not method or kind == "PipelineStage" or _is_schedule(kind)


def _is_schedule(name: str) -> bool:
    return name.startswith(("Schedule", "PipelineSchedule", "_PipelineSchedule"))


def _versions(versions: dict[str, Signatures], name: str, argument: str = "") -> str:
    has = [one for one, names in versions.items() if name in names and (not argument or argument in map(_bare, names[name]))]
    if len(has) == len(versions):
        return "all"
    return f"from {has[0]}" if has[-1] == [*versions][-1] else f"until {has[-1]}"


def _bare(argument: str) -> str:
    return argument.partition("=")[0]


def ours(name: str) -> Any:
    """Return bpipe's object of a name."""
    kind, _, method = name.partition(".")
    owner = getattr(bpipe, kind)
    if method:
        owner = bpipe.FromCSV if kind in BASES else owner
        return getattr(owner, method, None)
    return owner


def _of_itself(name: str) -> str:
    note = NOTES.get((shown_as(name), None))
    if note is not None:
        return note
    refused = _refusal(name)
    return refused or (ITSELF if _is_torchs(ours(name)) else SAME)


def _refusal(name: str) -> str | None:
    kind, _, method = name.partition(".")
    way = (STAGE if kind == "PipelineStage" else SCHEDULE).get(method)
    return None if way is None else "refused, see below"


def of_argument(name: str, argument: str) -> str:
    """Return what an argument is here.

    Raises:
        LookupError: bpipe has it not, or elsewhere, and nothing is written about it.
    """
    if refused := _refusal(name):
        return refused
    if name in NEWEST:
        return ITSELF
    if argument in OPTIONS:
        default, way = OPTIONS[argument]
        return f"accepted by name if it is {default!r}, torch's default, and refused otherwise: {way}"
    found = ours(name)
    if _is_torchs(found):
        return ITSELF
    note = NOTES.get((shown_as(name), argument)) or (NOTES.get(("any schedule", argument)) if _is_schedule(name) else None)
    own, theirs = places(list(inspect.signature(found).parameters.values())), [*recorded().values()][-1].get(name, [])
    place = theirs_place(theirs, argument)
    if argument.lstrip("*") not in own or (note is None and place is not None and own[argument.lstrip("*")] not in (place, None)):
        raise LookupError(f"{name}({argument}): place {place} in torch, {own.get(argument.lstrip('*'))} here")
    return note or SAME


def places(parameters: list[inspect.Parameter]) -> dict[str, int | None]:
    """Return the place of each parameter, None for those given by name."""
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"]
    return {one.name: positional.index(one.name) if one.name in positional else None for one in parameters}


def theirs_place(arguments: list[str], argument: str) -> int | None:
    """Return the place of torch's argument in a call by position; None if it has none."""
    bare = [_bare(one) for one in arguments]
    star = next((i for i, one in enumerate(bare) if one.startswith("*")), len(bare))
    return bare.index(argument) if argument in bare[:star] else None


def _is_torchs(found: Any) -> bool:
    return getattr(found, "__module__", "").startswith("torch.")
