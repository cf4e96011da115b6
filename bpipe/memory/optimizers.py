"""Count the bytes of optimizer states that belong to a rank, for the optimizers that have stepped in this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bpipe.errors import ConfigurationError
from bpipe.memory.saved.storages import storages_of
from bpipe.memory.static import bytes_under
from bpipe.model.microbatch import tensors_in

__all__: list[str] = []


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]  # of one rank


class Stepped:
    """Remember, weakly, the torch optimizers that have stepped while a schedule was open.

    torch has one list of hooks for all optimizers of a process, so there is one hook for all schedules: the first one that opens
    registers it, and the last one that closes removes it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may close a schedule while another one opens
        self._open: set[object] = set()
        self._handle: RemovableHandle | None = None
        self._known: dict[int, weakref.ref[Optimizer]] = {}

    def open(self) -> object:
        """Follow the steps of optimizers until `close` is called with what this returns."""
        opened = object()
        with self._lock:
            self._open.add(opened)
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self._remember)
        return opened

    def close(self, opened: object) -> None:
        with self._lock:
            self._open.discard(opened)
            if not self._open and self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _remember(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # A write to a plain dict: torch.compile traces this along with the optimizer's step, and anything more breaks its graph.
        self._known[id(optimizer)] = weakref.ref(optimizer)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that are still alive."""
        return [one for reference in [*self._known.values()] if (one := reference()) is not None]

    def tidy(self) -> None:
        """Forget the optimizers that are no longer alive."""
        for key, reference in [*self._known.items()]:
            if reference() is None:
                self._known.pop(key, None)


STEPPED = Stepped()  # one per process, because torch's hooks are


class States:
    """Count the states that optimizers keep for one rank's parameters.

    They are counted again when values have come or gone, or were cast or moved, and in each step if some may grow undetected, as
    lists and dicts do.

    Args:
        device: only states on it count.
        given: an optimizer, or several, that count besides those that have stepped; see `Balanced`.
    """

    def __init__(self, device: torch.device, given: Any = None) -> None:
        self._device, self._given = device, several(given, "state")
        for one in self._given:
            if not isinstance(getattr(one, "state", None), Mapping):
                raise ConfigurationError(
                    f"optimizer= is of {type(one).__qualname__}, which has no mapping `state`, so bpipe cannot count its states: "
                    "give a torch.optim.Optimizer or several, or objects whose `state` has a pytree of tensors for each parameter"
                )
        self._seen: list[tuple[int, int, int, object]] = []
        self._is_fixed = True
        self._num_bytes = 0

    def of(self, modules: Callable[[], Sequence[nn.Module]]) -> int:
        """Return the bytes of the states of some modules' parameters, without the storages of parameters and buffers."""
        optimizers: list[Any] = STEPPED.optimizers()
        optimizers += [given for given in self._given if not any(given is one for one in optimizers)]
        seen = [(id(one), len(one.state), _num_values(one.state), _look(one.state)) for one in optimizers]
        if seen != self._seen or not self._is_fixed:
            STEPPED.tidy()
            self._seen, self._num_bytes = seen, self._count(optimizers, modules())
        return self._num_bytes

    def forget(self) -> None:
        """Count again at the next call, because modules have other parameters."""
        self._is_fixed = False

    def _count(self, optimizers: Sequence[Any], modules: Sequence[nn.Module]) -> int:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        buffers = [buffer for module in modules for buffer in module.buffers()]
        own, trains = set(map(id, parameters)), any(parameter.requires_grad for parameter in parameters)
        others = [tensor for tensor in (*parameters, *buffers) if not is_lazy(tensor)]
        entries = [entry for one in optimizers for entry in self._entries(one, own, trains)]
        self._is_fixed = all(map(_is_fixed, entries))
        states = tensors_in(entries)
        return bytes_under([*others, *states], self._device) - bytes_under(others, self._device)

    def _entries(self, optimizer: Any, own: Container[int], trains: bool) -> Iterator[Any]:
        """Yield the states that an optimizer keeps for a rank's own parameters, by identity, and those that belong to none.

        If a given optimizer has none of them, it works on copies of them (as for mixed precision), so all of its state counts.
        """
        state = optimizer.state
        if any(id(one) in own for one in chain(state, _parameters(optimizer))):
            yield from (entry for key, entry in state.items() if id(key) in own or not isinstance(key, torch.Tensor))
        elif trains and any(optimizer is one for one in self._given):
            yield from state.values()


def several(given: Any, attribute: str) -> tuple[Any, ...]:
    """Return the optimizers that were given for a rank: none, one, several, or several by name.

    Args:
        attribute: what one optimizer has, and several have not, such as "param_groups".
    """
    if given is None:
        return ()
    if hasattr(given, attribute) or isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(given.values() if isinstance(given, Mapping) else given)


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _is_fixed(entry: Any) -> bool:
    """Return whether the state of a parameter changes its size only when values come or go."""
    return isinstance(entry, dict) and not any(isinstance(value, (list, tuple, dict)) for value in entry.values())


def _num_values(state: Mapping[Any, Any]) -> int:
    """Count the values, which takes less time than looking at each of them; -1 if they cannot be counted."""
    try:
        return sum(map(len, state.values()))
    except TypeError:  # not the dicts that torch's optimizers keep
        return -1


def _look(state: Mapping[Any, Any]) -> object:
    """Return how the first tensor that is not a scalar looks: all of them are cast or moved together."""
    entry = next(iter(state.values()), None)
    values = entry.values() if isinstance(entry, dict) else ()
    tensor = next((value for value in values if isinstance(value, torch.Tensor) and value.ndim), None)
    try:
        return None if tensor is None else (tensor.dtype, tensor.device, sum(one.nbytes() for one in storages_of(tensor)))
    except (RuntimeError, ValueError, TypeError, AttributeError):  # of a kind without storages
        return None
