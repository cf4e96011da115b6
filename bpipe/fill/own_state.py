"""What a fill job has to itself of the state of the process: random numbers, torch's settings, and Python's."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from bpipe.device.generators import PYTHON, TORCH, GlobalNumPy, are_equal, torch_on
from bpipe.torch_private.process_settings import Setting, settings

__all__: list[str] = []

_UNREADABLE = object()  # torch refuses to read some settings while others contradict them


class OwnState:
    """The job's own state of the process, so that training has the same one with and without the job.

    What a job changes holds in its later pieces, and for nobody else: a generator may yield within `sdpa_kernel`, say. Its random
    numbers begin as those of training are when the job is set, and go their own way. What it has not changed, it shares.

    Attributes:
        left: what the latest piece has left behind that cannot be set back.
    """

    def __init__(self, device: torch.device) -> None:
        self._random, self._settings = list(_random_numbers(device)), [*_of_python(), *settings()]
        self._own_random = [one.get() for one in self._random]
        self._own: dict[int, Any] = {}  # by the number of the setting
        self.left: list[str] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the job's code run with its own state. Called in the thread that trains."""
        outside, random = self._now(), [one.get() for one in self._random]
        try:
            self._draw_from(random, self._own_random)
            self._apply(self._own)
            yield
        finally:
            inside = self._now()
            is_same = are_equal(inside, outside)  # as it is nearly always
            self._own = {} if is_same else {i: one for i, one in enumerate(inside) if not are_equal(one, outside[i])}
            self.left = self._apply({i: outside[i] for i in self._own})
            self._own_random = [one.get() for one in self._random]
            self._draw_from(self._own_random, random)

    def _now(self) -> list[Any]:
        try:
            return [one.get() for one in self._settings]
        except Exception:
            return list(map(_read, self._settings))

    def _draw_from(self, now: Iterable[Any], states: Iterable[Any]) -> None:
        for one, state, other in zip(self._random, states, now):
            if not are_equal(state, other):
                one.set(state)

    def _apply(self, values: dict[int, Any]) -> list[str]:
        """Set what does not have its value yet, such as by an earlier setting; return the names of what cannot be set."""
        failed = []
        for setting, value in ((self._settings[i], value) for i, value in values.items()):
            if not are_equal(_read(setting), value):
                with suppress(Exception):
                    setting.set(value)
                if not are_equal(_read(setting), value):
                    failed.append(setting.name)
        return failed


def _read(setting: Setting) -> Any:
    try:
        return setting.get()
    except Exception:
        return _UNREADABLE


def _random_numbers(device: torch.device) -> Iterator[Setting]:
    for whose, source in (("torch's", TORCH), ("the device's", torch_on(device)), ("Python's", PYTHON)):
        yield Setting(f"{whose} random numbers", *source)
    numpy = GlobalNumPy()
    if hasattr(np.random, "get_bit_generator"):
        yield Setting("NumPy's generator", np.random.get_bit_generator, np.random.set_bit_generator)  # type: ignore[attr-defined]
    yield Setting("NumPy's random numbers", numpy.get, numpy.set)


def _of_python() -> Iterator[Setting]:
    yield Setting("the working directory", os.getcwd, os.chdir)
    yield Setting("the filters of warnings", lambda: (warnings.filters, tuple(warnings.filters)), _set_filters)
    yield Setting("garbage collection", gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable())
    yield Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Setting("the level below which nothing is logged", lambda: logging.root.manager.disable, logging.disable)
    for name in ("stdin", "stdout", "stderr"):
        yield Setting(f"sys.{name}", partial(getattr, sys, name), partial(setattr, sys, name))


def _set_filters(value: tuple[Any, tuple[Any, ...]]) -> None:
    warnings.filters, filters = value
    warnings.filters[:] = filters  # type: ignore[index]
