"""What a model takes, layer by layer, from formulas or from measurements: all that advice and choices ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import fsum
from typing import Any, ClassVar, NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.estimate.activations import working_bytes
from bpipe.estimate.cut_search import Ends, pieces
from bpipe.estimate.devices import Device
from bpipe.estimate.execution import Execution
from bpipe.estimate.layers import Chain, LayerCost, halves_s
from bpipe.estimate.long_contexts import attention_share
from bpipe.estimate.measurement import Profile
from bpipe.estimate.stages import layer_costs, split_layers
from bpipe.estimate.transformer import Transformer
from bpipe.plan.destinations import mirror_pairs
from bpipe.simulator.costs import Costs, Link

__all__ = ["costs_of"]

AS_MEASURED = "as measured"
DEFAULT_EFFICIENCY = 0.45  # 140 of an A100's 312 TFLOP/s; Narayanan et al. (arXiv 2104.04473, table 1) reach 44% to 52%


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between ranks, the node of each rank, and the link between a rank and its host's memory."""

    link: Link
    cross_link: Link | None = None
    nodes: tuple[int, ...] | None = None
    host_link: Link | None = None

    def between(self, costs: Costs) -> Costs:
        """Return the costs of stages whose ranks these links join."""
        return replace(costs, link=self.link, cross_link=self.cross_link, host_link=self.host_link, nodes=self.nodes)

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth between the ranks of a pair."""
        return (self._across or self.link).bytes_per_s

    def with_pairs_at(self, bytes_per_s: float) -> Links:
        """Return the links with another bandwidth for the kind of link that joins the ranks of a pair."""
        other = Link(bytes_per_s=bytes_per_s)
        return replace(self, link=other) if self._across is None else replace(self, cross_link=other)

    @property
    def _across(self) -> Link | None:
        """The link between nodes, if it is a different one and pairs need it."""
        nodes = self.nodes or ()
        is_across = any(nodes[rank] != nodes[pair] for rank, pair in enumerate(mirror_pairs(len(nodes))))
        return self.cross_link if is_across else None


class Load(NamedTuple):
    """A microbatch, as a step may run it."""

    microbatch_size: int  # sequences, or rows; 0 if microbatches are cut already
    recomputation: str = ""  # inside each layer, such as "selective"; empty if layers run as they were measured


class Workload:
    """A model whose layers' costs are known."""

    @property
    def attention(self) -> float | None:
        """The part of a layer's forward that fused attention takes; None if it is not fused, or not known."""
        return None

    def layers(self, load: Load) -> Sequence[LayerCost]:
        """Return what each layer takes of a microbatch."""
        raise NotImplementedError

    def working_bytes(self, load: Load) -> int:
        """Return memory that no costs count: what a stage makes again in its backward."""
        return 0

    @cached_property
    def _chains(self) -> dict[Load, Chain]:
        return {}

    def chain(self, load: Load) -> Chain:
        """Return the layers, to be cut."""
        if load not in self._chains:
            self._chains[load] = Chain(self.layers(load))
        return self._chains[load]

    def costs(self, load: Load, ends: Ends) -> Costs:
        """Return the costs of stages; links are free."""
        return self.chain(load).costs(pieces(ends))

    def exact_costs(self, load: Load, ends: Ends) -> Costs:
        """Return the costs of stages, of which equal ones take exactly as long."""
        seconds = [(one.forward_s, one.backward_s, *halves_s(one)) for one in self.chain(load).layers]
        of_stages = (map(fsum, zip(*seconds[start:end])) for start, end in pieces(ends))
        series: dict[str, Any] = dict(zip(("forward_s", "backward_s", "input_s", "weight_s"), zip(*of_stages)))
        return replace(self.costs(load, ends), **series)


