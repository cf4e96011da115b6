"""Memory that processes of one host share: a file without a name, which the kernel frees with the last process that has it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np

from bpipe.errors import CommError

__all__: list[str] = []


class Lent(NamedTuple):
    """What a process passes on to another one, which then reaches memory of the first.

    Args:
        descriptor: of an open file. Whoever gets it owns it.
        data: at most 65,535 bytes, if the file does not say all.
    """

    descriptor: int
    data: bytes = b""


class SharedFile:
    """Memory that each process maps which holds the file.

    It has no name in any folder, so nothing is left of it after its processes have ended, however they ended.

    Args:
        descriptor: of an open file, which belongs to this object from now on; by default, a new file is made.

    Raises:
        OSError: this platform has no such files, or this process has too many open files.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _new() if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def num_bytes(self) -> int:
        """The size that one of the processes gave it."""
        return os.fstat(self.descriptor).st_size

    def grow(self, num_bytes: int) -> None:
        """Reserve its first bytes, so that no later access can fail for want of memory.

        Raises:
            CommError: there is not enough memory.
        """
        missing = num_bytes - self.num_bytes
        if missing <= 0:
            return
        try:
            if missing > _available():  # the kernel would end processes before it says so
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            raise CommError(
                f"{num_bytes} bytes of memory that processes share cannot be reserved ({error.strerror}): free memory on this "
                "host, or set BPIPE_SHARED_MEMORY=0 so that tensors travel over sockets"
            ) from error

    def map(self) -> np.ndarray:
        """Return its bytes, uint8 [num_bytes]; all pages are mapped at once, because faults cost as much as a copy."""
        return np.frombuffer(mmap.mmap(self.descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)


def _available() -> int:
    """Return the bytes of memory that the kernel can still give."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 2**63)


def _new() -> int:
    """Make a file that no process can shrink, because an access behind its end would kill the others."""
    descriptor = os.memfd_create("bpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def can_share() -> bool:
    """Return whether this platform has memory that processes share through a file without a name."""
    try:
        SharedFile()
    except (AttributeError, OSError):
        return False
    return True
