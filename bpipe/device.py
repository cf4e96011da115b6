"""What a stage computes on: its streams, events, memory and random numbers, whatever kind of device it is.

Nothing else in bpipe knows kinds of devices. They are reached through the module that torch has for it (`torch.get_device_module`):
`torch.cuda` for "cuda", `torch.xpu` for "xpu", or one that a package has registered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from bpipe.errors import ConfigurationError

__all__: list[str] = []

POOL = 32  # streams that torch has of each priority

Stream = Any  # torch.cuda.Stream, torch.xpu.Stream ...
Event = Any


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host goes on while the device computes what was queued on its streams."""
    return device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")


def with_index(device: torch.device) -> torch.device:
    """The device itself where only its type is given: the one that is current now, in whichever thread it is used later."""
    if device.index is not None or not is_asynchronous(device):
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device()) if module.is_available() else device


def default_kind() -> str:
    """The type of device that torch computes on here; "cuda" where there is none, as torch's own defaults say."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def current_stream(device: torch.device) -> Stream:
    """The stream on which the calling thread queues what it computes."""
    return torch.get_device_module(device).current_stream(device)


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Queue on a stream, of whose device it is meanwhile; None: as before."""
    return nullcontext() if stream is None else torch.get_device_module(stream.device).stream(stream)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one of the calling thread: threads start with the first, where pinned memory takes room, too."""
    return torch.get_device_module(device).device(device) if is_asynchronous(device) else nullcontext()


def reached(device: torch.device) -> Event:
    """An event that comes when all that is queued on the current stream has run."""
    return current_stream(device).record_event()


def timed_moment(device: torch.device) -> Event:
    """Such an event that knows its time."""
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record(current_stream(device))
    return event


def has_come(event: Event, device: torch.device) -> bool:
    """Whether an event of a device has come. A query makes room for itself on whichever device is the current one."""
    with current(device):
        return bool(event.query())


def synchronize(device: torch.device) -> None:
    """Block the host until the device has run all that is queued, on a device that is asynchronous."""
    if is_asynchronous(device):
        torch.get_device_module(device).synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether what is queued is recorded into a graph, in place of being run."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None) if is_asynchronous(device) else None
    return capturing is not None and bool(capturing())


def graph_maker(function: type) -> str | None:
    """What made an autograd Function that replays a graph of some kind of device; None for any other Function."""
    module = function.__module__
    is_graph = function.__name__ == "Graphed" and module.startswith("torch.") and module.endswith(".graphs")
    return f"{module.removesuffix('.graphs')}.make_graphed_callables" if is_graph else None


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's random numbers, uint8; None where they are the CPU's."""
    return torch.get_device_module(device).get_rng_state(device) if is_asynchronous(device) else None


def set_random_state(state: torch.Tensor | None, device: torch.device) -> None:
    """Go back to what `random_state` gave."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def fork_random_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the states of the CPU's random numbers and of these devices' back in the end."""
    states = [(device, random_state(device)) for device in devices]
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            for device, state in states:
                set_random_state(state, device)


def free_bytes(device: torch.device) -> int:
    """The bytes that are free on an asynchronous device. What torch's allocator keeps there and nobody uses is not."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def give_back_unused(device: torch.device) -> None:
    """Let torch's allocator give back what nobody uses: it keeps that for the stream that has used it. Blocks the host."""
    with current(device):
        torch.get_device_module(device).empty_cache()


def pin(address: int, num_bytes: int, device: torch.device) -> bool:
    """Let a device copy to and from memory of the host by itself.

    Returns:
        False if this kind of device cannot pin memory that exists already.

    Raises:
        ConfigurationError: the host cannot pin so much.
    """
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None:
        return False
    with current(device):
        code = int(runtime().cudaHostRegister(address, num_bytes, 0))
    if code:
        raise ConfigurationError(
            f"the host cannot pin {num_bytes:,} bytes for {device} (CUDA error {code}): let fewer bytes go to the host, "
            "or raise the limit of locked memory (`ulimit -l`, or the container's)"
        )
    return True


def unpin(address: int, device: torch.device) -> None:
    """End what `pin` began. May block the host."""
    with suppress(Exception), current(device):  # at the interpreter's end the device may be gone
        torch.get_device_module(device).cudart().cudaHostUnregister(address)


def marks_only_its_own(device: torch.device) -> bool:
    """Whether torch's allocator for a device leaves memory alone that it has not allocated, where it is to mark it as in use."""
    backend = getattr(torch.get_device_module(device), "get_allocator_backend", None)
    return backend is None or backend() == "native"


def name_of(device: torch.device) -> str:
    """What its maker calls it."""
    return str(torch.get_device_module(device).get_device_name(device)) if is_asynchronous(device) else device.type


def guests(rank: int, evictor: int) -> Hashable:
    """Whose stream a rank's rooms for an evictor are on, and the transfers to and from them."""
    return "guests", rank, evictor


class Streams:
    """The streams on which a pipeline works beside its caller's.

    In a step each one waits for what it needs, where the plan has it. A step that fails leaves work for which nobody waits, and
    frees what that works on: so `join` then has all of them wait for each other.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, torch.device], Stream] = {}

    def of(self, user: Hashable, device: torch.device) -> Stream | None:
        """The stream of a lane, of a channel, or of whatever else; the same each time. None where nothing is asynchronous."""
        if (user, device) not in self._made and is_asynchronous(device):
            self._made[user, device] = self._new(device)
        return self._made.get((user, device))

    def _new(self, device: torch.device) -> Stream:
        """A stream that nobody here has: torch gives them out of a pool in turn, and the same ones again after the last."""
        ours, stream = list(self._made.values()), None
        for _ in range(POOL):
            stream = torch.get_device_module(device).Stream(device)
            if stream not in ours:
                break
        return stream

    def join(self) -> None:
        """Let what is queued from now on, here or on the callers' current streams, run after all that is queued now."""
        ours = list(self._made.values())
        currents = [current_stream(device) for device in {stream.device for stream in ours}]
        for waiting, others in ((currents, ours), (ours, currents)):
            for stream in waiting:
                for other in others:
                    stream.wait_stream(other)