@dataclass(frozen=True, kw_only=True)
class ModelWorkload(Workload):
    """A transformer, computed by formulas."""

    model: Transformer  # its dimensions
    execution: Execution  # how it runs; its recomputation is replaced
    recomputations: tuple[str, ...]  # the distinguishable ones to try, least first
    device: Device  # the device that it runs on
    # the share of the device's peak that a stage reaches, by microbatch size or for all; None if unknown
    efficiency: float | Mapping[int, float] | None
    bytes_per_parameter: float  # what stays for each parameter
    layers_by_stage: tuple[int, ...] | None = None  # layers of each stage; None for as even as possible

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def microbatch_sizes(self) -> Sequence[int] | None:
        """The microbatch sizes with known costs; None for any."""
        return sorted(self.efficiency) if isinstance(self.efficiency, Mapping) else None

    @property
    def attention(self) -> float | None:
        return attention_share(self.model) if self.execution.attention == "flash" else None

    @property
    def caveat(self) -> str:
        """A caveat to print beside the verdict; "" if there is none."""
        if isinstance(self.efficiency, Mapping):
            return ""
        whose = "assumed, not measured" if self.efficiency is None else "taken for every size"
        return (
            f"One stage's efficiency decides whether a larger microbatch pays; {100 * self.share(1):.3g}% is {whose}: measure it "
            "with bpipe.profile, or give efficiency={1: ..., 2: ...}."
        )

    def share(self, microbatch_size: int) -> float:
        """Return the share of the peak that a stage reaches with a microbatch size."""
        if isinstance(self.efficiency, Mapping):
            return self.efficiency[microbatch_size]
        return DEFAULT_EFFICIENCY if self.efficiency is None else self.efficiency

    @property
    def assumptions(self) -> Sequence[str]:
        """The assumptions behind its numbers."""
        t, cut = self.execution.tensor_parallel, "cut along the sequence" if self.execution.sequence_parallel else "kept whole"
        return (
            f"A stage reaches {self._efficiency_text()} of the peak of {self.device.flops_per_s / 1e12:g} TFLOP/s per device, "
            "recomputed operations counted, tensor-parallel communication included.",
            f"Activations by Korthikanti et al. (arXiv 2205.05198): {self.execution.attention} attention, "
            f"{self.execution.precision}, tensor parallel {t}"
            + (f", norms and dropout {cut}" if t > 1 else "")
            + "; all that is saved can move.",
            f"{self.bytes_per_parameter:g} bytes per parameter stay on its stage, divided by tensor parallelism.",
            "A backward takes twice its forward, and what it recomputes.",
        )

    def flops_per_s(self, microbatch_size: int) -> float:
        """Return the operations per second that the devices of a stage reach together."""
        return self.execution.tensor_parallel * self.device.flops_per_s * self.share(microbatch_size)

    def layers(self, load: Load) -> Sequence[LayerCost]:
        flops_per_s = self.flops_per_s(load.microbatch_size)
        rates = {"flops_per_s": flops_per_s, "bytes_per_parameter": self.bytes_per_parameter}
        return layer_costs(self.model, self._execution(load), load.microbatch_size, **rates)

    def ends(self, num_stages: int) -> Ends:
        """Return where the stages end that advice is about."""
        *inner, last = accumulate(split_layers(self.model.num_layers, num_stages, self.layers_by_stage))
        return (0, *(end + 1 for end in inner), last + 2)  # the embedding is before the layers, and the head behind them

    def working_bytes(self, load: Load) -> int:
        return working_bytes(self.model, self._execution(load), load.microbatch_size)

    def costs(self, load: Load, ends: Ends) -> Costs:
        costs = super().costs(load, ends)
        if len(ends) > 2 or not self.model.is_tied:
            return costs
        head_bytes = self.model.head_parameters * self.bytes_per_parameter / self.execution.tensor_parallel
        return replace(costs, static_bytes=costs.static(0) - round(head_bytes))  # beside the embedding it is no copy

    def _execution(self, load: Load) -> Execution:
        return replace(self.execution, recomputation=load.recomputation or "none")

    def _efficiency_text(self) -> str:
        if isinstance(self.efficiency, Mapping):
            return ", ".join(f"{100 * share:.3g}% at microbatch {size}" for size, share in sorted(self.efficiency.items()))
        return f"{100 * self.share(1):.3g}% for any microbatch size" + " (an assumption)," * (self.efficiency is None)


