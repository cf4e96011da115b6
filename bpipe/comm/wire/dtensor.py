"""DTensors between stages: each rank sends its own shard, and the receiver puts the same placements on a mesh of its own.

Sender and receiver are ranks of one pipeline, so they have the same place in their stages' meshes. `to_local` and
`from_local` are differentiable: gradients come back in the placements of the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bpipe.errors import StageError

__all__: list[str] = []

# Finds the receiver's mesh from the names of the sender's mesh dimensions (None if they have none) and its shape.
FindMesh = Callable[[tuple[str, ...] | None, tuple[int, ...]], Any]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without an import that takes a second in programs that do not use DTensors."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def mesh_of(tensor: Any) -> Any:
    """Return the device mesh of a DTensor; None for any other tensor, because this process has all of it."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def local(tensor: Any) -> torch.Tensor:
    """Return this process's own part: a DTensor's shard, all of any other tensor. It is not a copy and has no graph."""
    own: torch.Tensor = tensor.detach().to_local() if is_dtensor(tensor) else tensor.detach()
    return own


def describe(tensor: Any, path: str, where: object) -> dict[str, Any]:
    """Describe the mesh, placements, global shape and stride of a DTensor, as JSON values.

    Args:
        tensor: the DTensor.
        path: where in the output it is, for messages.
        where: the stage and microbatch, for messages.

    Raises:
        StageError: its placements cannot be sent, because sums are pending or shards are interleaved.
    """
    mesh = tensor.device_mesh
    return {
        "names": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names),
        "mesh": list(mesh.shape),
        "placements": [_code(placement, path, where) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _code(placement: Any, path: str, where: object) -> int | None:
    """Return the dimension along which a placement shards; None if every rank has the whole."""
    if placement.is_replicate():
        return None
    if type(placement) is not _tensor().Shard:
        raise StageError(
            f"{where} returned a DTensor at {path} with the placement {placement!r}, which cannot be handed on as it is: "
            "redistribute it to Shard or Replicate at the end of the stage, as `output_layouts` of a parallel style does."
        )
    return int(placement.dim)


def from_shard(shard: torch.Tensor, description: dict[str, Any], find_mesh: FindMesh) -> torch.Tensor:
    """Make the DTensor whose shard has arrived.

    Raises:
        StageError: the stage has no mesh like the sender's.
    """
    names, shape = description["names"], tuple(description["mesh"])
    placements = [_tensor().Replicate() if dim is None else _tensor().Shard(int(dim)) for dim in description["placements"]]
    mesh = find_mesh(None if names is None else tuple(names), shape)
    whole: torch.Tensor = _tensor().DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=torch.Size(description["shape"]), stride=tuple(description["stride"])
    )
    return whole


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor; gradients of the shard become gradients of the whole."""
    shard: torch.Tensor = tensor.to_local()
    return shard


def mesh_among(tensors: Iterable[Any], names: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
    """Return the mesh of one of the tensors, or a part of it, that has these names and this shape; None if there is none."""
    for mesh in {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if is_dtensor(tensor)}.values():
        known = mesh.mesh_dim_names
        if known == names and tuple(mesh.shape) == shape:
            return mesh
        if names is not None and known is not None and set(names) < set(known):
            part = mesh[names]
            if tuple(part.shape) == shape:
                return part
    return None


def _tensor() -> Any:
    import torch.distributed.tensor as loaded

    return loaded
