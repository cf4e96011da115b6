"""Check plans made from microbatch counts or given sizes against the memory that devices really hold, and warn if they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bpipe.comm.health.agreement import RoomRecord, StepRecord
from bpipe.engine.run import Run
from bpipe.memory.peaks import peak
from bpipe.passes.balance.outcome import unbalanced_peaks
from bpipe.passes.communicate import communicate, computations_only
from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Op, Plan
from bpipe.session.context import Once

__all__: list[str] = []

WORTH_SAYING = 1.01  # warn from this multiple of the memory without balancing


@dataclass(frozen=True, slots=True)
class PeakRecord(RoomRecord):
    """The most bytes that a rank has held, where its plan has to show that this is less than without balancing.

    Args:
        balanced: what it has held.
        plain: what it would have held without evictions and recomputation.
        states: the bytes of optimizer states among these.
        budget: what it may hold, if a plan was made for budgets from given (not measured) sizes.
    """

    balanced: int = 0
    plain: int = 0
    states: int = 0
    budget: int | None = None

    @classmethod
    def doubts(cls, records: Sequence[StepRecord], depth: int) -> Iterator[str]:
        """Yield whether balancing raises the peak of the fullest rank, and which rank exceeds its budget most."""
        peaks = cls.of(records)
        if cls() in peaks:  # of a rank that has nothing to compare, or has said enough
            return
        names = [f"rank {rank}" for rank in range(len(peaks))]
        yield from _raised([one.plain for one in peaks], [one.balanced for one in peaks], names)
        over = [(one.balanced - one.budget, rank) for rank, one in enumerate(peaks) if one.budget is not None]
        excess, rank = max(over, default=(0, 0))
        if excess > 0:
            own = peaks[rank]
            holds, budget = show_bytes(own.balanced), show_bytes(own.balanced - excess)
            among = f", including {show_bytes(own.states)} of optimizer states" * bool(own.states)
            yield (
                f"{names[rank]} holds {holds}, over its budget of {budget}" + f" by {show_bytes(excess)}" * (holds == budget) + ", "
                f"because sizes= gives fewer bytes than the rank uses{among}. Give stats['static_bytes'] as its static bytes, or "
                "leave sizes= out, so that bpipe measures them"
            )


class Fullest:
    """Compare the fullest rank's peak with its peak without evictions and recomputation, and each rank's peak with its budget.

    After the first step of a plan each rank knows both of its peaks, the second one from the footprints of the same microbatches.
    They travel with the records of the next steps, and the first rank warns, once.

    Args:
        budgets: each rank's budget in bytes, if a plan was made for them from given (not measured) sizes.
    """

    def __init__(self, budgets: Sequence[int | None] | None = None) -> None:
        self._budgets = budgets
        self.plan: Plan | None = None  # the plan whose first step was compared
        self._own = PeakRecord()  # both peaks of this rank, without optimizer states
        self._has_said = False  # that a plan's sizes show a problem

    def note(self, run: Run, stats: Mapping[str, float], states: int, once: Once) -> None:
        """Note both peaks of this rank after a plan's first training step, for the comparison."""
        self.plan, self._own, budgets = run.plan, PeakRecord(), self._budgets
        balances = any(action.op in (Op.EVICT, Op.R) for lane in run.plan.actions for action in lane)
        if not self._has_said and (budgets is not None or balances):
            with_messages_alone = once(("plain", run.plan), lambda: communicate(computations_only(run.plan)))
            plain = peak(with_messages_alone, run.rank, run.evictions.ledger.footprints, with_messages=True)
            balanced, static = int(stats["device_peak_bytes"]) - states, int(stats["static_bytes"]) - states
            self._own = PeakRecord(balanced, static + plain, budget=None if budgets is None else budgets[run.rank])

    def record(self, states: int) -> PeakRecord:
        """Return both peaks of this rank including the present optimizer states, if there is something to compare."""
        own = self._own
        return own if own == PeakRecord() else PeakRecord(own.balanced + states, own.plain + states, states, own.budget)

    def check_plan(self, plan: Plan, names: Sequence[str], rule: str, warn: Callable[..., None]) -> None:
        """Warn if a plan's sizes show that, within different budgets, a rank gets fuller than any rank without balancing."""
        if not self._has_said and plan.sizes is not None and len(set(plan.budgets or ())) > 1:
            for problem in _raised(unbalanced_peaks(plan), plan.device_peak_bytes, names):
                self._has_said = True
                warn("%s: %s", rule, problem)


def _raised(plain: Sequence[int], balanced: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    """Yield a warning if balancing raises the highest peak of the ranks."""
    (before, was), (after, now) = (max((peak, -rank) for rank, peak in enumerate(peaks)) for peaks in (plain, balanced))
    if after >= WORTH_SAYING * before and after > before:
        yield (
            f"balancing raises the memory of the fullest rank from {show_bytes(before)} ({names[-was]}) to {show_bytes(after)} "
            f"({names[-now]}): weights, gradients, optimizer states, activations, messages and buffers together. Balance in bytes "
            'with bpipe.Balanced(schedule, budget="lowest"), send evictions to other ranks (to=), or train without balancing'
        )
