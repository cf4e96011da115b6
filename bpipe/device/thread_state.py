"""What torch keeps for each thread, and another thread may need as its maker has it: modes, autocast, the device and its stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.device import current_stream, is_asynchronous, on_stream
from bpipe.device.autocast import Autocast

__all__: list[str] = []


def devices_in_use() -> list[torch.device]:
    """Return the calling thread's current device, if there is an asynchronous one that is in use."""
    found = torch.accelerator.current_accelerator()
    if found is None or not is_asynchronous(found) or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(found)
    is_initialized = getattr(module, "is_initialized", lambda: True)
    return [torch.device(found.type, module.current_device())] if is_initialized() else []


def _is_multithreaded() -> bool:
    """Return whether a backward may run in several threads: torch tells it to who sets it."""
    setting = torch.autograd.set_multithreading_enabled(True)
    with setting:
        return bool(setting.prev)


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state of the thread that makes it, to be entered in another one."""

    devices: list[torch.device]
    context: Context = field(default_factory=copy_context)
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)
    is_inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    is_multithreaded: bool = field(default_factory=_is_multithreaded)
    autocast: Autocast = field(init=False)
    streams: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "autocast", Autocast.now(self.devices))
        object.__setattr__(self, "streams", list(map(current_stream, self.devices)))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this state in the calling thread."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(on_stream(stream))
            stack.enter_context(torch.inference_mode(self.is_inference))
            stack.enter_context(torch.set_grad_enabled(self.has_gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self.is_multithreaded))
            # Not `torch.autocast`: where the outermost one of a thread ends, such as that of a recomputation, it throws away the
            # casts of all threads, which the forward beside it uses.
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
            stack.callback(Autocast.now(self.devices).apply)
            self.autocast.apply()
            yield
