"""Weights that several stages of a model share: what is known of them when it is cut, or by the names that the model gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import nn

from bpipe.errors import ConfigurationError
from bpipe.memory.saved.spans import Span, is_plain
from bpipe.model.state.reachable import Reachable
from bpipe.torch_private.modules import WRAPPERS
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

MARK = "_bpipe_ties"  # the attribute of a module that was cut from a model some of whose stages share weights
SUMS = "_bpipe_sums"  # the attribute of a weight whose gradients `TiedWeights` sum
STATISTICS = "running_mean"  # the buffer of a module that its forward changes in place, as BatchNorm's
Trained = Callable[[Sequence[nn.Module], Iterable[Any]], Sequence[torch.Tensor]]  # the parameters that train in place of others


class Tie(NamedTuple):
    """What several stages share.

    Args:
        names: by stage, the names of it.
        is_one: whether it is one tensor on all of them; if not, their tensors have memory in common.
    """

    names: Mapping[int, Sequence[str]]
    is_one: bool

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, whose gradients can be added up, and no statistics of a norm."""
        return self.is_one and not any(name.endswith(STATISTICS) for names in self.names.values() for name in names)


class HiddenWeight(NamedTuple):
    """A parameter that a stage may use, from a list, say, and that is registered on another stage alone.

    Args:
        stage: that other one.
        name: its name there.
    """

    stage: int
    name: str
    weight: nn.Parameter


class Ties(NamedTuple):
    """What a stage's module shares with other stages of the model that it was cut from."""

    stage: int
    shared: list[Tie]
    hidden: list[HiddenWeight]


class TiedParameter(NamedTuple):
    """A parameter of a stage that other stages have, too.

    Args:
        key: stands for it on all stages.
        first_name: its name on the first of them.
        name: its name in the stage's module.
    """

    key: str
    first_name: str
    name: str
    parameter: nn.Parameter


class _Held(NamedTuple):
    """A tensor of a stage's: its memory, and its name there."""

    tensor: torch.Tensor
    span: Span
    stage: int
    place: int  # among the names of the stage
    name: str


def mark_ties(parts: Sequence[Any], shared: Sequence[Tie] | None = None) -> None:
    """Mark the stages of a model with the weights that they share.

    Args:
        parts: all stages, in order.
        shared: what they share; default: the parameters, and statistics of norms, that are the same tensor or share memory.
    """
    shared = list(shared_by(parts) if shared is None else shared)
    for stage, part in enumerate(parts):  # a stage that shares nothing, too: what its model names is not shared then
        setattr(part, MARK, Ties(stage, [tie for tie in shared if stage in tie.names], [*_hidden_in(part, parts)]))


def _hidden_in(part: nn.Module, parts: Sequence[nn.Module]) -> Iterator[HiddenWeight]:
    """Yield the parameters of other stages that attributes of a stage's modules lead to."""
    reached = Reachable([part])
    found = {id(one): one for one in (*reached.tensors.values(), *(one for _, one in reached.parameters))}
    own = {id(one) for one in part.parameters()}
    for stage, other in enumerate(parts):
        for name, parameter in other.named_parameters():
            if id(parameter) in found and id(parameter) not in own:
                yield HiddenWeight(stage, name, parameter)


def shared_by(parts: Sequence[nn.Module]) -> Iterator[Tie]:
    """Yield the parameters, and statistics of norms, that are one tensor of several stages, or share memory."""
    found = sorted(_held_by(parts), key=lambda one: (one.span.storage, one.span.begin, one.stage, one.name))
    near: list[_Held] = []
    for held in found:
        if near and (held.span.storage != near[0].span.storage or held.span.begin >= max(one.span.end for one in near)):
            yield from _ties_among(near)
            near = []
        near.append(held)
    yield from _ties_among(near)


def _held_by(parts: Sequence[nn.Module]) -> Iterator[_Held]:
    for stage, part in enumerate(parts):
        buffers = part.named_buffers(remove_duplicate=False)
        statistics = [(name, one) for name, one in buffers if name.rpartition(".")[2] == STATISTICS]
        for place, (name, tensor) in enumerate([*part.named_parameters(remove_duplicate=False), *statistics]):
            yield _Held(tensor, Span(tensor), stage, place, name)


