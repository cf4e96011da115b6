"""Cut one value that holds samples along its batch, and join its parts again: tensors of all kinds, arrays, masks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.model.pytree import is_block_mask
from bpipe.torch_private.owners_and_versions import ragged_dimension

__all__: list[str] = []


class CannotCutError(ValueError):
    """A value cannot be cut in this way; the message follows the value's name."""


class Cut(NamedTuple):
    """The parts of a value, one for each microbatch, cut or repeated."""

    parts: Sequence[Any]  # one for each microbatch
    rows: int | None  # the size of the dimension that was cut; None if the value was repeated
    are_alike: bool = True  # whether all parts need the same memory
    # for a DTensor, its mesh and the dimensions of the mesh over which its batch is sharded
    sharding: tuple[Any, tuple[int, ...]] | None = None


Offsets = dict[int, tuple[torch.Tensor, list[torch.Tensor]]]  # jagged tensors' offsets by identity, with those of the microbatches


def cutter_of(value: Any, offsets: Offsets) -> Callable[[Any, int, int], Cut] | None:
    """Return the function that cuts a value into m parts along a dimension; None if it is not known to hold samples.

    Args:
        offsets: those that were cut before: tensors that share theirs must do so in each microbatch, for torch to combine them.
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return partial(_cut_jagged, known=offsets) if value.layout is torch.jagged else _cut_nested
        if value.layout is not torch.strided:
            return _cut_sparse
        return _cut_dtensor if type(value) is not torch.Tensor and is_dtensor(value) else _cut_tensor
    if isinstance(value, np.ndarray):
        return _cut_array
    if isinstance(value, PackedSequence):
        return _cut_packed
    return _cut_block_mask if is_block_mask(value) else None


def _cut_tensor(tensor: torch.Tensor, m: int, dim: int) -> Cut:
    rows = _divided(tensor.shape, m, dim)
    try:
        parts = tensor.tensor_split(m, dim=dim)
        shapes = set() if type(tensor) is torch.Tensor else {tuple(part.shape) for part in parts}
    except Exception as error:  # raised by some subclasses, and by tensors quantized by channel
        raise CannotCutError(f" cannot be cut: {type(error).__qualname__}: {error}") from error
    expected = list(tensor.shape)
    expected[dim] = rows // m
    if len(parts) != m or shapes - {tuple(expected)}:
        raise CannotCutError(f" cannot be cut: its parts have the shapes {sorted(shapes)} instead of {m} times {expected}")
    return Cut(parts, rows)


def _divided(shape: Sequence[int], m: int, dim: int) -> int:
    """Return the size of the dimension to cut, and raise if it does not divide into m microbatches."""
    if not -len(shape) <= dim < len(shape):
        raise CannotCutError(f" of shape {list(shape)} has no dimension {dim} to cut")
    rows = shape[dim]
    if rows < m or rows % m:
        raise CannotCutError(f" of shape {list(shape)}: {rows} along dimension {dim} does not divide into {m} microbatches")
    return rows


def _samples(rows: int, m: int, dim: int) -> int:
    """Return how many samples each microbatch gets of a value that is a row of samples."""
    if dim != 0:
        raise CannotCutError(f" can be cut only along its samples, dimension 0, but its spec says dimension {dim}")
    if rows < m or rows % m:
        raise CannotCutError(f" of {rows} samples does not divide into {m} microbatches")
    return rows // m


def _cut_array(array: np.ndarray[Any, Any], m: int, dim: int) -> Cut:
    rows = _divided(array.shape, m, dim)
    return Cut(np.split(array, m, axis=dim), rows)


def _cut_dtensor(tensor: Any, m: int, dim: int) -> Cut:
    """Cut the shard of each rank, and keep the placements: a microbatch has a part of each rank's samples."""
    from torch.distributed.tensor import DTensor, Shard

    _divided(tensor.shape, m, dim)
    dim %= tensor.ndim
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    sharding = tuple(i for i, one in enumerate(placements) if getattr(one, "dim", None) == dim)
    if any(type(placements[i]) is not Shard for i in sharding):
        raise CannotCutError(f" is a DTensor whose dimension {dim} is interleaved over ranks, {placements}, which cannot be cut")
    num_shards = math.prod(mesh.size(i) for i in sharding)
    if tensor.shape[dim] % num_shards:
        raise CannotCutError(f" of shape {list(tensor.shape)} has uneven shards over {num_shards} ranks, which cannot be cut")
    rows = _divided(local.shape, m, dim)
    size, shape = rows // m, list(tensor.shape)
    shape[dim] //= m
    wrap = partial(
        DTensor.from_local,
        device_mesh=mesh,
        placements=placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tensor.stride(),
    )
    # Each is cut from the tensor itself, so that no two microbatches share a node of the graph.
    parts = [wrap(tensor.to_local().narrow(dim, i * size, size)) for i in range(m)]
    return Cut(parts, rows, sharding=(mesh, sharding))


