"""All ranks of a pipeline in one process and one thread, for notebooks, for tests and for one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from bpipe.backward.without_loss import refusing_backward
from bpipe.checks import check_count
from bpipe.cleanup import concise, keeping, noted_on
from bpipe.comm.transport.in_process import Wires
from bpipe.device import Stream, current_stream, is_asynchronous, on_stream, random_state, serving, set_random_state
from bpipe.engine.run import Run
from bpipe.errors import ConfigurationError, PipelineBrokenError
from bpipe.model.call import Call, call_of
from bpipe.model.ties import check_ties
from bpipe.not_copied import NotCopied
from bpipe.parallel.fsdp import trained
from bpipe.plan.action import SERVED
from bpipe.plan.order import linearise
from bpipe.schedules import Action, Plan
from bpipe.session.plan_source import PlanSource
from bpipe.session.session import Session, under_way

__all__ = ["Loopback", "LoopbackGroup"]

T = TypeVar("T")


class HasSession(Protocol):
    """A schedule, as the loopback uses it."""

    @property
    def session(self) -> Session: ...


class LoopbackGroup(NamedTuple):
    """The place of one rank in a `Loopback`, which a stage takes as its `group`."""

    loopback: Loopback
    rank: int


class Loopback(NotCopied):
    """A pipeline's ranks, all in this process, run one action at a time.

    Each rank has a random number state of its own, which starts from the global one when the `Loopback` is made:
    as if every process had called `torch.manual_seed` with the same seed. On a GPU each rank also has a stream of its own.

    Args:
        num_ranks: ranks in the pipeline.
        own_random_state: False to draw from the global random numbers on all ranks.

    Example:
        >>> import bpipe
        >>> from torch import nn
        >>> loopback = bpipe.Loopback(2)
        >>> stages = [bpipe.PipelineStage(nn.Linear(4, 4), i, 2, "cpu", group=loopback.rank(i)) for i in range(2)]
        >>> schedules = [bpipe.OneFOneB(stage, 4, loss_fn=nn.functional.mse_loss) for stage in stages]
        >>> loopback.step(schedules, torch.randn(8, 4), target=torch.randn(8, 4)).shape
        torch.Size([8, 4])
    """

    instead_of_a_copy = "its ranks are in this process, so make another one"

    def __init__(self, num_ranks: int, *, own_random_state: bool = True) -> None:
        check_count("num_ranks", num_ranks)
        self.num_ranks = num_ranks
        self.own_random_state = own_random_state
        self._random = [_RandomState() for _ in range(num_ranks)]
        self._order: tuple[Plan | None, list[tuple[int, Action]]] = (None, [])
        self._latest: tuple[Any, Any] = (None, None)
        self._running = threading.Lock()
        self.wires = Wires()

    def __repr__(self) -> str:
        own = "" if self.own_random_state else ", which draw from the global random numbers"
        return f"Loopback({self.num_ranks} rank{'s' * (self.num_ranks > 1)} in this process{own})"

    def rank(self, rank: int) -> LoopbackGroup:
        """Return the `group` for the stages of one rank."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigurationError(f"rank {rank} is not in a loopback of {self.num_ranks} ranks")
        return LoopbackGroup(self, rank)

    def manual_seed(self, seed: int, rank: int | None = None) -> None:
        """Seed the random numbers of one rank, or of all."""
        for index in range(self.num_ranks) if rank is None else (self.rank(rank).rank,):
            self._random[index].seed(seed)

    @concise
    def step(self, schedules: Sequence[HasSession], *args: Any, **kwargs: Any) -> Any:
        """Run one training step of all ranks: `schedules[r].step(*args, **kwargs)` on each rank r.

        Args:
            schedules: one per rank, in the order of the ranks.
            args: passed to every rank's `step`; positional arguments reach the first stage, as there.
            kwargs: likewise; `target` and `losses` are used by the last stage.

        Returns:
            The last stage's outputs.
        """
        sessions = [schedule.session for schedule in schedules]
        outputs = self._run(sessions, call_of(*args, **kwargs)._replace(is_step=True), [one.context.trains for one in sessions])
        for context in (one.context for one in sessions if one.context.loss_fn is None):
            outputs = refusing_backward(outputs, context.last_modules())
        return outputs

    @concise
    def eval(self, schedules: Sequence[HasSession], *args: Any, **kwargs: Any) -> Any:
        """Evaluate on all ranks: `schedules[r].eval(*args, **kwargs)` on each rank r."""
        return self._run([schedule.session for schedule in schedules], call_of(*args, **kwargs), [False] * len(schedules))

    def _run(self, sessions: Sequence[Session], call: Call, is_training: Sequence[bool]) -> Any:
        self._check(sessions)
        if not self._running.acquire(blocking=False):
            raise PipelineBrokenError("a step of this loopback was called inside another step: run one step at a time")
        with ExitStack() as guards:
            guards.callback(self._running.release)
            for session in sessions:
                guards.enter_context(session.guard.entered())
                guards.enter_context(session.reducing(call))
            if any(is_training):
                modules = {index: stage.submod for one in sessions for index, stage in one.context.stages.items()}
                check_ties(modules, trained, are_alone=False)
            started = time.perf_counter()
            steps = [session.begin(call, is_training=trains) for session, trains in zip(sessions, is_training)]
            records = [step.record for step in steps]
            for session in sessions:  # that two steps in a row have the same records, as over a process group
                session.context.transport.control.activity.call += 1

            def gather(ask: Callable[[PlanSource], bytes]) -> list[bytes]:
                return [ask(session.source) for session in sessions]

            for session, step in zip(sessions, steps):
                session.hear(step, records)
            runs = [session.agree(step, records, gather) for session, step in zip(sessions, steps)]
            with ExitStack() as breaking:
                for session, run in zip(sessions, runs):
                    breaking.enter_context(session.guard.breaking())
                    breaking.enter_context(under_way(run))
                self._execute(runs)
                _share_results(runs)
                result = next((session.result(run) for session, run in zip(sessions, runs) if run.holds_last_stage), None)
                # The losses of the last stage are those that stay in the caller's one list, where other ranks have some, too.
                for session, step, run in sorted(zip(sessions, steps, runs), key=lambda one: one[2].holds_last_stage):
                    session.finish(step, run, started)
            return result

    def _check(self, sessions: Sequence[Session]) -> None:
        """Raise unless there is one session for each rank, in order."""
        if len(sessions) != self.num_ranks:
            raise ConfigurationError(f"got {len(sessions)} schedules for {self.num_ranks} ranks: give one per rank")
        for rank, session in enumerate(sessions):
            if session.context.group != LoopbackGroup(self, rank):
                raise ConfigurationError(f"schedule {rank} is not on rank {rank} of this loopback: give schedules in rank order")

    def _execute(self, runs: Sequence[Run]) -> None:
        self.wires.clear()
        plan = runs[0].plan
        if self._order[0] is not plan:
            self._order = (plan, linearise(plan))
        group_ranks = {run.rank: group_rank for group_rank, run in enumerate(runs)}
        with self._joined_streams(runs):
            for plan_rank, action in self._order[1]:
                group_rank = group_ranks[plan_rank]
                run, evictor = runs[group_rank], action.peer if action.op in SERVED else None
                with self._random_numbers(group_rank, run.device), self._on_stream(run, evictor):
                    run.execute(action)

    @contextmanager
    def _joined_streams(self, runs: Sequence[Run]) -> Iterator[None]:
        """Let the ranks' streams start after the work that the caller has queued, and the caller's stream continue after theirs.

        As in separate processes, a rank's work for each evictor has a stream of its own.
        """
        on_device = [run for run in runs if is_asynchronous(run.device)]
        lanes = [(run, evictor) for run in on_device for evictor in (None, *run.plan.chains(run.rank))]
        for run, evictor in lanes:
            self._stream(run, evictor).wait_stream(current_stream(run.device))
        try:
            yield
        except BaseException as error:
            with noted_on(error):
                self.wires.streams.join()  # memory of the step may be freed now, while copies of it may still be queued
            raise
        for run, evictor in lanes:
            current_stream(run.device).wait_stream(self._stream(run, evictor))

    def _stream(self, run: Run, evictor: int | None) -> Stream:
        """Return the stream of a rank's computations, or of its work for one evictor whose activations it stores."""
        user = ("computations", run.rank) if evictor is None else serving(run.rank, evictor)
        return self.wires.streams.of(user, run.device)

    def _random_numbers(self, rank: int, device: torch.device) -> AbstractContextManager[Any]:
        return self._random[rank].active(device) if self.own_random_state else nullcontext()

    def _on_stream(self, run: Run, evictor: int | None) -> AbstractContextManager[Any]:
        return keeping(on_stream(self._stream(run, evictor))) if is_asynchronous(run.device) else nullcontext()


