"""Run a model in both of its modes, and prove that a trace has left it as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

# Attributes of modules that hold others, and one that is set on purpose.
NOT_COMPARED = {"_buffers", "_parameters", "_modules", "training"}


@contextmanager
def in_mode(modules: Iterable[nn.Module], *, is_other: bool) -> Iterator[None]:
    """Run modules in the mode that they are in, or in the other one, training or evaluating; and leave them in their own."""
    modes = {module: module.training for module in modules}
    try:
        for module, trains in modes.items():
            module.training = trains != is_other
        yield
    finally:
        for module, trains in modes.items():
            module.training = trains


class Attributes:
    """The attributes of modules at some moment, with what their lists, dicts and sets contained and the versions of their tensors.

    Args:
        modules: by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before = {path: (dict(vars(module)), _described(module)) for path, module in modules.items()}
        self._contents = {
            path: [(value, value.copy()) for value in vars(module).values() if isinstance(value, (dict, list, set))]
            for path, module in modules.items()
        }

    def restore(self) -> list[str]:
        """Restore everything but the values of tensors, and return what was changed."""
        changed = []
        for path, module in self._modules.items():
            (values, before), now = self._before[path], _described(module)
            written = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            if written:
                changed += [f"{path}.{name}" if path else name for name in written]
                vars(module).clear()
                vars(module).update(values)
                for value, content in self._contents[path]:
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(content)
        return changed


def _described(module: nn.Module) -> dict[str, tuple[int, object]]:
    """Return, by name, the identity of each attribute, parameter, buffer and child of a module, and what is compared inside it."""
    every = {**vars(module), **module._parameters, **module._buffers, **module._modules}
    return {name: (id(value), _inside(value)) for name, value in every.items() if name not in NOT_COMPARED}


def _inside(value: Any) -> object:
    """Return the version of a tensor, or the identities of what is in a list, a dict or a set."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else version_of(value)
    if isinstance(value, dict):
        return [(key, id(one)) for key, one in value.items()]
    return [*map(id, value)] if isinstance(value, (list, set)) else None
