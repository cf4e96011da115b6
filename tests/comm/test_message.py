"""Outputs of stages, taken apart, carried over as bytes, and put together again."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

from bpipe.comm.wire.message import MessageSpec, TensorMeta, bytes_of, dense, flatten_message, meta_of, unflatten_message
from bpipe.errors import CommError, StageError
from tests.comm.strategies import NESTS, tensors
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


def carry(tensor: torch.Tensor) -> torch.Tensor:
    """What a receiver makes of a tensor: memory of the same kind, and the same bytes in it."""
    sent = dense(tensor)
    received = meta_of(sent, requires_grad=tensor.requires_grad).new(CPU)
    bytes_of(received).copy_(bytes_of(sent))
    return received


def same(ones: Any, others: Any) -> bool:
    """Equal in structure, types, dtypes, shapes and bits."""
    if isinstance(ones, torch.Tensor):
        bits = [bytes_of(tensor.detach().contiguous().clone()) for tensor in (ones, others)]
        return ones.dtype == others.dtype and ones.shape == others.shape and torch.equal(*bits)
    if type(ones) is not type(others):
        return False
    if isinstance(ones, dict):
        return [*ones] == [*others] and same([*ones.values()], [*others.values()])
    if isinstance(ones, (tuple, list)):
        return len(ones) == len(others) and all(map(same, ones, others))
    return repr(ones) == repr(others)


@given(NESTS)
@settings(max_examples=examples(150))
def test_round_trip(value: Any) -> None:
    tree, parts = flatten_message(value, "stage 0")
    assert same(unflatten_message(tree, [carry(part) for part in parts]), value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 10**30, "\ud800 ä \0", True, {1: "a", "1": "b"}, {}, (), [[]]])
def test_unusual_plain_values(value: Any) -> None:
    assert same(unflatten_message(*flatten_message(value, "stage 0")), value)


@given(tensors())
@settings(max_examples=examples(150))
def test_dense_has_no_gaps_and_keeps_strides(tensor: torch.Tensor) -> None:
    sent = dense(tensor)
    assert torch.ops.aten.is_non_overlapping_and_dense(sent)
    assert not sent.requires_grad
    assert same(sent, tensor)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        assert (sent.data_ptr(), sent.stride()) == (tensor.data_ptr(), tensor.stride())
    meta = meta_of(sent, requires_grad=True)
    received = meta.new(CPU)
    assert (received.shape, received.stride(), received.dtype) == (sent.shape, sent.stride(), sent.dtype)
    assert bytes_of(received).numel() == bytes_of(sent).numel() == meta.num_bytes


def test_channels_last_survives() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    received = carry(image)
    assert received.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(received, image)


def test_lazy_conjugates_and_negatives_are_carried_out() -> None:
    complex_ = torch.randn(3, 2, dtype=torch.complex64)
    assert torch.equal(carry(complex_.conj()), complex_.conj().clone())
    assert torch.equal(carry(torch._neg_view(complex_.real)), -complex_.real)
    assert torch.equal(carry(torch._neg_view(torch.ones(3))), -torch.ones(3))


def test_collectives_under_way_are_waited_for() -> None:
    result = dense(AsyncCollectiveTensor(torch.arange(3.0)))
    assert type(result) is torch.Tensor
    assert bytes_of(result).view(torch.float32).tolist() == [0, 1, 2]


# What cannot be sent


@pytest.mark.parametrize(
    ("part", "seen"),
    [
        (np.zeros(2), "numpy.ndarray"),
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (1j, "builtins.complex"),
        (b"bytes", "builtins.bytes"),
        (Point(1, 2), "Point"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({(1, 2): 3}, "builtins.dict"),
        ({True: 3}, "builtins.dict"),
        (torch.float32, "torch.dtype"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "device meta"),
        (TwoTensor(torch.zeros(2), torch.zeros(2)), "TwoTensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(part: Any, seen: str) -> None:
    with pytest.raises(StageError) as raised:
        flatten_message((torch.zeros(1), {"mask": [1, part]}), "stage 3, microbatch 0")
    message = str(raised.value)
    assert message.startswith("stage 3, microbatch 0 returned a")
    assert "at output[1]['mask'][1]" in message
    assert seen in message


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_cannot_be_sent() -> None:
    with pytest.raises(StageError, match="quantized"):
        flatten_message(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "stage 3")


# What is no description of an output


@pytest.mark.parametrize(
    ("tree", "num_tensors"),
    [
        ('"T"', 0),
        ('"T"', 2),
        ('{"tuple": ["T", "T"]}', 1),
        ('{"dict": [["a", "T"]]}', 0),
        ('{"list": []}', 1),
        ("", 0),
        ("null", 0),
        ("5", 0),
        ("{}", 0),
        ('{"tuple": [], "list": []}', 0),
        ('{"set": []}', 0),
        ('{"value": []}', 0),
        ('{"dict": [[[1], {"value": 1}]]}', 0),
        ('{"dict": ["abc"]}', 0),
        ('{"tuple": 5}', 0),
        ("[" * 100_000, 0),
        ('{"list": [' * 50_000 + "]}" * 50_000, 0),
        ('{"value": ' + "9" * 5000 + "}", 0),
    ],
)
def test_hostile_pytrees(tree: str, num_tensors: int) -> None:
    with pytest.raises(CommError) as raised:
        unflatten_message(tree, [torch.zeros(1)] * num_tensors)
    assert len(str(raised.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just("T") | st.text(max_size=3),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(["tuple", "list", "dict", "value", "T"]), parts, max_size=2)
    ),
    max_leaves=8,
)


@given(st.text(max_size=30) | JSON.map(json.dumps), st.integers(0, 3))
@settings(max_examples=examples(300))
def test_any_nest_is_an_output_or_an_error(tree: str, num_tensors: int) -> None:
    tensors = [torch.zeros(1) for _ in range(num_tensors)]
    with suppress(CommError):
        found = [part for part in tree_leaves(unflatten_message(tree, tensors)) if isinstance(part, torch.Tensor)]
        assert list(map(id, found)) == list(map(id, tensors))


def test_text() -> None:
    meta = TensorMeta((2, 3), (3, 1), torch.bfloat16, True)
    assert str(MessageSpec('"T"', (meta, None))) == '"T" of (bfloat16[2, 3], requires grad, None)'
    assert meta.num_bytes == 12
