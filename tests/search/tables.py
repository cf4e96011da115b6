"""Random cost tables: models of uneven layers, cut into one or two stages a rank, with budgets and links."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random

from bpipe.errors import ConfigurationError
from bpipe.passes.setting import Setting
from bpipe.plan.plan import Plan
from bpipe.schedules import Action, Costs, Link, Op, build
from bpipe.search.work import Family
from bpipe.tools.balancing import sizes_of

FAMILIES = (
    (1, ("1f1b", "gpipe")),
    (1, ("zb_h1", "zb_h2")),
    (2, ("zbv", "v_half", "v_min")),
    (2, ("interleaved_1f1b", "breadth_first")),
)
MICROBATCH = 1000  # bytes that a rank's share of the model keeps
MESSAGES = 6  # that a budget has room for beside them


@dataclass(frozen=True)
class Table:
    """Costs in forwards of an average rank: 2p layers of uneven lengths, of which each rank has two."""

    num_ranks: int
    num_microbatches: int
    layers: tuple[float, ...]  # seconds of their forwards
    input: float  # seconds of I for each second of a forward
    weight: float
    budget: int  # in microbatches of a rank
    message_s: float
    eviction_s: float  # of a rank's microbatch

    @classmethod
    def random(cls, random: Random, ranks: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16)) -> Table:
        p = random.choice(ranks)
        layers = [random.uniform(0.35, 0.75) for _ in range(2 * p)]
        layers[-1] += random.choice([0, 0, 0.5, 1])  # a head
        return cls(
            num_ranks=p,
            num_microbatches=p * random.choice([1, 2, 3]),
            layers=tuple(layers),
            input=random.uniform(0.7, 1.6),
            weight=random.uniform(0.4, 1.2),
            budget=random.randint(1, p),
            message_s=random.choice([0.0, 0.05, 0.2, 0.5]),
            eviction_s=random.choice([0.0, 0.3, 1.0, 2.0]),
        )

    def costs(self, per_rank: int, *, sends: bool = True) -> Costs:
        """Return the costs of stages, of which each rank has some: 1 or 2.

        Args:
            sends: whether messages have bytes; else they only take time, any number of them at once.
        """
        forward = self.layers if per_rank == 2 else [sum(self.layers[2 * x : 2 * x + 2]) for x in range(self.num_ranks)]
        rate = MICROBATCH / self.eviction_s if self.eviction_s else inf
        sent = min(self.message_s / self.eviction_s if self.eviction_s else 0.1, 0.5)
        return Costs(
            forward_s=forward,
            backward_s=[(self.input + self.weight) * seconds for seconds in forward],
            input_s=[self.input * seconds for seconds in forward],
            saved_bytes=MICROBATCH // per_rank,
            output_bytes=int(MICROBATCH * sent) if sends else 0,
            link=Link(bytes_per_s=rate, latency_s=0.0 if sends else self.message_s),
        )

    def families(self, *, sends: bool = True) -> list[Family]:
        """Return the schedules that can run, by their computations; `costs` explains `sends`."""
        found = []
        for per_rank, names in FAMILIES:
            plans = [plan for name in names if (plan := self._plan(name, per_rank)) is not None]
            if plans:
                costs = self.costs(per_rank, sends=sends)
                most = self.budget * MICROBATCH + MESSAGES * costs.carried(Action(Op.SEND_F, 0, 0))
                setting = Setting(costs=costs, sizes=sizes_of(plans[0], costs, 1), budgets=(most,) * self.num_ranks)
                found.append(Family(starts=tuple(plans), setting=setting))
        return found

    def _plan(self, name: str, per_rank: int) -> Plan | None:
        try:
            return build(name, per_rank * self.num_ranks, self.num_microbatches)
        except ConfigurationError:
            return None