def _ties_among(near: Sequence[_Held]) -> Iterator[Tie]:
    """Yield the ties among tensors that lie around each other, as some columns of a matrix do around others."""
    groups: list[list[_Held]] = []
    for held in near:
        met = [group for group in groups if any(held.span.overlaps(one.span) for one in group)]
        groups = [*(group for group in groups if group not in met), [*(one for group in met for one in group), held]]
    for group in groups:
        names: dict[int, list[str]] = {}
        for one in sorted(group, key=lambda one: (one.stage, one.place)):
            names.setdefault(one.stage, []).append(one.name)
        if len(names) > 1:
            yield Tie(names, all(one.tensor is group[0].tensor for one in group))


def tied_in(module: nn.Module, number: int) -> Iterator[TiedParameter]:
    """Yield the parameters of a stage that other stages have, too, as the cut has shown it, or as a model names them.

    A model names them in `_tied_weights_keys`, a dict that leads from the name of each to that of the first one, as those of
    Transformers do. Copies in one module are none of them: they were parted on purpose.

    Args:
        number: of the stage in the pipeline.
    """
    if (cut := _cut_in(module)) is not None:
        ties: Ties = vars(cut)[MARK]
        for tie in (tie for tie in ties.shared if tie.is_weight):
            key = _digest(sorted((number - ties.stage + stage, sorted(names)) for stage, names in tie.names.items()))
            first, name = tie.names[min(tie.names)][0], tie.names[ties.stage][0]
            yield from (TiedParameter(key, first, name, one) for one in _parameters(cut, name))
        return
    for prefix, part in module.named_modules():
        yield from _named_by_model(prefix, part)


def _named_by_model(prefix: str, model: nn.Module) -> Iterator[TiedParameter]:
    names = getattr(model, "all_tied_weights_keys", getattr(model, "_tied_weights_keys", None))
    found: dict[str, list[TiedParameter]] = {}
    path = [part for part in prefix.split(".") if part not in ("module", *WRAPPERS)]  # two models of one class are two
    for target, first in names.items() if isinstance(names, Mapping) else ():
        for name in (first, target):
            for one in _parameters(model, name):
                key = _digest([*path, type(model).__name__.removeprefix("FSDP"), first])
                here, everywhere = f"{prefix}.{name}".lstrip("."), ".".join([*path, first]).lstrip(".")
                found.setdefault(key, []).append(TiedParameter(key, everywhere, here, one))
    yield from (same[0] for same in found.values() if len({id(one.parameter) for one in same}) == 1)


def _parameters(module: nn.Module, name: str) -> list[nn.Parameter]:
    return [one for one in _named(module, name) if isinstance(one, nn.Parameter)]


