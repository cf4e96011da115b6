"""Run a module without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__: list[str] = []


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put buffers, gradients and random numbers back, whatever happens; gradients start from none."""
    owners = [(one, dict(one._buffers)) for module in modules for one in module.modules()]  # a forward may assign new buffers
    buffers = {id(buffer): (buffer, buffer.clone()) for module in modules for buffer in module.buffers()}
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    devices = {tensor.device for tensor in parameters.values() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers.values():
                    buffer.copy_(value)
            for owner, its in owners:
                owner._buffers.update(its)
