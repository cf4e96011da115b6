"""Convert the arguments of `advise` into what it works with. Every refusal that needs no simulation happens here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from bpipe.checks import check_count, check_positive, lookup
from bpipe.errors import ConfigurationError
from bpipe.estimate.devices import Device, device_named, is_named, link_named
from bpipe.estimate.execution import RECOMPUTATIONS, Execution
from bpipe.estimate.measurement import Profile
from bpipe.estimate.models import model_named
from bpipe.estimate.state_bytes import DEFAULT_BYTES_PER_PARAMETER
from bpipe.estimate.transformer import Transformer
from bpipe.estimate.workload import Links, ModelWorkload
from bpipe.simulator.costs import Link

__all__: list[str] = []

RESERVED_SHARE = 0.05  # 4 of 80 GiB: CUDA's context, communication buffers, fragmentation, gradients of activations

LinkArgument = str | float | Link | None


def device_of(device: str | Device | None) -> Device | None:
    """Look up a device by name; return a `Device` or None unchanged."""
    if device is None or isinstance(device, Device):
        return device
    return device_named(device)


def computing(device: Device | None, precision: str) -> Device:
    """Return the device; raise unless its peak is known, and is one of that precision."""
    if device is None:
        raise ConfigurationError("how fast is a device? Give device= (such as 'a100-80gb'), or a bpipe.estimate.Device")
    if precision == "fp32" and is_named(device):
        raise ConfigurationError(
            f"the peak of {device.name} is known for 16 bits: give device=Device(...) with its peak in fp32 or tf32"
        )
    return device


def transformer_of(model: object) -> Transformer:
    """Look up a model by name; return a `Transformer` unchanged."""
    if isinstance(model, Transformer):
        return model
    if isinstance(model, str):
        return model_named(model)
    raise ConfigurationError(
        f"model= is of type {type(model).__qualname__}: give a name, a bpipe.estimate.Transformer, or a result of bpipe.profile"
    )


def workload_of(
    model: object,
    device: Device | None,
    *,
    sequence: int | None,
    recomputations: object,
    efficiency: float | Mapping[int, float] | None,
    bytes_per_parameter: float | None,
    layers: object = None,
    **execution: Any,
) -> ModelWorkload:
    """Return a model by formulas, as `advise` describes it; further arguments are those of `Execution`."""
    how, whole = Execution(**execution), transformer_of(model)
    return ModelWorkload(
        model=whole if sequence is None else replace(whole, sequence=sequence),
        execution=how,
        recomputations=recomputations_of(recomputations, how.attention),
        device=computing(device, how.precision),
        efficiency=None if efficiency is None else efficiency_of(efficiency),
        bytes_per_parameter=bytes_per_parameter or DEFAULT_BYTES_PER_PARAMETER,
        layers_by_stage=None if layers is None else series("layers", layers),
    )


def profiles_in(model: object) -> tuple[Profile, ...]:
    """Return the profiles, if profiles were given, else an empty tuple."""
    if isinstance(model, Profile):
        return (model,)
    if isinstance(model, (list, tuple)) and model and all(isinstance(one, Profile) for one in model):
        return tuple(model)
    return ()


def refuse_for_profiles(**given: object) -> None:
    """Raise if an argument was given that a measurement has already decided."""
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(f"{name}= says how to calculate a model, and these stages were measured: leave it out")


def memory_of(device: Device | None, memory_bytes: int | None, reserve_bytes: int | None) -> tuple[int, int]:
    """Return the bytes of a device, and how many of them are set aside."""
    memory = device.memory_bytes if memory_bytes is None and device is not None else memory_bytes
    if memory is None:
        raise ConfigurationError("how much memory has a device? Give device= (such as 'a100-80gb') or memory_bytes=")
    check_count("memory_bytes", memory)
    reserved = round(RESERVED_SHARE * memory) if reserve_bytes is None else reserve_bytes
    check_count("reserve_bytes", reserved, least=0)
    if reserved >= memory:
        raise ConfigurationError(f"reserve_bytes={reserved} leaves nothing of memory_bytes={memory}")
    return memory, reserved


def links_of(
    device: Device | None,
    link: LinkArgument,
    cross_link: LinkArgument,
    nodes: object,
    stages: Sequence[int],
    host_link: LinkArgument = None,
) -> Links:
    """Make the links from names or numbers, or else from the device's own."""
    default = inf if device is None else device.link_bytes_per_s
    across = None if cross_link is None else link_of("cross_link", cross_link, default)
    if across is not None and nodes is None:
        raise ConfigurationError(
            "cross_link= needs nodes=: which ranks does it join? Give the node of each rank, such as "
            "nodes=[0, 0, 1, 1, 1, 1, 0, 0] for 8 stages on 2 nodes with the ranks of a pair, x and p-1-x, on one"
        )
    return Links(
        link=link_of("link", link, default),
        cross_link=across,
        nodes=None if nodes is None else _nodes_of(nodes, stages),
        host_link=None if host_link is None else link_of("host_link", host_link),
    )


