"""Notes: a message of the agreed sizes and a note make the gradients that were sent, and whatever else arrives is a CommError."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bpipe.comm.wire.header import FIXED, Subject
from bpipe.comm.wire.message import MessageSpec, TensorMeta, meta_of, on_the_wire
from bpipe.comm.wire.note import can_tell, needing, read_note, renewed, with_more, with_note
from bpipe.errors import CommError

SUBJECT, CPU = Subject(step=5, stage=2, microbatch=7), torch.device("cpu")
SHAPES = [(3, 4), (), (2, 1, 5), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.float64]
T = torch.Tensor

ORDERS = st.sampled_from(["absent", "contiguous", "transposed"])


def gradient(index: int, order: str, value: int) -> T | None:
    shape, dtype = SHAPES[index], DTYPES[index]
    if order == "absent":
        return None
    tensor = torch.arange(value, value + math.prod(shape)).to(dtype).reshape(shape)
    return tensor if order == "contiguous" or tensor.ndim < 2 else tensor.transpose(0, -1).contiguous().transpose(0, -1)


def layout_of(tensors: list[T | None]) -> MessageSpec:
    return MessageSpec("", tuple(None if one is None else meta_of(one, requires_grad=False) for one in tensors))


@given(st.lists(st.tuples(ORDERS, ORDERS), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_what_is_sent_arrives(orders: list[tuple[str, str]]) -> None:
    agreed = layout_of([gradient(i, order, 0) for i, (order, _) in enumerate(orders)])
    tensors = [gradient(i, order, 9) for i, (_, order) in enumerate(orders)]
    spec = layout_of(tensors)
    assert can_tell(agreed, spec)
    sent, note = with_note(SUBJECT, agreed, spec, tensors, CPU)
    landed = [None if meta is None else meta.new(CPU) for meta in agreed.tensors]
    travelling = [on_the_wire(one) for one in sent if one is not None]
    for target, source in zip([on_the_wire(one) for one in landed if one is not None], travelling, strict=True):
        assert (target.dtype, target.shape) == (source.dtype, source.shape)  # as backends compare them
        target.copy_(source)
    seen, arrived = read_note(SUBJECT, agreed, note, landed, CPU)
    assert seen == spec and layout_of(arrived) == spec
    assert all(one is other or torch.equal(one, other) for one, other in zip(arrived, tensors, strict=True))  # type: ignore[arg-type]
    again = renewed(agreed, spec)
    assert can_tell(again, spec) and [meta is None for meta in again.tensors] == [orders[i] == ("absent",) * 2 for i in range(4)]


def test_what_cannot_be_told() -> None:
    one, other = (layout_of([torch.zeros(3, dtype=dtype)]) for dtype in (torch.float32, torch.float64))
    assert not can_tell(one, other) and not can_tell(one, MessageSpec("", ())) and not can_tell(one, layout_of([torch.zeros(4)]))


def test_a_note_that_does_not_fit_is_an_error() -> None:
    tensors: list[T | None] = [torch.ones(3), torch.ones(2)]
    agreed, spec = layout_of([None, torch.ones(2)]), layout_of(tensors)
    _, note = with_note(SUBJECT, agreed, spec, tensors, CPU)
    landed = [None, torch.zeros(2)]
    damaged = [b"", note[: FIXED.size - 1], note[:-1], note + b"\0", note[:40] + b"\1" + note[41:]]
    for data in damaged:
        with pytest.raises(CommError, match="step 5, stage 2, microbatch 7"):
            read_note(SUBJECT, agreed, data, landed, CPU)
    with pytest.raises(CommError, match="microbatch 8"):
        read_note(SUBJECT._replace(microbatch=8), agreed, note, landed, CPU)
    with pytest.raises(CommError, match="arrived where"):
        read_note(SUBJECT, layout_of([None, torch.ones(4)]), note, [None, torch.zeros(4)], CPU)


def metas_of(tensors: list[T], needs: list[bool]) -> tuple[TensorMeta, ...]:
    return tuple(meta_of(tensor, requires_grad=needed) for tensor, needed in zip(tensors, needs, strict=True))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=5))
def test_what_is_agreed_when_more_outputs_need_a_gradient(needs: list[tuple[bool, bool, bool]]) -> None:
    """By output: whether it is a float, needed a gradient, and needs one now. Gradients stay agreed, others are absent."""
    outputs = [torch.zeros(i + 1, dtype=torch.float32 if is_float else torch.int64) for i, (is_float, *_) in enumerate(needs)]
    before, now = (
        MessageSpec("T", metas_of(outputs, [is_float and of[k] for is_float, *of in needs]), is_open=True) for k in (0, 1)
    )
    after = needing(before, now)
    flags = [meta is not None and meta.requires_grad for meta in after.tensors]
    assert flags == [is_float and (one or other) for is_float, one, other in needs]
    assert after.is_open == any(is_float and not flag for (is_float, *_), flag in zip(needs, flags))
    assert needing(after, now) == needing(after, before) == after
    gradients = layout_of([t for t, (is_float, needed, _) in zip(outputs, needs) if is_float and needed])
    expected = [(t if needed else None) for t, (is_float, needed, now) in zip(outputs, needs) if is_float and (needed or now)]
    assert with_more(gradients, before, after) == layout_of(expected)


class OnADevice(torch.Tensor):
    """Whose copy on the host is another tensor, as CUDA's is."""

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_what_travels_in_a_note_is_copied_before_its_memory_is_given_back():
    tensor = torch.arange(4096.0)
    meta = meta_of(tensor, requires_grad=False)
    subject = Subject(1, 2, 3)
    _, note = with_note(
        subject, MessageSpec("", (None,)), MessageSpec("", (meta,)), [tensor.as_subclass(OnADevice)], torch.device("cpu")
    )
    _, (arrived,) = read_note(subject, MessageSpec("", (None,)), note, [None], torch.device("cpu"))
    assert arrived is not None and torch.equal(arrived, tensor)
