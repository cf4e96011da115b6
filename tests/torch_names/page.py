"""docs/torch-pipelining.md: every argument of torch.distributed.pipelining beside bpipe's, from signatures and notes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bpipe
from bpipe.model.of_torch_alone import SCHEDULE, STAGE
from tests.torch_names.signatures import Signatures, recorded

PAGE = Path(__file__).parents[2] / "docs" / "torch-pipelining.md"
BASES = ("PipelineScheduleSingle", "PipelineScheduleMulti")
ITSELF = "torch's own"
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
both.

**Shapes.** bpipe learns shapes from the first real microbatch, and again if they change; it never runs a module on made-up inputs.
It compares `input_args` and `output_args` with the first microbatch, once, on the rank that gave them. A difference is a
StageError; torch 2.13 logs a warning, or takes the example's shape without looking.

**Orders.** Interleaved orders are torch's. `ScheduleZBVZeroBubble` has torch's order of forwards and of the inputs' halves of
backwards, and computes the weights' halves where a rank would wait. `ScheduleLoopedBFS` runs the backwards of a stage in the order
of its microbatches, which torch's runs in reverse. `ScheduleDualPipeV` runs the forward and the backward of a pair
one after the other, unless it gets `overlapped=True`. bpipe places all transfers itself. `_load_csv` reads both of torch's
formats: it keeps the order of computations, places transfers anew, and proves the result before anything runs. It refuses a file in
which a stage runs the backwards of its microbatches in another order than their forwards, such as torch's own of LoopedBFS.

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

These names, many of them private in torch, can be read as in torch, and set where the table says so:

| of | name | what it is |
| --- | --- | --- |
"""

REFUSED = """
## What is refused

These names belong to torch's runtime. A program that asks for one gets an AttributeError, and a subclass that overrides one a
ConfigurationError. The message names the way out:

| of | name | instead |
| --- | --- | --- |
"""

ATTRIBUTES = {
    ("a stage", "submod, stage_index, num_stages, device, group"): "as given; `submod` may be replaced between steps",
    ("a stage", "group_rank, group_size"): "this process's number in the group, and the group's size",
    ("a stage", "is_first, is_last"): "whether it has the model's inputs, or its outputs",
    ("a stage", "has_backward"): "whether the latest schedule that was made of it trains",
    ("a schedule", "_stage"): "the stage, of a schedule of one stage per rank",
    ("a schedule", "_stages"): "the list of stages, of the others",
    ("a schedule", "_num_stages, n_local_stages"): "the number of all stages, and of this rank's",
    ("a schedule", "_n_microbatches"): "m; if it is set on all ranks, the next step has a plan for it",
    ("a schedule", "_loss_fn, scale_grads"): "may be set on all ranks between steps, but not with slices",
    ("a schedule", "_has_backward"): "if it is set to False on all ranks, `step` evaluates",
    ("a schedule", "_args_chunk_spec, _kwargs_chunk_spec, _output_merge_spec"): "may be set between steps",
    ("a schedule", "rank, pp_group_size, stage_index_to_group_rank"): "this process's number, p, and the rank of each stage",
    ("a schedule", "pipeline_order, pipeline_order_with_comms"): "torch's actions by rank, without idle moments; of a plan with "
    "evictions, torch has no words: use `schedule.plan`",
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
    private = [f"| {of} | {_code(names.split(', '))} | {what} |" for (of, names), what in ATTRIBUTES.items()]
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
