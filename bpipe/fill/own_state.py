"""The state of torch that a fill job has to itself, and what a piece may not leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from bpipe.device import current_index, random_state, set_random_state
from bpipe.device.autocast import Autocast

__all__: list[str] = []

Numbers = tuple[torch.Tensor, torch.Tensor | None, bool]  # random numbers of the CPU and of the device, and the grad mode


class OwnState:
    """The job's own random numbers and modes, so that a rank's microbatches have the same ones with and without it.

    Random numbers and the grad mode go on from piece to piece: a generator may yield within `torch.no_grad()`, which holds for its
    later pieces and for nobody else. Autocast and inference mode are in each piece those of when the job was set, whatever is
    around `schedule.step`.

    Args:
        device: the rank's.

    Attributes:
        left: what the latest piece has left behind that only the job's own code can undo.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own, self._autocast = self._numbers(), Autocast.now([device])
        self._is_inference = torch.is_inference_mode_enabled()
        self.left: list[str] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the job's code run with its own state."""
        outside, self.left = Autocast.now([self._device]), []
        self._autocast.apply()
        torch.set_autocast_cache_enabled(False)  # what is cached stays until the end of the user's autocast
        try:
            with torch.inference_mode(self._is_inference) if self._is_inference_changed() else nullcontext(), self._numbered():
                before = Left.now(self._device)
                yield
                self.left = before.changed(Left.now(self._device))
        finally:
            outside.apply()

    def _is_inference_changed(self) -> bool:
        return torch.is_inference_mode_enabled() is not self._is_inference

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        outside = self._numbers()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._numbers()
            self._set(outside)

    def _numbers(self) -> Numbers:
        return torch.get_rng_state(), random_state(self._device), torch.is_grad_enabled()

    def _set(self, numbers: Numbers) -> None:
        torch.set_rng_state(numbers[0])
        set_random_state(numbers[1], self._device)
        torch.set_grad_enabled(numbers[2])


class Left(NamedTuple):
    """What holds on this thread for whatever runs next, training included."""

    autocast: Autocast
    inference_mode: bool
    default_dtype: torch.dtype
    current_device: int | None
    function_modes: tuple[Any, ...]  # a default device is one of them
    dispatch_modes: tuple[Any, ...]

    @classmethod
    def now(cls, device: torch.device) -> Left:
        return cls(
            autocast=Autocast.now([device]),
            inference_mode=torch.is_inference_mode_enabled(),
            default_dtype=torch.get_default_dtype(),
            current_device=current_index(device),
            function_modes=tuple(_get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
        )

    def changed(self, after: Left) -> list[str]:
        """Return the names of what has changed."""
        return [NAMES[field] for field, one, other in zip(self._fields, self, after) if one != other]


NAMES = {
    "autocast": "autocast",
    "inference_mode": "inference mode",
    "default_dtype": "the default dtype",
    "current_device": "the current device",
    "function_modes": "the default device or another function mode",
    "dispatch_modes": "a dispatch mode",
}
