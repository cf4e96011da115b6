"""Run a module without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__: list[str] = []


@contextmanager
def untouched(modules: Sequence[nn.Module], device: torch.device | None = None) -> Iterator[None]:
    """Put buffers, gradients and random numbers back, whatever happens; gradients start from none.

    Args:
        modules: what runs.
        device: whose random numbers are drawn, besides those of the parameters' devices.
    """
    owners = [(one, dict(one._buffers)) for module in modules for one in module.modules()]  # a forward may assign new buffers
    buffers = {id(buffer): (buffer, buffer.clone()) for module in modules for buffer in module.buffers()}
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    devices = {*(parameter.device for parameter in parameters.values()), *(() if device is None else (device,))}
    with torch.random.fork_rng([one for one in devices if one.type == "cuda"]):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for owner, its in owners:
                owner._buffers.clear()
                owner._buffers.update(its)
            with torch.no_grad():
                for buffer, value in buffers.values():
                    buffer.copy_(value)
