"""Find out whether a slice's forward draws random numbers: slices would draw other ones than the whole sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bpipe.device import random_state

__all__: list[str] = []

RANDOM = torch.Tag.nondeterministic_seeded
Own = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


class Randomness:
    """Watches one forward.

    Args:
        device: the stages'.

    Attributes:
        is_found: whether random numbers were drawn, once the forward is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_found = device, False

    @contextmanager
    def states(self) -> Iterator[None]:
        """Compare torch's random states before and after, which costs next to nothing."""
        before = self._torch_states()
        yield
        self.is_found |= not all(map(torch.equal, before, self._torch_states()))

    @contextmanager
    def closely(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Look at every operation, and at the random states of Python and numpy too, which costs much.

        Operations find generators of the user's own, and states that are restored. Compiled code would run as it is written under
        a mode, so that only states are compared there.
        """
        mode = _Drawing()  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            before = self._other_states(modules)
            if not any(map(_is_compiled, modules)):
                stack.enter_context(mode)
            yield
        self.is_found |= mode.is_found or before != self._other_states(modules)

    def _torch_states(self) -> list[torch.Tensor]:
        return [state for state in (torch.get_rng_state(), random_state(self._device)) if state is not None]

    def _other_states(self, modules: Sequence[nn.Module]) -> list[Any]:
        own = [value for module in modules for value in vars(module).values() if isinstance(value, Own)]
        return [random.getstate(), _plain(np.random.get_state()), *map(_state_of, own)]


def _plain(state: Any) -> str:
    return repr([one.tolist() if isinstance(one, np.ndarray) else one for one in state])


def _state_of(own: Own) -> Any:
    if isinstance(own, torch.Generator):
        return own.get_state().tolist()
    if isinstance(own, random.Random):
        return own.getstate()
    return repr(own.bit_generator.state) if isinstance(own, np.random.Generator) else _plain(own.get_state())


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


class _Drawing(TorchDispatchMode):
    """Notes operations that draw random numbers; attention without dropout is none."""

    is_found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RANDOM in func.tags and not _is_without_dropout(func, args, kwargs or {}):
            self.is_found = True
        return func(*args, **(kwargs or {}))


def _is_without_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation has a rate of dropout, and it is 0."""
    for place, argument in enumerate(func._schema.arguments):
        if "dropout" in argument.name:
            rate = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
            return not rate
    return False
