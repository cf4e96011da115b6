"""Notes on gradient messages: say which gradients differ from the agreement, while the message keeps its agreed sizes.

What is agreed about a message of gradients is what an earlier step had, because its receive is posted before anybody can know more.
In this step a stage may leave an input unused, so that its gradient is absent, or use one that it had not used before. Then a note
says what each gradient really is. For an absent gradient, zeros are sent, which the receiver ignores; a gradient that was agreed to
be absent is sent in the note, and both ends expect it from then on.

    the note: a header with the actual layout, then the bytes of each tensor that was agreed to be absent

An output may need a gradient that it did not need before. Then a note that is only a header says what is agreed from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.comm.wire.message import MessageSpec, TensorMeta, bytes_of, memory_of
from bpipe.errors import CommError

__all__: list[str] = []

Tensors = Sequence[torch.Tensor | None]


def can_tell(agreed: MessageSpec, spec: MessageSpec) -> bool:
    """Return whether a note can express the difference: tensors are absent, or new, or lie in another order of strides."""
    if len(agreed.tensors) != len(spec.tensors):
        return False
    pairs = zip(agreed.tensors, spec.tensors)
    return all(one is None or other is None or (one.shape, one.dtype) == (other.shape, other.dtype) for one, other in pairs)


def renewed(agreed: MessageSpec, spec: MessageSpec) -> MessageSpec:
    """Return what is agreed after a note: all tensors that have ever been there, as they were the last time."""
    return MessageSpec(agreed.tree, tuple(one if other is None else other for one, other in zip(agreed.tensors, spec.tensors)))


def with_note(
    subject: Subject, agreed: MessageSpec, spec: MessageSpec, tensors: Tensors, device: torch.device
) -> tuple[list[torch.Tensor | None], bytes]:
    """Make a message as its receiver expects it, and the note that goes with it.

    Args:
        subject: what it is about.
        agreed: the layout that is expected.
        layout: its actual layout.
        tensors: its tensors, dense, or None.
        device: where they lie.
    """
    note = [header.pack_spec(subject, spec)]
    sent: list[torch.Tensor | None] = []
    for meta, tensor in zip(agreed.tensors, tensors, strict=True):
        if meta is not None:
            sent.append(meta.new(device).zero_() if tensor is None else _lying_as(meta, tensor))
        elif tensor is not None:
            on_host = tensor.cpu()  # named, to live until its bytes are copied: a view of its memory keeps nothing alive
            note.append(bytes(memory_of(bytes_of(on_host))))
    return sent, b"".join(note)


def read_note(
    subject: Subject, agreed: MessageSpec, note: bytes, landed: Tensors, device: torch.device
) -> tuple[MessageSpec, list[torch.Tensor | None]]:
    """Return the layout and the tensors of a message that came with a note.

    Args:
        subject: what it must be about.
        agreed: the layout that was expected.
        note: the note that came with it.
        landed: the tensors that arrived, one for each that was expected.
        device: where they lie.

    Raises:
        CommError: the note does not fit what was expected, or contradicts itself.
    """
    size = header.size_of(note, subject)
    spec, unexpected = header.unpack_spec(note[:size], subject), note[size:]
    new = [meta for meta, tensor in zip(spec.tensors, landed) if meta is not None and tensor is None]
    if not can_tell(agreed, spec) or sum(meta.num_bytes for meta in new) != len(unexpected):
        raise CommError(f"{subject}: a note of {len(note)} bytes says that {spec} arrived where {agreed} was expected")
    arrived = _unpacked(new, unexpected, device)
    return spec, [
        None if meta is None else next(arrived) if tensor is None else _lying_as(meta, tensor)
        for meta, tensor in zip(spec.tensors, landed, strict=True)
    ]


def needing(agreed: MessageSpec, spec: MessageSpec) -> MessageSpec:
    """Return what is agreed about a stage's outputs after some need a gradient that were agreed to need none."""
    pairs = zip(agreed.tensors, spec.tensors, strict=True)
    tensors = tuple(one._replace(requires_grad=True) if one and other and other.requires_grad else one for one, other in pairs)
    return agreed._replace(tensors=tensors, is_open=agreed.is_open and any(map(may_need_later, tensors)))


def may_need_later(meta: TensorMeta | None) -> bool:
    """Return whether a tensor needs no gradient, but could."""
    return meta is not None and meta.is_differentiable and not meta.requires_grad


def with_more(gradients: MessageSpec, before: MessageSpec, after: MessageSpec) -> MessageSpec:
    """Return what is agreed about gradients when more outputs need one: the new ones are absent until they come in a note."""
    pairs = [(one, other) for one, other in zip(before.tensors, after.tensors, strict=True) if one and other]
    known = iter(gradients.tensors)
    return MessageSpec(
        gradients.tree, tuple(next(known) if one.requires_grad else None for one, other in pairs if other.requires_grad)
    )


def _unpacked(metas: Iterable[TensorMeta], data: bytes, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensors that came in a note, one after the other."""
    start = 0
    for meta in metas:
        tensor = meta.new(torch.device("cpu"))
        memory_of(bytes_of(tensor))[:] = data[start : start + meta.num_bytes]
        start += meta.num_bytes
        yield tensor.to(device)


def _lying_as(meta: TensorMeta, tensor: torch.Tensor) -> torch.Tensor:
    """Reinterpret the memory of a dense tensor in another order of strides."""
    is_same = tensor.stride() == meta.stride
    return tensor if is_same else tensor.as_strided(meta.shape, meta.stride, tensor.storage_offset())
