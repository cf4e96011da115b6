"""Memory that processes of one host share: a file without a name, which the kernel frees with the last process that has it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from bpipe.device.available import available_bytes
from bpipe.errors import CommError

__all__: list[str] = []

READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
PUNCH_HOLE = 3  # of fallocate: free the pages, and keep the size
OFFSET, SIZE = ctypes.c_int64, ctypes.c_size_t


class Closeable(Protocol):
    """Something that is open in this process, such as a socket."""

    def close(self) -> object:
        """Close it here, which other processes do not notice as long as one of them has it open."""


_OPEN: weakref.WeakSet[Closeable] = weakref.WeakSet()  # in this process, and not in its children


def close_in_children(one: Closeable) -> None:
    """Close an object in each child that this process forks: one that lives on would keep it open after this process has ended."""
    _OPEN.add(one)


def _close_all() -> None:
    for one in list(_OPEN):
        with suppress(OSError):
            one.close()


os.register_at_fork(after_in_child=_close_all)


class Lent(NamedTuple):
    """What a process passes on to another one, which then reaches memory of the first.

    Args:
        descriptor: of an open file. Whoever gets it owns it.
        data: at most 65,535 bytes, if the file does not say all.
    """

    descriptor: int
    data: bytes = b""


class NoSharedMemoryError(CommError):
    """Memory that processes share cannot be had.

    Attributes:
        why: the reason, without what to do.
    """

    why: str = ""


def no_memory(num_bytes: int, why: str | None) -> NoSharedMemoryError:
    """Return the error for memory of a size that cannot be had."""
    error = NoSharedMemoryError(
        f"{num_bytes} bytes of memory that processes share cannot be reserved ({why}): free memory on this host, or set "
        "BPIPE_SHARED_MEMORY=0 so that tensors travel over sockets"
    )
    error.why = f"{num_bytes} bytes of it cannot be reserved ({why})" if num_bytes else f"it cannot be made ({why})"
    return error


class SharedFile:
    """Memory that each process maps which holds the file.

    It has no name in any folder, so nothing is left of it after its processes have ended, however they ended. Forked children hold
    neither the file nor its memory, because they may outlive this process.

    Args:
        descriptor: of an open file, which belongs to this object from now on; by default, a new file is made.

    Raises:
        NoSharedMemoryError: this platform has no such files, or this process has too many open files.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _new() if descriptor is None else descriptor
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        close_in_children(self)

    @property
    def num_bytes(self) -> int:
        """The size that one of the processes gave it."""
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        """Close it in this process. What is mapped stays."""
        self._closing()

    def grow(self, num_bytes: int) -> None:
        """Reserve memory behind its end until it has this size, so that no later access can fail for want of memory.

        Raises:
            NoSharedMemoryError: there is not enough memory.
        """
        begin = self.num_bytes
        missing = num_bytes - begin
        if missing <= 0:
            return
        try:
            if missing > available_bytes():  # the kernel would end processes before it says so
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(self.descriptor, begin, missing)
        except OSError as error:
            raise no_memory(missing, error.strerror) from error

    def free(self, begin: int, num_bytes: int) -> None:
        """Give the memory of some of its bytes back to the host. They are zeros from now on, and are no longer reserved."""
        _library().fallocate(self.descriptor, PUNCH_HOLE, OFFSET(begin), OFFSET(num_bytes))  # if it cannot, the bytes stay

    def map(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return its bytes, uint8 [end - begin]; all pages are mapped at once, because faults cost as much as a copy.

        `mmap.mmap` would keep another open file for each part that is mapped.

        Raises:
            NoSharedMemoryError: this process may not map more.
        """
        end = self.num_bytes if end is None else end
        first = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        flags, size = mmap.MAP_SHARED | mmap.MAP_POPULATE, end - first
        address = _library().mmap(None, SIZE(size), READ_AND_WRITE, flags, self.descriptor, OFFSET(first))
        if address == ctypes.c_void_p(-1).value:
            raise no_memory(size, os.strerror(ctypes.get_errno()))
        _library().madvise(ctypes.c_void_p(address), SIZE(size), mmap.MADV_DONTFORK)
        mapped = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit, when threads may still copy.
        weakref.finalize(mapped, _unmap, os.getpid(), address, size).atexit = False
        return np.frombuffer(memoryview(mapped), np.uint8)[begin - first :]


def _unmap(process: int, address: int, size: int) -> None:
    if os.getpid() == process:  # a forked child may have something else there
        _library().munmap(ctypes.c_void_p(address), SIZE(size))


@cache
def _library() -> Any:
    """Return the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def _new() -> int:
    """Make a file that no process can shrink, because an access behind its end would kill the others."""
    try:
        descriptor = os.memfd_create("bpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except AttributeError as error:
        raise no_memory(0, f"this platform does not have it: {error}") from error
    except OSError as error:
        raise no_memory(0, error.strerror) from error
    return descriptor


def why_not_shared() -> str:
    """Return why this process can share no memory through files without a name; empty if it can."""
    try:
        SharedFile().close()
    except NoSharedMemoryError as error:
        return error.why
    return ""
