"""The process group that a user means."""

from __future__ import annotations

from typing import Any

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
