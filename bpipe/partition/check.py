"""Prove a split on an example: the stages one after the other compute what the whole model computes, to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bpipe.errors import ConfigurationError, StageError
from bpipe.partition.untouched import untouched

__all__ = ["check_split"]

HINT = (
    "What the model's forward does outside of its modules, every stage does again. Rewrite it so that it goes well with missing "
    "modules, or say with missing= and keep_positions= what shall stand for them"
)


def check_split(model: nn.Module, parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
    """Run a model, and its stages one after the other, and raise unless the outputs are equal to the bit.

    Nothing is left behind: random numbers and buffers are put back. Not collective; blocks the host. Runs forwards alone, in the
    train or eval mode that the modules are in; random numbers start the same for both.

    Args:
        model: the whole, on a device where it can run.
        parts: its stages, in order.
        args: positional arguments of the model, which the first stage gets.
        kwargs: keyword arguments, which every stage gets, as from a schedule's `step`.

    Raises:
        StageError: a stage raised, or the outputs differ.
        ConfigurationError: there are no stages, or parameters are on the meta device, where nothing has a value.

    Example:
        >>> from bpipe.partition.split import split_model
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> check_split(model, split_model(model, [["0", "1"], ["2"]]), torch.randn(3, 2))
    """
    if not parts:
        raise ConfigurationError("no stages to check: give the list that split_model returned")
    if any(parameter.is_meta for module in (model, *parts) for parameter in module.parameters()):
        raise ConfigurationError("parameters are on the meta device, where nothing has a value: check an initialised small model")
    with torch.no_grad():
        with untouched([model, *parts]):
            expected = tree_leaves(_plain(model(*_copied(args), **_copied({**_without_cache(model), **kwargs}))))
        with untouched([model, *parts]):
            found = tree_leaves(_chained(parts, _copied(args), kwargs))
    _compare(expected, found, len(parts))


def _without_cache(model: nn.Module) -> dict[str, bool]:
    """A Hugging Face model that fills a cache lays its keys and values out otherwise, which may round otherwise."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _chained(parts: Sequence[nn.Module], args: Any, kwargs: dict[str, Any]) -> Any:
    value = args
    for index, part in enumerate(parts):
        try:
            value = part(*(value if isinstance(value, (tuple, list)) else (value,)), **_copied(kwargs))
        except Exception as error:
            raise StageError(f"stage {index} of {len(parts)} cannot run: {type(error).__name__}: {error}. {HINT}") from error
    return value


def _compare(expected: list[Any], found: list[Any], num_stages: int) -> None:
    if len(expected) != len(found):
        raise StageError(f"the model returns {len(expected)} values, and its {num_stages} stages return {len(found)}. {HINT}")
    for index, (one, other) in enumerate(zip(expected, found)):
        if not _is_same(one, other):
            raise StageError(
                f"the {num_stages} stages do not compute what the model computes: output {index} {_difference(one, other)}. {HINT}"
            )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(one.isnan(), other.isnan())
    return type(one) is type(other) and bool(one == other)


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or _described(one) != _described(other):
        return f"is {_described(one)} of the model, and {_described(other)} of the stages"
    largest = (one.to(torch.float64) - other.to(torch.float64)).abs().max().item()
    return f"differs by up to {largest:.3g}"


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _copied(nest: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.clone, nest)


def _plain(output: Any) -> Any:
    """What a Hugging Face model returns is a dict; its stages return the logits, or the first value, alone."""
    if not (isinstance(output, dict) and hasattr(output, "to_tuple")):
        return output
    return output["logits"] if "logits" in output else output.to_tuple()[0]
