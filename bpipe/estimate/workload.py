"""The costs of a step, from formulas or from measurements: all that advice asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bpipe.errors import ConfigurationError
from bpipe.estimate import huang
from bpipe.estimate.devices import Device
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.execution import Execution
from bpipe.estimate.long_contexts import attention_share
from bpipe.estimate.measurement import Profile, costs_of
from bpipe.estimate.stages import stages_of
from bpipe.estimate.transformer import Transformer
from bpipe.plan.destinations import mirror_pairs
from bpipe.simulator.costs import Costs, Link

__all__: list[str] = []

DEFAULT_EFFICIENCY = 0.45  # 140 of an A100's 312 TFLOP/s; Narayanan et al. (arXiv 2104.04473, table 1) reach 44% to 52%


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between ranks, and the node of each rank."""

    link: Link
    cross_link: Link | None = None
    nodes: tuple[int, ...] | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The costs of one microbatch."""

    costs: Costs  # for the simulation
    working_bytes: int  # memory that the costs leave out: what a stage makes again in its backward
    stage_mfu: float | None  # the share of the peak that the slowest stage reaches alone (Huang et al.'s E2); None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload:
    """A transformer, computed by formulas."""

    model: Transformer  # its dimensions
    execution: Execution  # how it runs; its recomputation is replaced
    recomputations: tuple[str, ...]  # the distinguishable ones to try, least first
    device: Device  # the device that it runs on
    # the share of the device's peak that a stage reaches, by microbatch size or for all; None if unknown
    efficiency: float | Mapping[int, float] | None
    bytes_per_parameter: float  # what stays for each parameter
    links: Links  # between ranks
    layers: tuple[int, ...] | None = None  # layers of each stage; None for as even as possible

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def microbatch_sizes(self) -> Sequence[int] | None:
        """The microbatch sizes with known costs; None for any."""
        return sorted(self.efficiency) if isinstance(self.efficiency, Mapping) else None

    @property
    def attention(self) -> float | None:
        """The part of a layer's forward that fused attention takes; None if it is not fused."""
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

    def load(self, num_stages: int, microbatch_size: int, recomputation: str) -> Load:
        """Return what a microbatch costs."""
        execution, t = replace(self.execution, recomputation=recomputation), self.execution.tensor_parallel
        stages = stages_of(self.model, execution, num_stages=num_stages, microbatch_size=microbatch_size, layers=self.layers)
        flops_per_s = t * self.device.flops_per_s * self.share(microbatch_size)
        costs = Costs(
            forward_s=tuple(stage.forward_flops / flops_per_s for stage in stages),
            backward_s=tuple(stage.backward_flops / flops_per_s for stage in stages),
            saved_bytes=tuple(stage.saved_bytes for stage in stages),
            output_bytes=tuple(stage.message_bytes for stage in stages),
            static_bytes=tuple(round(stage.num_parameters * self.bytes_per_parameter / t) for stage in stages),
            link=self.links.link,
            cross_link=self.links.cross_link,
            nodes=self.links.nodes,
        )
        slowest = max(stages, key=lambda stage: stage.forward_flops + stage.backward_flops)
        stage_s = (slowest.forward_flops + slowest.backward_flops) / flops_per_s
        sequence_flops = 3 * slowest.forward_flops / microbatch_size
        mfu = huang.stage_mfu(microbatch_size, sequence_flops, stage_s, t * self.device.flops_per_s)
        return Load(costs=costs, working_bytes=max(stage.working_bytes for stage in stages), stage_mfu=mfu)

    def slice_shares(self, slices: int) -> list[float]:
        """Return the share of the sequence in each slice of a microbatch."""
        return even_shares(attention_share(self.model), slices)

    def _efficiency_text(self) -> str:
        if isinstance(self.efficiency, Mapping):
            return ", ".join(f"{100 * share:.3g}% at microbatch {size}" for size, share in sorted(self.efficiency.items()))
        return f"{100 * self.share(1):.3g}% for any microbatch size" + " (an assumption)," * (self.efficiency is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorkload:
    """Stages that were measured: one profile for each, or one for all."""

    profiles: tuple[Profile, ...]
    bytes_per_parameter: float | None
    links: Links

    @property
    def name(self) -> str:
        return " ".join(dict.fromkeys(profile.name for profile in self.profiles))

    @property
    def recomputations(self) -> Sequence[str]:
        return ("as measured",)

    @property
    def microbatch_sizes(self) -> Sequence[int] | None:
        return sorted(set.intersection(*(set(profile.microbatch_sizes) for profile in self.profiles)))

    @property
    def attention(self) -> float | None:
        """None: a profile does not say how much of it is attention."""
        return None

    @property
    def caveat(self) -> str:
        return ""

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

    def load(self, num_stages: int, microbatch_size: int, recomputation: str) -> Load:
        if len(self.profiles) not in (1, num_stages):
            raise ConfigurationError(f"{len(self.profiles)} profiles for {num_stages} stages: give one for each, or one for all")
        profiles = self.profiles * (num_stages // len(self.profiles))
        links = self.links
        costs = costs_of(
            profiles,
            microbatch_size,
            link=links.link,
            cross_link=links.cross_link,
            nodes=links.nodes,
            bytes_per_parameter=self.bytes_per_parameter,
        )
        return Load(costs=costs, working_bytes=0, stage_mfu=None)

    def slice_shares(self, slices: int) -> list[float]:
        """Return the share of the sequence in each slice; a profile does not say how much of it is attention."""
        return [1 / slices] * slices


Workload = ModelWorkload | MeasuredWorkload  # all that advice asks of a model
