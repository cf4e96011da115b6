"""What a plan is to be chosen for: the layers of a model, or its stages; ranks with their memory and links; what may be done."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from bpipe.api.policy import Way
from bpipe.chooser.cuts import cuts_of
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.workload import Links
from bpipe.partition.cut_search import Ends, pieces
from bpipe.partition.layers import Chain, LayerCost
from bpipe.passes.fit import Budgets
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes
from bpipe.schedules.rule import Placement, Rule
from bpipe.search.setting import Setting
from bpipe.simulator.costs import Costs, Link
from bpipe.tools.balancing import sizes_of

__all__: list[str] = []


class Load(NamedTuple):
    """A microbatch, as a step may run it."""

    microbatch_size: int  # sequences, or rows; 0 if microbatches are cut already
    recomputation: str = ""  # inside each layer, such as "selective"; empty if layers run as they were measured


class Layout(NamedTuple):
    """A load, and the stages that run it."""

    load: Load
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    slices: int
    ends: Ends  # of each stage's layers
    skips: tuple[tuple[int, ...], ...] = ()  # of the stages


class Question(Protocol):
    """What a plan is chosen for."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def schedules(self) -> tuple[str, ...] | None:
        """The names of those to choose from; None: all that learn the same and hold the model once."""

    @property
    def slices(self) -> tuple[int, ...]:
        """The numbers of slices to choose from, for schedules that take several."""

    def layouts(self, rule: Rule) -> Iterator[Layout]:
        """Yield the layouts on which a rule can run."""

    def costs_of(self, layout: Layout) -> Costs:
        """Return the costs of whole microbatches on the stages."""

    def setting_of(self, layout: Layout, plan: Plan) -> Setting:
        """Return what a plan with these stages is searched for."""

    def names_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """Return the names of each stage's layers."""


