"""A microbatch's storages leave, really free their memory, and come back to the bit; or nothing happens at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import SavedTensorError
from bpipe.memory.saved.bundle import SMALL, Bundle
from bpipe.memory.saved.storages import Storage, owners
from tests.tiers import examples

NAME = "microbatch 3 of stage 1"


def saved(*sizes: int) -> tuple[list[torch.Tensor], list[tuple[Storage, int]]]:
    """Tensors of some sizes in bytes, and their storages as a stash would give them."""
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    return tensors, [(tensor.untyped_storage(), 1) for tensor in tensors]


def travel(bundle: Bundle, messages: list[torch.Tensor]) -> None:
    """Send the messages away, empty the bundle, and bring them back."""
    remotes = [message.clone() for message in messages]
    messages.clear()
    bundle.empty()
    assert all(storage.nbytes() == 0 for storage in (*bundle._small, *(storage for storage, _ in bundle._large)))
    remote_buffers = bundle.refill()
    for room, remote in zip(remote_buffers, remotes, strict=True):
        room.copy_(remote)
    bundle.scatter(remote_buffers)


@given(st.lists(st.sampled_from([1, 7, 4096, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL]), max_size=6))
@settings(max_examples=examples(30))
def test_there_and_back(sizes: list[int]) -> None:
    tensors, storages = saved(*sizes)
    before = [tensor.clone() for tensor in tensors]
    large, small = [size for size in sizes if size >= SMALL], [size for size in sizes if size < SMALL]
    bundle = Bundle(storages, NAME)
    assert bundle.message_sizes == large + [sum(small)] * bool(small)
    assert bundle.num_bytes == sum(sizes)
    messages = bundle.messages()
    assert [(message.dtype, message.numel()) for message in messages] == [(torch.uint8, size) for size in bundle.message_sizes]
    travel(bundle, messages)
    assert all(map(torch.equal, tensors, before))


def test_views_and_strides_survive() -> None:
    whole = torch.randn(40, 30)
    views = [whole.t()[3:, ::2], whole.view(10, 120)[1], torch.randn(3, 5)[:, 1:].t()]
    before = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    bundle = Bundle([(whole.untyped_storage(), owners(whole.untyped_storage())), (views[2].untyped_storage(), 2)], NAME)
    travel(bundle, bundle.messages())
    assert all(map(torch.equal, views, before))
    assert [view.stride() for view in views] == strides


def test_memory_is_given_back() -> None:
    """The small ones at once, because their bytes are in the shared message; the large ones when they have arrived."""
    _, storages = saved(10, SMALL, 20)
    bundle = Bundle(storages, NAME)
    messages = bundle.messages()
    assert [storage.nbytes() for storage, _ in storages] == [0, SMALL, 0]
    del messages
    bundle.empty()
    assert [(storage.nbytes(), storage.data_ptr()) for storage, _ in storages] == [(0, 0)] * 3
    assert bundle.num_bytes == SMALL + 30
    messages = bundle.refill()
    assert [storage.nbytes() for storage, _ in storages] == [0, SMALL, 0]
    bundle.scatter(messages)
    assert [storage.nbytes() for storage, _ in storages] == [10, SMALL, 20]


def test_large_messages_are_no_copies() -> None:
    tensors, storages = saved(10, SMALL, 20, SMALL + 8)
    bundle = Bundle(storages, NAME)
    places = [message.data_ptr() for message in bundle.messages()]
    assert places[:2] == [tensors[1].data_ptr(), tensors[3].data_ptr()]
    assert len(places) == 3
    bundle.empty()
    assert [message.data_ptr() for message in bundle.refill()][:2] == [tensors[1].data_ptr(), tensors[3].data_ptr()]


@pytest.mark.parametrize("index", [0, 1])
def test_a_new_owner_stops_the_emptying(index: int) -> None:
    tensors, storages = saved(SMALL, SMALL + 1, 10)
    bundle = Bundle(storages, NAME)
    bundle.messages()
    taken = tensors[index][1:].detach()
    with pytest.raises(SavedTensorError, match=f"a saved storage of {NAME}"):
        bundle.empty()
    assert [storage.nbytes() for storage, _ in storages] == [SMALL, SMALL + 1, 0]
    del taken
    bundle.empty()
    assert [storage.nbytes() for storage, _ in storages] == [0, 0, 0]


def test_a_transfer_under_way_stops_the_emptying() -> None:
    _tensors, storages = saved(SMALL)
    bundle = Bundle(storages, NAME)
    messages = bundle.messages()
    with pytest.raises(SavedTensorError):
        bundle.empty()
    messages.clear()
    bundle.empty()


def test_a_small_storage_that_a_send_still_reads_stays_until_then() -> None:
    tensors, storages = saved(10, 20)
    sent = tensors[0].view(2, 5)
    del tensors[0]
    before = sent.clone()
    bundle = Bundle([(storages[0][0], 0), storages[1]], NAME)
    assert bundle.message_sizes == [10, 20]
    bundle.messages()
    assert torch.equal(sent, before)
    with pytest.raises(SavedTensorError, match=NAME):
        bundle.empty()
    del sent
    bundle.empty()
    assert storages[0][0].nbytes() == 0


def test_an_owner_less_does_no_harm() -> None:
    tensors, storages = saved(10)
    tensors.clear()
    bundle = Bundle(storages, NAME)
    bundle.messages()
    bundle.empty()
    assert storages[0][0].nbytes() == 0


def test_empty_bundle() -> None:
    bundle = Bundle([], NAME)
    assert (bundle.num_bytes, bundle.message_sizes, bundle.messages()) == (0, [], [])
    bundle.empty()
    assert bundle.refill() == []
    bundle.scatter([])