@dataclass(frozen=True, kw_only=True)
class MeasuredWorkload(Workload):
    """Stages that were measured, as layers that may be joined, but not cut: one profile for each, or one for all."""

    profiles: tuple[Profile, ...]
    num_stages: int
    bytes_per_parameter: float | None
    recomputations: ClassVar[Sequence[str]] = (AS_MEASURED,)
    caveat: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return " ".join(dict.fromkeys(profile.name for profile in self.profiles))

    @property
    def microbatch_sizes(self) -> Sequence[int]:
        return sorted(set.intersection(*(set(profile.microbatch_sizes) for profile in self.profiles)))

    @property
    def assumptions(self) -> Sequence[str]:
        stays = (
            "parameters and gradients as measured, and Adam's fp32 moments (and fp32 copies of 16-bit parameters)"
            if self.bytes_per_parameter is None
            else f"{self.bytes_per_parameter:g} bytes a trainable parameter"
        )
        alone = "A stage takes as long in the pipeline as it took alone, and as much memory."
        alike = "Every stage is like the one that was measured." if len(self.profiles) == 1 else ""
        return tuple(text for text in (alone, alike, f"On each stage stay {stays}.") if text)

    def share(self, microbatch_size: int) -> None:
        """Return None: nobody knows how fast the device could be."""

    @property
    def _stages(self) -> Sequence[Profile]:
        return self.profiles * (self.num_stages if len(self.profiles) == 1 else 1)

    def layers(self, load: Load) -> Sequence[LayerCost]:
        return [_joinable(profile, place, load, self.bytes_per_parameter) for place, profile in enumerate(self._stages)]

    def ends(self, num_stages: int) -> Ends:
        return tuple(range(num_stages + 1))

    def costs(self, load: Load, ends: Ends) -> Costs:
        measured, stages = [profile.at(load.microbatch_size) for profile in self._stages], pieces(ends)
        return replace(
            super().costs(load, ends),
            movable_bytes=[sum(one.movable_bytes for one in measured[start:end]) for start, end in stages],
            gradient_bytes=[*(measured[end].input_gradient_bytes for _, end in stages[:-1]), 0],
        )


def _joinable(profile: Profile, place: int, load: Load, bytes_per_parameter: float | None) -> LayerCost:
    measured = profile.at(load.microbatch_size)
    if not measured.backward_s:
        raise ConfigurationError(
            f"only the forward of {profile.name} was measured: a step has backwards too, profile it without backward=False"
        )
    input_s, weight_s = measured.halves_s
    return LayerCost(
        names=(f"{profile.name}.{place}",),
        forward_s=measured.forward_s,
        backward_s=measured.backward_s,
        input_s=input_s,
        weight_s=weight_s,
        saved_bytes=measured.own_bytes,
        output_bytes=measured.output_bytes,
        static_bytes=profile.static_bytes(bytes_per_parameter) + measured.shared_bytes,
    )


def costs_of(
    profiles: Sequence[Profile],
    microbatch_size: int,
    *,
    link: Link | None = None,
    cross_link: Link | None = None,
    nodes: Sequence[int] | None = None,
    bytes_per_parameter: float | None = None,
) -> Costs:
    """Compute the costs of a plan whose stages were measured, with whole backwards or with split ones.

    Args:
        profiles: one for each stage, in order.
        microbatch_size: the size to take.
        link: between ranks of one node; default: free.
        cross_link: between ranks of different nodes; default: `link`.
        nodes: the node of each rank; default: all on one.
        bytes_per_parameter: see `Profile.static_bytes`.

    Raises:
        ConfigurationError: there is no profile, or the size was not measured, or only its forward was.

    Example:
        >>> from bpipe.estimate import Measurement
        >>> from bpipe.schedules import build, simulate
        >>> one = Measurement(microbatch_size=1, own_bytes=9, movable_bytes=8, shared_bytes=0, output_bytes=2,
        ...     input_gradient_bytes=2, forward_s=1.0, backward_s=2.0)
        >>> stage = Profile(name="Stage", device="cpu", num_parameters=0, num_trainable=0, parameter_bytes=0,
        ...     trainable_bytes=0, gradient_bytes=0, buffer_bytes=0, measurements=(one,))
        >>> simulate(build("1f1b", 4, 8), costs_of([stage] * 4, 1)).makespan_s
        33.0
    """
    if not profiles:
        raise ConfigurationError("no profiles: give one for each stage")
    measured = MeasuredWorkload(profiles=tuple(profiles), num_stages=len(profiles), bytes_per_parameter=bytes_per_parameter)
    links = Links(link=link or Link(), cross_link=cross_link, nodes=None if nodes is None else tuple(nodes))
    return links.between(measured.exact_costs(Load(microbatch_size), measured.ends(len(profiles))))
