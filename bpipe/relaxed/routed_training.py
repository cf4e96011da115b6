"""Train over replicas that come and go: each step deals its microbatches to those that are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bpipe.api.options import WAITS, Options, options_for
from bpipe.checks import check_count, check_positive
from bpipe.cleanup import concise
from bpipe.comm.health.activity import State
from bpipe.comm.health.collective import Collective, RankLeftError
from bpipe.comm.rendezvous.store import using_store
from bpipe.comm.transport.c10d import C10dTransport
from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.errors import (
    AgreementError,
    CommError,
    ConfigurationError,
    PipelineBrokenError,
    RankFailedError,
    RankLostError,
    format_error,
)
from bpipe.flow.shape_arguments import paths_of
from bpipe.logs import LOG
from bpipe.model.call import Call
from bpipe.model.stage import PipelineStage, as_replica
from bpipe.not_copied import NotCopied
from bpipe.plan.plan import Plan
from bpipe.relaxed.attendance import Attendance
from bpipe.relaxed.compression import CompressedTransport
from bpipe.relaxed.paths import routed_plan
from bpipe.relaxed.replica_sums import Replicas, channels_between, givers_of, load_state, packed_state, set_aside
from bpipe.relaxed.throughputs import Stopwatch, Throughputs
from bpipe.session.context import RankContext
from bpipe.session.plan_source import PlanSource
from bpipe.session.session import Session

__all__ = ["Routes"]

T = TypeVar("T")
# What ranks tell of a step, by seat: its losses by microbatch, its microbatches a second, and whether it has seen newcomers.
Told = dict[str, tuple[dict[str, float], float | None, bool]]
GONE = (RankLostError, RankLeftError)
TIMEOUT_S = 300.0  # to wait for other ranks, by default
NO_ONE = -1  # the rank of the group of a seat that is not there


class Routes(NotCopied):
    """A pipeline of S stages with d replicas of each, over ranks that may be slow, end, and come back (SWARM, arXiv 2301.11913).

    Each step deals its microbatches to the replicas of every stage by their measured speed, so that each takes a path of its own,
    and gives all replicas of a stage the gradient of all microbatches, with the same bits. If a rank ends in mid-step, the others
    throw away what the step has made, meet again without it, and run it once more within the same call. A process that is started
    in its place gets the weights and the state of a replica at the next step. docs/relaxed.md says what that costs.

    It makes torch.distributed's default process group itself, over gloo, each time that the ranks change.

    Args:
        stage: this rank's `PipelineStage`, with its index among the S stages; all replicas of a stage start with the weights of the
            first one.
        n_microbatches: m, the microbatches of a step of all replicas together.
        loss_fn: `loss_fn(output, target, **loss_kwargs)`, one number.
        replica: which replica of its stage this rank is, 0 to d-1.
        num_replicas: d, the same for all stages.
        store: a store of torch.distributed, such as a `TCPStore`, whose host outlives the ranks. Each run needs a new one, or a
            `PrefixStore` of its own.
        state: what a rank that comes back gets besides the weights: objects with `state_dict` and `load_state_dict`, such as the
            optimizer and its scheduler, in the same order on all replicas. Their states hold tensors and plain values.
        in_flight: how many microbatches a rank may have in flight, as a multiple of 1F1B's (`bpipe.relaxed.routed_plan` says how).
        compress: send the floats of messages between stages in 8 bits, with one scale for each block of so many elements, such as
            64 to 2048: each differs by at most the largest absolute value of its block / 254. Default: exact.
        options: `timeout_s` and `slow_s`.

    Raises:
        ConfigurationError: the arguments cannot work together, or torch.distributed has a default group already.

    Example:
        One process for each stage and replica, which starts at the step that the others have come to::

            routes = bpipe.Routes(
                bpipe.PipelineStage(module, stage, 2), 16, loss_fn, replica=replica, num_replicas=3, store=store, state=[optimizer]
            )
            for step in range(routes.join(), num_steps):
                inputs, targets = batch(step)
                routes.step(inputs, target=targets)
                optimizer.step()
                optimizer.zero_grad()
    """

    @concise
    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor],
        *,
        replica: int,
        num_replicas: int,
        store: Any,
        state: Sequence[Any] = (),
        in_flight: float = 2.5,
        compress: int | None = None,
        options: Options | None = None,
    ) -> None:
        check_count("n_microbatches", n_microbatches)
        check_count("num_replicas", num_replicas)
        check_count("compress", 1 if compress is None else compress)
        if not 0 <= replica < num_replicas:
            raise ConfigurationError(f"replica={replica!r}: with {num_replicas} replicas it is 0 to {num_replicas - 1}")
        check_positive("in_flight", in_flight)
        options = options_for("Routes", options, WAITS)
        timeout_s = TIMEOUT_S if options.timeout_s is None else options.timeout_s
        given = PipelineStage.adopt(stage)
        self._check(given)
        self.num_steps = 0  # that are complete
        self.stats: dict[str, float] = {}
        self._stage, self._loss_fn, self._state = as_replica(given, replica, num_replicas), loss_fn, tuple(state)
        self._m, self._depth, self._in_flight = n_microbatches, given.num_stages, in_flight
        self._seat, self._num_seats = self._stage.stage_index, self._stage.num_stages
        self._timeout_s, self._slow_s, self._block = timeout_s, options.slow_s, compress
        self._attendance = Attendance(store, self._seat, self._depth, self._num_seats, timeout_s)
        self._speeds, self._watch = Throughputs(self._depth, self._num_seats), Stopwatch()
        self._session: Session | None = None
        self._plan: Plan | None = None  # of the latest attempt
        self._is_joined = self._wants_meeting = False
        self._replicas: Replicas  # of the session
        self._lost: set[int] = set()  # seats that have ended since the latest meeting

    def __repr__(self) -> str:
        if "_lost" not in vars(self):
            return "Routes(not constructed)"
        replica, stage = divmod(self._seat, self._depth)
        state = f"{self.num_steps} steps complete" if self._is_joined else "not joined"
        place = f"stage {stage} of {self._depth}, replica {replica} of {self._num_seats // self._depth}"
        return f"Routes({place}, {self._m} microbatches, {state})"

    @staticmethod
    def _check(stage: PipelineStage) -> None:
        if dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed has a default process group already, and Routes makes it anew whenever ranks change: leave "
                "init_process_group out, and give store="
            )
        if stage.group is not None or stage.directions > 1 or stage.skips:
            raise ConfigurationError("Routes takes a stage without group, directions and skips: leave these out")
        if any(is_dtensor(parameter) for parameter in stage.submod.parameters()):
            raise ConfigurationError("Routes takes no sharded parameters (DTensors): give it modules that are not sharded")
        if stage.device.type != "cpu":
            raise ConfigurationError(f"Routes runs on CPU, over gloo, so far, and the stage is on {stage.device}")

    @concise
    def join(self) -> int:
        """Meet the other ranks, and get the weights and the state of a replica; return how many steps are complete.

        The first step does this too. A process that is started in place of one that has ended comes in when the others begin
        their next step. Collective; blocks the host.

        Raises:
            TransferTimeoutError: not everybody came in time, or nobody begins a step; the message names who is missing.
            PipelineBrokenError: a stage has lost its last replica.
            CommError: the store does not answer.
        """
        if not self._is_joined:
            self._persist(lambda: None)
        return self.num_steps

    @concise
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run one training step: all microbatches forward and backward, each on its path, with gradients added to the parameters'.

        Each rank gives the whole batch, and uses those of its microbatches: the arguments on the first stage, the target on the
        last. Collective over all ranks that are there; blocks the host. After it `.grad` has the step's gradient on every rank.

        Args:
            args: the first stage's positional arguments, whole batches.
            target: the whole batch of targets.
            losses: a list to be filled with the loss of each microbatch, unscaled, on all ranks.
            loss_kwargs: further arguments of `loss_fn`, whole.
            kwargs: keyword arguments of this rank's stage, whole batches.

        Raises:
            ConfigurationError: a batch does not divide into m microbatches, or a target is missing.
            StageError: the module or the loss returned a value that cannot be used.
            RankFailedError: another rank raised an error in this step, which it would raise again.
            TransferTimeoutError: ranks that are expected do not come, or nobody lets this one take part again.
            CommError: the store does not answer, or as many attempts have failed as there are ranks.
            PipelineBrokenError: a stage has lost its last replica; or the others have gone on without this rank, which did not
                answer in time, and has what they have by now: go on with the batch of step `num_steps`.
        """
        step, call = self.num_steps, Call(args, kwargs, target, None, False, loss_kwargs, None, None, None)
        told = self._persist(lambda: self._attempt(call) if self.num_steps == step else None)
        if told is None:
            raise PipelineBrokenError(
                f"the other ranks went on from step {step} to {self.num_steps} without this one, {self._attendance.named}. It has "
                f"their weights now: call join() before the first step, and step() with the batch of step {self.num_steps}"
            )
        self._finish(told, losses)

    def _persist(self, work: Callable[[], T]) -> T:
        """Do some work together with all ranks that are there; after a loss do it again with those that are left."""
        self.stats["attempts"] = 0
        while True:
            if self._session is None or self._wants_meeting:
                self._meet()
            self.stats["attempts"] += 1
            try:
                if self._session is None:
                    self._connect()
                return work()
            except CommError as error:
                self.close()
                is_last = self.stats["attempts"] > self._num_seats
                if is_last or (isinstance(error, (AgreementError, RankFailedError)) and not isinstance(error, GONE)):
                    raise
                self._note_lost(error)
                gone = f"{self._attendance.listed(self._lost)} has ended" if self._lost else format_error(error)
                LOG.warning("%s: step %d is run again by those who are left: %s", self._attendance.named, self.num_steps, gone)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave: release the group, its connections and threads. The others go on without this rank, if they make another step."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def seats(self) -> list[int]:
        """Who took part in the latest attempt: r*S + s for replica r of stage s."""
        return list(self._attendance.seats)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest attempt; None before the first one."""
        return self._plan

    # Meetings

    def _meet(self) -> None:
        """Find out who is there."""
        self.close()
        self._attendance.meet(self._lost)
        self._lost.clear()
        self._attendance.check_stages()
        self._wants_meeting = False

    def _connect(self) -> None:
        """Connect with those who are there, agree on what is known, and give newcomers their state."""
        seats = self._attendance.seats
        with using_store():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{self._attendance.number}/group", self._attendance.store),
                rank=seats.index(self._seat),
                world_size=len(seats),
                timeout=timedelta(seconds=self._timeout_s),
            )
        self._session = self._make_session(seats)
        with self._session.guard.failing_together():
            self._agree(self._session.context, seats)
        self._session.guard.num_steps = self.num_steps
        self._is_joined = True

    def _make_session(self, seats: list[int]) -> Session:
        alike = Throughputs(self._depth, self._num_seats).table(seats)  # a newcomer does not know the speeds yet
        self._plan = routed_plan(self._m, alike, in_flight=self._in_flight)
        make = C10dTransport if self._block is None else partial(CompressedTransport, block=self._block)
        context = RankContext(
            stages={self._seat: self._stage},
            loss_fn=self._loss_fn,
            transport=make(None, self._stage.device, timeout_s=self._timeout_s, slow_s=self._slow_s),
            plan_rank=self._seat,
            group_ranks=[seats.index(seat) if seat in seats else NO_ONE for seat in range(self._num_seats)],
        )
        session = Session(context, PlanSource(self._plan, f"routes, compress={self._block}, in_flight={self._in_flight:g}"))
        session.observer = self._watch
        return session

    def _agree(self, context: RankContext, seats: list[int]) -> None:
        """Agree on the number of the step and on speeds, and let ranks that are behind get their state from a replica."""
        transport = context.transport
        own = json.dumps([self.num_steps, self._is_joined, self._speeds.known.get(self._seat)]).encode()
        told = dict(zip(seats, map(json.loads, transport.exchange(Collective.CONNECT, own))))
        self._speeds.known = {seat: speed for seat, (_, _, speed) in told.items() if speed is not None}
        steps = max(number for number, _, _ in told.values())
        able = {seat for seat, (number, is_joined, _) in told.items() if is_joined and number == steps}
        givers = givers_of(seats, able, self._depth, steps)
        takers = [seat for seat in seats if seat not in able | {*givers.values()}]
        transport.connect(channels_between(seats, self._depth), context.group_ranks)
        replicas = Replicas(transport, self._seat, [seat for seat in seats if seat % self._depth == self._seat % self._depth])
        mine = [seat for seat in takers if givers[seat % self._depth] == self._seat]
        state = packed_state(self._stage.submod, self._state) if mine else torch.empty(0, dtype=torch.uint8)
        sizes = dict(zip(seats, map(json.loads, transport.exchange(Collective.CONNECT, json.dumps(state.nbytes).encode()))))
        transport.control.activity.state = State.SHARING
        replicas.give(state, mine)
        if self._seat in takers:
            giver = givers[self._seat % self._depth]
            load_state(replicas.take(sizes[giver], giver), self._stage.submod, self._state)
        self.num_steps, self._replicas = steps, replicas

    def _note_lost(self, error: CommError) -> None:
        """Remember which seat is not there any more, so that nobody waits for it."""
        if isinstance(error, GONE) and 0 <= error.rank < len(self._attendance.seats):
            self._lost.add(self._attendance.seats[error.rank])

    # Steps

    def _attempt(self, call: Call) -> Told:
        """Run the step once, and return what all ranks have told each other of it."""
        session, plan, seats = self._session, self._plan, self._attendance.seats
        assert session is not None and plan is not None
        if (paths := self._speeds.better_paths(paths_of(plan.flow), seats)) is not None:
            self._plan = plan = routed_plan(self._m, self._speeds.table(seats), paths, in_flight=self._in_flight)
            session.adopt(PlanSource(plan, session.source.rule))
        own: list[torch.Tensor] = []
        parameters = [one for one in self._stage.parts().parameters if one.requires_grad]
        with set_aside(parameters) as keep:
            try:
                session.run(lambda: session.begin(call._replace(losses=own), is_training=True))
                with session.guard.failing_together():
                    session.context.transport.control.activity.state = State.SHARING
                    self._replicas.add_up(parameters)
                    told = session.context.transport.exchange(Collective.RESULT, self._told(plan, own))
                settled = self._attendance.settle(self.num_steps, json.dumps(dict(zip(seats, map(json.loads, told)))))
            except CommError as error:
                # Another rank may know already that all have come to the end: then this one has the whole gradient, too.
                settled = self._attendance.settle(self.num_steps, "")
                if not settled:
                    raise
                self.close()
                self._note_lost(error)
            if not settled:
                raise RankLostError(f"a rank has ended before all were at the end of step {self.num_steps}")
            keep()
        self.stats |= session.stats
        of_all: Told = json.loads(settled)
        return of_all

    def _told(self, plan: Plan, losses: Sequence[torch.Tensor]) -> bytes:
        """Return what this rank tells the others of the step: its losses, its speed, and whether it has seen newcomers."""
        mine = [unit for unit, path in enumerate(paths_of(plan.flow)) if self._seat in path]
        speed = len(mine) / self._watch.seconds if mine and self._watch.seconds else None
        try:
            has_newcomers = self._attendance.has_newcomers()
        except CommError:  # perhaps of this rank alone: then `settle` raises it here, and the others go on
            has_newcomers = False
        return json.dumps([dict(zip(mine, map(float, losses))), speed, has_newcomers]).encode()

    def _finish(self, told: Told, losses: list[torch.Tensor] | None) -> None:
        """Learn from a step, and hand out its losses."""
        self.num_steps += 1
        self._speeds.learn({int(seat): speed for seat, (_, speed, _) in told.items() if speed is not None})
        self._wants_meeting = any(sees_newcomers for *_, sees_newcomers in told.values())
        if losses is not None:
            by_unit = {int(unit): loss for own, *_ in told.values() for unit, loss in own.items()}
            losses[:] = [torch.tensor(by_unit[unit], dtype=torch.float64) for unit in range(self._m)]
