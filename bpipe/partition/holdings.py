"""The bytes that each rank of a plan holds for stages of any size, from microbatches that are counted once for the plan."""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.plan.action import Action
from bpipe.plan.meter import occupancy, slots_of
from bpipe.plan.plan import Plan
from bpipe.plan.reserved import reserve

__all__: list[str] = []

Counts = tuple[int, ...]  # what a rank holds of each of its stages at one time: the weights of its microbatches or slices


class Holdings:
    """The memory that the ranks of a plan hold: microbatches of their own stages, and buffers for remote activations.

    Args:
        plan: the plan.
        weights: of the slices of a microbatch, which keep its bytes in this proportion; default: equal ones.
    """

    def __init__(self, plan: Plan, weights: Sequence[int] | None = None) -> None:
        self.plan = plan
        self._weights = [1] * plan.slices if weights is None else list(weights)
        self._whole = sum(self._weights)
        ranks = range(plan.num_ranks)
        self.stages = list(map(plan.stages_of, ranks))
        self._counts = [_largest(_counts(plan.actions[rank], self.stages[rank], self._weights)) for rank in ranks]
        chains = [list(plan.chains(rank).values()) for rank in ranks]
        self._chains = [[chain for chain in of_rank if len(_stages_in(chain)) > 1] for of_rank in chains]
        self._reserved = [  # of remote activations of one stage: the stage, and the weights of the buffers
            [(chain[0].stage, reserve(chain, self._weight).sizes) for chain in of_rank if len(_stages_in(chain)) == 1]
            for of_rank in chains
        ]

    def _weight(self, action: Action) -> int:
        return self._weights[action.microbatch % len(self._weights)]

    def bytes_of(self, weight: int, saved: int) -> int:
        """Return the bytes of microbatches or slices of a stage, given their weight and what a whole microbatch keeps there."""
        return -(-weight * saved // self._whole)

    @property
    def are_own(self) -> bool:
        """True if each rank holds microbatches of one stage only, its own."""
        return self.plan.num_stages == self.plan.num_ranks and not any(self._chains) and not any(self._reserved)

    def most(self, rank: int) -> int:
        """Return the weight of all that a rank holds of its only stage, at most."""
        return max(counts[0] for counts in self._counts[rank])

    def num_bytes(self, rank: int, saved: Sequence[int], static: Sequence[int]) -> int:
        """Return the most bytes that a rank holds, given what a microbatch keeps on each stage and what stays there."""
        stages = self.stages[rank]
        own = max(sum(self.bytes_of(count, saved[stage]) for count, stage in zip(counts, stages)) for counts in self._counts[rank])
        remotes = sum(
            sum(reserve(chain, lambda action: self.bytes_of(self._weight(action), saved[action.stage])).sizes)
            for chain in self._chains[rank]
        )
        remote_buffers = sum(self.bytes_of(size, saved[stage]) for stage, sizes in self._reserved[rank] for size in sizes)
        return sum(static[stage] for stage in stages) + own + remotes + remote_buffers


def _stages_in(chain: Sequence[Action]) -> set[int]:
    return {action.stage for action in chain}


def _counts(lane: Sequence[Action], stages: Sequence[int], weights: Sequence[int]) -> set[Counts]:
    """Return the weight of what is held of each stage while each action of a lane runs, each combination once."""
    series = []
    for own in stages:
        of_slices = [lambda stage, part, own=own, weight=weight: weight * (stage == own) for weight in weights]
        series.append(occupancy(lane, slots_of(*of_slices)))
    return set(zip(*series)) or {(0,) * len(stages)}


def _largest(combinations: set[Counts]) -> list[Counts]:
    """Return the combinations that no other one covers."""
    return [
        one for one in combinations if not any(other != one and all(a <= b for a, b in zip(one, other)) for other in combinations)
    ]
