"""Convert the arguments of `advise` and `choose_plan` into what they work with. Every refusal that needs no simulation is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from bpipe.checks import check_count, check_positive, counts_of, lookup, series
from bpipe.errors import ConfigurationError
from bpipe.estimate.devices import Device, device_named, is_named, link_named
from bpipe.estimate.execution import RECOMPUTATIONS, Execution
from bpipe.estimate.measurement import Profile
from bpipe.estimate.models import model_named
from bpipe.estimate.state_bytes import DEFAULT_BYTES_PER_PARAMETER
from bpipe.estimate.transformer import Transformer
from bpipe.estimate.workload import Links, MeasuredWorkload, ModelWorkload
from bpipe.simulator.costs import Link

__all__: list[str] = []

RESERVED_SHARE = 0.05  # 4 of 80 GiB: CUDA's context, communication buffers, fragmentation, gradients of activations
USUAL = {"attention": "flash", "precision": "bf16"}

LinkArgument = str | float | Link | None


def device_of(device: str | Device | None) -> Device | None:
    """Look up a device by name; return a `Device` or None unchanged."""
    return device if device is None or isinstance(device, Device) else device_named(device)


def profiles_in(model: object) -> tuple[Profile, ...]:
    """Return the profiles, if profiles were given, else an empty tuple."""
    given = tuple(model) if isinstance(model, (list, tuple)) else (model,)
    return given if all(isinstance(one, Profile) for one in given) else ()


def workload_of(
    model: object,
    device: Device | None,
    num_stages: int,
    *,
    sequence: int | None,
    recomputations: object,
    efficiency: float | Mapping[int, float] | None,
    bytes_per_parameter: float | None,
    layers: object = None,
    **execution: Any,
) -> ModelWorkload | MeasuredWorkload:
    """Return stages as they were measured, or a model by formulas; further arguments are those of `Execution`."""
    if profiles := profiles_in(model):
        changed = {name: execution[name] for name, usual in USUAL.items() if execution[name] != usual}
        for name, value in {"efficiency": efficiency, "layers": layers, "sequence": sequence, **changed}.items():
            if value is not None:
                raise ConfigurationError(f"{name}= says how to calculate a model, and these stages were measured: leave it out")
        return MeasuredWorkload(profiles=profiles, num_stages=num_stages, bytes_per_parameter=bytes_per_parameter)
    if not isinstance(model, (str, Transformer)):
        raise ConfigurationError(
            f"model= is of type {type(model).__qualname__}: give a name, a bpipe.estimate.Transformer, or a result of bpipe.profile"
        )
    how, whole = Execution(**execution), model_named(model) if isinstance(model, str) else model
    return ModelWorkload(
        model=whole if sequence is None else replace(whole, sequence=sequence),
        execution=how,
        recomputations=_recomputations(recomputations, how.attention),
        device=_computing(device, how.precision),
        efficiency=None if efficiency is None else _efficiency(efficiency),
        bytes_per_parameter=bytes_per_parameter or DEFAULT_BYTES_PER_PARAMETER,
        layers_by_stage=None if layers is None else series("layers", layers),
    )


def _computing(device: Device | None, precision: str) -> Device:
    """Return the device; raise unless its peak is known, and is one of that precision."""
    if device is None:
        raise ConfigurationError("how fast is a device? Give device= (such as 'a100-80gb'), or a bpipe.estimate.Device")
    if precision == "fp32" and is_named(device):
        raise ConfigurationError(
            f"the peak of {device.name} is known for 16 bits: give device=Device(...) with its peak in fp32 or tf32"
        )
    return device


def _efficiency(efficiency: float | Mapping[int, float]) -> float | Mapping[int, float]:
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


def _recomputations(recomputations: object, attention: str) -> tuple[str, ...]:
    """Return the ways to recompute, least first; "selective" is "none" with fused attention, which has no core to recompute."""
    given = series("recomputations", recomputations)
    named = [lookup("recomputation", name, {one: one for one in RECOMPUTATIONS}) for name in given]
    kept = {"none" if attention == "flash" and name == "selective" else name for name in named}
    return tuple(name for name in RECOMPUTATIONS if name in kept)


def memory_of(device: Device | None, memory_bytes: int | None) -> int:
    """Return the bytes of a device."""
    memory = device.memory_bytes if memory_bytes is None and device is not None else memory_bytes
    if memory is None:
        raise ConfigurationError("how much memory has a device? Give device= (such as 'a100-80gb') or memory_bytes=")
    check_count("memory_bytes", memory)
    return memory


def reserved_of(memory_bytes: int, reserve_bytes: int | None) -> int:
    """Return how many bytes of a device are set aside."""
    reserved = round(RESERVED_SHARE * memory_bytes) if reserve_bytes is None else reserve_bytes
    if reserved >= memory_bytes:
        raise ConfigurationError(f"reserve_bytes={reserved} leaves nothing of memory_bytes={memory_bytes}")
    return reserved


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
    across = None if cross_link is None else _link("cross_link", cross_link)
    if across is not None and nodes is None:
        raise ConfigurationError(
            "cross_link= needs nodes=: which ranks does it join? Give the node of each rank, such as "
            "nodes=[0, 0, 1, 1, 1, 1, 0, 0] for 8 stages on 2 nodes with the ranks of a pair, x and p-1-x, on one"
        )
    return Links(
        link=Link(bytes_per_s=default) if link is None else _link("link", link),
        cross_link=across,
        nodes=None if nodes is None else _nodes(series("nodes", nodes), stages),
        host_link=None if host_link is None else _link("host_link", host_link),
    )


def _nodes(nodes: tuple[Any, ...], stages: Sequence[int]) -> tuple[int, ...]:
    for p in stages:
        if len(nodes) != p:
            raise ConfigurationError(f"nodes has {len(nodes)} entries: give one for each of {p} ranks, and one number of stages")
    for node in nodes:
        check_count("nodes", node, least=0)
    return nodes


def _link(name: str, link: str | float | Link) -> Link:
    """Make a link from a name or a number."""
    if isinstance(link, Link):
        return link
    if isinstance(link, str):
        return Link(bytes_per_s=link_named(link))
    if link != inf:
        check_positive(name, link)
    return Link(bytes_per_s=link)


def stages_of(num_stages: object, num_profiles: int) -> list[int]:
    """Return the numbers of stages to compare, in increasing order."""
    if num_stages is None and num_profiles < 2:
        raise ConfigurationError("into how many stages? Give num_stages=, one number or several to compare")
    stages = counts_of("num_stages", num_profiles if num_stages is None else num_stages)
    for p in stages:
        if num_profiles > 1 and p != num_profiles:
            raise ConfigurationError(f"{num_profiles} profiles for {p} stages: give one for each stage, or one for all")
    return stages


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
            raise ConfigurationError(
                f"none of the microbatch sizes {list(known or ())} divides a batch of {batch} sequences: measure one that does"
            )
        return divisors if known else [size for size in divisors if size < batch] or divisors
    sizes = counts_of("microbatch_sizes", given, of_one="microbatch size")
    for size in sizes:
        if batch % size:
            raise ConfigurationError(f"a batch of {batch} sequences of one pipeline does not divide into microbatches of {size}")
        if known is not None and size not in known:
            raise ConfigurationError(f"nothing is known about microbatch size {size}, only about {', '.join(map(str, known))}")
    return sizes
