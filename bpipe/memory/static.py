"""What stays on a device besides activations, and what is free there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from bpipe.memory.storages import storages_of

__all__: list[str] = []


def static_bytes(modules: Sequence[torch.nn.Module], device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> int:
    """The bytes on a device of what is there, and of the gradients that are still to come."""
    return present_bytes(modules, device, optimizer) + coming_bytes(modules, device)


def present_bytes(modules: Sequence[torch.nn.Module], device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> int:
    """The bytes of parameters, of gradients and buffers, and of an optimizer's states that are on a device; shared ones once."""
    parameters = _parameters(modules)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    states = [] if optimizer is None else [leaf for leaf in tree_leaves(optimizer.state) if isinstance(leaf, torch.Tensor)]
    return bytes_under([*parameters, *gradients, *buffers, *states], device)


def coming_bytes(modules: Sequence[torch.nn.Module], device: torch.device) -> int:
    """The bytes of gradients that a step will make."""
    without = [parameter for parameter in _parameters(modules) if parameter.requires_grad and parameter.grad is None]
    return sum(min(parameter.nbytes, bytes_under([parameter], device)) for parameter in without)


def available_bytes(device: torch.device, reserve_bytes: int) -> int:
    """What a CUDA device has left: free there, or held by torch's allocator and unused; less a reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + unused - reserve_bytes)


def bytes_under(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> int:
    """The bytes of the storages under some tensors, each once; of those on a device, or anywhere."""
    storages = {storage._cdata: storage for tensor in tensors for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values() if device is None or _is_on(storage.device, device))


def _is_on(one: torch.device, device: torch.device) -> bool:
    return one.type == device.type and (None in (one.index, device.index) or one.index == device.index)


def _parameters(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Each parameter once, tied ones too."""
    return list({id(parameter): parameter for module in modules for parameter in module.parameters()}.values())
