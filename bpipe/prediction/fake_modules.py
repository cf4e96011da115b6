"""Modules as a dry run has them: with fake parameters and buffers, and as they were afterwards."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from bpipe.device import fork_random_states
from bpipe.device.generators import PYTHON, GlobalNumPy, source_of
from bpipe.model.pytree import mapped
from bpipe.prediction.known_values import KnownValues, know
from bpipe.torch_private.fakes import FakeTensor, fake_mode
from bpipe.torch_private.modules import hooks_of

__all__: list[str] = []

LIBRARIES = frozenset({"torch", "transformers", "peft"})  # whose hooks make a weight, or let an input need a gradient
CONTAINERS = (list, dict, set, deque)
SMALL = 64  # elements of a tensor of floating-point numbers that counts as known, if it is neither a parameter nor a buffer

Look = list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]]  # attributes, what they were, what containers held


class FakeModules:
    """Some modules on fake tensors, while this context is entered, which may be several times, and as they were outside of it.

    Operations inside make fake tensors. No random number is drawn, no hook of the user's is called, and nothing is written to a
    parameter, a gradient or a buffer. What a forward notes in attributes of its modules is there inside, and gone outside.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._modules = list({id(part): part for module in modules for part in module.modules()}.values())
        self._device, self._mode = device, fake_mode()
        self._fakes = WeakIdKeyDictionary()  # by the real tensor, as long as others have it, too
        self._inside: Look | None = None
        self._entered = ExitStack()

    def fake(self, value: Any) -> Any:
        """Return a pytree with a fake tensor for each of its tensors, always the same one for the same tensor."""
        return mapped(self._fake_of, value)

    def _fake_of(self, tensor: torch.Tensor, most_numbers: int = 0) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake: torch.Tensor | None = self._fakes.get(tensor)
        if fake is None:
            with warnings.catch_warnings(action="ignore"):  # of a gradient that only leaves have, which torch asks for
                self._fakes[tensor] = fake = self._mode.from_tensor(tensor)
            know(fake, tensor, most_numbers)
        return fake

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(_random_numbers(self._device, self._modules))
            entered.callback(_restore, _look(self._modules))
            if self._inside is None:
                self._prepare()
            else:
                _restore(self._inside)
            entered.callback(self._look_inside)
            entered.enter_context(_masks_as_of_real_tensors())
            entered.enter_context(self._mode)
            entered.enter_context(KnownValues(partial(self._fake_of, most_numbers=SMALL)))
            self._entered = entered.pop_all()

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def _look_inside(self) -> None:
        self._inside = _look(self._modules)

    def _prepare(self) -> None:
        """Put fake tensors into the modules, and take the user's hooks out."""
        for module in self._modules:
            held: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in held:
                tensors.update({name: self._fake_of(one) for name, one in tensors.items() if one is not None})
            for hooks in hooks_of(module):
                for key in [key for key, hook in hooks.items() if not _is_a_librarys(hook)]:
                    del hooks[key]


def _is_a_librarys(hook: Callable[..., Any]) -> bool:
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(kind.__module__).partition(".")[0] in LIBRARIES


def _look(modules: Iterable[nn.Module]) -> Look:
    """Look at the attributes of modules, and at what is in those that are containers."""
    found: Look = []
    for module in modules:
        own = vars(module)
        found.append((own, dict(own), [(one, one.copy()) for one in own.values() if isinstance(one, CONTAINERS)]))
    return found


def _restore(look: Look) -> None:
    for own, before, containers in look:
        own.clear()
        own.update(before)
        for one, held in containers:
            if isinstance(one, (list, deque)):
                one.clear()
                one.extend(held)
            elif one is not own:
                one.clear()
                one.update(held)


@contextmanager
def _random_numbers(device: torch.device, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the states of random numbers: torch's, Python's and NumPy's own, and those in attributes of modules."""
    held = (part for module in modules for value in vars(module).values() for part in _inside(value))
    with fork_random_states({device}), ExitStack() as after:
        sources: list[Any] = [PYTHON, GlobalNumPy(), *filter(None, map(source_of, held))]
        for source in sources:
            after.callback(source.set, source.get())
        yield


def _inside(value: Any) -> Iterable[Any]:
    return (value,) if not isinstance(value, CONTAINERS) else value.values() if isinstance(value, dict) else value


@contextmanager
def _masks_as_of_real_tensors() -> Iterator[None]:
    """Let Transformers make the masks that it makes of real tensors: of fake ones, it keeps those that mask nothing."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as after:
        if (before := getattr(utils, "is_fake_tensor", None)) is not None:
            after.callback(setattr, utils, "is_fake_tensor", before)
            utils.is_fake_tensor = lambda tensor: False
        yield
