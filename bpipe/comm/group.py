"""The process group that a user means."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bpipe.comm.communicators import maker_of
from bpipe.device import with_index
from bpipe.errors import ConfigurationError

__all__: list[str] = []


def group_of(group: Any) -> Any:
    """The process group of a DeviceMesh of one dimension; anything else as it is.

    Raises:
        ConfigurationError: a mesh of several dimensions.
    """
    if not hasattr(group, "mesh_dim_names"):
        return group
    if group.ndim != 1:
        raise ConfigurationError(f"a mesh of {group.ndim} dimensions: give the pipeline's one, such as mesh['pp']")
    return group.get_group()


def backends_of(group: Any) -> dict[str, str]:
    """The backend that a process group has for each type of device."""
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))


def device_of(group: Any) -> torch.device:
    """Where tensors of a process group's collectives are: on this rank's device, if the group has a backend that is for devices."""
    kinds = [kind for kind, backend in backends_of(group).items() if kind != "cpu" and maker_of(backend) is not None]
    return with_index(torch.device(kinds[0] if kinds else "cpu"))
