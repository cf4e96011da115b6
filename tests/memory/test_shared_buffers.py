"""Buffers of an acceptor that the evictor fills and empties by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bpipe.errors import CommError, TransferError
from bpipe.memory.shared_buffers import HEAD, PeerMemory, SharedBuffers
from bpipe.memory.shared_file import SharedFile
from bpipe.plan.reserved import Reserved

FIRST, SECOND, THIRD = (0, 1, 0), (0, 2, 0), (0, 3, 0)
RESERVED = Reserved((100, 300), {FIRST: 0, SECOND: 1, THIRD: 0})


def both_ends(*, in_bytes: bool = True) -> tuple[SharedBuffers, PeerMemory]:
    """The acceptor's, and the evictor's with descriptors of its own, as in two processes."""
    lent = SharedBuffers(RESERVED, in_bytes=in_bytes)
    lent.reserve()
    ours = SharedBuffers(RESERVED, SharedFile(os.dup(lent.file.descriptor)), in_bytes=in_bytes)
    ours.map()
    return lent, PeerMemory(ours, "rank 3")


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
        peer.put(remote, message(remote[1], *sizes)).wait()
    for remote, sizes in ((SECOND, (300,)), (FIRST, (60, 0, 40))):
        found = message(0, *sizes)
        peer.get(remote, found).wait()
        assert all(map(torch.equal, found, message(remote[1], *sizes)))
    peer.put(THIRD, message(9, 7)).wait()  # in the first one's buffer
    found = message(0, 7)
    peer.get(THIRD, found).wait()
    assert torch.equal(found[0], message(9, 7)[0])


def test_memory_is_what_the_plan_reserves() -> None:
    lent, peer = both_ends()
    assert lent.num_bytes == 400
    peer.put(FIRST, message(1, 100)).wait()
    assert lent.num_bytes == 400


def test_buffers_of_slots_are_as_large_as_the_first_activation() -> None:
    lent, peer = both_ends(in_bytes=False)
    assert lent.num_bytes == 0
    peer.put(SECOND, message(1, 50, 20)).wait()
    assert lent.num_bytes == 140


def test_a_larger_activation_grows_its_buffer_for_both() -> None:
    lent, peer = both_ends()
    peer.put(FIRST, message(1, 5000)).wait()
    assert lent.num_bytes == 5300
    found = message(0, 5000)
    peer.get(FIRST, found).wait()
    assert torch.equal(found[0], message(1, 5000)[0])


@pytest.mark.parametrize("what", ["a head of another", "nothing"])
def test_what_others_wrote_is_not_loaded(what: str) -> None:
    lent, peer = both_ends()
    peer.put(FIRST, message(1, 100)).wait()
    os.pwrite(lent.file.descriptor, bytes(HEAD) if what == "nothing" else bytes(range(HEAD)), HEAD)
    with pytest.raises(TransferError, match="rank 3 no longer has what this rank has stored there of microbatch 1 of stage 0"):
        peer.get(FIRST, message(0, 100)).wait()


def whole(lent: SharedBuffers) -> bytes:
    return os.pread(lent.file.descriptor, lent.file.num_bytes, 0)


@pytest.mark.parametrize("what", ["an earlier step", "another pipeline"])
def test_what_another_step_or_pipeline_left_there_is_not_loaded(what: str) -> None:
    """Even if all of it is in its place, the head too: as after a copy that was lost."""
    lent, peer = both_ends()
    if what == "another pipeline":
        other_lent, other = both_ends()
        other.put(FIRST, message(1, 100)).wait()
        left = whole(other_lent)
    else:
        peer.put(FIRST, message(1, 100)).wait()
        left = whole(lent)
        peer.get(FIRST, message(0, 100)).wait()
    peer.put(FIRST, message(2, 100)).wait()
    os.pwrite(lent.file.descriptor, left, 0)
    with pytest.raises(TransferError, match="no longer has what this rank has stored there of microbatch 1 of stage 0"):
        peer.get(FIRST, message(0, 100)).wait()


def test_bytes_that_something_else_changes_are_not_noticed() -> None:
    """As docs/how-to/one-host.md says: a checksum would cost as much as the copy."""
    lent, peer = both_ends()
    peer.put(FIRST, message(1, 100)).wait()
    os.pwrite(lent.file.descriptor, bytes([77]), 2 * HEAD)
    found = message(0, 100)
    peer.get(FIRST, found).wait()
    assert found[0][:2].tolist() == [77, 1]


def times_open(file: SharedFile) -> int:
    """How many open files of this process are this one."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.samestat(os.stat(link), os.fstat(file.descriptor)) for link in links if os.path.exists(link))


def test_one_file_has_all_buffers_and_what_grows_gives_its_place_back() -> None:
    many = Reserved((4096,) * 50, {(0, index, 0): index for index in range(50)})
    lent = SharedBuffers(many, in_bytes=True)
    lent.reserve()
    ours = SharedBuffers(many, SharedFile(os.dup(lent.file.descriptor)), in_bytes=True)
    ours.map()
    peer = PeerMemory(ours, "rank 3")
    for size in (4096, 40_960, 409_600):
        for index in range(50):
            peer.put((0, index, 0), message(index, size)).wait()
        assert lent.num_bytes == 50 * size
        assert 512 * os.fstat(lent.file.descriptor).st_blocks < 50 * (size + 3 * 4096)
        for index in range(50):
            found = message(0, size)
            peer.get((0, index, 0), found).wait()
            assert torch.equal(found[0], message(index, size)[0])
    assert times_open(lent.file) == 2
    peer.clear()
    assert times_open(lent.file) == 1
    assert lent.num_bytes == 50 * 409_600
    lent.clear()
    assert lent.num_bytes == 0


def test_a_copy_keeps_its_tensors_until_it_is_waited_for() -> None:
    """As the plan counts them."""
    _, peer = both_ends()
    storage = torch.UntypedStorage(100)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    copying = peer.put(FIRST, [tensor])
    peer.put(SECOND, message(1, 3)).wait()  # so that the first is over
    assert copying._tensors[0] is tensor
    copying.wait()
    assert not copying._tensors
    del tensor
    storage.resize_(0)


def test_memory_ends_with_its_last_user() -> None:
    before = mapped()
    lent, peer = both_ends()
    peer.put(FIRST, message(1, 100)).wait()
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
