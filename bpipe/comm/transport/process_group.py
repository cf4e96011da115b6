"""The process group that the user gave: its backends, its device, and how many pipelines it has."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from bpipe.comm.transport.communicators import maker_of
from bpipe.device import with_index
from bpipe.errors import ConfigurationError

__all__: list[str] = []

FAKE = "fake"  # torch's backend that does not communicate; it takes tensors of any device

# The pipelines of each group, as this process has made them. A store may outlive the process, because an elastic agent keeps it for
# the processes that it starts in place of those that failed, and these begin to count anew.
_NUM_PIPELINES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def group_of(group: Any) -> Any:
    """Return the process group of a one-dimensional DeviceMesh; return anything else unchanged.

    Raises:
        ConfigurationError: the mesh has several dimensions, or this rank is not in the mesh or the group.
    """
    is_mesh = hasattr(group, "mesh_dim_names")
    if is_mesh and group.ndim != 1:
        raise ConfigurationError(f"a mesh of {group.ndim} dimensions: give the pipeline's one, such as mesh['pp']")
    is_outside = group.get_coordinate() is None if is_mesh else group is not None and group is _outside()
    if is_outside:  # torch gives all ranks that call new_group an object, also those that it leaves out
        raise ConfigurationError(f"rank {dist.get_rank()} is not in the group: give the group of this rank's own pipeline")
    return group.get_group() if is_mesh else group


def _outside() -> Any:
    """Return what stands for a group to a rank that is not in it; None in a build of torch without torch.distributed."""
    return dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return this process's number in a group and the group's size, also of a rank of a `Loopback`; (0, 1) without a group."""
    if hasattr(group, "loopback"):
        return group.rank, group.loopback.num_ranks
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def backends_of(group: Any) -> dict[str, str]:
    """Return the backend that a process group has for each type of device."""
    return dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))


def is_fake(group: Any, device: torch.device) -> bool:
    """Return whether a process group only pretends to communicate for a device: torch's backend "fake"."""
    return dist.is_initialized() and backends_of(group).get(device.type) == FAKE


def device_of(group: Any) -> torch.device:
    """Return the device for tensors of a group's collectives: this rank's, if the group has a backend for devices, else the CPU."""
    backends = backends_of(group).items()
    kinds = [kind for kind, backend in backends if kind != "cpu" and backend != FAKE and maker_of(backend) is not None]
    return with_index(torch.device(kinds[0] if kinds else "cpu"))


def count_pipelines(group: Any, change: int) -> int:
    """Change the number of a group's pipelines that this process has made, and return it."""
    _NUM_PIPELINES[group] = number = _NUM_PIPELINES.get(group, 0) + change
    return number
