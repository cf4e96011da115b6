"""The time and memory that a model's layers take, each by itself and several in a row as one stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.flow.flow import value_name
from bpipe.plan.sizes import OF_VALUES, Amount
from bpipe.simulator.costs import Costs

__all__ = ["LayerCost"]

TIMES = ("forward_s", "backward_s", "input_s", "weight_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The time and memory that one layer takes, per microbatch where they depend on it. `bpipe.measure_layers` measures them.

    Args:
        names: the modules that make up the layer, and stay on one stage.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        input_s: seconds of the half of a split backward that computes the gradients of its inputs; 0 in the first layer, if the
            model's own input needs none; None if it was not measured: then half of the backward.
        weight_s: seconds of the other half; None if it was not measured: then what is left of the backward. Both halves together
            take longer than a whole backward, because some work is done in each.
        saved_bytes: what its forward keeps for the backward.
        shared_bytes: the part of these that the layer before keeps too, so that it counts once where both are on one stage.
        output_bytes: what it sends if a stage ends with it, besides `values`.
        static_bytes: parameters, gradients, optimizer states and buffers.
        values: what it makes for later layers than the next: each is named by the places of the layer and of those that use it, in
            order, such as `Amount("0-2-3", 4096)`. It counts besides what layers save of it.

    Raises:
        ConfigurationError: no names, a negative number, more shared than saved, or a value that is not named by places.

    Example:
        >>> LayerCost(names=("layers.0",), forward_s=1.0, backward_s=2.0, saved_bytes=4096).static_bytes
        0
    """

    names: tuple[str, ...]
    forward_s: float
    backward_s: float
    input_s: float | None = None
    weight_s: float | None = None
    saved_bytes: int = 0
    shared_bytes: int = 0
    output_bytes: int = 0
    static_bytes: int = 0
    values: tuple[Amount, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not self.names or not all(isinstance(name, str) for name in self.names):
            raise ConfigurationError(f"names={self.names!r}: give the names of the layer's modules, such as ('layers.0',)")
        halves = [name for name in ("input_s", "weight_s") if getattr(self, name) is not None]
        for name in ("forward_s", "backward_s", *halves):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give seconds of at least 0")
        for name in ("saved_bytes", "shared_bytes", "output_bytes", "static_bytes"):
            check_count(name, getattr(self, name), least=0)
        if self.shared_bytes > self.saved_bytes:
            raise ConfigurationError(f"shared_bytes={self.shared_bytes} are part of saved_bytes={self.saved_bytes}")
        if not all(OF_VALUES.fullmatch(value.name) for value in self.values):
            raise ConfigurationError(f"values={self.values!s:.200}: name each by the places of layers, such as Amount('0-2', 4096)")


class Chain:
    """Layers in order, with what those from `start` up to but not including `end` take as one stage, in constant time."""

    def __init__(self, layers: Sequence[LayerCost]) -> None:
        self.layers = tuple(layers)
        times = [(one.forward_s, one.backward_s, *halves_s(one)) for one in self.layers]
        self._times = {name: _sums(of_layer[place] for of_layer in times) for place, name in enumerate(TIMES)}
        self._forward, self._backward = self._times["forward_s"], self._times["backward_s"]
        self._saved = _sums(layer.saved_bytes for layer in self.layers)
        self._shared = _sums(layer.shared_bytes for layer in self.layers)
        self._static = _sums(layer.static_bytes for layer in self.layers)
        self._values: list[tuple[tuple[int, ...], Amount]] = []
        for own, value in ((place, value) for place, layer in enumerate(self.layers) for value in layer.values):
            places = tuple(map(int, value.name.split("-")))
            if places[0] != own or list(places) != sorted(set(places)) or places[-1] >= len(self.layers):
                raise ConfigurationError(
                    f"value {value.name} of layer {own}: its name has the place of this layer, then those of the later layers that "
                    f"use it, in ascending order, up to {len(self.layers) - 1}"
                )
            self._values.append((places, value))

    def __len__(self) -> int:
        return len(self.layers)

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds of a microbatch: forward and backward."""
        return self._forward[end] - self._forward[start] + (self._backward[end] - self._backward[start])

    def saved_bytes(self, start: int, end: int) -> int:
        """Return the bytes that a microbatch keeps, counting once what two neighbours share."""
        return int(self._saved[end] - self._saved[start] - (self._shared[end] - self._shared[min(start + 1, end)]))

    def static_bytes(self, start: int, end: int) -> int:
        """Return the bytes that stay throughout."""
        return int(self._static[end] - self._static[start])

    def costs(self, stages: Sequence[tuple[int, int]], **options: Any) -> Costs:
        """Return what stages cost, given the start and the end of each, with other options of `Costs`.

        Where a stage begins with a model's input, which needs no gradient, all of its backward is for weights.
        """
        times: dict[str, Any] = {name: [sums[end] - sums[start] for start, end in stages] for name, sums in self._times.items()}
        for stage, (start, _) in enumerate(stages):
            if start == 0 and self.layers[0].input_s == 0:
                times["input_s"][stage], times["weight_s"][stage] = 0.0, times["backward_s"][stage]
        output_bytes = [self.layers[end - 1].output_bytes for _, end in stages]
        for (first, user, *_), value in self._between(stages).items():
            output_bytes[first] += value.num_bytes * (user == first + 1)
        return Costs(
            **times,
            saved_bytes=[self.saved_bytes(*stage) for stage in stages],
            output_bytes=output_bytes,
            static_bytes=[self.static_bytes(*stage) for stage in stages],
            **options,
        )

    def values(self, stages: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], Amount]:
        """Return what stages make for later ones than the next, by the stage that makes it and those that use it."""
        return {places: value for places, value in self._between(stages).items() if places != (places[0], places[0] + 1)}

    def _between(self, stages: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], Amount]:
        """Return all values that leave their stage; those that the next stage uses, too, lie in the message to it."""
        stage_of = [stage for stage, (start, end) in enumerate(stages) for _ in range(start, end)]
        found: dict[tuple[int, ...], list[Amount]] = defaultdict(list)
        for places, value in self._values:
            found[tuple(sorted({stage_of[place] for place in places}))].append(value)
        return {
            places: Amount(
                value_name(places),
                num_bytes := sum(value.num_bytes for value in values),
                joint=num_bytes * (places[1] == places[0] + 1),
                gradient=sum(value.gradient_bytes for value in values),
            )
            for places, values in sorted(found.items())
            if len(places) > 1
        }

    def names(self, start: int, end: int) -> tuple[str, ...]:
        """Return the names of these layers' modules."""
        return tuple(name for layer in self.layers[start:end] for name in layer.names)


def halves_s(layer: LayerCost) -> tuple[float, float]:
    """Return the seconds of the halves of a layer's backward."""
    input_s = layer.backward_s / 2 if layer.input_s is None else layer.input_s
    return input_s, max(0.0, layer.backward_s - input_s) if layer.weight_s is None else layer.weight_s


def _sums(numbers: Iterable[float]) -> list[float]:
    return list(accumulate(numbers, initial=0))
