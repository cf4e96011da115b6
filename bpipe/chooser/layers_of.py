"""The layers of a model as they were measured, for each microbatch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from bpipe.checks import is_count
from bpipe.errors import ConfigurationError
from bpipe.estimate.layers import LayerCost
from bpipe.estimate.workload import AS_MEASURED, Load, Workload

__all__: list[str] = []

ALONE = "A layer takes as long in a stage as it took alone, and as much memory."
ONE_ROW = "The layers were measured with microbatches of one row, as they were given without a microbatch size."


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers(Workload):
    """A model that can be cut anywhere, with what each layer takes for each load to choose from."""

    of_load: Mapping[Load, tuple[LayerCost, ...]]
    assumptions: tuple[str, ...] = ()
    recomputations: ClassVar[Sequence[str]] = (AS_MEASURED,)

    @property
    def microbatch_sizes(self) -> Sequence[int]:
        return sorted(load.microbatch_size for load in self.of_load)

    def layers(self, load: Load) -> tuple[LayerCost, ...]:
        return self.of_load[load]


def as_measured(layers: Any) -> MeasuredLayers:
    """Return measured layers, of each microbatch size or of one row.

    Raises:
        ConfigurationError: they are not layers, or differ in number.
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
        found[Load(size)] = tuple(some)
    if len({tuple(one.names for one in some) for some in found.values()}) > 1:
        raise ConfigurationError("layers of different microbatch sizes have different names: measure the same layers at each")
    return MeasuredLayers(of_load=found, assumptions=(ALONE,) if given is layers else (ALONE, ONE_ROW))
