"""Check plans made from microbatch counts or given sizes against the memory that devices really hold, and warn if they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bpipe.comm.health.agreement import StepRecord
from bpipe.engine.run import Run
from bpipe.memory.peaks import Peaks
from bpipe.passes.balance.outcome import unbalanced_peaks
from bpipe.passes.communicate import communicate, computations_only
from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Op, Plan
from bpipe.session.context import Once

__all__: list[str] = []

WORTH_SAYING = 1.01  # warn from this multiple of the memory without balancing


class Fullest:
    """Compare the fullest rank's peak with its peak without evictions and recomputation, and each rank's peak with its budget.

    After the first step of a plan each rank knows both of its peaks, the second one from the footprints of the same microbatches.
    They travel with the record of the next step, in which the first rank warns, once.

    Args:
        budgets: each rank's budget in bytes, if a plan was made for them from given (not measured) sizes.
    """

    def __init__(self, budgets: Sequence[int | None] | None = None) -> None:
        self._budgets = budgets
        self.plan: Plan | None = None  # the plan whose first step was compared
        self.is_open = False  # whether the next records are to be checked
        self._own: tuple[int, int] | None = None  # both peaks of this rank, without optimizer states
        self._has_said = False

    def note(self, run: Run, stats: Mapping[str, float], states: int, once: Once) -> None:
        """Note both peaks of this rank after a plan's first training step, for the comparison."""
        self.plan, self._own = run.plan, None
        if self._budgets is not None or any(action.op in (Op.EVICT, Op.R) for lane in run.plan.actions for action in lane):
            with_messages_alone = once(("plain", run.plan), lambda: communicate(computations_only(run.plan)))
            plain = Peaks(with_messages=True).of(with_messages_alone, run.rank, run.evictions.ledger.footprints)
            self.is_open = not self._has_said
            self._own = int(stats["device_peak_bytes"]) - states, int(stats["static_bytes"]) - states + plain

    def peaks(self, states: int) -> tuple[int, int]:
        """Return both peaks of this rank including the present optimizer states; zeros if there is nothing to compare."""
        return (0, 0) if self._own is None else (self._own[0] + states, self._own[1] + states)

    def check(self, records: Sequence[StepRecord], names: Sequence[str], rule: str, warn: Callable[..., None]) -> None:
        """Warn if the records of all ranks, in the order of the plan, show a problem, after a step that was compared."""
        self.is_open = False
        raised = _raised([record.plain_peak for record in records], [record.peak for record in records], names)
        self._say((*raised, *self._over_budget(records, names)), rule, warn)

    def check_plan(self, plan: Plan, names: Sequence[str], rule: str, warn: Callable[..., None]) -> None:
        """Warn if a plan's sizes show that, within different budgets, a rank gets fuller than any rank without balancing."""
        if not self._has_said and plan.sizes is not None and len(set(plan.budgets or ())) > 1:
            self._say(_raised(unbalanced_peaks(plan), plan.device_peak_bytes, names), rule, warn)

    def _say(self, problems: Iterable[str], rule: str, warn: Callable[..., None]) -> None:
        for problem in problems:
            self._has_said = True
            warn("%s: %s", rule, problem)

    def _over_budget(self, records: Sequence[StepRecord], names: Sequence[str]) -> Iterator[str]:
        over = [(one.peak - most, rank) for rank, (one, most) in enumerate(zip(records, self._budgets or ())) if most is not None]
        excess, rank = max(over, default=(0, 0))
        if excess > 0:
            peak, states = records[rank].peak, records[rank].states
            holds, budget = show_bytes(peak), show_bytes(peak - excess)
            among = f", including {show_bytes(states)} of optimizer states" * bool(states)
            yield (
                f"{names[rank]} holds {holds}, over its budget of {budget}" + f" by {show_bytes(excess)}" * (holds == budget) + ", "
                f"because sizes= gives fewer bytes than the rank uses{among}. Give stats['static_bytes'] as its static bytes, or "
                "leave sizes= out, so that bpipe measures them"
            )


def _raised(plain: Sequence[int], balanced: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    """Yield a warning if balancing raises the highest peak of the ranks."""
    (before, was), (after, now) = (max((peak, -rank) for rank, peak in enumerate(peaks)) for peaks in (plain, balanced))
    if after >= WORTH_SAYING * before and after > before:
        yield (
            f"balancing raises the memory of the fullest rank from {show_bytes(before)} ({names[-was]}) to {show_bytes(after)} "
            f"({names[-now]}): weights, gradients, optimizer states, activations, messages and buffers together. Balance in bytes "
            'with bpipe.Balanced(schedule, budget="lowest"), send evictions to other ranks (to=), or train without balancing'
        )
