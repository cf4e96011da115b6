"""`torch.cuda` over the simulated device: the functions that bpipe, torch's own Python code and the tests call."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stream:
    """As torch.cuda.Stream."""

    simulator: Any = None

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> None:
        self.stream_id: int = self.simulator.new_stream(_index(device)) if stream_id is None else stream_id
        self.device_index, self.device_type, self.cuda_stream = self.simulator.device_of_stream(self.stream_id), 1, self.stream_id
        self.device, self.priority = torch.device("cuda", self.device_index), priority

    def wait_event(self, event: Event) -> None:
        event._event.block(self.stream_id)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return bool(self.simulator.is_idle(self.stream_id))

    def synchronize(self) -> None:
        self.simulator.synchronize_stream(self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<simulated stream {self.stream_id} of {self.device}>"


class Event:
    """As torch.cuda.Event."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._event, self.enable_timing = Stream.simulator.Event(), enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self._event.record((current_stream() if stream is None else stream).stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        self._event.block((current_stream() if stream is None else stream).stream_id)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: Event) -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return float(self._event.milliseconds_to(end._event))


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(Stream.simulator.current_device()) if index is None else index


def current_stream(device: Any = None) -> Stream:
    return Stream(stream_id=Stream.simulator.current_stream(_index(device)))


@contextmanager
def stream(of: Stream | None) -> Iterator[Stream | None]:
    """As torch.cuda.stream: the stream, and its device, are current inside."""
    if of is None:
        yield None
        return
    with Device(of.device_index):
        outer = Stream.simulator.set_current_stream(of.stream_id)
        try:
            yield of
        finally:
            Stream.simulator.set_current_stream(outer)


class Device:
    """As torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> Device:
        self._outer = Stream.simulator.current_device()
        Stream.simulator.set_device(self.idx)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.simulator.set_device(self._outer)


def _exchange(device: int) -> int:
    before = int(Stream.simulator.current_device())
    if device >= 0:
        Stream.simulator.set_device(device)
    return before


def install(simulator: Any) -> None:
    """Put the simulated device behind torch.cuda, for good."""
    Stream.simulator = simulator
    _install_streams(simulator)
    _install_memory(simulator)
    _install_random_numbers(simulator)
    _install_attention()
    atexit.register(simulator.synchronize_device, -1)


def _install_streams(simulator: Any) -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream, cuda.StreamContext, cuda.device = Stream, Event, stream, stream, Device
    cuda.current_stream = current_stream
    cuda.default_stream = lambda device=None: Stream(stream_id=_index(device))
    cuda.set_stream = lambda one: simulator.set_current_stream(one.stream_id)
    cuda.synchronize = lambda device=None: simulator.synchronize_device(_index(device))
    cuda._lazy_init = cuda.init = lambda: None
    cuda._initialized = True
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = simulator.num_devices
    cuda.current_device = simulator.current_device
    cuda.set_device = lambda device: simulator.set_device(_index(device))
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda._is_in_bad_fork = cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda self, stream: simulator.record_stream(self, stream.stream_id)  # type: ignore[method-assign]
    cuda.get_device_name = lambda device=None: "simulated"
    cuda.get_device_capability = lambda device=None: (9, 0)


def _install_memory(simulator: Any) -> None:
    cuda: Any = torch.cuda

    def statistics(device: Any = None) -> dict[str, int]:
        return dict(simulator.statistics(_index(device)))

    def reserved(device: Any = None) -> int:
        found = statistics(device)
        return found["allocated"] + found["deferred"]

    cuda.memory_allocated = lambda device=None: statistics(device)["allocated"]
    cuda.max_memory_allocated = lambda device=None: statistics(device)["peak"]
    cuda.memory_reserved = reserved
    cuda.max_memory_reserved = lambda device=None: statistics(device)["peak_held"]
    cuda.mem_get_info = lambda device=None: (statistics(device)["capacity"] - reserved(device), statistics(device)["capacity"])
    cuda.reset_peak_memory_stats = lambda device=None: simulator.reset_peak(_index(device))
    cuda.memory_stats = lambda device=None: {
        "allocated_bytes.all.current": statistics(device)["allocated"],
        "allocated_bytes.all.peak": statistics(device)["peak"],
    }
    cuda.empty_cache = lambda: None
    resize = torch.UntypedStorage.resize_

    def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)  # type: ignore[no-any-return, func-returns-value]
        simulator.resize_storage(self, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]


def _install_random_numbers(simulator: Any) -> None:
    cuda: Any = torch.cuda
    generators = tuple(simulator.default_generator(one) for one in range(simulator.num_devices()))
    cuda.default_generators = generators
    cuda.get_rng_state = lambda device="cuda": generators[_index(device)].get_state()
    cuda.set_rng_state = lambda state, device="cuda": generators[_index(device)].set_state(state)
    cuda.get_rng_state_all = lambda: [one.get_state() for one in generators]
    cuda.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    cuda.manual_seed_all = lambda seed: [one.manual_seed(seed) for one in generators]
    cuda.initial_seed = lambda: generators[_index()].initial_seed()


def _install_attention() -> None:
    """The fused kernels of attention are not simulated: its composition of other operations is used."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **how: Any
    ) -> Any:
        if not q.is_cuda:
            return fused(q, k, v, attn_mask, dropout_p, is_causal, **how)
        composed = torch.ops.aten._scaled_dot_product_attention_math
        return composed(q, k, v, attn_mask, dropout_p, is_causal, None, **how)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