@dataclass(frozen=True, kw_only=True)
class ModelQuestion:
    """What a plan is chosen for, if the model can still be cut anywhere.

    Args:
        layers: what each layer takes, for each load to choose from.
        num_ranks: p.
        batch: rows of a step of this pipeline.
        budgets: the bytes that each rank may hold, static ones included; None: no limit.
        links: between ranks, and the node of each.
        host_link: between a rank and its host's memory; None: like `links.link`.
        working_bytes: of each load, what no plan counts and each rank must have free beside the budget.
        schedules: see `Question`.
        stages_per_rank: to choose from.
        slices: see `Question`.
        attention: the part of a layer's forward that attention takes, which decides how long slices are.
        parts: into which a microbatch may be cut to move.
        host: whether activations may go to the host if no rank has room.
        by: what keeps budgets.
    """

    layers: Mapping[Load, tuple[LayerCost, ...]]
    num_ranks: int
    batch: int
    budgets: Budgets
    links: Links
    host_link: Link | None = None
    working_bytes: Mapping[Load, int] = field(default_factory=dict)
    schedules: tuple[str, ...] | None = None
    stages_per_rank: tuple[int, ...] = (1, 2)
    slices: tuple[int, ...] = (1,)
    attention: float = 0.0
    parts: int = 1
    host: bool = False
    by: Way = "evict_or_recompute"

    @cached_property
    def chains(self) -> dict[Load, Chain]:
        """The layers of each load, to be cut."""
        return {load: Chain(layers) for load, layers in self.layers.items()}

    @property
    def fingerprint(self) -> str:
        """A text that is the same for the same question."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    @cached_property
    def _cuts(self) -> dict[tuple[Load, tuple[int, ...]], tuple[Ends, ...]]:
        return {}

    def layouts(self, rule: Rule) -> Iterator[Layout]:
        per_rank = self.stages_per_rank
        if rule.placement is not Placement.LOOPED:
            per_rank = tuple(v for v in per_rank if v == rule.default_stages_per_rank)
        for load, chain in self.chains.items():
            m = self.batch // load.microbatch_size
            for v in per_rank if rule.allows(self.num_ranks, m) else ():
                stage_ranks = rule.placement.stage_ranks(self.num_ranks, v)
                if rule.placement is Placement.LOOPED and v == 1:
                    continue
                if (load, stage_ranks) not in self._cuts:
                    self._cuts[load, stage_ranks] = cuts_of(chain, stage_ranks, self._budgets_of(load))
                for ends in self._cuts[load, stage_ranks]:
                    yield Layout(load, m, stage_ranks, rule.slices, ends)

    def _budgets_of(self, load: Load) -> Budgets:
        """Return what each rank may hold of what plans count."""
        aside = self.working_bytes.get(load, 0)
        return tuple(None if budget is None else max(0, budget - aside) for budget in self.budgets)

    def costs_of(self, layout: Layout) -> Costs:
        chain, stages = self.chains[layout.load], pieces(layout.ends)
        return Costs(
            forward_s=[chain.forward_s(*piece) for piece in stages],
            backward_s=[chain.backward_s(*piece) for piece in stages],
            input_s=[chain.input_s(*piece) for piece in stages],
            weight_s=[chain.weight_s(*piece) for piece in stages],
            saved_bytes=[chain.saved_bytes(*piece) for piece in stages],
            output_bytes=[chain.layers[end - 1].output_bytes for _, end in stages],
            static_bytes=[chain.static_bytes(*piece) for piece in stages],
            link=self.links.link,
            cross_link=self.links.cross_link,
            host_link=self.host_link,
            nodes=self.links.nodes,
        )

    def setting_of(self, layout: Layout, plan: Plan) -> Setting:
        costs = self.costs_of(layout)
        if plan.slices > 1:
            costs = costs.of_slices(plan, lengths=even_shares(self.attention, plan.slices))
        return Setting(
            costs=costs,
            sizes=_with_results(sizes_of(plan, costs, self.parts), self.chains[layout.load].layers[-1].output_bytes),
            budgets=self._budgets_of(layout.load),
            to=Destinations(nodes=costs.nodes, host="last" if self.host else "no"),
            evicts=self.by != "recompute",
            recomputes=self.by != "evict",
        )

    def names_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        return tuple(self.chains[layout.load].names(*piece) for piece in pieces(layout.ends))


def _with_results(sizes: Sizes, num_bytes: int) -> Sizes:
    """Return sizes with what the last stage returns for a microbatch, which is no message."""
    each = num_bytes // len(sizes.by_slice)
    slices = ((*stages[:-1], replace(stages[-1], sent=each)) for stages in sizes.by_slice)
    return Sizes.of_slices(slices, static=sizes.static)


@dataclass(frozen=True, kw_only=True)
class StagesQuestion:
    """What a plan is chosen for, if the stages are made and on their ranks, and microbatches are cut.

    Args:
        stage_ranks: the rank of each stage.
        num_microbatches: m.
        costs: of each stage, and of the links.
        sizes: of a microbatch on each stage, and the static bytes of each rank, as they were measured.
        budgets: the bytes that each rank may hold; None: no limit.
        to: the ranks that may store evicted activations.
        by: what keeps budgets.
        schedules: see `Question`.
        slices: the number of slices that the stages run in, alone.
        skips: of the stages, whose bytes recomputation does not count, so that it is left out.
    """

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    sizes: Sizes
    budgets: Budgets
    to: Destinations = field(default_factory=Destinations)
    by: Way = "evict_or_recompute"
    schedules: tuple[str, ...] | None = None
    slices: tuple[int, ...] = (1,)
    skips: tuple[tuple[int, ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.budgets)

    def layouts(self, rule: Rule) -> Iterator[Layout]:
        p, m, v = self.num_ranks, self.num_microbatches, len(self.stage_ranks) // self.num_ranks
        is_placed = v == rule.default_stages_per_rank or (rule.placement is Placement.LOOPED and v > 1)
        if is_placed and rule.placement.stage_ranks(p, v) == self.stage_ranks and rule.allows(p, m):
            yield Layout(Load(0), m, self.stage_ranks, rule.slices, tuple(range(len(self.stage_ranks) + 1)), self.skips)

    def costs_of(self, layout: Layout) -> Costs:
        return self.costs

    def setting_of(self, layout: Layout, plan: Plan) -> Setting:
        return Setting(
            costs=self.costs,
            sizes=self.sizes,
            budgets=self.budgets,
            to=self.to,
            evicts=self.by != "recompute" or bool(self.skips),
            recomputes=self.by != "evict" and not self.skips,
        )

    def names_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        return tuple((f"stage {stage}",) for stage in range(len(self.stage_ranks)))
