"""Rooms are reserved once, used again and again, and no more than the plan says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.memory.guests import Rooms

CPU = torch.device("cpu")


def test_nothing_is_reserved_before_the_first_guest() -> None:
    assert Rooms([0] * 3, CPU).num_bytes == 0


def test_all_rooms_are_reserved_with_the_first_guest() -> None:
    rooms = Rooms([0] * 3, CPU)
    parts = rooms.take((0, 0, 0), [70, 30])
    assert [(part.dtype, part.shape) for part in parts] == [(torch.uint8, (70,)), (torch.uint8, (30,))]
    assert rooms.num_bytes == 300


def test_rooms_are_used_again() -> None:
    rooms = Rooms([0] * 2, CPU)
    places = set()
    for microbatch in range(50):
        places.add(rooms.take((0, microbatch, 0), [64])[0].data_ptr())
        if microbatch:
            rooms.leave((0, microbatch - 1, 0))
        assert rooms.num_bytes == 128
    assert len(places) == 2


def test_rooms_grow_for_a_larger_guest_and_stay_so() -> None:
    rooms = Rooms([0] * 2, CPU)
    first = rooms.take((0, 0, 0), [10])[0].fill_(7)
    rooms.take((0, 1, 0), [25])
    assert rooms.num_bytes == 35
    assert first.tolist() == [7] * 10
    rooms.leave((0, 1, 0))
    place = rooms.take((0, 2, 0), [5])[0].data_ptr()
    rooms.leave((0, 2, 0))
    assert rooms.take((0, 3, 0), [25])[0].data_ptr() == place
    rooms.leave((0, 0, 0))
    rooms.take((0, 4, 0), [20])
    assert rooms.num_bytes == 45


def test_a_guest_of_no_bytes_has_a_room_too() -> None:
    rooms = Rooms([0] * 1, CPU)
    assert rooms.take((0, 0, 0), []) == []
    rooms.leave((0, 0, 0))
    assert [part.numel() for part in rooms.take((0, 1, 0), [3])] == [3]


def test_clear() -> None:
    rooms = Rooms([0] * 2, CPU)
    rooms.take((0, 0, 0), [8])
    rooms.clear()
    assert rooms.num_bytes == 0


@pytest.mark.parametrize("guest", [(0, 1, 0), (1, 0, 0), (0, 0, 1)])
def test_a_stranger_cannot_leave(guest: tuple[int, int, int]) -> None:
    rooms = Rooms([0] * 2, CPU)
    rooms.take((0, 0, 0), [8])
    with pytest.raises(KeyError):
        rooms.leave(guest)


@given(st.integers(1, 4), st.data())
@settings(max_examples=50)
def test_guests_never_share_memory(count: int, data: st.DataObject) -> None:
    rooms = Rooms([0] * count, CPU)
    present: dict[tuple[int, int, int], torch.Tensor] = {}
    largest = 0
    for microbatch in range(data.draw(st.integers(1, 20))):
        if len(present) == count or (present and data.draw(st.booleans())):
            guest = data.draw(st.sampled_from(sorted(present)))
            assert (present.pop(guest) == guest[1]).all()  # nobody wrote over it
            rooms.leave(guest)
        size = data.draw(st.sampled_from([16, 16, 16, 40]))
        largest = max(largest, size)
        (present[0, microbatch, 0],) = rooms.take((0, microbatch, 0), [size])
        present[0, microbatch, 0].fill_(microbatch)
        assert rooms.num_bytes <= count * largest
