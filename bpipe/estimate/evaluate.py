"""Evaluate candidates: build each plan once, simulate it with each workload's costs, and compare its peaks with the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

from bpipe.estimate.advice import Candidate, gib
from bpipe.estimate.candidates import variants
from bpipe.estimate.even_slices import even_shares
from bpipe.estimate.workload import Links, Load, MeasuredWorkload, ModelWorkload
from bpipe.schedules import Costs, Op, Plan, simulate
from bpipe.simulator.gaps import fill_gaps
from bpipe.simulator.simulation import simulated_times

__all__: list[str] = []

PIECES = 10  # of a fill job, in a forward


@dataclass
class Evaluator:
    """Simulates the candidates of one workload.

    Args:
        workload: what the step runs.
        links: between ranks.
        batch: sequences per step, of all pipelines together.
        batches: sequences per step and pipeline, for each number of stages.
        sizes: microbatch sizes to try, for each number of stages.
        memory_bytes: the memory of a device.
        reserved_bytes: of these, set aside.
        many: more microbatches than this are simulated only if they may fit and no larger ones fit plain.
        slices: of a microbatch, for the schedules that take several.
    """

    workload: ModelWorkload | MeasuredWorkload
    links: Links
    batch: int
    batches: Mapping[int, int]
    sizes: Mapping[int, Sequence[int]]
    memory_bytes: int
    reserved_bytes: int
    many: int
    slices: int = 1

    def __post_init__(self) -> None:
        self.variants, self._costs_of = cache(partial(variants, slices=self.slices)), cache(self._costs)
        self._simulated: dict[Candidate, tuple[Plan, Costs]] = {}

    def ranked(self, progress: Callable[[int, int], None] | None = None) -> tuple[Candidate, ...]:
        """Rank all candidates: those that fit first, each group by time for the same number of sequences.

        Of equally fast ones, those that move and recompute less come first.
        """
        ways = self.workload.recomputations
        cases = [(p, Load(size, how)) for p, sizes in self.sizes.items() for size in reversed(sizes) for how in ways]
        found: list[Candidate] = []
        told = progress or (lambda done, total: None)
        for done, case in enumerate(cases):
            told(done, len(cases))
            if self._is_worth_it(*case, [one for one in found if one.fits]):
                found += self._candidates(*case)
        told(len(cases), len(cases))

        def rank(one: Candidate) -> tuple[float, ...]:
            step_s = float(f"{one.step_s:.9g}")  # without rounding errors
            return not one.fits, step_s, one.is_balanced, ways.index(one.recomputation), max(one.device_peak_bytes)

        return tuple(sorted(found, key=rank))

    def _is_worth_it(self, p: int, load: Load, fitting: Sequence[Candidate]) -> bool:
        """Return whether to simulate a load: if it makes many microbatches, only if they may fit, and no larger ones fit plain."""
        if self.batches[p] // load.microbatch_size <= self.many or not fitting:
            return True
        if any((one.is_balanced, one.num_stages, one.recomputation) == (False, p, load.recomputation) for one in fitting):
            return False
        fewer = self.variants(p, self.many)  # more never need less
        return any(self._candidate(plan, load).fits for each in fewer for plan in each.plain_and_tight)

    def _candidates(self, p: int, load: Load) -> Iterator[Candidate]:
        """Yield each schedule plain and balanced, and with the largest budget that fits, if only balancing makes it fit."""
        for each in self.variants(p, self.batches[p] // load.microbatch_size):
            if each.plain.slices > 1 and load.recomputation == "full":  # drops keys and values that later slices read
                continue
            yield (plain := self._candidate(each.plain, load))
            if each.tight is not None:
                yield (tight := self._candidate(each.tight, load, plain))
                if tight.fits and not plain.fits:
                    roomier = (self._candidate(plan, load, plain) for plan in each.roomier)
                    yield from islice((one for one in roomier if one.fits), 1)

    def _candidate(self, plan: Plan, load: Load, plain: Candidate | None = None) -> Candidate:
        """Simulate a plan; `plain` is the candidate that it balances."""
        whole, working_bytes = self._costs_of(plan.num_ranks, load), self.workload.working_bytes(load)
        costs = whole.of_slices(plan, lengths=even_shares(self.workload.attention or 0.0, plan.slices))
        timeline, ranks, aside = simulate(plan, costs), range(plan.num_ranks), max(self.reserved_bytes, working_bytes)
        forward_s, backward_s = max(((whole.seconds(Op.F, x, 0), whole.seconds(Op.B, x, 0)) for x in ranks), key=sum)
        share, there = self.workload.share(load.microbatch_size), self.memory_bytes - aside
        peaks, exposed = tuple(map(timeline.device_peak_bytes, ranks)), list(map(timeline.exposed_s, ranks))
        pieces_s = [costs.seconds(Op.F, x, 0) / PIECES or timeline.makespan_s or 1.0 for x in ranks]
        idle = [fill_gaps(timeline, rank, piece_s, budget=there) for rank, piece_s in zip(ranks, pieces_s)]
        found = Candidate(
            schedule=plan.name,
            slots=plan.slots[0] if any(plan.served) else None,
            num_stages=plan.num_ranks,
            microbatch_size=load.microbatch_size,
            num_microbatches=plan.num_microbatches,
            slices=plan.slices,
            recomputation=load.recomputation,
            step_s=timeline.makespan_s,
            times_plain=None if plain is None else timeline.makespan_s / plain.step_s,
            sequences_per_s=self.batch / timeline.makespan_s,
            sequence_s=(forward_s + backward_s) / load.microbatch_size,
            stage_mfu=None if share is None else 3 * forward_s / (forward_s + backward_s) * share,
            device_peak_bytes=peaks,
            peak_bytes=tuple(map(timeline.peak_bytes, ranks)),
            working_bytes=working_bytes,
            fits=max(peaks) <= there,
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

    def _costs(self, p: int, load: Load) -> Costs:
        return self.links.between(self.workload.exact_costs(load, self.workload.ends(p)))

    def step_s(self, candidate: Candidate, bytes_per_s: float) -> float:
        """Return the seconds of a candidate's step if the kind of link that joins the ranks of a pair had another bandwidth."""
        if bytes_per_s == self.links.bytes_per_s:
            return candidate.step_s
        plan, costs = self._simulated[candidate]
        return simulated_times(plan, self.links.with_pairs_at(bytes_per_s).between(costs)).makespan_s


def _hides_at(plan: Plan, costs: Costs) -> float | None:
    """Return the bandwidth that moves a microbatch or slice within one forward: for p = 4..32, such transfers cost nothing."""
    moved = {(action.stage, action.microbatch) for lane in plan.served for action in lane}
    return max((costs.movable(*one) / seconds for one in moved if (seconds := costs.seconds(Op.F, *one)) > 0), default=None)
