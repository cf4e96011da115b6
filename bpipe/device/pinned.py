"""Pinned host memory in whole pages: torch's own rounds up to a power of two, which may be twice as much."""

from __future__ import annotations

import ctypes
import mmap
import threading
from weakref import WeakValueDictionary

import torch

from bpipe.device import Event, Stream, current, pin, unpin

__all__: list[str] = []


class _Pages(mmap.mmap):
    """Whole pages of host memory that a device copies to and from without the host, pinned as long as they have an owner."""

    pinned: tuple[int, torch.device] | None = None  # the address, and the device
    done: Event | None = None  # behind the last copy, once they are returned

    def __del__(self) -> None:
        if self.pinned is not None:  # the last owner may be another than the thread that waits, such as an error's frames
            unpin(*self.pinned, self.done)


_PAGES: WeakValueDictionary[int, _Pages] = WeakValueDictionary()  # by address


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate host memory that a device copies to and from without the host, uint8 [num_bytes]. Blocks the host.

    It must not be freed while a copy is in flight: see `return_`.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    pages = _Pages(-1, num_bytes)
    if hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DONTFORK)  # otherwise a child, such as a data loader's worker, would keep it
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pin(memory.data_ptr(), num_bytes, device):
        pages.pinned = memory.data_ptr(), device
        _PAGES[memory.data_ptr()] = pages
        return memory
    with current(device):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def return_(memory: list[torch.Tensor], stream: Stream) -> None:
    """Empty the list, and free its pinned memory once a stream has run its queued work. Does not block: a thread waits."""
    held, memory[:] = [one for one in memory if one.numel()], []
    if not held:
        return
    done = stream.record_event()
    for one in held:
        if (pages := _PAGES.get(one.data_ptr())) is not None:
            pages.done = done
    try:
        threading.Thread(target=_hold, args=(held, done, stream.device), name="bpipe-give-back", daemon=True).start()
    except RuntimeError:  # the interpreter ends, and with it the process, which frees all memory: do not free it before that
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _hold(held: list[torch.Tensor], done: Event, device: torch.device) -> None:
    with current(device):
        done.synchronize()
        held.clear()
