"""The process group that the user gave, its backends and its device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bpipe.comm.transport.communicators import maker_of
from bpipe.device import with_index
from bpipe.errors import ConfigurationError

__all__: list[str] = []


def group_of(group: Any) -> Any:
    """Return the process group of a one-dimensional DeviceMesh; return anything else unchanged.

    Raises:
        ConfigurationError: the mesh has several dimensions.
    """
    if not hasattr(group, "mesh_dim_names"):
        return group
    if group.ndim != 1:
        raise ConfigurationError(f"a mesh of {group.ndim} dimensions: give the pipeline's one, such as mesh['pp']")
    return group.get_group()


def backends_of(group: Any) -> dict[str, str]:
    """Return the backend that a process group has for each type of device."""
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))


def device_of(group: Any) -> torch.device:
    """Return the device for tensors of a group's collectives: this rank's, if the group has a backend for devices, else the CPU."""
    kinds = [kind for kind, backend in backends_of(group).items() if kind != "cpu" and maker_of(backend) is not None]
    return with_index(torch.device(kinds[0] if kinds else "cpu"))
