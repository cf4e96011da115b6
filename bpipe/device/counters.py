"""Numbers in the host's memory that the streams of several processes' devices write and wait for, by functions of CUDA's driver.

A wait takes no multiprocessor. The memory is the host's, so that a process can end its own waits by writing there itself.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np
import torch

from bpipe.device import Stream
from bpipe.device.handles import call_driver, in_context
from bpipe.errors import CommError

__all__: list[str] = []

AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
PAGE = 4096  # bytes


class Counters:
    """Numbers of 64 bits, which begin as zeros.

    Args:
        memory: whole pages that each process maps which uses them, uint8.
        device: this process's.

    Raises:
        CommError: the driver has no such functions, or the host cannot pin the memory.
    """

    def __init__(self, memory: np.ndarray, device: torch.device) -> None:
        self._numbers, self._device = memory.view(np.uint64), device
        host, self._begin = memory.ctypes.data, ctypes.c_uint64()
        with in_context(device):
            # Not by the runtime, in which an error would stay and be taken for one of the next kernel's.
            call_driver("cuMemHostRegister_v2", ctypes.c_void_p(host), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(0))
            try:
                call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(self._begin), ctypes.c_void_p(host), ctypes.c_uint(0))
            except CommError:
                self.close()
                raise

    def write(self, index: int, value: int, stream: Stream) -> None:
        """Let a stream write a number, once all that it was given before is done and to be seen by every device."""
        self._queue("cuStreamWriteValue64_v2", index, value, stream, 0)

    def wait(self, index: int, least: int, stream: Stream) -> None:
        """Let a stream wait until a number is at least this."""
        self._queue("cuStreamWaitValue64_v2", index, least, stream, AT_LEAST)

    def _queue(self, name: str, index: int, value: int, stream: Stream, flags: int) -> None:
        place = ctypes.c_uint64(self._begin.value + index * self._numbers.itemsize)
        call_driver(name, ctypes.c_void_p(stream.cuda_stream), place, ctypes.c_uint64(value), ctypes.c_uint(flags))

    def set(self, index: int, value: int) -> None:
        """Write a number now."""
        self._numbers[index] = value

    def close(self) -> None:
        """Unpin the memory. No stream may use it any more."""
        with suppress(Exception), in_context(self._device):  # at the interpreter's end the device may be gone
            call_driver("cuMemHostUnregister", ctypes.c_void_p(self._numbers.ctypes.data))
