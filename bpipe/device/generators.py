"""Read and restore the states of random numbers: torch's own, Python's, NumPy's, and those of generators."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from bpipe.device import random_state, set_random_state

__all__: list[str] = []

_MT19937_BYTES = 625 * 4  # its words, and the position among them


class Source(NamedTuple):
    """A source of random numbers: how its state is read and restored. Two equal states compare equal, except tensors."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class GlobalNumPy:
    """NumPy's global state. Its words are read as bytes (0.6 us), and as a state (34 us) only if they have changed."""

    def __init__(self) -> None:
        self._words: bytes | None = None
        self._state: Any = None

    def get(self) -> Any:
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None  # it has not been used
        words = _words_of(numpy)
        if words is None or words != self._words or self._state["has_gauss"]:  # using up half of a pair changes no word
            self._words, self._state = words, numpy.get_state(legacy=False)
        return self._state

    def set(self, state: Any) -> None:
        if state is not None:
            sys.modules["numpy.random"].set_state(state)


def _words_of(numpy: Any) -> bytes | None:
    """Return the bytes of the global generator's state, if it is the usual kind of generator."""
    bits: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) if type(bits) is numpy.MT19937 else None


PYTHON = Source(random.getstate, random.setstate)  # Python's own random numbers
TORCH = Source(torch.get_rng_state, torch.set_rng_state)  # torch's, on the CPU


def torch_on(device: torch.device) -> Source:
    """Return torch's random numbers on a device; their state is None if they are the CPU's."""
    return Source(partial(random_state, device), partial(set_random_state, device=device))


def threads_beside(*own: int) -> str:
    """Return the names of the process's threads that may draw from Python's and NumPy's own numbers meanwhile, too.

    Args:
        own: the identities of the threads whose draws are looked for; bpipe's others draw none.
    """
    others = [one.name for one in threading.enumerate() if one.ident not in own and not one.name.startswith("bpipe-")]
    return ", ".join(sorted(others))


def _owner(method: Any) -> Any:
    return getattr(method, "__self__", method)


def source_of(value: Any) -> Source | None:
    """Return the source of random numbers that an object is, if its state can be kept; None for Python's and NumPy's own.

    To these also a method leads, such as `np.random.rand`.
    """
    if isinstance(value, random.Random):
        is_other = not isinstance(value, random.SystemRandom) and value is not _owner(random.getstate)
        return Source(value.getstate, value.setstate) if is_other else None
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and value is _owner(numpy.get_state):
        return None
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.RandomState)):
        return Source(value.get_state, value.set_state)  # a RandomState keeps half of a pair of normal numbers besides its bits
    if numpy is None or not isinstance(value, (numpy.Generator, numpy.BitGenerator)):
        return None
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    return Source(lambda: bits.state, partial(setattr, bits, "state"))


class Drawn:
    """The generator states that a forward finds: torch's, on the CPU and its device, and those of other sources."""

    def __init__(self, device: torch.device, sources: Iterable[Source | GlobalNumPy]) -> None:
        self._torch = [(source, source.get()) for source in (TORCH, torch_on(device))]
        self._states = [(source, source.get()) for source in sources]

    def forget_unused(self) -> None:
        """Forget the other generators that the forward, which has run, did not use: they do not affect another forward."""
        self._states = [(source, state) for source, state in self._states if not are_equal(source.get(), state)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again, and restore the current states in the end."""
        with ExitStack() as after:
            for source, state in (*self._torch, *self._states):
                after.callback(source.set, source.get())
                source.set(state)
            yield


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two states of a source are equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return bool(one == other)
    except ValueError:  # arrays among NumPy's
        return pickle.dumps(one) == pickle.dumps(other)
    except RuntimeError:  # tensors inside
        return False
