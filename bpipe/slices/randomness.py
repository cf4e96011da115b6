"""Find out whether a slice's forward draws random numbers: slices would draw other ones than the whole sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import numpy.random  # noqa: F401  # its first import would look like a draw
import torch
from torch import nn

from bpipe.device.generators import PYTHON, TORCH, GlobalNumPy, Source, are_equal, source_of, threads_beside, torch_on
from bpipe.logs import warn_once
from bpipe.torch_private.modes import DispatchMode
from bpipe.torch_private.modules import is_compiled
from bpipe.torch_private.operators import arguments_of

__all__: list[str] = []

RANDOM = torch.Tag.nondeterministic_seeded
PERHAPS_DRAWN = (
    "Python's or NumPy's random numbers were drawn during a slice's forward or loss, by it or by another thread of this "
    "process (%s). If the slice draws them itself, train without slices: they draw other ones than the whole sequence. If "
    "another thread does, as one that loads data, give it a generator of its own"
)


class Randomness:
    """Watches one forward on a device, with generators of the user's beside the process's.

    Attributes:
        is_found: whether random numbers were drawn, once the forward is over.
        norm: the operation of a norm whose statistics are over all positions, if one was seen.
    """

    def __init__(self, device: torch.device, own: Sequence[Source]) -> None:
        self._own = [TORCH, torch_on(device), *own]
        self.is_found, self.norm = False, ""

    @contextmanager
    def states(self) -> Iterator[None]:
        """Compare the random states of torch, Python, numpy and the user's generators before and after, which costs little."""
        of_process: list[Source | GlobalNumPy] = [PYTHON, GlobalNumPy()]
        before, before_of_process = _states(self._own), _states(of_process)
        yield
        self.is_found |= not all(map(are_equal, before, _states(self._own)))
        if not all(map(are_equal, before_of_process, _states(of_process))):
            if threads := threads_beside(get_ident()):
                warn_once("numbers of slices", PERHAPS_DRAWN, threads)
            else:
                self.is_found = True

    @contextmanager
    def closely(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Look at every operation, which costs much.

        Operations find generators that nobody else knows, and states that are restored. Compiled code would run as it is written
        under a mode, so that only states are compared there.
        """
        mode = _Drawing()  # type: ignore[no-untyped-call]
        with nullcontext() if any(map(is_compiled, modules)) else mode:
            yield
        self.is_found, self.norm = self.is_found or mode.is_found, mode.norm


def _states(sources: Iterable[Source | GlobalNumPy]) -> list[Any]:
    return [source.get() for source in sources]


def roots_of(functions: Sequence[Any]) -> list[Any]:
    """Return where a search for the generators of modules and functions begins: at them, their code, and what that refers to."""
    codes: dict[int, Any] = {}
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        code = getattr(type(function), "forward", None) if isinstance(function, nn.Module) else function
        codes.setdefault(id(code), inspect.unwrap(code) if callable(code) else None)
    own = [getattr(code, "__func__", code) for code in codes.values()]
    own = [code for code in own if not (getattr(code, "__module__", "") or "").startswith("torch.")]
    around = [value for code in own for value in getattr(code, "__globals__", {}).values()]
    inner = [one for value in around if isinstance(value, (list, tuple)) for one in value]
    inner += [one for value in around if isinstance(value, dict) for one in [*value.values()]]
    return [*functions, *own, *{id(one): one for one in (*around, *inner) if source_of(one) is not None}.values()]


class _Drawing(DispatchMode):
    """Notes operations that draw random numbers (attention without dropout is none), and those of BatchNorm and InstanceNorm."""

    is_found, norm = False, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RANDOM in func.tags and not _is_off("dropout", func, args, kwargs or {}):
            self.is_found = True
        if "batch_norm" in str(func) and not _is_off("train", func, args, kwargs or {}):
            self.norm = "batch_norm"
        return func(*args, **(kwargs or {}))


def _is_off(word: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation has an argument of this name, such as a rate of dropout, and it is 0 or False."""
    for place, argument in enumerate(arguments_of(func)):
        if word in argument.name:
            return not kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
    return False
