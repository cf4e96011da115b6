"""What a plan is to be chosen for: the layers of a model, or its stages; ranks with their memory and links; what may be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from bpipe.api.policy import Way
from bpipe.chooser.cuts import cuts_of
from bpipe.estimate.cut_search import pieces
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.workload import Links, Load, Workload
from bpipe.flow.flow import Flow
from bpipe.flow.shaping import shaped
from bpipe.passes.fit import Budgets
from bpipe.passes.setting import Setting
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import OUT, Amount, Sizes
from bpipe.schedules.rule import Placement, Rule
from bpipe.simulator.costs import Costs
from bpipe.tools.balancing import sizes_of

__all__: list[str] = []

Values = Mapping[tuple[int, ...], Amount]  # by the stage that makes each and those that use it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLayout:
    """A load, and the stages that run it.

    Args:
        load: a microbatch.
        num_microbatches: m.
        stage_ranks: the rank of each stage.
        names: of each stage's layers.
        costs: of whole microbatches.
        flow: returns what a plan with these stages computes, given what a schedule makes of a chain of them.
        setting: returns what a plan with these stages is searched for.
    """

    load: Load
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    costs: Costs
    flow: Callable[[Flow], Flow]
    setting: Callable[[Plan], Setting]

    @property
    def num_ranks(self) -> int:
        """p."""
        return max(self.stage_ranks) + 1


@dataclass(frozen=True, kw_only=True)
class ModelQuestion:
    """What a plan is chosen for, if the model can still be cut anywhere.

    Args:
        model: its layers.
        loads: to choose from.
        num_ranks: p.
        batch: rows of a step of this pipeline.
        budgets: the bytes that each rank may hold, static ones included; None: no limit.
        links: between ranks, the node of each, and to the host.
        schedules: the names of those to choose from; None: all that learn the same and hold the model once.
        stages_per_rank: to choose from.
        slices: the numbers of slices to choose from, for schedules that take several.
        parts: into which a microbatch may be cut to move.
        host: whether activations may go to the host if no rank has room.
        by: what keeps budgets.
    """

    model: Workload
    loads: tuple[Load, ...]
    num_ranks: int
    batch: int
    budgets: Budgets
    links: Links
    schedules: tuple[str, ...] | None = None
    stages_per_rank: tuple[int, ...] = (1, 2)
    slices: tuple[int, ...] = (1,)
    parts: int = 1
    host: bool = False
    by: Way = "evict_or_recompute"

    @cached_property
    def _known(self) -> dict[tuple[Load, tuple[int, ...]], tuple[StageLayout, ...]]:
        return {}

    def layouts(self, rule: Rule) -> Iterator[StageLayout]:
        """Yield the layouts on which a rule can run; those of another rule, if stages are the same."""
        per_rank = self.stages_per_rank
        if rule.placement is not Placement.LOOPED:
            per_rank = tuple(v for v in per_rank if v == rule.default_stages_per_rank)
        for load in self.loads:
            for v in per_rank if rule.allows(self.num_ranks, self.batch // load.microbatch_size) else ():
                key = load, rule.placement.stage_ranks(self.num_ranks, v)
                if rule.placement is Placement.LOOPED and v == 1:
                    continue
                if key not in self._known:
                    self._known[key] = tuple(self._cut(*key))
                yield from self._known[key]

    def _cut(self, load: Load, stage_ranks: tuple[int, ...]) -> Iterator[StageLayout]:
        chain, aside = self.model.chain(load), self.model.working_bytes(load)
        budgets = tuple(None if budget is None else max(0, budget - aside) for budget in self.budgets)
        for ends in cuts_of(chain, stage_ranks, budgets):
            costs, values = self.links.between(self.model.costs(load, ends)), chain.values(pieces(ends))
            yield StageLayout(
                load=load,
                num_microbatches=self.batch // load.microbatch_size,
                stage_ranks=stage_ranks,
                names=tuple(chain.names(*piece) for piece in pieces(ends)),
                costs=costs,
                flow=partial(_handing_on, tuple(values)),
                setting=partial(self._setting, costs, budgets, values, chain.layers[-1].output_bytes),
            )

    def _setting(self, costs: Costs, budgets: Budgets, values: Values, results_bytes: int, plan: Plan) -> Setting:
        """Return what a plan is searched for, with costs, values and the last stage's results of whole microbatches."""
        if plan.slices > 1:
            costs = costs.of_slices(plan, lengths=even_shares(self.model.attention or 0.0, plan.slices))
        return Setting(
            costs=costs,
            sizes=_with_amounts(sizes_of(plan, costs, self.parts), values, results_bytes),
            budgets=budgets,
            to=Destinations(nodes=costs.nodes, host="last" if self.host else "no"),
            evicts=self.by != "recompute",
            recomputes=self.by != "evict",
        )


