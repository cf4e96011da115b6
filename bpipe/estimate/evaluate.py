"""Evaluate candidates: build each plan once, simulate it with each workload's costs, and compare its peaks with the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import isfinite

from bpipe.estimate.advice import Candidate, gib
from bpipe.estimate.candidates import Variant, roomier, variants
from bpipe.estimate.workload import Load, Workload
from bpipe.schedules import Costs, Op, Plan, simulate
from bpipe.simulator.gaps import Filling, fill_gaps
from bpipe.simulator.simulation import idle_bytes, own_bytes
from bpipe.simulator.timeline import Timeline

__all__: list[str] = []

Progress = Callable[[int, int], None]
Case = tuple[int, int, str]  # stages, microbatch size, recomputation
RECOMPUTING_STATE = ("full",)  # recomputations that drop the keys and values which the slices behind a slice read
PIECES = 10  # of a fill job, in a forward


@dataclass
class Evaluator:
    """Simulates the candidates of one workload."""

    workload: Workload  # what the step runs
    batch: int  # sequences per step, of all pipelines together
    batches: Mapping[int, int]  # sequences per step and pipeline, for each number of stages
    memory_bytes: int  # the memory of a device
    reserved_bytes: int  # of these, set aside
    many: int  # a case with more microbatches than this is simulated only if it may fit and no larger ones fit plain
    slices: int = 1  # of a microbatch, for the schedules that take several
    _variants: dict[tuple[int, int], tuple[Variant, ...]] = field(default_factory=dict)
    _loads: dict[Case, Load] = field(default_factory=dict)
    _roomier: dict[tuple[str, str, int, int], tuple[Variant, ...]] = field(default_factory=dict)

    def variants(self, num_stages: int, num_microbatches: int) -> tuple[Variant, ...]:
        """Return the plans for a number of stages and of microbatches, which are built once."""
        key = (num_stages, num_microbatches)
        if key not in self._variants:
            self._variants[key] = tuple(variants(*key, self.slices))
        return self._variants[key]

    def load(self, case: Case) -> Load:
        """Return what a microbatch costs, which is computed once."""
        if case not in self._loads:
            self._loads[case] = self.workload.load(*case)
        return self._loads[case]

    def ranked(self, microbatch_sizes: Mapping[int, Sequence[int]], progress: Progress | None = None) -> tuple[Candidate, ...]:
        """Rank all candidates: those that fit first, each group by time for the same number of sequences.

        Of equally fast ones, those that move and recompute less come first.
        """
        order = {name: index for index, name in enumerate(self.workload.recomputations)}
        cases = [(p, b, how) for p, sizes in microbatch_sizes.items() for b in reversed(sizes) for how in order]
        found: list[Candidate] = []
        for done, case in enumerate(cases):
            if progress is not None:
                progress(done, len(cases))
            if self._is_worth_it(case, [one for one in found if one.fits]):
                found += self._candidates(case)
        if progress is not None:
            progress(len(cases), len(cases))
        found.sort(key=lambda one: (one.is_balanced, order[one.recomputation], max(one.device_peak_bytes)))
        return tuple(sorted(found, key=lambda one: (not one.fits, float(f"{one.step_s:.9g}"))))  # without rounding errors

    def _is_worth_it(self, case: Case, fitting: Sequence[Candidate]) -> bool:
        """Return whether to simulate a case: if it has many microbatches, only if they may fit, and no larger ones fit plain."""
        p, b, how = case
        if self.batches[p] // b <= self.many or not fitting:
            return True
        if any((one.is_balanced, one.num_stages, one.recomputation) == (False, p, how) for one in fitting):
            return False
        return any(self._fits(one, case) for one in self.variants(p, self.many))  # more never need less

    def _candidates(self, case: Case) -> Iterator[Candidate]:
        """Yield a candidate per variant, and if only balancing makes a schedule fit, another with the largest budget that fits."""
        plain: dict[str, Candidate] = {}  # it comes before what balances it
        for variant in self.variants(case[0], self.batches[case[0]] // case[1]):
            if variant.plan.slices > 1 and case[2] in RECOMPUTING_STATE:
                continue
            twin = plain.get(variant.schedule)
            candidate = self._candidate(variant, case, twin)
            yield candidate
            if twin is None:
                plain[variant.schedule] = candidate
            elif candidate.fits and not twin.fits:
                yield from islice((self._candidate(one, case, twin) for one in self.roomier(variant) if self._fits(one, case)), 1)

    def roomier(self, variant: Variant) -> tuple[Variant, ...]:
        """Return a variant with larger budgets, which are built once."""
        plan = variant.plan
        key = (variant.schedule, variant.destination, plan.num_ranks, plan.num_microbatches)
        if key not in self._roomier:
            self._roomier[key] = roomier(variant)
        return self._roomier[key]

    def _fits(self, variant: Variant, case: Case) -> bool:
        plan, load = variant.plan, self.load((variant.plan.num_stages, *case[1:]))
        costs = self._costs(plan, load)
        peaks = [idle_bytes(plan, costs, rank) + max(own_bytes(plan, costs, rank)) for rank in range(plan.num_ranks)]
        return self._verdict(peaks, load)[0]

    def _candidate(self, variant: Variant, case: Case, plain: Candidate | None) -> Candidate:
        plan, load = variant.plan, self.load((variant.plan.num_stages, *case[1:]))
        costs = self._costs(plan, load)
        timeline = simulate(plan, costs)
        peaks = tuple(map(timeline.device_peak_bytes, range(plan.num_ranks)))
        fits, reason = self._verdict(peaks, load)
        idle = [self._idle(timeline, rank, load) for rank in range(plan.num_ranks)]
        return Candidate(
            schedule=variant.schedule,
            destination=variant.destination,
            slots=variant.slots,
            num_stages=case[0],
            microbatch_size=case[1],
            num_microbatches=plan.num_microbatches,
            slices=plan.slices,
            recomputation=case[2],
            step_s=timeline.makespan_s,
            times_plain=None if plain is None else timeline.makespan_s / plain.step_s,
            sequences_per_s=self.batch / timeline.makespan_s,
            sequence_s=_slowest_s(plan, load.costs) / case[1],
            stage_mfu=load.stage_mfu,
            device_peak_bytes=peaks,
            peak_bytes=tuple(map(timeline.peak_bytes, range(plan.num_ranks))),
            working_bytes=load.working_bytes,
            fits=fits,
            reason=reason,
            exposed_s=max(_exposed_s(timeline, rank) for rank in range(plan.num_ranks)),
            hides_at_bytes_per_s=_hides_at(plan, costs),
            idle_s=tuple(one.idle_s for one in idle),
            fillable_s=tuple(one.used_s for one in idle),
            idle_free_bytes=tuple(one.least_bytes for one in idle),
        )

    def _costs(self, plan: Plan, load: Load) -> Costs:
        """Return the costs of a plan's microbatches, or of their slices."""
        return load.costs.of_slices(plan, lengths=self.workload.slice_shares(plan.slices))

    def _idle(self, timeline: Timeline, rank: int, load: Load) -> Filling:
        """Return what small pieces make of a rank's gaps."""
        piece_s = min(span.seconds for span in timeline.computations(rank) if span.action.op is Op.F) / PIECES
        budget = self.memory_bytes - max(self.reserved_bytes, load.working_bytes)
        return fill_gaps(timeline, rank, piece_s or timeline.makespan_s or 1.0, budget=budget)

    def _verdict(self, peaks: Sequence[int], load: Load) -> tuple[bool, str]:
        aside = max(self.reserved_bytes, load.working_bytes)
        there, needed = self.memory_bytes - aside, max(peaks)
        text = f"rank {peaks.index(needed)} needs {gib(needed)} of {gib(there)} GiB"
        if aside > self.reserved_bytes:
            text += f" ({gib(aside)} are for recomputing a layer)"
        return needed <= there, text if needed <= there else f"{text}, {gib(needed - there)} too much"

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth between the ranks of a pair."""
        return self.workload.links.bytes_per_s

    def step_s(self, candidate: Candidate, bytes_per_s: float) -> float:
        """Return the seconds of a candidate's step if the kind of link that joins the ranks of a pair had another bandwidth."""
        if bytes_per_s == self.link_bytes_per_s:
            return candidate.step_s
        other = self.workload.links.with_pairs_at(bytes_per_s)
        plan, costs = self._simulated(candidate)
        return simulate(plan, replace(costs, link=other.link, cross_link=other.cross_link)).makespan_s

    def _simulated(self, candidate: Candidate) -> tuple[Plan, Costs]:
        """Return the plan of a candidate and its costs."""
        tight = self.variants(candidate.num_stages, candidate.num_microbatches)
        found = chain(tight, (one for variant in tight if variant.destination for one in self.roomier(variant)))
        name = (candidate.schedule, candidate.destination, candidate.slots)
        plan = next(one.plan for one in found if (one.schedule, one.destination, one.slots) == name)
        return plan, self._costs(plan, self.load((plan.num_stages, candidate.microbatch_size, candidate.recomputation)))


def _slowest_s(plan: Plan, costs: Costs) -> float:
    return max(costs.seconds(Op.F, x, 0) + costs.seconds(Op.B, x, 0) for x in range(plan.num_stages))


def _exposed_s(timeline: Timeline, rank: int) -> float:
    exposed = timeline.exposed_s(rank)
    return exposed.get(Op.WAIT_EVICT, 0.0) + exposed.get(Op.WAIT_LOAD, 0.0)


def _hides_at(plan: Plan, costs: Costs) -> float | None:
    """Return the bandwidth that moves a microbatch or slice within one forward: for p = 4..32, such transfers cost nothing."""
    moved = {(action.stage, action.microbatch) for lane in plan.served for action in lane}
    speeds = [costs.movable(*one) / costs.seconds(Op.F, *one) for one in moved if costs.seconds(Op.F, *one) > 0]
    return max(speeds, default=None)


def finite(bytes_per_s: float) -> float | None:
    """Return a bandwidth as JSON can express it: None if it is unlimited."""
    return bytes_per_s if isfinite(bytes_per_s) else None
