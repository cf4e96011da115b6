"""What a rank may run out of while it connects to others: it says so, because it would look like a fault of the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bpipe.errors import CommError, text_of

__all__: list[str] = []

NO_THREAD = "can't start new thread"  # what Python says


def _limit_of_files() -> str:
    try:
        import resource

        limit = f", which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} here"
    except ImportError:  # the platform has none
        limit = ""
    return f"raise this process's limit of open files{limit} (ulimit -n, or LimitNOFILE of its service), or close some"


WAYS_OUT: dict[int, Callable[[], str]] = {
    # First the one whose text has the next one's in it.
    errno.ENFILE: lambda: "raise this machine's limit of open files (sysctl fs.file-max), or end what has them open",
    errno.EMFILE: _limit_of_files,
    errno.ENOBUFS: lambda: "free memory of this machine's kernel for connections, or end what has them open",
    errno.ENOMEM: lambda: "free memory of this machine",
}
MORE_WATCHES = "raise the number of watches that this user may have (sysctl fs.epoll.max_user_watches)"
NO_PORT = "all ports that this machine calls from are taken (sysctl net.ipv4.ip_local_port_range), or it has no such address"
MORE_SHARED = "make /dev/shm larger (docker run --shm-size, or mount -o remount,size=), or remove what ended jobs have left there"
MORE_THREADS = "raise the limit of threads (ulimit -u, or pids.max of its cgroup), or start fewer processes on this machine"


def way_out(error: BaseException | str) -> str:
    """Return what to do if an error says that this process or machine has run out of something; empty if it says something else.

    torch raises a RuntimeError, whose text has the system's.
    """
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    for code, advice in WAYS_OUT.items():
        if _says(error, text, code):
            return advice()
    if _says(error, text, errno.ENOSPC):  # of watches, or in a file
        is_file = "epoll" not in text if text else getattr(error, "filename", None) is not None
        return MORE_WATCHES if not is_file else MORE_SHARED if "/dev/shm" in text else ""
    return MORE_THREADS if NO_THREAD in text else ""


def _says(error: BaseException | str, text: str, code: int) -> bool:
    return getattr(error, "errno", None) == code or os.strerror(code) in text


def explained(error: BaseException | str) -> str:
    """Return why a call has failed, with what to do if there is no port to call from."""
    return f"{error} ({NO_PORT})" if getattr(error, "errno", None) == errno.EADDRNOTAVAIL else str(error)


def named(error: BaseException) -> CommError | None:
    """Return the error to raise in place of one that says that this rank has run out of something; None for any other."""
    advice = "" if isinstance(error, CommError) else way_out(error)
    return CommError(f"this rank cannot connect to the others: {text_of(error)}: {advice}") if advice else None


@contextmanager
def naming_shortage() -> Iterator[None]:
    """Open connections inside this context.

    Raises:
        CommError: this rank has run out of descriptors, memory or threads.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (shortage := named(error)) is not None:
            raise shortage from error
        raise


@contextmanager
def passing_over() -> Iterator[None]:
    """Pass over an error of one connection or address, but not that this rank has run out of something."""
    try:
        yield
    except OSError as error:
        if way_out(error):
            raise
