"""Count the memory of a device besides activations, and its free memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

from bpipe.device import free_bytes, give_back_unused
from bpipe.memory.makeup import UNREADABLE, buffers_of, looks_of
from bpipe.memory.saved.stash import is_on
from bpipe.memory.saved.storages import storages_of
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []


class StaticBytes:
    """The static bytes of a rank, which are counted again when a tensor was added, removed or changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: object = None
        self.num_bytes = 0  # the latest count

    def has_changed(self, modules: Sequence[torch.nn.Module], seen: object) -> bool:
        """Count again at the end of a step if something has changed, and return whether it has."""
        if seen == self._seen:
            return False
        self._seen, self.num_bytes = seen, static_bytes(modules, self._device)
        return True


def standing(modules: Sequence[torch.nn.Module], parameters: Sequence[torch.nn.Parameter]) -> object:
    """Return values that a step may change while the modules stay the same: gradients, addresses of parameters, and buffers."""
    gradients = [(one.requires_grad, one.grad is None) for one in parameters]
    return gradients, _places(parameters), looks_of(buffers_of(modules))


def _places(parameters: Sequence[torch.nn.Parameter]) -> object:
    """Return the addresses of parameters, which show when some begin or cease to share memory."""
    try:
        return [*map(torch.Tensor.data_ptr, parameters)]
    except UNREADABLE:
        return object()  # equal to no earlier value


def static_bytes(modules: Sequence[torch.nn.Module], device: torch.device) -> int:
    """Return the bytes on a device of present tensors and of gradients still to come; `memory/optimizers` adds the states."""
    return present_bytes(modules, device) + coming_bytes(modules, device)


def present_bytes(modules: Sequence[torch.nn.Module], device: torch.device) -> int:
    """Return the bytes of parameters, gradients and buffers that are on a device; shared ones count once."""
    parameters = _parameters(modules)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    buffers = [buffer for module in modules for buffer in module.buffers() if not is_lazy(buffer)]
    return bytes_under([*parameters, *gradients, *buffers], device)


def coming_bytes(modules: Sequence[torch.nn.Module], device: torch.device) -> int:
    """Return the bytes of the gradients that a step will create."""
    without = [parameter for parameter in _parameters(modules) if parameter.requires_grad and parameter.grad is None]
    return sum(min(parameter.nbytes, bytes_under([parameter], device)) for parameter in without)


def available_bytes(device: torch.device, reserve_bytes: int) -> int:
    """Release torch's unused memory to the device, and return the device's free bytes, less a reserve."""
    give_back_unused(device)
    return max(0, free_bytes(device) - reserve_bytes)


def bytes_under(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of the storages of some tensors, each once: those on a device, or anywhere."""
    storages = {address_of(storage): storage for tensor in tensors for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values() if device is None or is_on(storage.device, device))


def _parameters(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return each parameter once, including tied ones, except those without memory yet."""
    found = [parameter for module in modules for parameter in module.parameters() if not is_lazy(parameter)]
    return list({id(parameter): parameter for parameter in found}.values())
