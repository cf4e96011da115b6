"""Memory of a CUDA device that another process of the host opens by a handle, which CUDA's driver makes.

torch has handles too (`UntypedStorage._share_cuda_`, `_new_shared_cuda`), for tensors that many processes share. They count their
users in a named file of /dev/shm, which stays if a process is killed, and keep the memory until the count is zero; torch opens them
on the device that has the sender's number, which may be another one here, or none. A handle of the driver is opened on this
process's own device, and the memory may lie on any that this one can copy to and from, even on one that this process does not see.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bpipe.device import current, current_stream, free_bytes
from bpipe.errors import CommError
from bpipe.torch_private.owners_and_versions import storage_at

__all__: list[str] = []

DRIVER = "libcuda.so.1"
LAZY_ENABLE_PEER_ACCESS = 1
NO_HANDLE = (
    "(torch's allocator takes memory without handles under expandable_segments:True and backend:cudaMallocAsync in "
    "PYTORCH_CUDA_ALLOC_CONF; BPIPE_SHARED_MEMORY=0 does without handles)"
)
FORM = struct.Struct("=64sQQ")  # the driver's handle of an allocation, and where in it the memory is: offset and size


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def why_no_handles(device: torch.device) -> str:
    """Return why no process can open memory of a device by a handle, as far as is known without trying; empty if nothing is."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "only CUDA's memory has handles that bpipe knows"
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        return str(error)
    return ""


def handle_of(memory: torch.Tensor) -> bytes:
    """Return a handle by which another process opens memory, uint8 [size >= 1], that torch allocated on the current stream.

    Blocks the host until nothing that was queued writes or reads the memory any more.

    Raises:
        CommError: the driver gives none, as for memory of expandable segments.
    """
    with in_context(memory.device):
        current_stream(memory.device).synchronize()
        base, handle = ctypes.c_uint64(), _Handle()
        try:
            call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), None, ctypes.c_uint64(memory.data_ptr()))
            call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except CommError as error:
            raise CommError(f"{error} {NO_HANDLE}") from error
    return FORM.pack(bytes(handle), memory.data_ptr() - base.value, memory.numel())


class OpenedMemory:
    """Memory of another process, on this device as far as torch is concerned.

    Args:
        handle: what `handle_of` returned there.
        device: this process's own.

    Raises:
        CommError: it cannot be opened: it is on another host, or this device cannot reach that one.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        identity, offset, num_bytes = FORM.unpack(handle)
        self._device, self._base = device, ctypes.c_uint64()
        with in_context(device):
            flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
            call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(self._base), _Handle.from_buffer_copy(identity), flags)
        storage = storage_at(self._base.value + offset, device, num_bytes)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))

    def close(self) -> None:
        """Unmap it. Nothing that was queued may use it any more, and no tensor after this."""
        with in_context(self._device):
            call_driver("cuIpcCloseMemHandle", self._base)


@contextmanager
def in_context(device: torch.device) -> Iterator[None]:
    """Make a device's context the calling thread's for the driver, which torch does only where it asks the driver something."""
    with current(device):
        free_bytes(device)
        yield


def call_driver(name: str, *arguments: Any) -> None:
    try:
        code = getattr(ctypes.CDLL(DRIVER), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise CommError(f"CUDA's driver has no {name}: {error}") from error
    if code:
        text = ctypes.c_char_p()
        ctypes.CDLL(DRIVER).cuGetErrorName(code, ctypes.byref(text))
        raise CommError(f"{name} says {(text.value or b'').decode() or code}")
