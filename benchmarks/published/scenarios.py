"""Where a choice is to be made: a model, its devices and links, and the plans to choose between.

For each microbatch size and recomputation a chooser needs a `Case`: the costs and the bytes of a microbatch on each stage, the
number of microbatches and the budget of a rank. `Scenario.ways` names the plans beside 1F1B and balanced 1F1B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from bpipe.estimate import Transformer
from bpipe.estimate.advise_inputs import RESERVED_SHARE
from bpipe.estimate.devices import GIB, Device, device_named
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.execution import Execution
from bpipe.estimate.long_contexts import attention_share, halves
from bpipe.estimate.models import model_named
from bpipe.estimate.workload import DEFAULT_EFFICIENCY, Links, Load, ModelWorkload
from bpipe.passes.balance.balance import default_slots
from bpipe.passes.recompute import recompute
from bpipe.schedules import Costs, Link, Op, Plan, build, finish, simulate

BYTES_PER_PARAMETER = 18.0


class Way(NamedTuple):
    """A plan to choose.

    Args:
        schedule: its name for `build`.
        stages_per_rank: v.
        slices: of each microbatch.
        layers: of each stage; None for as even as possible.
        recomputes: whether it keeps to ceil((p+2)/2) microbatches by running as few as that takes forward twice.
    """

    schedule: str
    stages_per_rank: int = 1
    slices: int = 1
    layers: tuple[int, ...] | None = None
    recomputes: bool = False

    def __str__(self) -> str:
        several = f", v = {self.stages_per_rank}" * (self.stages_per_rank > 1) + f", {self.slices} slices" * (self.slices > 1)
        again = " that recomputes over the cap" * self.recomputes
        return f"{self.schedule}{again}{several}" + f", layers {' '.join(map(str, self.layers or ()))}" * (self.layers is not None)


@cache
def plan_of(way: Way, num_ranks: int, num_microbatches: int) -> Plan:
    """Build the plan, once."""
    plan = build(way.schedule, num_ranks * way.stages_per_rank, num_microbatches, num_ranks=num_ranks, slices=way.slices)
    return finish(recompute(plan, slots=default_slots(num_ranks))) if way.recomputes else plan


PLAIN, BALANCED, RECOMPUTING = Way("1f1b"), Way("balanced_1f1b"), Way("1f1b", recomputes=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What a chooser knows of one microbatch size and recomputation.

    Args:
        num_microbatches: of a step.
        costs: of a microbatch on each stage, and of the links; I and W are the halves of B that attention's share gives.
        budget: bytes that a rank may hold, static bytes included.
        attention: the part of a layer's forward that attention's core takes.
    """

    num_microbatches: int
    costs: Costs
    budget: int
    attention: float

    def costs_of(self, plan: Plan) -> Costs:
        """Return the costs of a plan's microbatches, or of their slices, which cost the same."""
        return self.costs.of_slices(plan, lengths=even_shares(self.attention, plan.slices))


class Outcome(NamedTuple):
    """What a plan does in a case."""

    step_s: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """A model on devices.

    Args:
        name: for the page.
        source: who tried it, and what came of it.
        model: its dimensions.
        num_ranks: p.
        batch: sequences per step and pipeline.
        device: each of them.
        efficiency: the share of the device's peak that a stage reaches, for each microbatch size to choose from.
        tensor_parallel: t.
        attention: "materialised" or "flash".
        recomputations: the ones to choose from.
        bytes_per_s: of the links between ranks; default: the device's.
        ways: plans to choose from beside 1F1B and balanced 1F1B.
    """

    name: str
    source: str
    model: Transformer
    num_ranks: int
    batch: int
    device: Device
    efficiency: Mapping[int, float]
    tensor_parallel: int = 1
    attention: str = "flash"
    recomputations: tuple[str, ...] = ("none",)
    bytes_per_s: float | None = None
    ways: tuple[Way, ...] = ()

    @property
    def links(self) -> Links:
        return Links(link=Link(bytes_per_s=self.bytes_per_s or self.device.link_bytes_per_s))

    def workload(self, layers: tuple[int, ...] | None = None) -> ModelWorkload:
        return ModelWorkload(
            model=self.model,
            execution=Execution(attention=self.attention, tensor_parallel=self.tensor_parallel),
            recomputations=self.recomputations,
            device=self.device,
            efficiency=self.efficiency,
            bytes_per_parameter=BYTES_PER_PARAMETER,
            layers_by_stage=layers,
        )

    def case(self, microbatch_size: int, recomputation: str, way: Way = PLAIN) -> Case:
        """Return what a chooser knows, for the stages of a plan."""
        workload, load = self.workload(way.layers), Load(microbatch_size, recomputation)
        num_stages = self.num_ranks * way.stages_per_rank
        costs = self.links.between(workload.exact_costs(load, workload.ends(num_stages)))
        i, w = halves(attention_share(self.model))
        input_s = [costs.seconds(Op.B, stage, 0) * i / (i + w) for stage in range(num_stages)]
        return Case(
            num_microbatches=self.batch // microbatch_size,
            costs=replace(costs, input_s=input_s, weight_s=None),
            budget=self.device.memory_bytes - max(round(RESERVED_SHARE * self.device.memory_bytes), workload.working_bytes(load)),
            attention=attention_share(self.model),
        )

    @property
    def described(self) -> dict[str, Any]:
        """The arguments that `advise` and `choose_plan` have in common."""
        return {
            "batch": self.batch,
            "device": self.device,
            "tensor_parallel": self.tensor_parallel,
            "attention": self.attention,
            "recomputations": self.recomputations,
            "microbatch_sizes": list(self.efficiency),
            "efficiency": self.efficiency,
            "link": self.bytes_per_s,
        }

    def outcomes(self) -> dict[tuple[Way, int, str], Outcome]:
        """Return what every plan does with every microbatch size and recomputation."""
        ways = (PLAIN, BALANCED, *self.ways)
        return {(way, b, how): outcome(self, way, b, how) for b in self.efficiency for how in self.recomputations for way in ways}