def _handing_on(values: tuple[tuple[int, ...], ...], flow: Flow) -> Flow:
    return shaped(flow, "skips", values) if values else flow


def _with_amounts(sizes: Sizes, values: Values, results_bytes: int) -> Sizes:
    """Return sizes with the values that stages hand on, and what the last one returns for a microbatch, which is no message."""
    k = len(sizes.by_unit)
    found: dict[int, list[Amount]] = {len(sizes.stages) - 1: [Amount(OUT, results_bytes // k)]}
    for stages, value in values.items():
        for stage in stages:
            joint, gradient = value.joint // k * (stage == stages[0]), value.gradient_bytes // k
            found.setdefault(stage, []).append(Amount(value.name, value.num_bytes // k, joint=joint, gradient=gradient))
    slices = (tuple(one.with_amounts(*found.get(stage, ())) for stage, one in enumerate(stages)) for stages in sizes.by_unit)
    return Sizes.of_slices(slices, static=sizes.static)


@dataclass(frozen=True, kw_only=True)
class StagesQuestion:
    """What a plan is chosen for, if the stages are made and on their ranks, and microbatches are cut.

    Args:
        flow: what they compute.
        costs: of each stage, and of the links.
        sizes: of a microbatch on each stage, and the static bytes of each rank, as they were measured.
        budgets: the bytes that each rank may hold; None: no limit.
        to: the ranks that may store evicted activations.
        by: what keeps budgets.
        schedules: see `ModelQuestion`.
    """

    flow: Flow
    costs: Costs
    sizes: Sizes
    budgets: Budgets
    to: Destinations = field(default_factory=Destinations)
    by: Way = "evict_or_recompute"
    schedules: tuple[str, ...] | None = None

    @property
    def slices(self) -> tuple[int, ...]:
        """The number of slices that the stages run in, alone."""
        return (int(self.flow.units),)

    @property
    def num_ranks(self) -> int:
        return len(self.budgets)

    @cached_property
    def _layout(self) -> StageLayout:
        setting = Setting(
            costs=self.costs,
            sizes=self.sizes,
            budgets=self.budgets,
            to=self.to,
            evicts=self.by != "recompute",
            recomputes=self.by != "evict",
        )
        return StageLayout(
            load=Load(0),
            num_microbatches=self.flow.num_microbatches,
            stage_ranks=self.flow.stage_ranks,
            names=tuple((f"stage {stage}",) for stage in range(len(self.flow.stage_ranks))),
            costs=self.costs,
            flow=lambda _: self.flow,
            setting=lambda _: setting,
        )

    def layouts(self, rule: Rule) -> Iterator[StageLayout]:
        """Yield the layout of the stages, if a rule can run on it."""
        if is_placed_as(rule, self.flow.stage_ranks, self.num_ranks, self.flow.num_microbatches):
            yield self._layout


Question = ModelQuestion | StagesQuestion


def is_placed_as(rule: Rule, stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int) -> bool:
    """Return whether a schedule runs stages on these ranks, with that many microbatches."""
    v = len(stage_ranks) // num_ranks
    fits = v == rule.default_stages_per_rank or (rule.placement is Placement.LOOPED and v > 1)
    return fits and rule.placement.stage_ranks(num_ranks, v) == tuple(stage_ranks) and rule.allows(num_ranks, num_microbatches)