def _nodes_of(nodes: object, stages: Sequence[int]) -> tuple[int, ...]:
    listed = series("nodes", nodes)
    for p in stages:
        if len(listed) != p:
            raise ConfigurationError(f"nodes has {len(listed)} entries: give one for each of {p} ranks, and one number of stages")
    return counts_of("nodes", listed, least=0)


def link_of(name: str, link: LinkArgument, default: float = inf) -> Link:
    """Make a link from a name or a number; the default is the bandwidth of None."""
    if isinstance(link, Link):
        return link
    if link is None:
        return Link(bytes_per_s=default)
    if isinstance(link, str):
        return Link(bytes_per_s=link_named(link))
    if link != inf:
        check_positive(name, link)
    return Link(bytes_per_s=link)


def efficiency_of(efficiency: float | Mapping[int, float]) -> float | Mapping[int, float]:
    """Check a share of the peak, or one for each microbatch size, and return it."""
    if isinstance(efficiency, Mapping):
        if not efficiency:
            raise ConfigurationError("efficiency={}: give a share of the peak for each microbatch size, such as {1: 0.4, 2: 0.45}")
        for size, share in efficiency.items():
            check_count("microbatch size of efficiency", size)
            check_positive(f"efficiency[{size}]", share, most=1)
        return dict(efficiency)
    check_positive("efficiency", efficiency, most=1)
    return efficiency


def recomputations_of(recomputations: object, attention: str) -> tuple[str, ...]:
    """Return the ways to recompute, least first; "selective" is "none" with fused attention, which has no core to recompute."""
    given = series("recomputations", recomputations)
    named = [lookup("recomputation", name, {one: one for one in RECOMPUTATIONS}) for name in given]
    kept = {"none" if attention == "flash" and name == "selective" else name for name in named}
    return tuple(name for name in RECOMPUTATIONS if name in kept)


def stages_of(num_stages: object, num_profiles: int) -> tuple[int, ...]:
    """Return the numbers of stages to compare, in increasing order."""
    if num_stages is None and num_profiles < 2:
        raise ConfigurationError("into how many stages? Give num_stages=, one number or several to compare")
    stages = (num_profiles,) if num_stages is None else series("num_stages", num_stages)
    for p in stages:
        check_count("num_stages", p)
        if num_profiles > 1 and p != num_profiles:
            raise ConfigurationError(f"{num_profiles} profiles for {p} stages: give one for each stage, or one for all")
    return tuple(sorted(set(stages)))


def batches_of(batch: int, stages: Sequence[int], tensor_parallel: int, num_devices: int | None) -> dict[int, int]:
    """Return the sequences of one pipeline, for each number of stages, if the devices are filled with pipelines."""
    check_count("batch", batch)
    devices = tensor_parallel * max(stages) if num_devices is None else num_devices
    check_count("num_devices", devices)
    batches = {}
    for p in stages:
        pipelines, left = divmod(devices, tensor_parallel * p)
        if left or not pipelines:
            raise ConfigurationError(
                f"{devices} devices do not divide into pipelines of {p} stages x {tensor_parallel}: give num_devices="
            )
        if batch % pipelines:
            raise ConfigurationError(f"a batch of {batch} sequences does not divide over {pipelines} pipelines of {p} stages")
        batches[p] = batch // pipelines
    return batches


def sizes_of(given: object, batch: int, known: Sequence[int] | None) -> list[int]:
    """Return the microbatch sizes to try, of those that something is known about and that divide a batch."""
    if given is None:
        divisors = [size for size in (known or range(1, batch + 1)) if batch % size == 0]
        if not divisors:
            raise ConfigurationError(f"none of the microbatch sizes {list(known or ())} divides a batch of {batch} sequences")
        return divisors if known else [size for size in divisors if size < batch] or divisors
    sizes = series("microbatch_sizes", given)
    for size in sizes:
        check_count("microbatch size", size)
        if batch % size:
            raise ConfigurationError(f"a batch of {batch} sequences of one pipeline does not divide into microbatches of {size}")
        if known is not None and size not in known:
            raise ConfigurationError(f"nothing is known about microbatch size {size}, only about {', '.join(map(str, known))}")
    return sorted(set(sizes))


def counts_of(name: str, numbers: object, *, least: int = 1) -> tuple[int, ...]:
    """Return one whole number or several as a tuple; raise if one is below `least`."""
    counts = series(name, numbers)
    for one in counts:
        check_count(name, one, least=least)
    return counts


def series(name: str, value: object) -> tuple[Any, ...]:
    """Return one value or several as a tuple."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (value,)
    listed = tuple(value)
    if not listed:
        raise ConfigurationError(f"{name} is empty: give at least one")
    return listed
