"""Into which parts a microbatch is cut: whole storages, about as many bytes each, none of them empty."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from bpipe.memory.saved.saved_tensor import Saved
from bpipe.memory.saved.stash import Movable, Stash, StashContents, cuts_for

SIZES = st.lists(st.integers(1, 50), max_size=8)


def movable(sizes: list[int]) -> list[Movable]:
    """Storages of so many bytes, saved one after the other."""
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    return [Movable(tensor.untyped_storage(), [Saved(tensor, order)], False) for order, tensor in enumerate(tensors)]


@given(SIZES, st.integers(1, 9))
def test_no_part_is_empty_and_none_has_much_more_than_its_share(sizes: list[int], num_parts: int) -> None:
    cuts = cuts_for(movable(sizes), num_parts)
    ends = [0, *cuts, len(sizes)]
    parts = [sum(sizes[start:end]) for start, end in pairwise(ends)]
    assert list(cuts) == sorted(set(cuts))
    assert len(parts) <= num_parts
    assert all(parts) or not sizes
    assert max(parts) <= sum(sizes) / num_parts + max(sizes, default=0)


def test_equal_storages_are_dealt_out_evenly() -> None:
    assert cuts_for(movable([4] * 8), 4) == (2, 4, 6)
    assert cuts_for(movable([4] * 3), 64) == (1, 2)


def test_a_microbatch_like_one_before_is_cut_in_the_same_places() -> None:
    """Although some of it may be away already."""
    stash = Stash("microbatch 1 of stage 0", {}, cuts=(1, 2))
    stash.settle(StashContents(movable([4, 4])[1:]), 3)
    assert tuple(stash.cuts) == (1, 2)
