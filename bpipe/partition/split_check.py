"""Prove a split on an example: the stages, run one after the other, compute the whole model's outputs and gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from bpipe.errors import ConfigurationError, StageError, format_error
from bpipe.flow.shape_arguments import Skip
from bpipe.model.preserve_state import preserved_state
from bpipe.model.pytree import flattened, mapped
from bpipe.partition.router_loss import plain

__all__ = ["check_split"]

HINT = (
    "What the model's forward does outside of its modules, every stage does again. Rewrite it so that it goes well with missing "
    "modules, or say with missing= and keep_positions= what shall stand for them"
)


def check_split(model: nn.Module, parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
    """Run a model, and its stages one after the other, and raise unless they compute the same.

    Outputs must be equal bit for bit, and the same parameters must get gradients. The gradients' values are compared by norm, to
    within a hundredth, because a GPU sums in a different order each time, whereas a forward that scales or detaches in each stage
    is further off. Of parameters that the stages do not share with the model (on meta before), no gradients are compared.

    Nothing is left behind: random states, gradients and buffers are restored. Not collective; blocks the host. Runs a forward
    and a backward of each, in the train or eval mode that the modules are in and from the same random state.

    Args:
        model: the whole model, on a device where it can run.
        parts: its stages, in order.
        args: positional arguments of the model, which the first stage gets.
        kwargs: keyword arguments, which every stage gets, as from a schedule's `step`.

    Raises:
        StageError: a stage raised, or the outputs or the gradients differ.
        ConfigurationError: there are no stages, or parameters are on the meta device, where nothing has a value.

    Example:
        >>> from bpipe.partition.model_split import split_model
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> check_split(model, split_model(model, [["0", "1"], ["2"]]), torch.randn(3, 2))
    """
    if not parts:
        raise ConfigurationError("no stages to check: give the list that split_model returned")
    if any(parameter.is_meta for module in (model, *parts) for parameter in module.parameters()):
        raise ConfigurationError("parameters are on the meta device, where nothing has a value: check an initialised small model")
    try:
        compare(model, parts, args, kwargs)
    except DifferenceError as found:
        raise StageError(f"{found}. {HINT}") from found.__cause__


class DifferenceError(Exception):
    """The stages do something else than the model; the cause is the error of one that cannot run."""


def compare(
    model: nn.Module,
    parts: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_exact: bool = False,
    skips: Mapping[str, Skip] | None = None,
) -> None:
    """Run a model, and its stages one after the other; raise a DifferenceError for the first difference, or the model's own error.

    Args:
        is_exact: True to compare gradients bit for bit too, which a CPU allows because it sums them in the same order.
        skips: what passes stages in between, for stages of which the first alone gets the keyword arguments, and whose buffers are
            compared, too; default: none, each stage gets all keyword arguments.
    """
    staged = {id(parameter) for part in parts for parameter in part.parameters()}
    shared = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in staged}
    with torch.enable_grad():
        with preserved_state([model, *parts]):
            expected = flattened(plain(model, model(*copied(args), **copied({**without_cache(model), **kwargs}))))
            gradients = gradients_of(expected, shared)
            buffers = {} if skips is None else copied(dict(model.named_buffers()))
        if is_exact and not _is_telling(expected):
            raise ValueError("most of its output is not finite, so the comparison proves nothing")
        with preserved_state([model, *parts]):
            several = [] if skips is None else _of_several(parts)
            before = copied(several)
            made = list[Any]()
            try:
                made += in_a_row(parts, args, kwargs, skips, hand_over=copied)
            except Exception as error:
                raise DifferenceError(f"stage {len(made)} of {len(parts)} cannot run: {format_error(error)}") from error
            found = flattened(made[-1][0])
            if not all(map(torch.equal, several, before)):
                raise DifferenceError("a buffer that several stages use is written by one of them, and each rank has its own")
            _compare_outputs(expected, found, len(parts))
            _compare_gradients(gradients, gradients_of(found, shared), is_exact)
            for name, buffer in (named for part in parts for named in part.named_buffers()):
                if name in buffers and not _is_same(buffers[name], buffer):
                    raise DifferenceError(f"the buffer {name} gets another value")


def is_repeatable(model: nn.Module, args: Sequence[Any]) -> bool:
    """Return whether a model does the same twice, from the same random state: of no other does a comparison tell anything."""
    try:
        compare(model, [_Itself(model)], args, {})
    except DifferenceError:
        return False
    return True


class _Itself(nn.Module):
    """A model as the only stage of itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return plain(self.model, self.model(*args, **without_cache(self.model)))


