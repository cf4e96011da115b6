"""The layers of a model, for each microbatch size: from formulas, from profiles of its stages, or as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bpipe.chooser.question import Load
from bpipe.errors import ConfigurationError
from bpipe.estimate.long_contexts import attention_share, halves
from bpipe.estimate.measurement import Measurement, Profile
from bpipe.estimate.stages import Stage, stages_of
from bpipe.estimate.workload import ModelWorkload
from bpipe.partition.layers import LayerCost

__all__: list[str] = []

Layers = Mapping[Load, tuple[LayerCost, ...]]


def of_transformer(workload: ModelWorkload, sizes: Iterable[int]) -> tuple[Layers, dict[Load, int]]:
    """Return the embedding, the layers and the head of a transformer, and the working bytes of each load."""
    model, execution = workload.model, workload.execution
    counts = (0, *(1,) * model.num_layers, 0)
    layers, working = {}, {}
    for size in sizes:
        flops_per_s = execution.tensor_parallel * workload.device.flops_per_s * workload.share(size)
        for how in workload.recomputations:
            again = replace(execution, recomputation=how)
            stages = stages_of(model, again, num_stages=len(counts), microbatch_size=size, layers=counts)
            load = Load(size, "" if how == "none" else how)
            layers[load] = tuple(_layer(workload, stage, x, flops_per_s) for x, stage in enumerate(stages))
            working[load] = max(stage.working_bytes for stage in stages)
    return layers, working


def _layer(workload: ModelWorkload, stage: Stage, place: int, flops_per_s: float) -> LayerCost:
    model, last = workload.model, workload.model.num_layers + 1
    input_, weight = halves(attention_share(model) if 0 < place < last else 0.0)
    twice = 2 * stage.forward_flops
    input_flops = twice * input_ / (input_ + weight) + (stage.backward_flops - twice)  # what is recomputed comes before both halves
    return LayerCost(
        names=("embedding" if place == 0 else "head" if place == last else f"layers.{place - 1}",),
        forward_s=stage.forward_flops / flops_per_s,
        backward_s=stage.backward_flops / flops_per_s,
        input_s=input_flops / flops_per_s,
        saved_bytes=stage.saved_bytes,
        output_bytes=0 if place == last else stage.message_bytes,
        static_bytes=round(stage.num_parameters * workload.bytes_per_parameter / workload.execution.tensor_parallel),
    )


def of_profiles(profiles: Sequence[Profile], sizes: Iterable[int], bytes_per_parameter: float | None) -> Layers:
    """Return profiled stages as layers: they may be joined, but not cut."""
    return {
        Load(size): tuple(
            _profiled(profile, profile.at(size), place, bytes_per_parameter) for place, profile in enumerate(profiles)
        )
        for size in sizes
    }


def _profiled(profile: Profile, at: Measurement, place: int, bytes_per_parameter: float | None) -> LayerCost:
    return LayerCost(
        names=(f"{profile.name}.{place}",),
        forward_s=at.forward_s,
        backward_s=at.backward_s,
        input_s=at.halves_s[0],
        weight_s=at.halves_s[1],
        saved_bytes=at.own_bytes,
        output_bytes=at.output_bytes,
        static_bytes=profile.static_bytes(bytes_per_parameter) + at.shared_bytes,
    )


def as_measured(layers: Any, sizes: Sequence[int] | None, batch: int) -> Layers:
    """Return measured layers for each microbatch size.

    Raises:
        ConfigurationError: they are not layers, differ in number, or no size divides the batch.
    """
    given = layers if isinstance(layers, Mapping) else {1: layers}
    found = {}
    for size, some in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigurationError(f"layers={{{size!r}: ...}}: give layers by microbatch size, a whole number")
        if not isinstance(some, Sequence) or not some or not all(isinstance(one, LayerCost) for one in some):
            raise ConfigurationError(
                f"layers of microbatch size {size}: give LayerCosts, as bpipe.measure_layers(model, example) returns them"
            )
        if batch % size == 0 and (sizes is None or size in sizes):
            found[Load(size)] = tuple(some)
    if not found:
        wanted = "" if sizes is None else f", and is among microbatch_sizes={list(sizes)}"
        raise ConfigurationError(
            f"none of the microbatch sizes {sorted(given)} of the layers divides a batch of {batch}{wanted}: measure them at one "
            "that does"
        )
    if len({tuple(one.names for one in some) for some in found.values()}) > 1:
        raise ConfigurationError("layers of different microbatch sizes have different names: measure the same layers at each")
    return found
