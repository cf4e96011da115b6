"""The module that torch has for a make of device, over the simulated one: what bpipe, torch's Python code and the tests call.

It is put behind `torch.cuda`, or into a module of its own, such as a package for another make registers with torch.
"""

from __future__ import annotations

import atexit
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Stream:
    """As torch.cuda.Stream."""

    simulator: Any = None
    kind = "cuda"  # of device

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **_: Any) -> None:
        self.stream_id: int = _pooled(_index(device), priority) if stream_id is None else stream_id
        self.device_index, self.device_type = self.simulator.device_of_stream(self.stream_id), self.simulator.device_type
        self.device, self.priority = torch.device(self.kind, self.device_index), priority

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

    def is_capturing(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<simulated stream {self.stream_id} of {self.device}>"


POOL = 32  # streams of each priority on a device, which torch gives out in turn
_pools: dict[tuple[int, int], list[int]] = defaultdict(list)
_turns: dict[tuple[int, int], count[int]] = defaultdict(count)


def _pooled(device: int, priority: int) -> int:
    pool, turn = _pools[device, priority], next(_turns[device, priority]) % POOL
    if turn == len(pool):
        pool.append(int(Stream.simulator.new_stream(device)))
    return pool[turn]


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


def install(simulator: Any, kind: str) -> None:
    """Put the simulated device behind torch's module for a make, for good: torch's own for CUDA, else a new one, as a package's."""
    Stream.simulator, Stream.kind = simulator, kind
    if kind == "cuda":
        module: Any = torch.cuda
        _install_as_cuda(module, simulator)
    else:
        module = ModuleType(f"torch.{kind}")
        _register(module, kind)
    _install_streams(module, simulator)
    _install_memory(module, simulator)
    _install_random_numbers(module, simulator)
    _install_attention(kind)
    atexit.register(simulator.synchronize_device, -1)


def _register(module: Any, kind: str) -> None:
    """As a package for a make that torch does not know: its name, its module, and what tensors and modules have for it."""
    torch.utils.rename_privateuse1_backend(kind)
    torch._register_device_module(kind, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]


def _install_as_cuda(module: Any, simulator: Any) -> None:
    """What CUDA alone has."""
    module._lazy_init = lambda: None
    module._initialized = True
    module.get_device_capability = lambda device=None: (9, 0)
    module.get_allocator_backend = lambda: "native"
    module.cudart = lambda: SimpleNamespace(cudaHostRegister=simulator.pin, cudaHostUnregister=simulator.unpin)
    Stream.cuda_stream = property(lambda self: self.stream_id)  # type: ignore[attr-defined]
    resize = torch.UntypedStorage.resize_

    def resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)  # type: ignore[no-any-return, func-returns-value]
        simulator.resize_storage(self, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]


def _install_streams(module: Any, simulator: Any) -> None:
    module.Stream, module.Event, module.stream, module.StreamContext, module.device = Stream, Event, stream, stream, Device
    module.current_stream = torch.accelerator.current_stream = current_stream
    module.default_stream = lambda device=None: Stream(stream_id=_index(device))
    module.set_stream = lambda one: simulator.set_current_stream(one.stream_id)
    module.synchronize = lambda device=None: simulator.synchronize_device(_index(device))
    module.init = lambda: None
    module.is_available = module.is_initialized = lambda: True
    module.device_count = simulator.num_devices
    module.current_device = simulator.current_device
    module.set_device = lambda device: simulator.set_device(_index(device))
    module._exchange_device = module._maybe_exchange_device = _exchange
    module._is_in_bad_fork = module.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda self, stream: simulator.record_stream(self, stream.stream_id)  # type: ignore[method-assign]
    module.get_device_name = lambda device=None: "simulated"


def _install_memory(module: Any, simulator: Any) -> None:

    def statistics(device: Any = None) -> dict[str, int]:
        return dict(simulator.statistics(_index(device)))

    def reserved(device: Any = None) -> int:
        found = statistics(device)
        return found["allocated"] + found["deferred"]

    module.memory_allocated = lambda device=None: statistics(device)["allocated"]
    module.max_memory_allocated = lambda device=None: statistics(device)["peak"]
    module.memory_reserved = reserved
    module.max_memory_reserved = lambda device=None: statistics(device)["peak_held"]
    module.mem_get_info = lambda device=None: (
        statistics(device)["capacity"] - statistics(device)["symmetric"] - reserved(device),
        statistics(device)["capacity"],
    )
    module.reset_peak_memory_stats = lambda device=None: simulator.reset_peak(_index(device))
    module.memory_stats = lambda device=None: {
        "allocated_bytes.all.current": statistics(device)["allocated"],
        "allocated_bytes.all.peak": statistics(device)["peak"],
    }
    module.empty_cache = lambda: None


def _install_random_numbers(module: Any, simulator: Any) -> None:
    generators = tuple(simulator.default_generator(one) for one in range(simulator.num_devices()))
    module.default_generators = generators
    module.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[_index(device)].set_state(state)
    module.get_rng_state_all = lambda: [one.get_state() for one in generators]
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [one.manual_seed(seed) for one in generators]
    module.initial_seed = lambda: generators[_index()].initial_seed()


def _install_attention(kind: str) -> None:
    """The fused kernels of attention are not simulated: its composition of other operations is used."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **how: Any
    ) -> Any:
        if q.device.type != kind:
            return fused(q, k, v, attn_mask, dropout_p, is_causal, **how)
        composed = torch.ops.aten._scaled_dot_product_attention_math
        return composed(q, k, v, attn_mask, dropout_p, is_causal, None, **how)[0]

    torch.nn.functional.scaled_dot_product_attention = attention