def _of_several(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the buffers that several stages have."""
    found = [{id(buffer): buffer for buffer in part.buffers()} for part in parts]
    return [one for index, of_part in enumerate(found) for key, one in of_part.items() if any(key in o for o in found[:index])]


def _is_telling(outputs: Sequence[Any]) -> bool:
    finite = [one.isfinite().double().mean().item() for one in outputs if isinstance(one, torch.Tensor) and one.numel()]
    return bool(finite) and min(finite) > 0.5


def gradients_of(outputs: Sequence[Any], parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Return the gradients of parameters after a backward whose gradient of each output differs in each element."""
    results = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    rising = [torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape).to(one.dtype) for one in results]
    if results:
        torch.autograd.backward(results, rising)
    return {name: parameter.grad for name, parameter in parameters.items()}


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that turns off a Hugging Face model's cache, because a cache changes the layout of keys or the mask."""
    named = inspect.signature(model.forward).parameters
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in named.values())
    is_asked = takes_more and getattr(getattr(model, "config", None), "use_cache", False) is True
    is_theirs = isinstance(getattr(model, "base_model", None), nn.Module)
    return {"use_cache": False} if is_theirs and (is_asked or "use_cache" in named) else {}


def in_a_row(
    parts: Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    skips: Mapping[str, Skip] | None,
    hand_over: Callable[[Any], Any] = lambda value: value,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run stages one after the other; yield what each makes for the next one, and for others by name.

    Args:
        skips: as for `compare`.
        hand_over: makes what a stage gets of what others made: copies, as over a link.
    """
    value, kept = args, dict[str, Any]()
    for index, part in enumerate(parts):
        given = kwargs if index == 0 or skips is None else {}
        given = given | {name: kept[name] for name, (_, *users) in (skips or {}).items() if index in users}
        value = part(*hand_over(value if isinstance(value, (tuple, list)) else (value,)), **hand_over(given))
        made: dict[str, Any] = {}
        if any(source == index for source, *_ in (skips or {}).values()):
            value, made = value
            kept |= made
        yield value, made


def _compare_outputs(expected: list[Any], found: list[Any], num_stages: int) -> None:
    if len(expected) != len(found):
        raise DifferenceError(f"the model returns {len(expected)} values, and its {num_stages} stages return {len(found)}")
    for index, (one, other) in enumerate(zip(expected, found)):
        if not _is_same(one, other):
            what = f"output {index} {_difference(one, other)}"
            raise DifferenceError(f"the {num_stages} stages do not compute what the model computes: {what}")


def _compare_gradients(
    expected: dict[str, torch.Tensor | None], found: dict[str, torch.Tensor | None], is_exact: bool
) -> None:
    norms = [gradient.norm().item() for gradient in expected.values() if gradient is not None]
    largest = max(filter(isfinite, norms), default=0.0)
    for name, gradient in expected.items():
        other = found[name]
        if is_exact or gradient is None or other is None:
            is_same = _is_same(gradient, other)
        else:
            is_near = bool((gradient - other).norm() <= 0.01 * gradient.norm() + 1e-4 * largest)
            is_same = is_near or not isfinite(gradient.norm().item())
        if not is_same:
            texts = ["none" if one is None else f"one of norm {one.norm().item():.4g}" for one in (gradient, other)]
            apart = "" if gradient is None or other is None else f" ({_difference(gradient, other)})"
            raise DifferenceError(
                f"the stages compute what the model computes, but {name} gets another gradient: {texts[0]} in the model, and "
                f"{texts[1]} in the stages{apart}"
            )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return alike and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(one.isnan(), other.isnan())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or _described(one) != _described(other):
        return f"is {_described(one)} of the model, and {_described(other)} of the stages"
    largest = (one.to(torch.float64) - other.to(torch.float64)).abs().max().item()
    return f"differs by up to {largest:.3g}, where the largest is {one.abs().max().item():.3g}"


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def copied(tree: Any) -> Any:
    """Return a pytree with copies of its tensors, which lead back to them."""
    return mapped(torch.Tensor.clone, tree)
