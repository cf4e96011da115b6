"""Buffers of an acceptor that the evictor fills and empties by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bpipe.errors import CommError, TransferError
from bpipe.memory.shared_buffers import PeerMemory, SharedBuffers
from bpipe.memory.shared_file import SharedFile
from bpipe.plan.reserved import Reserved

FIRST, SECOND, THIRD = (0, 1, 0), (0, 2, 0), (0, 3, 0)
RESERVED = Reserved((100, 300), {FIRST: 0, SECOND: 1, THIRD: 0})


def both_ends(*, in_bytes: bool = True) -> tuple[SharedBuffers, PeerMemory]:
    """The acceptor's, and the evictor's with descriptors of its own, as in two processes."""
    lent = SharedBuffers(RESERVED, in_bytes=in_bytes)
    with lent.offered() as offered:
        files = [SharedFile(os.dup(one.descriptor)) for one in offered]
    return lent, PeerMemory(SharedBuffers(RESERVED, files, in_bytes=in_bytes), "rank 3")


def message(value: int, *sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), value + index, dtype=torch.uint8) for index, size in enumerate(sizes)]


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:bpipe")


@pytest.mark.parametrize("in_bytes", [True, False])
def test_what_is_stored_comes_back(in_bytes: bool) -> None:
    _, peer = both_ends(in_bytes=in_bytes)
    for remote, sizes in ((FIRST, (60, 0, 40)), (SECOND, (300,)), (THIRD, (7,))):
        if remote == THIRD:
            continue
        peer.store(remote, message(remote[1], *sizes)).wait()
    for remote, sizes in ((SECOND, (300,)), (FIRST, (60, 0, 40))):
        found = message(0, *sizes)
        peer.fetch(remote, found).wait()
        assert all(map(torch.equal, found, message(remote[1], *sizes)))
    peer.store(THIRD, message(9, 7)).wait()  # in the first one's buffer
    found = message(0, 7)
    peer.fetch(THIRD, found).wait()
    assert torch.equal(found[0], message(9, 7)[0])


def test_memory_is_what_the_plan_reserves() -> None:
    lent, peer = both_ends()
    assert lent.num_bytes == 400
    peer.store(FIRST, message(1, 100)).wait()
    assert lent.num_bytes == 400


def test_buffers_of_slots_are_as_large_as_the_first_activation() -> None:
    lent, peer = both_ends(in_bytes=False)
    assert lent.num_bytes == 0
    peer.store(SECOND, message(1, 50, 20)).wait()
    assert lent.num_bytes == 140


def test_a_larger_activation_grows_its_buffer_for_both() -> None:
    lent, peer = both_ends()
    peer.store(FIRST, message(1, 5000)).wait()
    assert lent.num_bytes == 5300
    found = message(0, 5000)
    peer.fetch(FIRST, found).wait()
    assert torch.equal(found[0], message(1, 5000)[0])


@pytest.mark.parametrize("what", ["a head of another", "nothing"])
def test_what_others_wrote_is_not_loaded(what: str) -> None:
    lent, peer = both_ends()
    peer.store(FIRST, message(1, 100)).wait()
    foreign = SharedFile(os.dup(lent.files[0].descriptor))
    os.pwrite(foreign.descriptor, bytes(64) if what == "nothing" else bytes(range(64)), 0)
    with pytest.raises(TransferError, match="rank 3 no longer has what this rank has stored there of microbatch 1 of stage 0"):
        peer.fetch(FIRST, message(0, 100)).wait()


def test_a_copy_keeps_its_tensors_until_it_is_waited_for() -> None:
    """As the plan counts them."""
    _, peer = both_ends()
    storage = torch.UntypedStorage(100)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    copying = peer.store(FIRST, [tensor])
    peer.store(SECOND, message(1, 3)).wait()  # so that the first is over
    assert copying._tensors[0] is tensor
    copying.wait()
    assert not copying._tensors
    del tensor
    storage.resize_(0)


def test_memory_ends_with_its_last_user() -> None:
    before = mapped()
    lent, peer = both_ends()
    peer.store(FIRST, message(1, 100)).wait()
    assert mapped() > before
    lent.clear()
    peer.clear()
    del lent, peer
    assert mapped() == before
    assert not [name for name in os.listdir("/dev/shm") if "bpipe" in name]


def test_too_little_memory_is_said_with_the_way_out() -> None:
    with pytest.raises(CommError, match=r"cannot be reserved .*BPIPE_SHARED_MEMORY=0"):
        SharedFile().grow(2**60)


def test_a_file_is_never_shrunk() -> None:
    file = SharedFile()
    file.grow(100)
    file.grow(50)
    assert file.num_bytes == 100
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 10)