def run_alone(loopback: Loopback, session: Session, call: Call, *, is_training: bool) -> Any:
    """Run a call of the only rank's session.

    Raises:
        ConfigurationError: there are more ranks, whose steps run together.
    """
    if loopback.num_ranks > 1:
        raise ConfigurationError(
            "a Loopback runs all ranks together: call loopback.step(schedules, ...) or loopback.eval(schedules, ...)"
        )
    return loopback._run([session], call, [is_training])


def once(loopback: Loopback, asked: object, make: Callable[[], T]) -> T:
    """Return what the previous rank has made, if it asked for the same; otherwise make it now."""
    known, latest = loopback._latest
    if latest is not None and known == asked:
        return cast("T", latest)
    made = make()
    loopback._latest = (asked, made)
    return made


def _share_results(runs: Sequence[Run]) -> None:
    """Give each rank with a last stage the results of both directions, if there are two: the caller gets all of a loopback's."""
    ends = [run.results for run in runs if run.holds_last_stage]
    if len(ends) > 1:
        outputs = _merged(end.outputs for end in ends)
        losses = _merged(end.losses for end in ends)
        for end in ends:
            end.outputs, end.losses = outputs, losses


def _merged(results: Iterable[Mapping[int, T]]) -> dict[int, T]:
    """Return the results of several ranks, by microbatch, in the order of microbatches."""
    return dict(sorted(chain.from_iterable(of_rank.items() for of_rank in results), key=itemgetter(0)))


class _RandomState:
    """A rank's own random number state, set while its actions run."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._of_devices: dict[torch.device, torch.Tensor] = {}
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._of_devices.clear()
        self._seed = seed

    @contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        with self._swapped_on(device) if is_asynchronous(device) else nullcontext():
            outside = torch.get_rng_state()
            torch.set_rng_state(self._cpu)
            try:
                yield
            finally:
                self._cpu = torch.get_rng_state()
                torch.set_rng_state(outside)

    @contextmanager
    def _swapped_on(self, device: torch.device) -> Iterator[None]:
        outside = random_state(device)
        assert outside is not None
        if device not in self._of_devices:
            seeded = None if self._seed is None else torch.Generator(device).manual_seed(self._seed).get_state()
            self._of_devices[device] = outside if seeded is None else seeded
        with keeping(ExitStack()) as after:  # a device that failed cannot return its state
            after.callback(self._swap_back, outside, device)
            set_random_state(self._of_devices[device], device)
            yield

    def _swap_back(self, outside: torch.Tensor, device: torch.device) -> None:
        now = random_state(device)
        assert now is not None
        self._of_devices[device] = now
        set_random_state(outside, device)