@cache
def outcome(scenario: Scenario, way: Way, microbatch_size: int, recomputation: str = "none") -> Outcome:
    """Build a plan, simulate it, and compare its peaks with the budget."""
    case = scenario.case(microbatch_size, recomputation, way)
    plan = plan_of(way, scenario.num_ranks, case.num_microbatches)
    timeline = simulate(plan, case.costs_of(plan))
    return Outcome(timeline.makespan_s, max(map(timeline.device_peak_bytes, range(plan.num_ranks))) <= case.budget)


A100, A800, V100 = (device_named(name) for name in ("a100-80gb", "a800-80gb", "v100-32gb"))
GPT3_96B = model_named("gpt3-96b")


def _llama2_7b(tokens: int, source: str) -> Scenario:
    """Make a scenario of a long context."""
    model = replace(model_named("llama2-7b"), sequence=tokens)
    return Scenario(
        name=f"Llama 2 7B, {tokens:,} tokens (attention is {attention_share(model):.2f} of a forward)",
        source=source,
        model=model,
        num_ranks=8,
        batch=32,
        device=A100,
        efficiency={1: DEFAULT_EFFICIENCY},
        ways=(Way("zbv", 2), Way("v_half", 2), Way("v_min", 2), Way("seq_1f1b", 1, 4)),
    )


def _gpt3_96b(name: str, source: str, **options: Any) -> Scenario:
    """Make a scenario of GPT-3 96B on the devices of the re-evaluation."""
    sizes: dict[str, Any] = {"num_ranks": 8, "tensor_parallel": 4, "batch": 128, "device": A100}
    return Scenario(name=name, source=source, model=GPT3_96B, **sizes | options)


PAID_ON_48 = _gpt3_96b(
    "GPT-3 96B on 48 A100, attention materialised",
    "Kim et al., ICML 2023: balance paid",
    num_ranks=12,
    batch=48,
    attention="materialised",
    recomputations=("none", "selective"),
    efficiency={1: DEFAULT_EFFICIENCY},
)
PAID = _gpt3_96b(
    "GPT-3 96B, attention recomputed, a stage 1.42 times as efficient at microbatch 2",
    "Huang et al., arXiv 2401.02088: 1.35x",
    attention="materialised",
    recomputations=("selective",),
    efficiency={1: 0.33, 2: 0.33 * 1.42},
)
PAID_NOT = _gpt3_96b(
    "GPT-3 96B, flash attention, a stage 1.04 times as efficient at microbatch 2",
    "Huang et al.: next to nothing",
    efficiency={1: DEFAULT_EFFICIENCY, 2: DEFAULT_EFFICIENCY * 1.04},
)
LOST = replace(
    PAID_NOT,
    name="LLaMA 65B, flash attention, every microbatch as efficient",
    source="Huang et al.: a loss",
    model=model_named("llama-65b"),
    efficiency=dict.fromkeys((2, 4), DEFAULT_EFFICIENCY),
)
LONG, LONGER = (_llama2_7b(tokens, "Qi et al., arXiv 2405.15362: V-Half needs W + 2F >= 2I") for tokens in (8192, 32_768))
VOCABULARY = Scenario(
    name="5B with a vocabulary of 256,000 words",
    source="Yeung et al., arXiv 2411.05288: 5% to 51% over an even cut",
    model=Transformer(num_layers=32, hidden=3072, num_heads=24, sequence=2048, vocabulary=256_000, is_tied=False, name="5B"),
    num_ranks=8,
    batch=128,
    device=A100,
    efficiency={1: DEFAULT_EFFICIENCY},
    ways=(Way("1f1b", layers=(5, 5, 5, 5, 4, 4, 4, 0)),),
)
SLOW = Scenario(
    name="GPT-3 13B on 4 A800 without NVLink, 15 GB/s",
    source="Huang et al., Obscura, USENIX ATC 2025: balanced 11% and 17% slower",
    model=model_named("gpt3-13b"),
    num_ranks=4,
    batch=16,
    device=A800,
    efficiency={1: DEFAULT_EFFICIENCY},
    bytes_per_s=15e9,  # there balanced 1F1B loses about as much as was published
    ways=(RECOMPUTING,),
)
SLOW_AND_FULL = replace(
    SLOW,
    name="the same with 72 GiB",
    source="1F1B does not fit there",
    device=replace(A800, name="A800 with 72 GiB", memory_bytes=72 * GIB),
)
SMALL_BATCH = Scenario(
    name="52B on 64 V100, 8 microbatches",
    source="Lamy-Poirier, arXiv 2211.05953: breadth-first, up to 43%",
    model=Transformer(num_layers=64, hidden=8192, num_heads=64, sequence=1024, vocabulary=51_200, name="52B"),
    num_ranks=8,
    tensor_parallel=8,
    batch=8,
    device=V100,
    attention="materialised",
    efficiency={1: DEFAULT_EFFICIENCY},
    bytes_per_s=6.25e9,
    ways=(Way("interleaved_1f1b", 4), Way("breadth_first", 4)),
)
SCENARIOS = (PAID_ON_48, PAID, PAID_NOT, LOST, LONG, LONGER, VOCABULARY, SLOW, SLOW_AND_FULL, SMALL_BATCH)
