"""Make a stage: a copy of the model's outer modules that shares all that it keeps, with placeholders for what it lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError, format_error
from bpipe.model.microbatch import tensors_in
from bpipe.partition.name_lists import CONTAINERS, OF_PARAMETERS, Names

__all__: list[str] = []

Kind = Callable[[str], str]  # what stands for a missing module, by its name


def skeleton(
    model: nn.Module, names: Names, kept: Sequence[str], kind: Kind, *, claimed: Iterable[str], keep_positions: bool
) -> nn.Module:
    """Copy the modules above those that are kept, and share or leave out the rest.

    Args:
        kind: the placeholder of a module that it lacks.
        claimed: all that any stage names: a parameter or buffer of a copied module belongs to those that name it or that module.
        keep_positions: whether missing entries of a series are replaced too (parameters by None), so that the others keep places.
    """
    shared = {name: module for name, module in names.modules.items() if names.is_kept(name, kept)}
    copied = {name: module for name, module in names.modules.items() if names.is_copied(name, kept)}
    missing = {name: module for name, module in names.modules.items() if name not in shared and name not in copied}
    memo: dict[int, Any] = {id(module): placeholder("pass", module) for module in missing.values()}  # in place of copies
    for module in copied.values():
        memo.pop(id(module), None)
        memo |= {id(tensor): tensor for tensor in tensors_in(vars(module))}
    memo |= {id(one): one for one in (*shared.values(), *names.tensors.values())}
    part = _copied(model, memo)
    for name in (name for name in missing if names.owner(name) not in missing):
        owner, _, entry = name.rpartition(".")
        above, stand_in = part.get_submodule(owner), placeholder(kind(name), names.modules[name])
        if isinstance(above, CONTAINERS) and not keep_positions:
            above._modules.pop(entry, None)  # already gone where the series has two names
        else:
            above._modules[entry] = stand_in
    for name in names.tensors:
        if names.owner(name) in copied and names.is_kept(name, claimed) and not names.is_kept(name, kept):
            owner, _, entry = name.rpartition(".")
            above = part.get_submodule(owner)
            if isinstance(above, OF_PARAMETERS) and not keep_positions:
                leave_out(above, entry)
            else:
                (above._parameters if entry in above._parameters else above._buffers)[entry] = None
    return part


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be copied without its parts: {format_error(error)}. Take off the attribute "
            "that deepcopy does not take, and put it on each stage"
        ) from error


def leave_out(parameters: nn.ParameterList | nn.ParameterDict, entry: str) -> None:
    """Remove an entry from a stage's copy. The others keep their names; the first of a list's has index 0."""
    if isinstance(parameters, nn.ParameterDict):
        parameters.pop(entry)
        return
    some: Any = parameters
    if "_present" not in vars(some):
        some._present = [str(index) for index in range(len(some))]
    present = some._present
    present.remove(entry)
    some._get_abs_string_index = present.__getitem__  # of this list alone: a slice of it has entries of its own
    some._size -= 1
    delattr(some, entry)


class PassThrough(torch.nn.Module):
    """Hands the hidden states on, in place of a layer, a norm or a head that another stage has.

    They are `inputs_embeds` where the caller names them so, else the first argument that is not None.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (kwargs.get("inputs_embeds"), *args, *kwargs.values())
        return next((one for one in given if one is not None), None)


class AddsNothing(torch.nn.Module):
    """Returns a zero in place of position embeddings that the first stage has added; adding it changes no bit."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(-0.0)  # x + 0.0 would turn -0.0 into 0.0; and a number of no dimension leaves the dtype alone


KINDS = {"pass": PassThrough, "zero": AddsNothing, "none": None}


def placeholder(kind: str, module: torch.nn.Module) -> torch.nn.Module | None:
    """Return what stands for a module: "pass" it through, add "zero", or "none". It has the module's plain attributes."""
    chosen = KINDS[kind]
    if chosen is None:
        return None
    stand_in = chosen().train(module.training)
    for name, value in vars(module).items():
        if isinstance(value, (str, bool, int, float)) and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in