def _cut_jagged(tensor: Any, m: int, dim: int, *, known: Offsets) -> Cut:
    size = _samples(tensor.size(0), m, dim)
    _check_no_gradient(tensor)
    if ragged_dimension(tensor) != 1:
        raise CannotCutError(" is a jagged tensor whose ragged dimension is not the first after the batch, which cannot be cut")
    offsets, lengths = tensor.offsets(), tensor.lengths()
    ends = offsets[::size].tolist()
    if id(offsets) not in known:
        known[id(offsets)] = offsets, [offsets[i * size : (i + 1) * size + 1] - start for i, start in enumerate(ends[:-1])]
    parts = [
        torch.nested.nested_tensor_from_jagged(
            tensor.values()[start:end],
            offsets=known[id(offsets)][1][i],
            lengths=None if lengths is None else lengths[i * size : (i + 1) * size],
        )
        for i, (start, end) in enumerate(pairwise(ends))
    ]
    return Cut(parts, size * m, are_alike=False)


def _cut_nested(tensor: torch.Tensor, m: int, dim: int) -> Cut:
    size = _samples(tensor.size(0), m, dim)
    _check_no_gradient(tensor)
    parts = [torch.nested.as_nested_tensor(list(tensor.unbind()[i * size : (i + 1) * size])) for i in range(m)]
    return Cut(parts, size * m, are_alike=False)


def _cut_sparse(tensor: torch.Tensor, m: int, dim: int) -> Cut:
    if tensor.layout is not torch.sparse_coo:
        raise CannotCutError(f" is a tensor of layout {tensor.layout}, which torch cannot cut")
    _check_no_gradient(tensor)
    rows = _divided(tensor.shape, m, dim)
    parts = [tensor.narrow_copy(dim, i * (rows // m), rows // m) for i in range(m)]
    return Cut(parts, rows, are_alike=False)


def _check_no_gradient(tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise CannotCutError(" is a nested or sparse tensor that requires a gradient, which torch cannot add up over microbatches")


def _cut_packed(packed: PackedSequence, m: int, dim: int) -> Cut:
    """Cut packed sequences between sequences, by the positions of each one's steps in the packed data."""
    places = packed._replace(data=torch.arange(packed.data.shape[0], device=packed.data.device))
    padded, lengths = pad_packed_sequence(places, batch_first=True)
    size = _samples(len(lengths), m, dim)
    parts = []
    for i in range(0, size * m, size):
        one = pack_padded_sequence(
            padded[i : i + size], lengths[i : i + size], batch_first=True, enforce_sorted=packed.sorted_indices is None
        )
        parts.append(one._replace(data=packed.data.index_select(0, one.data)))
    return Cut(parts, size * m, are_alike=False)


def _cut_block_mask(mask: Any, m: int, dim: int) -> Cut:
    """Cut flex attention's mask; `mask_mod` still gets the index in the whole batch. One mask for all samples is repeated."""
    if mask.kv_num_blocks.ndim < 3:
        raise CannotCutError(" is a BlockMask without a batch dimension")
    rows = mask.kv_num_blocks.size(0)
    if rows == 1:
        return Cut([mask] * m, None)
    size, parts = _samples(rows, m, dim), []
    for i in range(0, rows, size):
        part = copy.copy(mask)
        for name, value in vars(mask).items():
            if isinstance(value, torch.Tensor) and value.size(0) != 1:
                setattr(part, name, value[i : i + size])
        # A tensor, because flex attention would be compiled again for each number.
        part.mask_mod = _shifted(mask.mask_mod, torch.full((), i, dtype=torch.int32, device=mask.kv_num_blocks.device))
        parts.append(part)
    return Cut(parts, rows)


def _shifted(mask_mod: Callable[..., Any], start: torch.Tensor) -> Callable[..., Any]:
    def shifted_mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + start, h, q_idx, kv_idx)

    return shifted_mask_mod


def check_joinable(value: Any, dim: int) -> None:
    """Raise a TypeError if values like this one cannot be joined along a dimension, for a reason that is known."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.is_nested:
        if dim:
            raise TypeError(f"nested tensors cannot be put together along dimension {dim}")
    elif type(value) is np.ndarray or (is_tensor and value.layout in (torch.strided, torch.sparse_coo)):
        if value.ndim and not -value.ndim <= dim < value.ndim:
            raise TypeError(f"it has no dimension {dim}")
    else:
        what = f"tensors of layout {value.layout}" if is_tensor else f"a {type(value).__qualname__}"
        raise TypeError(f"{what} cannot be put together")


def join(parts: Sequence[Any], dim: int) -> Any:
    """Join tensors or arrays along a dimension; those without dimensions are stacked."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.stack(parts) if first.ndim == 0 else np.concatenate(parts, axis=dim)
    if first.is_nested:
        return torch.nested.as_nested_tensor([one for part in parts for one in part.unbind()], layout=first.layout)
    if first.ndim == 0:
        return torch.stack(list(parts))
    is_plain = type(first) is torch.Tensor or not is_dtensor(first)
    return torch.cat(list(parts), dim=dim) if is_plain else _join_dtensors(parts, dim)


def _join_dtensors(parts: Sequence[Any], dim: int) -> Any:
    """Join the shards of each rank, and keep the placements."""
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if any(not is_dtensor(part) or part.placements != first.placements or part.device_mesh != first.device_mesh for part in parts):
        raise TypeError("DTensors with different placements cannot be put together")
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    local = torch.cat([part.to_local() for part in parts], dim=dim)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False, shape=torch.Size(shape), stride=strides)
