"""Batches are cut and put together as asked, with torch's own specs too; what does not fit is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate, sum_reducer

from bpipe.errors import ConfigurationError, StageError
from bpipe.model.cutting import Cutting
from bpipe.model.merging import merge
from bpipe.model.microbatch import describe, digest, tensors_in
from tests.tiers import examples

M = 3


def split(value: Any, spec: Any, m: int, name: str) -> list[Any]:
    return Cutting(m).split(value, spec, name)


def batch(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@st.composite
def cut_nests(draw: st.DrawFn, m: int) -> tuple[Any, Any]:
    """A pytree of tensors and plain values, and the specs along which m divides it."""
    kind = draw(st.sampled_from(["tensor", "tensor", "plain", "tuple", "list", "dict"]))
    if kind == "tensor":
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] *= m
        return batch(*shape), TensorChunkSpec(draw(st.sampled_from([dim, dim - len(shape)])))
    if kind == "plain":
        return draw(st.none() | st.integers() | st.text(max_size=3)), draw(st.none() | st.builds(_Replicate))
    parts = draw(st.lists(cut_nests(m), max_size=3))
    values, specs = [value for value, _ in parts], [spec for _, spec in parts]
    if kind == "dict":
        keys = list("abc"[: len(parts)])
        specs_by_key = dict(zip(keys, specs))
        return dict(zip(keys, values)), {key: specs_by_key[key] for key in draw(st.permutations(keys))}
    return (tuple(values), tuple(specs)) if kind == "tuple" else (values, draw(st.sampled_from([specs, tuple(specs)])))


def same(ones: Any, others: Any) -> bool:
    if isinstance(ones, torch.Tensor):
        return isinstance(others, torch.Tensor) and torch.equal(ones, others)
    if isinstance(ones, dict):
        return list(ones) == list(others) and same([*ones.values()], [*others.values()])
    if isinstance(ones, (tuple, list)):
        return type(ones) is type(others) and len(ones) == len(others) and all(map(same, ones, others))
    return bool(ones == others)


@given(st.integers(1, 4).flatmap(lambda m: st.tuples(st.just(m), cut_nests(m))))
@settings(max_examples=examples(150))
def test_what_is_cut_fits_together_again(case: tuple[int, tuple[Any, Any]]) -> None:
    m, (value, spec) = case
    parts = split(value, spec, m, "args")
    assert len(parts) == m
    assert same(merge(parts, spec), value)
    whole = tensors_in(value)
    for part in parts:
        assert all(cut.numel() * m == tensor.numel() for cut, tensor in zip(tensors_in(part), whole, strict=True))


def test_default_is_dimension_zero_and_no_copies() -> None:
    x = batch(6, 2)
    parts = split((x, {"scale": 2.5}), None, M, "args")
    assert [part[1] for part in parts] == [{"scale": 2.5}] * M
    assert [part[0].tolist() for part in parts] == [rows.tolist() for rows in x.split(2)]
    assert all(part[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)


def test_torch_specs() -> None:
    args, mask = (batch(6, 2), batch(2, 6), batch(5)), batch(4)
    parts = split(args, (TensorChunkSpec(0), TensorChunkSpec(-1), _Replicate()), M, "args")
    assert [tensor.shape for tensor in parts[1]] == [(2, 2), (2, 2), (5,)]
    assert parts[1][2] is args[2]
    for spec in (_Replicate(), _Replicate, None):
        assert split({"mask": mask}, {"mask": spec}, M, "kwargs") == [{"mask": mask}] * M
    for spec in (TensorChunkSpec.from_tuple((0, 1)), [TensorChunkSpec(0), TensorChunkSpec(1)]):
        assert [tensor.shape for tensor in split(args[:2], spec, M, "args")[0]] == [(2, 2), (2, 2)]


def test_specs_of_keyword_arguments_go_by_name() -> None:
    """In whatever order they were written: by place, both would divide, along the wrong dimensions."""
    kwargs, specs = {"ids": batch(6, 3), "mask": batch(3, 6)}, TensorChunkSpec.from_dict({"mask": 1, "ids": 0})
    assert {name: part.shape for name, part in split(kwargs, specs, M, "kwargs")[0].items()} == {
        "ids": (2, 3),
        "mask": (3, 2),
    }
    assert same(merge(split(kwargs, specs, M, "kwargs"), specs), kwargs)


def test_a_leaf_that_requires_grad_gets_the_gradient_of_all_parts() -> None:
    x = torch.ones(6, requires_grad=True)
    for index, part in enumerate(split(x, None, M, "args")):
        (part * index).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("value", "spec", "message"),
    [
        (batch(2, 5), None, r"^the target of shape \[2, 5\]: 2 along dimension 0 does not divide into 3 microbatches\. Drop"),
        (batch(7), None, "7 along dimension 0 does not divide into 3 microbatches"),
        (batch(0, 2), None, "0 along dimension 0 does not divide into 3 microbatches"),
        (batch(3, 4), TensorChunkSpec(1), "4 along dimension 1 does not divide"),
        (
            torch.tensor(1.0),
            TensorChunkSpec(0),
            r"^the target of shape \[\] has no dimension 0 to cut\. Give Options\(target_chunk_spec=\), nested",
        ),
        (batch(3), TensorChunkSpec(1), r"shape \[3\] has no dimension 1 to cut"),
        (batch(3), TensorChunkSpec(-2), r"shape \[3\] has no dimension -2 to cut"),
        ((batch(3), batch(3)), (TensorChunkSpec(0),), "^the target: tuple of 2 has the spec tuple of 1: give one for each value"),
        ((batch(3), batch(3)), TensorChunkSpec(0), "tuple of 2 has the spec TensorChunkSpec"),
        ({"a": batch(3)}, {"b": TensorChunkSpec(0)}, "{'a': ...} has the spec {'b': ...}"),
        (batch(3), {"a": TensorChunkSpec(0)}, "Tensor has the spec {'a': ...}"),
    ],
)
def test_what_cannot_be_cut(value: Any, spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split(value, spec, M, "the target")


# Merging


def test_merge_takes_each_leaf_in_its_way() -> None:
    outputs = [
        {"logits": torch.full((2, 3), i), "loss": torch.tensor(i), "stats": (torch.full((1, 2), i), "text", None)} for i in range(M)
    ]
    merged = merge(outputs)
    assert merged["logits"].tolist() == [[i] * 3 for i in (0, 0, 1, 1, 2, 2)]
    assert merged["loss"].tolist() == [0, 1, 2]
    assert merged["stats"][0].shape == (3, 2)
    assert merged["stats"][1:] == ("text", None)


def test_merge_along_the_dimension_of_the_spec() -> None:
    outputs = [(torch.full((2, 1), i), torch.full((2, 1), i)) for i in range(M)]
    merged = merge(outputs, (TensorChunkSpec(1), TensorChunkSpec(0)))
    assert [tensor.shape for tensor in merged] == [(2, 3), (6, 1)]


def test_merge_with_reducers() -> None:
    outputs = [(torch.tensor(float(i)), torch.full((2,), i)) for i in range(M)]
    largest = _CustomReducer(torch.tensor(-1), lambda a, b: torch.maximum(a, b))
    assert same(merge(outputs, (sum_reducer, largest)), (torch.tensor(3.0), torch.full((2,), 2)))


def test_merge_of_one_and_of_nothing() -> None:
    x = batch(2, 2)
    assert same(merge([(x, 3)]), (x, 3))
    assert merge([(), ()]) == ()
    assert merge([None, None]) is None


@pytest.mark.parametrize(
    ("outputs", "spec", "error", "message"),
    [
        (
            [(batch(2),), (batch(2), batch(2))],
            None,
            StageError,
            "fit together: one is tuple of 1, another tuple of 2. .*return_outputs=False",
        ),
        ([{"a": batch(2)}, {"b": batch(2)}], None, StageError, "do not fit together: one is {'a': ...}, another {'b': ...}"),
        ([batch(2), None], None, StageError, "do not fit together"),
        ([batch(2, 3), batch(2, 4)], None, StageError, "do not fit together: Sizes of tensors must match"),
        ([batch(2), batch(2)], TensorChunkSpec(3), StageError, "do not fit together: it has no dimension 3"),
        (
            [batch(2), batch(2)],
            (TensorChunkSpec(0), TensorChunkSpec(0)),
            ConfigurationError,
            "the output: Tensor has the spec tuple of 2",
        ),
    ],
)
def test_what_cannot_be_merged(outputs: list[Any], spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge(outputs, spec)


# Descriptions: equal exactly where the same messages and the same memory are needed

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        (X, torch.ones(2, 3), True),
        (X, torch.zeros(3, 2), False),
        (X, torch.zeros(3, 2).t(), False),
        (X, X.double(), False),
        (X, X.clone().requires_grad_(), False),
        (X, X.to_sparse(), False),
        ((X, 1), (X, 2), False),
        ((X, 1), (X, True), False),
        ((X, 1), (X, np.int64(2)), False),
        ((X, None), (X, "None"), False),
        ((X, X), [X, X], False),
        ({"a": X}, {"b": X}, False),
        ((X, SimpleNamespace(a=1)), (X, SimpleNamespace(a=2)), True),
    ],
)
def test_descriptions(one: Any, other: Any, is_alike: bool) -> None:
    assert (describe(one) == describe(other)) is is_alike
    assert (digest([str(describe(one))]) == digest([str(describe(other))])) is is_alike


def test_digest_depends_on_the_order() -> None:
    assert len(digest(["a", "b"])) == 16
    assert digest(["a", "b"]) != digest(["b", "a"])


class Unknown:
    def __init__(self) -> None:
        self.hidden = torch.ones(2)


@pytest.mark.parametrize("outputs", [[Unknown(), Unknown()], [[object()], [object()]]])
def test_outputs_that_cannot_be_put_together(outputs):
    with pytest.raises(StageError, match=r"a (Unknown|object) cannot be put together\. .* return_outputs=False"):
        merge(outputs)
