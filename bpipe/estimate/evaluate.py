"""Evaluate candidates: build each plan once, simulate it with each workload's costs, and compare its peaks with the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import isfinite
from typing import NamedTuple

from bpipe.estimate.advice import Candidate, gib
from bpipe.estimate.candidates import variants
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.workload import Links, Load, MeasuredWorkload, ModelWorkload
from bpipe.schedules import Costs, Op, Plan, Timeline, simulate
from bpipe.simulator.gaps import Filling, fill_gaps

__all__: list[str] = []

Progress = Callable[[int, int], None]
PIECES = 10  # of a fill job, in a forward


class Case(NamedTuple):
    """What a pipeline may run in a step."""

    num_stages: int
    microbatch_size: int
    recomputation: str

    @property
    def load(self) -> Load:
        return Load(self.microbatch_size, self.recomputation)


@dataclass
class Evaluator:
    """Simulates the candidates of one workload."""

    workload: ModelWorkload | MeasuredWorkload  # what the step runs
    links: Links  # between ranks
    batch: int  # sequences per step, of all pipelines together
    batches: Mapping[int, int]  # sequences per step and pipeline, for each number of stages
    memory_bytes: int  # the memory of a device
    reserved_bytes: int  # of these, set aside
    many: int  # a case with more microbatches than this is simulated only if it may fit and no larger ones fit plain
    slices: int = 1  # of a microbatch, for the schedules that take several

    def __post_init__(self) -> None:
        self.variants, self._costs_of = cache(partial(variants, slices=self.slices)), cache(self._costs)
        self._simulated: dict[Candidate, tuple[Plan, Costs]] = {}

    def ranked(self, microbatch_sizes: Mapping[int, Sequence[int]], progress: Progress | None = None) -> tuple[Candidate, ...]:
        """Rank all candidates: those that fit first, each group by time for the same number of sequences.

        Of equally fast ones, those that move and recompute less come first.
        """
        order = {name: index for index, name in enumerate(self.workload.recomputations)}
        cases = [Case(p, b, how) for p, sizes in microbatch_sizes.items() for b in reversed(sizes) for how in order]
        found: list[Candidate] = []
        told = progress or (lambda done, total: None)
        for done, case in enumerate(cases):
            told(done, len(cases))
            if self._is_worth_it(case, [one for one in found if one.fits]):
                found += self._candidates(case)
        told(len(cases), len(cases))

        def rank(one: Candidate) -> tuple[float, ...]:
            step_s = float(f"{one.step_s:.9g}")  # without rounding errors
            return not one.fits, step_s, one.is_balanced, order[one.recomputation], max(one.device_peak_bytes)

        return tuple(sorted(found, key=rank))

    def _is_worth_it(self, case: Case, fitting: Sequence[Candidate]) -> bool:
        """Return whether to simulate a case: if it has many microbatches, only if they may fit, and no larger ones fit plain."""
        p, b, how = case
        if self.batches[p] // b <= self.many or not fitting:
            return True
        if any((one.is_balanced, one.num_stages, one.recomputation) == (False, p, how) for one in fitting):
            return False
        fewer = self.variants(p, self.many)  # more never need less
        return any(self._candidate(each.schedule, plan, case).fits for each in fewer for plan in each.plain_and_tight)

    def _candidates(self, case: Case) -> Iterator[Candidate]:
        """Yield each schedule plain and balanced, and with the largest budget that fits, if only balancing makes it fit."""
        for each in self.variants(case.num_stages, self.batches[case.num_stages] // case.microbatch_size):
            if each.plain.slices > 1 and case.recomputation == "full":  # drops keys and values that later slices read
                continue
            yield (plain := self._candidate(each.schedule, each.plain, case))
            if each.tight is not None:
                yield (tight := self._candidate(each.schedule, each.tight, case, plain))
                if tight.fits and not plain.fits:
                    roomier = (self._candidate(each.schedule, plan, case, plain) for plan in each.roomier)
                    yield from islice((one for one in roomier if one.fits), 1)

    def _candidate(self, schedule: str, plan: Plan, case: Case, plain: Candidate | None = None) -> Candidate:
        """Simulate a plan of a schedule; `plain` is the candidate that it balances."""
        whole, working_bytes = self._costs_of(case), self.workload.working_bytes(case.load)
        costs = whole.of_slices(plan, lengths=even_shares(self.workload.attention or 0.0, plan.slices))
        timeline, ranks, aside = simulate(plan, costs), range(plan.num_ranks), max(self.reserved_bytes, working_bytes)
        slowest = max(ranks, key=lambda stage: whole.seconds(Op.F, stage, 0) + whole.seconds(Op.B, stage, 0))
        forward_s, backward_s = whole.seconds(Op.F, slowest, 0), whole.seconds(Op.B, slowest, 0)
        share = self.workload.share(case.microbatch_size)
        peaks, exposed = tuple(map(timeline.device_peak_bytes, ranks)), list(map(timeline.exposed_s, ranks))
        idle = [_filled(timeline, rank, self.memory_bytes - aside) for rank in ranks]
        found = Candidate(
            schedule=schedule,
            destination="pair" if any(plan.served) else "",
            slots=plan.slots[0] if any(plan.served) else None,
            num_stages=case.num_stages,
            microbatch_size=case.microbatch_size,
            num_microbatches=plan.num_microbatches,
            slices=plan.slices,
            recomputation=case.recomputation,
            step_s=timeline.makespan_s,
            times_plain=None if plain is None else timeline.makespan_s / plain.step_s,
            sequences_per_s=self.batch / timeline.makespan_s,
            sequence_s=(forward_s + backward_s) / case.microbatch_size,
            stage_mfu=None if share is None else 3 * forward_s / (forward_s + backward_s) * share,
            device_peak_bytes=peaks,
            peak_bytes=tuple(map(timeline.peak_bytes, ranks)),
            working_bytes=working_bytes,
            fits=max(peaks) <= self.memory_bytes - aside,
            reason=self._reason(peaks, aside),
            exposed_s=max(one.get(Op.WAIT_EVICT, 0.0) + one.get(Op.WAIT_LOAD, 0.0) for one in exposed),
            hides_at_bytes_per_s=_hides_at(plan, costs),
            idle_s=tuple(one.idle_s for one in idle),
            fillable_s=tuple(one.used_s for one in idle),
            idle_free_bytes=tuple(one.least_bytes for one in idle),
        )
        self._simulated[found] = plan, costs
        return found

    def _reason(self, peaks: Sequence[int], aside: int) -> str:
        """Say why a plan fits or not, if that much of the memory is set aside."""
        there, needed = self.memory_bytes - aside, max(peaks)
        text = f"rank {peaks.index(needed)} needs {gib(needed)} of {gib(there)} GiB"
        if aside > self.reserved_bytes:
            text += f" ({gib(aside)} are for recomputing a layer)"
        return text if needed <= there else f"{text}, {gib(needed - there)} too much"

    def _costs(self, case: Case) -> Costs:
        return self.links.between(self.workload.exact_costs(case.load, self.workload.ends(case.num_stages)))

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth between the ranks of a pair."""
        return self.links.bytes_per_s

    def step_s(self, candidate: Candidate, bytes_per_s: float) -> float:
        """Return the seconds of a candidate's step if the kind of link that joins the ranks of a pair had another bandwidth."""
        if bytes_per_s == self.link_bytes_per_s:
            return candidate.step_s
        other = self.links.with_pairs_at(bytes_per_s)
        plan, costs = self._simulated[candidate]
        return simulate(plan, replace(costs, link=other.link, cross_link=other.cross_link)).makespan_s


def _filled(timeline: Timeline, rank: int, budget: int) -> Filling:
    """Return what small pieces make of a rank's gaps."""
    piece_s = min(span.seconds for span in timeline.computations(rank) if span.action.op is Op.F) / PIECES
    return fill_gaps(timeline, rank, piece_s or timeline.makespan_s or 1.0, budget=budget)


def _hides_at(plan: Plan, costs: Costs) -> float | None:
    """Return the bandwidth that moves a microbatch or slice within one forward: for p = 4..32, such transfers cost nothing."""
    moved = {(action.stage, action.microbatch) for lane in plan.served for action in lane}
    speeds = [costs.movable(*one) / costs.seconds(Op.F, *one) for one in moved if costs.seconds(Op.F, *one) > 0]
    return max(speeds, default=None)


def finite(bytes_per_s: float) -> float | None:
    """Return a bandwidth as JSON can express it: None if it is unlimited."""
    return bytes_per_s if isfinite(bytes_per_s) else None
