"""The device of a stage: its streams, events, memory and random numbers, for any kind of device.

No other part of bpipe knows kinds of devices. Each is reached through the module that torch has for it (`torch.get_device_module`):
`torch.cuda` for "cuda", `torch.xpu` for "xpu", or one that a package has registered.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from bpipe.errors import CommError, ConfigurationError

__all__: list[str] = []

POOL = 32  # streams that torch has of each priority

Stream = Any  # torch.cuda.Stream, torch.xpu.Stream ...
Event = Any


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host continues while the device runs work that was queued on its streams."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


def with_index(device: torch.device) -> torch.device:
    """Return the device with an index: if it has none, that of the current device, so that all threads use the same one."""
    if device.index is not None or not is_asynchronous(device):
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device()) if module.is_available() else device


def default_kind() -> str:
    """Return the type of accelerator that torch uses here; "cuda" if there is none, as in torch's own defaults."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which the calling thread queues its work."""
    return torch.get_device_module(device).current_stream(device)


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Make a stream, and its device, current inside a context; None changes nothing."""
    return nullcontext() if stream is None else torch.get_device_module(stream.device).stream(stream)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's current one: threads start on the first device, where even pinned memory takes memory."""
    return torch.get_device_module(device).device(device) if is_asynchronous(device) else nullcontext()


def reached(device: torch.device) -> Event:
    """Record an event that completes when everything queued on the current stream has run."""
    return current_stream(device).record_event()


def timed_moment(device: torch.device) -> Event:
    """Record an event like that of `reached`, which also stores its time."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record(current_stream(device))
    return event


def has_come(event: Event, device: torch.device) -> bool:
    """Return whether a device's event has completed. The device is made current: a query takes memory on the current one."""
    with current(device):
        return bool(event.query())


def synchronize(device: torch.device) -> None:
    """Block the host until an asynchronous device has run everything that is queued."""
    if is_asynchronous(device):
        torch.get_device_module(device).synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether queued work is recorded into a graph instead of being run."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None) if is_asynchronous(device) else None
    return capturing is not None and bool(capturing())


def graph_maker(function: type) -> str | None:
    """Return which function made an autograd Function that replays a device's graph; None for any other Function."""
    module = function.__module__
    is_graph = function.__name__ == "Graphed" and module.startswith("torch.") and module.endswith(".graphs")
    return f"{module.removesuffix('.graphs')}.make_graphed_callables" if is_graph else None


def random_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's random numbers, uint8; None if they are the CPU's."""
    return torch.get_device_module(device).get_rng_state(device) if is_asynchronous(device) else None


def set_random_state(state: torch.Tensor | None, device: torch.device) -> None:
    """Restore a state that `random_state` returned."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def fork_random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of the CPU's random numbers and of these devices' on exit."""
    states = [(device, random_state(device)) for device in devices]
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            for device, state in states:
                set_random_state(state, device)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an asynchronous device; memory cached by torch's allocator does not count as free."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def total_bytes(device: torch.device) -> int:
    """Return the bytes of all memory of a device; of the machine, for the CPU."""
    if is_asynchronous(device):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(num_bytes: int, device: torch.device, what: object) -> None:
    """Refuse what another rank announces if it is larger than a device's whole memory, before any is allocated for it.

    Raises:
        CommError: it is.
    """
    if num_bytes > (total := total_bytes(device)):
        raise CommError(f"{what}: {num_bytes} bytes are announced, and all memory of {name_of(device)} has {total}")


def give_back_unused(device: torch.device) -> None:
    """Release the memory that torch's allocator caches, which it keeps for the stream that used it. Blocks the host."""
    with current(device):
        torch.get_device_module(device).empty_cache()


def pin(address: int, num_bytes: int, device: torch.device) -> bool:
    """Pin host memory, so that a device can copy to and from it without the host.

    Returns:
        False if this kind of device cannot pin memory that exists already.

    Raises:
        ConfigurationError: the host cannot pin so many bytes.
    """
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None:
        return False
    with current(device):
        code = int(runtime().cudaHostRegister(address, num_bytes, 0))
    if code:
        raise ConfigurationError(
            f"the host cannot pin {num_bytes:,} bytes for {device} (CUDA error {code}): evict fewer bytes to the host, "
            "or raise the limit of locked memory (`ulimit -l`, or the container's)"
        )
    return True


def unpin(address: int, device: torch.device, done: Event | None) -> None:
    """Unpin memory that `pin` pinned, behind an event. May block the host."""
    with suppress(Exception), current(device):  # at the interpreter's end the device may be gone
        if done is not None:
            done.synchronize()
        torch.get_device_module(device).cudart().cudaHostUnregister(address)


def marks_only_its_own(device: torch.device) -> bool:
    """Return whether torch's allocator ignores `record_stream` for memory that it did not allocate."""
    backend = getattr(torch.get_device_module(device), "get_allocator_backend", None)
    return backend is None or backend() == "native"


def name_of(device: torch.device) -> str:
    """Return the name that the device's maker gives it, or its type if it is not asynchronous."""
    return str(torch.get_device_module(device).get_device_name(device)) if is_asynchronous(device) else device.type


def serving(rank: int, evictor: int) -> Hashable:
    """Return the key of the stream for a rank's buffers for an evictor, and for the transfers to and from them."""
    return "remote activations", rank, evictor


class Streams:
    """The streams that a pipeline uses besides its caller's.

    In a step each stream waits for the work that it needs, where the plan says so. A step that fails leaves work that no stream
    waits for, and frees the memory that this work uses: so `join` then makes all of them wait for each other.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, torch.device], Stream] = {}

    def of(self, user: Hashable, device: torch.device) -> Stream | None:
        """Return the stream of a lane, a channel or any other user, the same each time; None if the device is not asynchronous."""
        if (user, device) not in self._made and is_asynchronous(device):
            self._made[user, device] = self._new(device)
        return self._made.get((user, device))

    def _new(self, device: torch.device) -> Stream:
        """Return a stream not in use here, if there is one: torch hands out a pool's streams in turn, then the same ones again."""
        ours, stream = list(self._made.values()), None
        for _ in range(POOL):
            stream = torch.get_device_module(device).Stream(device)
            if stream not in ours:
                break
        return stream

    def join(self) -> None:
        """Make work that is queued from now on, here or on the callers' current streams, run after everything queued until now."""
        ours = list(self._made.values())
        currents = [current_stream(device) for device in {stream.device for stream in ours}]
        for waiting, others in ((currents, ours), (ours, currents)):
            for stream in waiting:
                for other in others:
                    stream.wait_stream(other)
