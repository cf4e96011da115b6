"""The layers of a model as they were measured, for each microbatch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.checks import is_count
from bpipe.errors import ConfigurationError
from bpipe.estimate.workload import Load, Workload
from bpipe.partition.layers import LayerCost

__all__: list[str] = []

ALONE = "A layer takes as long in a stage as it took alone, and as much memory."
ONE_ROW = "The layers were measured with microbatches of one row, as they were given without a microbatch size."


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers(Workload):
    """A model that can be cut anywhere, with what each layer takes for each load to choose from."""

    of_load: Mapping[Load, tuple[LayerCost, ...]]
    assumptions: tuple[str, ...] = ()

    def layers(self, load: Load) -> tuple[LayerCost, ...]:
        return self.of_load[load]


def as_measured(layers: Any, sizes: Sequence[int] | None, batch: int) -> MeasuredLayers:
    """Return measured layers, of each microbatch size or of one row.

    Raises:
        ConfigurationError: they are not layers, differ in number, or no size divides the batch.
    """
    given = layers if isinstance(layers, Mapping) else {1: layers}
    found = {}
    for size, some in given.items():
        if not is_count(size):
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
    return MeasuredLayers(of_load=found, assumptions=(ALONE,) if given is layers else (ALONE, ONE_ROW))