def _digest(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


def is_summed(weight: torch.Tensor) -> bool:
    """Return whether a living `TiedWeights` has a weight."""
    mark = getattr(weight, SUMS, None)
    return getattr(mark, "weight", lambda: None)() is not None


def check_ties(
    modules: Mapping[int, nn.Module], trained: Trained, *, are_alone: bool, are_summed: bool = True, within_step: bool = False
) -> None:
    """Raise if a weight is tied to a stage of another process, and nothing sums the gradients of its copies.

    Args:
        modules: of this rank's stages, or of all in a `Loopback`, by their number in the pipeline.
        trained: finds the sharded parameters for those that are gathered.
        are_alone: whether the other stages are in other processes; if not, all must have the very same weight.
        are_summed: whether the gradients of copies can be summed before an optimizer steps.
        within_step: whether the step sums those of weights.
    """
    for number, module in modules.items():
        if (cut := _cut_in(module)) is None:
            continue
        ties: Ties = vars(cut)[MARK]
        for tie in ties.shared:
            begin = number - ties.stage  # of the model among the stages: there may be one for each direction, or replica
            here = {begin + stage: names for stage, names in tie.names.items() if begin + stage in modules}
            elsewhere = [stage for stage in tie.names if begin + stage not in modules]
            own = [one for name in tie.names[ties.stage] for one in _named(cut, name) if _is_trained(cut, name, one)]
            is_apart = bool(elsewhere) and are_alone
            if is_apart and own and not are_summed:
                raise ConfigurationError(
                    f"{tie.names[ties.stage][0]!r} of stage {ties.stage} is one tensor of several stages of the model that was "
                    "cut, and an optimizer that steps by itself would train each process's copy apart: put these stages on one "
                    "rank, or leave optimizer= out, sum by bpipe.TiedWeights, and step yourself"
                )
            is_apart = is_apart and not (within_step and tie.is_weight)
            is_apart = is_apart and not all(map(is_summed, trained(list(cut.modules()), own)))
            if is_apart or not _are_one(own, here, modules):
                raise ConfigurationError(_refusal(tie, ties.stage, elsewhere, is_weight=any(one.requires_grad for one in own)))


@contextmanager
def hidden_refused(modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Let backwards raise that give a gradient to a weight of another process, which a stage has hidden.

    It may also be reached and never used, as through a parent.

    Args:
        modules: of this rank's stages, by their number in the pipeline.
    """
    with ExitStack() as handles:
        for number, module in modules.items():
            if (cut := _cut_in(module)) is None:
                continue
            ties: Ties = vars(cut)[MARK]
            for hidden in ties.hidden:
                if number - ties.stage + hidden.stage not in modules and hidden.weight.requires_grad:
                    handles.callback(hidden.weight.register_hook(partial(_refuse, hidden, ties.stage)).remove)
        yield


def _refuse(hidden: HiddenWeight, stage: int, gradient: torch.Tensor) -> None:
    if not is_summed(hidden.weight):
        raise ConfigurationError(
            f"{hidden.name!r} of stage {hidden.stage} got a gradient on stage {stage}, which keeps it where parameters() does not "
            "find it, as in a list, and each process would train a copy of its own. Make its module an attribute of "
            f"stage {stage}'s, too, before the model is cut, make a bpipe.TiedWeights of it, or put these stages on one rank"
        )


def _refusal(tie: Tie, stage: int, elsewhere: Sequence[int], *, is_weight: bool) -> str:
    name, first = tie.names[stage][0], tie.names[min(tie.names)][0]
    holders = ", ".join(f"stage {one} as {names[0]!r}" for one, names in sorted(tie.names.items()))
    what = f"{name!r} of stage {stage} is one tensor of several stages of the model that was cut ({holders})"
    if not is_weight:
        return f"{what}, and its statistics would be each stage's own: give each stage a norm of its own, or put them on one rank"
    if not elsewhere:
        return f"{what}, and these stages, in one process, have copies of it now: let their modules have the same parameter again"
    if not tie.is_one:
        return (
            f"{what}, under parameters that only have memory in common, each of which an optimizer steps: give all stages the same "
            "parameter (head.weight = embedding.weight) before the model is cut, put these stages on one rank, or make a "
            "bpipe.TiedWeights of them, if that is what the sum of their gradients should train"
        )
    return (
        f"{what}, and each process would train a copy of its own. Make tied = bpipe.TiedWeights({{{first!r}: the parameter, or "
        "None where a rank has none}) on all ranks before the first step, keep it, and call tied.broadcast() once and "
        "tied.sum_grads() before each optimizer.step() (sum_grads is yours to leave out if you sum them otherwise); or put these "
        "stages on one rank"
    )


def _cut_in(module: nn.Module) -> nn.Module | None:
    """Return the module with the mark of a stage's ties: it, or what is inside of wrappers such as DDP; None if none has it."""
    children = list(module.children())
    inner = next((one for one in children if MARK in vars(one)), None)
    if inner is None and MARK in vars(module):
        return module
    inner = children[0] if inner is None and len(children) == 1 else inner
    return None if inner is None else _cut_in(inner)


def _named(module: nn.Module, name: str) -> Sequence[torch.Tensor]:
    """Return the parameter or buffer with this name; nothing if the user has taken it out since."""
    owner, _, entry = name.rpartition(".")
    try:
        tensor = getattr(module.get_submodule(owner), entry, None)
    except AttributeError:
        return ()
    return (tensor,) if isinstance(tensor, torch.Tensor) else ()


def _is_trained(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Return whether training changes a tensor: a parameter that is not frozen, or statistics that are collected."""
    return tensor.requires_grad or (name.endswith(STATISTICS) and module.get_submodule(name.rpartition(".")[0]).training)


def _are_one(own: Sequence[torch.Tensor], here: Mapping[int, Sequence[str]], modules: Mapping[int, nn.Module]) -> bool:
    """Return whether the stages of this rank still share a weight."""
    found = [own]
    for stage, names in here.items():
        cut = _cut_in(modules[stage])
        found.append([] if cut is None else [one for name in names for one in _named(cut, name)])
    storages = [{address_of(one.untyped_storage()) for one in tensors if is_plain(one)} for tensors in found]
    return all(not one or not storages[0] or one & storages[0] for one in storages)
