"""Flatten and unflatten the messages from a stage to the next one: pytrees of tensors and plain values."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from bpipe.comm.wire.dtensor import FindMesh, describe, from_shard, is_dtensor, shard_of
from bpipe.errors import CommError, StageError, printable

__all__: list[str] = []

PLAIN = (bool, int, float, str, type(None))
COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8})
ONE_TENSOR = '"T"'  # the pytree of a tensor alone
WRITABLE = 0x200  # PyBUF_WRITE
_VIEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view = _VIEW(("PyMemoryView_FromMemory", ctypes.pythonapi))


class TensorMeta(NamedTuple):
    """Everything that the receiver must know about a tensor before its bytes arrive; `shape` and `stride` in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires grad" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{grad}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def extent(self) -> tuple[tuple[int, ...], torch.dtype, list[int]]:
        """Its shape and dtype, and the strides that say where an element is."""
        strides = [stride for stride, size in zip(self.stride, self.shape) if size != 1 and 0 not in self.shape]
        return self.shape, self.dtype, strides

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def new(self, device: torch.device) -> torch.Tensor:
        """Allocate an uninitialised tensor of this kind."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class MessageSpec(NamedTuple):
    """The agreed layout of a message: its pytree, as JSON with a "T" for each tensor, and its tensors; None for an absent one.

    A DTensor is also a "T", for its shard, inside a description of the rest. A layout is open if outputs that need no gradient may
    need one later, which a note then says.
    """

    tree: str
    tensors: tuple[TensorMeta | None, ...]
    is_open: bool = False

    def __str__(self) -> str:
        return _text_of(self)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(meta.num_bytes for meta in self.tensors if meta is not None)

    def new(self, device: torch.device) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Allocate uninitialised tensors for such a message; return them, and those that a backend fills."""
        tensors = [None if meta is None else meta.new(device) for meta in self.tensors]
        return tensors, [on_the_wire(tensor) for tensor in tensors if tensor is not None]


@lru_cache(maxsize=1024)
def _text_of(spec: MessageSpec) -> str:
    return f"{printable(spec.tree)} of ({', '.join(map(str, spec.tensors))})"


def flatten_message(value: Any, where: object) -> tuple[str, list[torch.Tensor]]:
    """Split a stage's output into its pytree and its tensors; a DTensor contributes this rank's shard.

    Args:
        value: tensors, None, bool, int, float, str, and tuples, lists and dicts of these.
        where: its text names the stage and microbatch, for messages.

    Raises:
        StageError: it contains something that cannot be sent.
    """
    if type(value) is torch.Tensor:  # nearly always
        _check_sendable(value, "output", where)
        return ONE_TENSOR, [value]
    tensors: list[torch.Tensor] = []
    return json.dumps(_describe(value, "output", where, tensors)), tensors


def _describe(part: Any, path: str, where: object, tensors: list[torch.Tensor]) -> Any:
    """Describe a part of a pytree, and append its tensors. This is not a closure, because a recursive one would keep them alive."""
    if isinstance(part, torch.Tensor) and is_dtensor(part):
        return {"dtensor": [describe(part, path, where), _describe(shard_of(part), path, where, tensors)]}
    if isinstance(part, torch.Tensor):
        _check_sendable(part, path, where)
        tensors.append(part)
        return "T"
    if type(part) in (tuple, list):
        return {type(part).__name__: [_describe(item, f"{path}[{i}]", where, tensors) for i, item in enumerate(part)]}
    if type(part) is dict and all(type(key) in (str, int) for key in part):
        return {"dict": [[key, _describe(item, f"{path}[{key!r}]", where, tensors)] for key, item in part.items()]}
    if type(part) in PLAIN:
        return {"value": part}
    raise StageError(
        f"{where} returned a {type(part).__module__}.{type(part).__qualname__} at {path}, which cannot be sent to the next stage. "
        "Return tensors, None, bool, int, float, str, and tuples, lists and dicts (keys: str or int) of these."
    )


def _check_sendable(tensor: torch.Tensor, path: str, where: object) -> None:
    is_plain = type(tensor) is torch.Tensor
    is_wrapper = not is_plain and hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "trigger_wait")  # such as a DTensor
    is_special = tensor.is_quantized or tensor.is_nested or is_wrapper or tensor.device.type == "meta"
    if is_special or tensor.layout is not torch.strided:
        raise StageError(
            f"{where} returned a tensor at {path} that cannot be sent: a {type(tensor).__qualname__}, layout {tensor.layout}, "
            f"device {tensor.device}{', quantized' if tensor.is_quantized else ''}. Return a plain strided tensor."
        )


def _no_mesh(names: tuple[str, ...] | None, shape: tuple[int, ...]) -> Any:
    raise StageError(f"a DTensor on the mesh {names} of shape {shape} arrived where there is no mesh")


def unflatten_message(tree: str, tensors: Sequence[Any], find_mesh: FindMesh = _no_mesh) -> Any:
    """Put together what `flatten_message` split.

    Args:
        pytree: the pytree that `flatten_message` made.
        tensors: its tensors, as they arrived.
        find_mesh: finds the mesh of this rank's shards of a DTensor.

    Raises:
        CommError: the pytree is invalid, or asks for a different number of tensors.
        StageError: there is no mesh for a DTensor.
    """
    if tree == ONE_TENSOR and len(tensors) == 1:
        return tensors[0]
    remaining = iter(tensors)
    try:
        value = _build(json.loads(tree), remaining, find_mesh)
        rest = list(remaining)
    except StageError:
        raise
    except Exception as error:
        raise CommError(f"a message describes no output of a stage: {printable(tree[:200])}") from error
    if rest:
        raise CommError(f"a message has {len(rest)} tensors more than its description: {printable(tree[:200])}")
    return value


def _build(part: Any, remaining: Iterator[Any], find_mesh: FindMesh) -> Any:
    if part == "T":
        return next(remaining)
    ((kind, content),) = part.items()
    if kind == "dtensor":
        description, shard = content
        return from_shard(_build(shard, remaining, find_mesh), description, find_mesh)
    if kind == "value" and type(content) in PLAIN:
        return content
    if kind == "dict":
        return {key: _build(item, remaining, find_mesh) for key, item in content}
    return {"tuple": tuple, "list": list}[kind]([_build(item, remaining, find_mesh) for item in content])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if its memory has no gaps and no overlaps, in any order of strides, else a contiguous copy."""
    tensor = tensor.detach()
    if type(tensor) is torch.Tensor and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor has no bytes of its own
        tensor = tensor.trigger_wait()
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a dense tensor, in the order of its memory, as a uint8 tensor, without a copy."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy and without keeping the tensor alive."""
    memory: memoryview = _view(tensor.data_ptr(), tensor.nbytes, WRITABLE)
    return memory


def on_the_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor as backends carry it, at either end: itself if all of them can, else its bytes, without a copy."""
    if tensor.dtype not in COMMON or not tensor.is_contiguous():
        return bytes_of(tensor)
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def all_dense(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the dense tensors to send for a stage's outputs."""
    return [dense(tensor) for tensor in tensors]


def metas_of(sent: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[TensorMeta, ...]:
    """Return the metas of the tensors sent for some outputs; the metas say whether the outputs need gradients."""
    return tuple(meta_of(tensor, requires_grad=output.requires_grad) for tensor, output in zip(sent, outputs))


def meta_of(tensor: torch.Tensor, *, requires_grad: bool) -> TensorMeta:
    """Return the meta of a dense tensor."""
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype, requires_grad)
