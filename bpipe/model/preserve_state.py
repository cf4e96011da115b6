"""Run a module and restore its state afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from bpipe.cleanup import keeping
from bpipe.device import fork_random_states
from bpipe.device.generators import PYTHON, GlobalNumPy

__all__: list[str] = []


@contextmanager
def preserved_state(modules: Sequence[nn.Module], device: torch.device | None = None) -> Iterator[None]:
    """Restore buffers, gradients and random numbers on exit, whatever happens inside; gradients start as None.

    Random numbers are torch's, and Python's and NumPy's own.

    Args:
        device: a device whose random numbers are drawn, besides the parameters' devices.
    """
    owners = [(one, dict(one._buffers)) for module in modules for one in module.modules()]  # a forward may assign new buffers
    buffers = {id(buffer): (buffer, buffer.clone()) for module in modules for buffer in module.buffers()}
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    devices = {*(parameter.device for parameter in parameters.values()), *(() if device is None else (device,))}
    with keeping(fork_random_states(devices)), keeping(ExitStack()) as after:
        for source in (PYTHON, GlobalNumPy()):
            after.callback(source.set, source.get())
        for buffer, value in buffers.values():
            after.callback(_refill, buffer, value)
        for owner, its in owners:
            after.callback(owner._buffers.update, its)
            after.callback(owner._buffers.clear)  # runs before the line above: the last callback is called first
        for parameter, gradient in gradients:
            after.callback(setattr, parameter, "grad", gradient)
            parameter.grad = None
        yield


def _refill(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)
