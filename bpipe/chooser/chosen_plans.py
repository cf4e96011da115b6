"""Plans that are chosen for a schedule's stages by what its first steps measure, and once more by what its next steps take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from bpipe.api.known_shapes import Shapes
from bpipe.api.loopback import LoopbackGroup
from bpipe.api.measured_plans import MeasuredRecord, naming
from bpipe.api.policy import Policy
from bpipe.api.schedule import Schedule
from bpipe.chooser.compare_plans import choose
from bpipe.chooser.known_costs import KnownCosts
from bpipe.chooser.plan_choice import Choice, show_s
from bpipe.chooser.profiled_plans import ProfiledPlans
from bpipe.chooser.question import StagesQuestion
from bpipe.chooser.together import Together, communicate_inside
from bpipe.chooser.ways import Wishes
from bpipe.comm.health.agreement import StepRecord
from bpipe.comm.health.clocks import Clocks, Offset, align
from bpipe.comm.wire.codec import decode, encode
from bpipe.device import is_asynchronous
from bpipe.device.times import DeviceTimes
from bpipe.engine.recorder import Recorder
from bpipe.engine.run import Observer, Run
from bpipe.errors import AgreementError, BPipeError, BudgetError, CommError, ConfigurationError, PlanError, format_error
from bpipe.flow.shape_arguments import holders_of
from bpipe.memory.recent import Recent
from bpipe.passes.fit import Budgets
from bpipe.passes.gradient_exchanges import summing, with_sums
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes, gradients
from bpipe.session.filler import both
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import PreparedCall
from bpipe.session.session import REMEMBERED_SHAPES, StepKey
from bpipe.simulator.measured import Measured
from bpipe.simulator.simulation import simulate
from bpipe.tools.trace_record import Origin, joined, packed, parse
from bpipe.tools.tracing import timelines_of
from bpipe.verifier.proof import verify

__all__: list[str] = []

WARM = 1  # steps of a new plan that are not timed: they learn messages and make buffers
TIMED = 3  # steps of it that are
MOST_CHANGES = 3  # of the plan, for one form of inputs
GAIN = 0.02  # share of a step that another plan must save before it takes the place of one that runs
TOKEN = bytes(16)  # of a loopback's ranks, which share a clock


class Answer(NamedTuple):
    """What rank 0 has chosen."""

    choice: str = ""  # as JSON
    is_new: bool = False  # whether the plan changes
    is_last: bool = False  # whether nothing is measured any more
    said: str = ""  # for people
    refusal: str = ""  # why there is no plan
    is_budget: bool = False  # whether that is because of too little memory


@dataclass
class Timed:
    """The steps that are being timed, on this rank."""

    recorder: Recorder
    clocks: Clocks

    def packed(self, rank: int) -> bytes:
        """Return this rank's times, as a trace's record."""
        if self.recorder.device_times is not None:
            self.recorder.device_times.resolve(wait=True)
        part = timelines_of(self.recorder.records, rank, self.clocks)
        return "".join(packed(part, Origin(run=self.clocks.token.hex()))).encode()


@dataclass
class Track:
    """What is known of steps with inputs of one form, and how far their plan has come."""

    known: KnownCosts
    timed: Timed | None = None
    keeps_order: bool = False  # because results depend on it
    sizes: Sizes | None = None
    budgets: Budgets = ()
    choice: Choice | None = None
    measured: list[tuple[float, Choice]] = field(default_factory=list)  # the steps that plans took, in the order of the plans
    num_steps: int = 0  # of the present plan
    is_done: bool = False

    def judged(self, steps: Sequence[Measured], choose: Callable[[Sizes], Choice]) -> Answer:
        """Compare steps of the plan with what was expected of them; while it may change, choose again by what they took."""
        before, sizes = self.choice, self.sizes
        assert before is not None and sizes is not None, "a plan was chosen"
        taken_s = median(step.makespan_s for step in steps)
        self.known.learn(steps, before.plan)
        self.measured.append((taken_s, before))
        off = taken_s / before.step_s - 1
        said = f"{before.name} took {show_s(taken_s)}, {100 * abs(off):.1f}% {'more' if off > 0 else 'less'} than expected"
        least_s, fastest = min(self.measured, key=lambda one: one[0])
        if least_s < taken_s * (1 - GAIN):
            return Answer(fastest.to_json(), True, True, f"{said}: back to {fastest.name}, which took {show_s(least_s)}")
        if len(self.measured) > MOST_CHANGES:
            return Answer(is_last=True, said=f"{said}: it stays, because the plan has changed {MOST_CHANGES} times")
        again_s = simulate(before.plan, self.known.costs(sizes)).makespan_s
        choice = choose(sizes)
        if 1 - choice.step_s / again_s <= GAIN:
            return Answer(is_last=True, said=f"{said}: it stays, because nothing is clearly faster")
        if any(one.plan.actions == choice.plan.actions for _, one in self.measured):
            return Answer(is_last=True, said=f"{said}: it stays, because what would be faster was tried")
        expected = f"{show_s(choice.step_s)} are expected of it, and by the same costs {show_s(again_s)} of the present one"
        return Answer(choice.to_json(), True, False, f"{said}: {choice.name} takes its place: {expected}")


class ChosenPlans(ProfiledPlans):
    """Plans that rank 0 chooses, and all ranks verify.

    The first step with inputs of some form measures bytes, one microbatch at a time, and times; a plan is chosen for these. Steps
    of it are timed, and if another plan would be clearly faster by what these took, it takes its place, and is timed likewise.

    Args:
        schedule: whose stages it is; its plan gives the order in which a step measures if results depend on it.
        policy: how to measure, and what may store activations.
        known: the costs that are known before the first step.
        wishes: what the user allows.
        replicas: the ranks that hold the same stages in other pipelines: all run the plan that the first of them chooses.
        told: called on rank 0 with what is done of a choice, and of all.
    """

    def __init__(
        self,
        schedule: Schedule,
        policy: Policy,
        known: KnownCosts,
        wishes: Wishes,
        *,
        replicas: dist.ProcessGroup | None,
        told: Callable[[int, int], None] | None,
    ) -> None:
        where, asked = schedule.session.context, f"{policy} {wishes} {known} {replicas is not None}"
        super().__init__(schedule.plan, "auto", policy, where, replicas=None, is_lowest=False, asked=asked)
        self._prior, self._wishes, self._told, self._together = known, wishes, told, Together(replicas)
        self._needs_together = replicas is None
        self._tracks = Recent[StepKey, Track](REMEMBERED_SHAPES)
        self._key: StepKey = (True, ())  # of the latest training step's inputs
        self._timed: Timed | None = None  # what follows the step that begins
        self._round = 0  # how often ranks have sent each other their times
        self._sent: tuple[int, bytes] = (-1, b"")  # in the latest round
        self._answered: tuple[int, bytes] = (-1, b"")
        self._failure: Exception | None = None  # to choose, on rank 0
        self._is_due = False  # to choose again, in the step that begins

    @property
    def choice(self) -> Choice | None:
        """The choice for the latest step that had one."""
        return next((one.choice for one in reversed(self._tracks.values()) if one.choice is not None), None)

    # Steps that are timed

    def plan_of(self, inputs: PreparedCall, records: Sequence[StepRecord], gather: Gather, *, is_training: bool) -> Plan:
        self._timed = None
        if not is_training:
            return super().plan_of(inputs, records, gather, is_training=is_training)
        self._key = True, tuple(one.form for one in MeasuredRecord.of(records))
        self._tracks.use(self._key, Track(self._prior.copy()))
        plan = super().plan_of(inputs, records, gather, is_training=is_training)
        shapes, track = self._latest, self._tracks[self._key]
        if shapes.measured is None:
            track.timed = self._timed = self._listen(plan)
            return plan
        if self._is_due:
            shapes.plan = self.plan = plan = self._chosen_again(track, gather)
        if track.num_steps == WARM and not track.is_done:
            track.timed = self._listen(plan)
        if track.num_steps >= WARM:
            self._timed = track.timed
        track.num_steps += 1
        return plan

    def _agree_with_replicas(self, shapes: Shapes) -> None:
        """Forget what any replica has to measure or plan again, and choose again once all replicas have timed enough steps."""
        track = self._tracks[self._key]
        is_early = track.is_done or track.num_steps < WARM + TIMED
        level = 2 if shapes.measured is None else int(shapes.plan is None)
        level, some_are_early = self._together.most([level, int(is_early)])
        if level == 2 and shapes.measured is not None:
            shapes.measured = None
            self._context.memory.kinds.clear()
        if level:
            shapes.plan = None
        self._is_due = not level and not some_are_early

    def _plan_to_measure(self, gather: Gather) -> Plan:
        if self._needs_together:
            answers = gather(lambda source: b"1" if communicate_inside(_chosen(source)._context.modules()) else b"")
            if any(answers):
                self._context.guard.known_to_all = error = ConfigurationError(
                    "stages under FSDP2 or DDP, or in tensor parallelism, communicate in the order of the plan, so that all ranks "
                    "that hold the same stages have to run the same one: give bpipe.auto(replicas=), a process group of these ranks"
                )
                raise error
        plan = super()._plan_to_measure(gather)
        self._tracks[self._key].keeps_order = plan is self._in_order
        return plan

    def _listen(self, plan: Plan) -> Timed:
        """Time steps from this one on. Collective: the ranks compare their clocks."""
        context = self._context
        device = context.transport.device
        recorder = Recorder(DeviceTimes(device) if is_asynchronous(device) else None)
        if isinstance(context.group, LoopbackGroup):
            ranks = tuple(range(plan.num_ranks))
            return Timed(recorder, Clocks(TOKEN, ranks, (Offset(0, 0),) * len(ranks), 0))
        return Timed(recorder, align(context.transport.exchange, plan.fingerprint(), context.plan_rank))

    def observer_of(self, inputs: PreparedCall, plan: Plan, observer: Observer | None) -> Observer | None:
        inner = super().observer_of(inputs, plan, observer)
        return inner if self._timed is None or not plan.has_backward else both(self._timed.recorder, inner)

    def counted(self, run: Run, stats: Mapping[str, float]) -> None:
        super().counted(run, stats)
        if self._timed is not None:
            self._timed.recorder.finished(run, stats)

    def _times(self, number: int, key: StepKey) -> bytes:
        """Return this rank's times of the steps that were timed, if any were; the same for all who ask in a round."""
        if self._sent[0] != number:
            track = self._tracks[key]
            self._sent = number, b"" if track.timed is None else track.timed.packed(self._context.plan_rank)
            track.timed = None
        return self._sent[1]

    # The choice

    def _agreed_plan(self, sizes: Sizes, budgets: Sequence[int | None] | None, states: Sequence[int], gather: Gather) -> Plan:
        key = self._key
        limits: Budgets = (None,) * self._base.num_ranks if budgets is None else tuple(budgets)
        sizes, limits = self._together.covering(sizes, limits)
        answer = self._ask(key, gather, lambda first, times: first._first_answer(times, key, sizes, limits, states))
        plan, choice = self._accepted(answer, limits)
        before, is_done = self._tracks[key], isinstance(self._context.group, LoopbackGroup)
        self._tracks[key] = Track(before.known, None, before.keeps_order, sizes, limits, choice, is_done=is_done)
        self._say(answer.said)
        return plan

    def _chosen_again(self, track: Track, gather: Gather) -> Plan:
        key = self._key
        answer = self._ask(key, gather, lambda first, times: first._next_answer(times, key))
        if answer.refusal:  # there is a plan that works
            answer = Answer(is_last=True, said=f"{self.plan.name} stays: {answer.refusal}")
            self._failure = None
        self._say(answer.said)
        track.is_done = answer.is_last
        if not answer.is_new:
            return self.plan
        plan, track.choice = self._accepted(answer, track.budgets)
        track.num_steps = 0
        return plan

    def _ask(self, key: StepKey, gather: Gather, make: Callable[[ChosenPlans, list[bytes]], Answer]) -> Answer:
        """Return rank 0's answer to the times of all ranks. Collective."""
        self._round += 1
        number = self._round
        times = gather(lambda source: _chosen(source)._times(number, key))
        answers = gather(lambda source: _chosen(source)._answer(number, times, make))
        try:
            [data] = filter(None, answers)
            return decode(Answer, self._together.gather(data)[0], "choice", math.inf)
        except (ValueError, CommError) as error:
            raise CommError(f"rank 0 sent an unreadable choice of a plan: {answers!r:.80}") from error

    def _answer(self, number: int, times: list[bytes], make: Callable[[ChosenPlans, list[bytes]], Answer]) -> bytes:
        """Return what rank 0 answers in a round; what it cannot do is an answer, too, so that no rank waits for another one."""
        if self._context.plan_rank != 0:
            return b""
        if self._answered[0] != number:  # a loopback asks once for each of its ranks
            try:
                answer = make(self, times) if self._together.is_first else Answer()
            except BudgetError as error:
                answer = Answer(refusal=str(error), is_budget=True)
            except Exception as error:
                self._failure = error
                answer = Answer(refusal=f"rank 0 cannot choose a plan: {format_error(error)}")
            self._answered = number, encode(answer)
        return self._answered[1]

    def _accepted(self, answer: Answer, budgets: Budgets) -> tuple[Plan, Choice]:
        """Verify what rank 0 chose; raise on all ranks if it could not choose."""
        error: BPipeError
        if answer.refusal:
            error = BudgetError(answer.refusal) if answer.is_budget else AgreementError(answer.refusal)
        else:
            choice = Choice.from_json(answer.choice)
            try:
                verify(choice.plan)
                if choice.plan.flow != self._base.flow:
                    raise PlanError(f"rank 0 chose a plan for other stages or microbatches: {choice.plan.flow.shapes!r:.200}")
                over = [rank for rank, peak in enumerate(choice.plan.device_peak_bytes) if peak > (budgets[rank] or peak)]
                if over:
                    raise PlanError(f"rank 0 chose a plan that exceeds the memory of ranks {over}")
                return choice.plan, choice
            except PlanError as wrong:
                error = wrong
        self._context.guard.known_to_all = error
        failure, self._failure = self._failure, None
        raise error from failure

    def _first_answer(self, times: list[bytes], key: StepKey, sizes: Sizes, budgets: Budgets, states: Sequence[int]) -> Answer:
        """Choose a plan for sizes; if no times came, because these steps were timed before, for the known costs."""
        track = self._tracks[key]
        if all(times):
            steps = _steps(times)
            track.known.learn(steps, steps[0].plan)
        if not track.known.seconds:
            raise ConfigurationError("an earlier step failed before its times were known: make the schedule anew")
        began = time.perf_counter()
        with naming(states):
            choice = self._choose(track, sizes, budgets)
        took = time.perf_counter() - began
        said = f"chose {choice.name}: a step of {show_s(choice.step_s)} is expected; choosing took {show_s(took)}"
        return Answer(choice=choice.to_json(), is_new=True, said=said)

    def _next_answer(self, times: list[bytes], key: StepKey) -> Answer:
        """Compare the steps of a plan with what was expected of them, and choose again."""
        track = self._tracks[key]
        return track.judged(_steps(times), lambda sizes: self._choose(track, sizes, track.budgets))

    def _choose(self, track: Track, sizes: Sizes, budgets: Budgets) -> Choice:
        base, wishes = self._base, self._wishes
        holders = holders_of(base.flow)
        taken = [_exchanged_bytes(base, sizes, rank) for rank in range(base.num_ranks)]
        budgets = tuple(None if limit is None else limit - own for limit, own in zip(budgets, taken))
        question = StagesQuestion(
            flow=summing(base.flow, ()),
            costs=track.known.costs(sizes),
            sizes=sizes,
            budgets=budgets,
            to=self._policy.to,
            by=wishes.by,
            schedules=(base.name,) if track.keeps_order else wishes.schedules,
        )
        choice = choose(question, effort=0 if track.keeps_order else wishes.effort, seed=wishes.seed, progress=self._told)
        if not holders:
            return choice
        plan = with_sums(choice.plan, holders)
        return replace(choice, plan=plan, device_peak_bytes=plan.device_peak_bytes)


def _exchanged_bytes(plan: Plan, sizes: Sizes, rank: int) -> int:
    """Return the most bytes of gradients that a rank exchanges at once."""
    own = [(stage, part) for stage, part in plan.flow.exchanges if plan.stage_ranks[stage] == rank]
    return sum(sizes.at(stage, 0)[gradients(part)].num_bytes for stage, part in own)


def _steps(times: Sequence[bytes]) -> list[Measured]:
    """Return the steps that ranks have timed, given their records."""
    return joined([parse(data, f"rank {rank}") for rank, data in enumerate(times)])


def _chosen(source: PlanSource) -> ChosenPlans:
    assert isinstance(source, ChosenPlans), "ranks whose records agree have plans from the same kind of source"
    return source
