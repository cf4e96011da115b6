"""Random outputs of stages: pytrees of tensors of every dtype, in every order of strides."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from bpipe.comm.wire.header import DTYPES
from bpipe.comm.wire.message import MessageSpec, TensorMeta, bytes_of
from bpipe.comm.wire.note import may_need_later

SIZES = st.lists(st.integers(0, 4), max_size=4)


def of_bytes(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A contiguous tensor of random bytes, NaNs included."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    size = tensor.numel() * tensor.element_size()
    bytes_of(tensor).copy_(torch.randint(2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator))
    return tensor


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense ones, transposed ones, slices with gaps, and expanded ones."""
    tensor = of_bytes(draw(SIZES), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if tensor.ndim:
        if draw(st.booleans()):
            tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
        if draw(st.booleans()):
            dim = draw(st.integers(0, tensor.ndim - 1))
            tensor = tensor.narrow(dim, 0, draw(st.integers(0, tensor.shape[dim])))
        if draw(st.booleans()):
            tensor = tensor[tuple(slice(None, None, draw(st.integers(1, 2))) for _ in tensor.shape)]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
    if tensor.dtype.is_floating_point:
        tensor.requires_grad_(draw(st.booleans()))
    return tensor


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.integers() | st.text(max_size=5)


NESTS = st.recursive(
    tensors() | PLAIN,
    lambda parts: st.lists(parts, max_size=3) | st.lists(parts, max_size=3).map(tuple) | st.dictionaries(KEYS, parts, max_size=3),
    max_leaves=8,
)

ANY = st.integers(-(2**63), 2**63 - 1)  # what a field of a header can say


@st.composite
def wild_metas(draw: st.DrawFn) -> TensorMeta:
    """Any shape, with any strides or with those of a dense tensor of that shape."""
    shape = draw(st.lists(ANY | st.integers(0, 3) | st.sampled_from([2**31, 2**32, 2**62]), max_size=4))
    dense, step = [], 1
    for size in reversed(shape):
        dense.append(min(max(step, -(2**63)), 2**63 - 1))
        step *= size
    wild = st.lists(ANY | st.integers(0, 9), min_size=len(shape), max_size=len(shape))
    strides = draw(st.just(dense[::-1]) | wild)
    return TensorMeta(tuple(shape), tuple(strides), draw(st.sampled_from(DTYPES)), draw(st.booleans()))


WILD_LAYOUTS = st.builds(
    lambda tree, tensors, is_open: MessageSpec(tree, tuple(tensors), is_open and any(map(may_need_later, tensors))),
    st.text(max_size=20),
    st.lists(st.none() | wild_metas(), max_size=3),
    st.booleans(),
)
