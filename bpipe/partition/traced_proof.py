"""Prove that the parts of a traced model do what the model does, on an example, and that a trace left the model as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.errors import format_error
from bpipe.model.preserve_state import preserved_state
from bpipe.partition.split_check import CannotRunError, Difference, Run, copied, difference
from bpipe.skips.routes import Skip

__all__: list[str] = []

MODE = "training"  # an attribute that is set on purpose
OF_MODULES = ("_buffers", "_parameters", "_modules")  # attributes that hold others


class Attributes:
    """The attributes of modules at some moment, with what their lists, dicts and sets contained and the versions of their tensors.

    Args:
        modules: by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._before = [(path, module, dict(vars(module)), _insides(vars(module))) for path, module in modules.items()]

    def restore(self) -> list[str]:
        """Restore everything but the values of tensors, and return what was changed."""
        changed = []
        for path, module, values, insides in self._before:
            now = vars(module)
            for name in {**values, **now}:
                is_same = name in values and name in now and now[name] is values[name]
                if name == MODE or (is_same and (name not in insides or _is_same(now[name], insides[name]))):
                    continue
                written = [name]
                if name in OF_MODULES:
                    written = [key for key in {**insides[name], **now[name]} if now[name].get(key) is not insides[name].get(key)]
                changed += [f"{path}.{one}" if path else one for one in written]
                now.pop(name, None)
                if name in values:
                    now[name] = values[name]
                    _refill(values[name], insides.get(name))
        return changed


def _insides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of each container among some values, and each tensor's version."""
    copies = {name: value.copy() for name, value in values.items() if isinstance(value, (dict, list, set))}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and not value.is_inference()}
    return {**copies, **{name: tensor._version for name, tensor in tensors.items()}}


def _is_same(value: Any, inside: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value._version == inside)
    if isinstance(value, set):
        return bool(value == inside)
    if isinstance(value, dict):
        return list(value) == list(inside) and all(value[key] is inside[key] for key in value)
    return len(value) == len(inside) and all(one is other for one, other in zip(value, inside))


def _refill(value: Any, inside: Any) -> None:
    if isinstance(value, list):
        value[:] = inside
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(inside)


def difference_from(
    model: nn.Module, parts: Sequence[nn.Module], skips: Mapping[str, Skip], args: Sequence[Any], kwargs: dict[str, Any]
) -> Difference | None:
    """Run a model, and its parts, in both modes, and return the first difference; raise the errors of the model itself."""
    run, modules = _running(skips), {module: module.training for one in (model, *parts) for module in one.modules()}
    try:
        for is_other in (False, True):
            for module, trains in modules.items():
                module.training = trains != is_other
            found = difference(model, parts, args, kwargs, run=run) or _other_buffers(model, parts, args, kwargs, run)
            if found is not None:
                return found
    finally:
        for module, trains in modules.items():
            module.training = trains
    return None


def _running(skips: Mapping[str, Skip]) -> Run:
    """Return a function that runs parts one after the other; each gets copies of what others made, as over a link."""

    def run(parts: Sequence[nn.Module], args: Any, kwargs: dict[str, Any]) -> Any:
        kept: dict[str, Any] = {}
        result: Any = tuple(args)
        shared = _shared_buffers(parts)
        values = [buffer.clone() for buffer in shared]  # batch norms write theirs without a new version
        for index, part in enumerate(parts):
            used = {name: copied(kept[name]) for name, (_, *users) in skips.items() if index in users}
            arguments = result if isinstance(result, tuple) else (result,)
            try:
                result = part(*copied(arguments), **used, **(copied(kwargs) if index == 0 else {}))
            except Exception as error:
                raise CannotRunError(f"stage {index} of {len(parts)} cannot run: {format_error(error)}") from error
            if any(source == index for source, *_ in skips.values()):
                result, made = result
                kept |= made
        if not all(map(torch.equal, shared, values)):
            own = ValueError("each rank has its own")
            raise CannotRunError("a buffer that several stages use is written by one of them") from own
        return result

    return run


def _shared_buffers(parts: Sequence[nn.Module]) -> list[torch.Tensor]:
    found = [{id(buffer): buffer for buffer in part.buffers()} for part in parts]
    return [one for index, of_part in enumerate(found) for key, one in of_part.items() if any(key in o for o in found[:index])]


def _other_buffers(
    model: nn.Module, parts: Sequence[nn.Module], args: Sequence[Any], kwargs: dict[str, Any], run: Run
) -> Difference | None:
    """Return a buffer that has another value after the parts have run than after the model has."""
    with torch.no_grad():
        with preserved_state([model, *parts]):
            model(*copied(args), **copied(kwargs))
            expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with preserved_state([model, *parts]):
            run(parts, args, kwargs)
            found = {name: buffer.clone() for part in parts for name, buffer in part.named_buffers()}
    for name, value in expected.items():
        if name in found and not torch.equal(torch.nan_to_num(found[name]), torch.nan_to_num(value)):
            return Difference(f"the buffer {name} gets another value")
    return None
