"""One step of one rank: a dispatch from operation to a short method."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

from bpipe.backward.loss_scale import LossScale
from bpipe.backward.user_hooks import UserHooks
from bpipe.backward.without_loss import cut_off
from bpipe.cleanup import note
from bpipe.comm.health.activity import place_of
from bpipe.comm.transport.base import Transfer, Transport
from bpipe.engine.acceptor import Acceptor
from bpipe.engine.compute import Compute
from bpipe.engine.conventions import CONVENTIONS, Convention
from bpipe.engine.messages import Messages, MessageSpecs
from bpipe.engine.microbatch_state import LAST, MicrobatchState, MicrobatchStates
from bpipe.engine.remembered import Memory
from bpipe.engine.setup import Setup, StepInputs
from bpipe.engine.traffic import Traffic
from bpipe.logs import LOG
from bpipe.memory.peaks import NOTHING, Exchanged
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.parallel.fsdp import ShardedStage, Sharding
from bpipe.parallel.shared_weights import Shared
from bpipe.plan.action import BETWEEN_STAGES, SERVED, SHARDING, START_OF
from bpipe.schedules import Action, Op, Plan
from bpipe.torch_private.engine_and_graph import is_profiled

__all__: list[str] = []

# What runs an operation that few plans have, by the last of its actions: in a room of its own, loaded for such a plan.
OPERATIONS = {
    Op.R: "bpipe.recomputation.second_forward:SecondForwards",
    Op.WAIT_REDUCE_GRAD: "bpipe.sums.gradient_sums:GradientSums",
}


class Observer:
    """Follows the steps of one rank. Each method does nothing: a subclass overrides those that it needs.

    An observer that keeps the `Run` keeps the step's tensors.
    """

    def started(self, run: Run) -> None:
        """Follow a step that is ready for its first action."""

    def before(self, run: Run, action: Action) -> None:
        """Follow an action that is about to run."""

    def after(self, run: Run, action: Action) -> None:
        """Follow an action that ran without an error."""

    def filled(self, begin_ns: int, end_ns: int) -> None:
        """Follow a piece of a fill job, which has run from and until these times of the host's clock."""

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        """Follow a step whose actions have all run; `stats` are its numbers."""


class Operations:
    """Runs some operations of one rank during one step; this one has none, and a subclass overrides what it needs.

    Such a class is made of the setup, what computes, and what is remembered of second forwards.

    Attributes:
        keys: the microbatches whose forwards it runs, too.
        exchanged: by stage, the copies that its exchanges make.
        held_bytes: of gradients that a step sets aside.
    """

    keys: Collection[tuple[int, ...]] = ()
    exchanged: Exchanged = NOTHING
    held_bytes = 0

    def in_charge(self, sharding: Sharding | None) -> AbstractContextManager[object]:
        """Return what surrounds all actions of the step."""
        return nullcontext()

    def begin(self) -> None:
        """Do what comes before the first action."""

    def run(self, action: Action, state: Any) -> None:
        """Run an action, of a microbatch in this state; None for one that concerns a stage."""

    def check(self) -> None:
        """Raise if it shows behind the last action that something went wrong."""


MakeConvention = Callable[[Setup], Convention]


class Run:
    """One step of one rank of a plan.

    Args:
        plan: the plan to run; `rank` is this rank's place in it.
        step: its number.
        stages: the stages on this rank, by index.
        parts: a snapshot of each stage's modules, parameters and buffers when the step begins.
        transport: carries the messages.
        given: what the user gave for this step.
        specs: the agreed message specs, or an empty mapping to learn them into when `is_learning`.
        memory: what the schedule remembers from step to step.
        name: the name of this rank in messages.
        conventions: make those by which the stages are called, besides those of the plan's shapes.
        observer: called at the start of the step, and before and after each action on the thread that runs it.
        shared: the weights that other ranks have, too.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        step: int,
        stages: Mapping[int, PipelineStage],
        parts: Mapping[int, ModuleSnapshot],
        transport: Transport,
        given: StepInputs,
        specs: MessageSpecs,
        is_learning: bool,
        memory: Memory,
        name: str,
        conventions: Sequence[MakeConvention],
        observer: Observer | None,
        shared: Shared,
    ) -> None:
        self.plan, self.rank, self.step, self.device, self._name = plan, rank, step, transport.device, name
        self.microbatches, self._memory = MicrobatchStates(plan.flow), memory
        self.traffic = Traffic(transport, rank, step, self.microbatches, memory.device_waits)
        self.setup = Setup(
            plan=plan,
            rank=rank,
            stages=stages,
            parts=parts,
            given=given,
            traffic=self.traffic,
            loss_scale=LossScale(given.loss_scale),
            is_learning=is_learning,
            conventions=[],
            shared=shared,
        )
        of_shapes = [resolve_name(one) for shape, one in CONVENTIONS.items() if plan.flow.arguments(shape) is not None]
        self.setup.conventions.extend(make(self.setup) for make in (*of_shapes, *conventions))
        self.sharding = self._sharding()
        self._ops = {action.op for action in plan.actions[rank]}
        self.hooks = UserHooks(parts if Op.I in self._ops else {}, memory.silent)
        self.compute = Compute(self.setup, memory, self.hooks, set() if self.sharding is None else self.sharding.undivided)
        self.results, self.evictions = self.compute.results, self.compute.evictions
        self.second_forwards, self.exchanges = self._operations(Op.R), self._operations(Op.WAIT_REDUCE_GRAD)
        self._messages = Messages(self.setup, specs)
        self._acceptors = {
            peer: Acceptor(Traffic(transport, rank, step, MicrobatchStates(plan.flow)), buffers)
            for peer, buffers in memory.served().items()
        }
        self.position: int | None = None  # in the rank's lane, if its actions run in another order
        self.is_side_by_side = False  # whether a forward and a backward run now, of which either may begin or end first
        self._observer = observer
        if observer is not None:
            observer.started(self)

    @property
    def holds_last_stage(self) -> bool:
        """Whether outputs are returned on this rank."""
        return any(stage.is_last for stage in self.setup.stages.values())

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 or DDP act between computations."""
        return self.sharding is not None and self.sharding.is_needed

    def _sharding(self) -> Sharding | None:
        """Return what gathers and reduces, if the plan or a stage has anything for it."""
        fsdp, lane = sys.modules.get("torch.distributed.fsdp"), self.plan.actions[self.rank]
        kinds = DistributedDataParallel if fsdp is None else (DistributedDataParallel, fsdp.FSDPModule)
        is_planned = any(action.op in SHARDING and action.peer is None for action in lane)
        if is_planned or any(isinstance(one, kinds) for part in self.setup.parts.values() for one in part.modules):
            return Sharding(self.setup.parts, lane)
        return None

    def _operations(self, op: Op) -> Operations:
        """Return what runs an operation that has a room of its own, which is loaded for plans that have it."""
        make: Callable[..., Operations] = resolve_name(OPERATIONS[op]) if op in self._ops else lambda *_: Operations()
        return make(self.setup, self.compute, self._memory.learned)

    def taken(self, microbatch: int) -> object:
        """Return the memory and the messages of a microbatch on this rank, to compare them with another microbatch's."""
        sizes = [(stage, self.evictions.taken((stage, microbatch))) for stage in self.setup.stages]
        return sizes, self._messages.agreed(microbatch, self.setup.stages)

    def serves(self, evictor: int) -> bool:
        """Return whether this rank does anything for an evictor: it does not if the evictor reaches its memory."""
        return evictor in self._acceptors

    def chains(self) -> dict[int, Sequence[Action]]:
        """Return what this rank does for each evictor that it serves."""
        return {evictor: chain for evictor, chain in self.plan.chains(self.rank).items() if self.serves(evictor)}

    def posted(self, completion: Action) -> Transfer | None:
        """Return the transfer that an action of the compute lane will complete, once it is posted."""
        start = completion._replace(op=START_OF[completion.op])
        state = self.microbatches[start[1:3]]
        if start.op in BETWEEN_STAGES:
            transfers = self._messages.transfers(start, state)
        else:
            transfers = {} if state.memory is None else state.memory.transfers
        found = transfers.get((start.op, start.part))
        return None if found is None else found.transfer

    def _sharded(self, action: Action) -> ShardedStage:
        assert self.sharding is not None, "the plan has actions for it"
        return self.sharding.stages[action.stage]

    def _acceptor(self, action: Action) -> Acceptor:
        assert action.peer is not None
        return self._acceptors[action.peer]

    def _forward(self, action: Action, state: MicrobatchState) -> None:
        if action[1:3] in self.second_forwards.keys:
            self.second_forwards.run(action, state)
        else:
            self.compute.forward(state)
            self._count(state)
        if action.stage in self.compute.outputs.cut_off:
            self._check_cut_off(action.stage)

    def _recompute(self, action: Action, state: MicrobatchState) -> None:
        self.second_forwards.run(action, state)
        self._count(state)

    def _count(self, state: MicrobatchState) -> None:
        """Count what a forward has saved. It has ended: the owners of memory are counted when no frame holds anything of it."""
        if state.graph is not None:
            self.evictions.after_forward(state, state.graph)

    def _check_cut_off(self, stage: int) -> None:
        """Raise behind the last forward of a stage if none of its microbatches brings gradients to earlier stages that want them.

        In some microbatches a stage may, as in a single process. A need that came from another rank is remembered from earlier
        steps, in which it may have been there alone, so behind the first step this is only said, once.
        """
        if self.compute.outputs.cut_off[stage] < self._num_forwards[stage]:
            return
        error = cut_off(f"stage {stage}, all microbatches")
        if self.setup.is_learning or (stage - 1 in self.setup.stages and self.setup.is_plain):
            raise error
        if stage not in self._memory.cut_off:
            self._memory.cut_off.add(stage)
            LOG.warning("%s. If those stages needed gradients only in earlier steps, all is well", error)

    @cached_property
    def _num_forwards(self) -> Counter[int]:
        return Counter(action.stage for action in self.plan.actions[self.rank] if action.op is Op.F)

    def _backward(self, action: Action, compute: Callable[[], None]) -> None:
        if self.sharding is None or not self.sharding.is_needed:
            compute()
            return
        with self.sharding.around(action):
            compute()

    def execute(self, action: Action) -> None:
        """Run one action of the compute lane or of an acceptor lane.

        Raises:
            BaseException: any error of the user's code or a transfer, with a note that says where it happened.
        """
        is_sharding = action.op in SHARDING  # which concerns a stage, and no microbatch of it
        microbatches = self._acceptor(action).microbatches if action.op in SERVED else self.microbatches
        state = None if is_sharding else microbatches[action[1:3]]
        try:
            if self._observer is None and not is_profiled():
                _METHODS[action.op](self, action, state)
            else:
                self._execute_observed(action, state)
        except BaseException as error:
            note(
                error,
                f"bpipe: {self._name}, {place_of(action, self.plan.units)}, step {self.step}"
                + ("" if state is None else f"; {state.whereabouts}"),
            )
            raise
        if state is not None:
            state.latest = action
            if action.op in LAST and state.graph is None and state.is_over:
                del microbatches[action[1:3]]

    def _execute_observed(self, action: Action, state: MicrobatchState | None) -> None:
        """Run an action under its name in torch.profiler, if that is on, and call the observer before and after."""
        with self._named(action):
            if self._observer is not None:
                self._observer.before(self, action)
            _METHODS[action.op](self, action, state)
            if self._observer is not None:
                self._observer.after(self, action)

    def _named(self, action: Action) -> AbstractContextManager[object]:
        # Only while the profiler is on: record_function takes microseconds even while it is off.
        return profiler.record_function(f"bpipe rank {self.rank} {action}") if is_profiled() else nullcontext()


# Functions of the module, not bound methods in each run: those would form a cycle that keeps a step's tensors alive.
_METHODS: dict[Op, Callable[[Run, Action, Any], None]] = {
    Op.F: lambda run, action, state: run._forward(action, state),
    Op.B: lambda run, action, state: run._backward(action, lambda: run.compute.backward(state)),
    Op.I: lambda run, action, state: run._backward(action, lambda: run.compute.backward_input(state)),
    Op.W: lambda run, action, state: run._backward(action, lambda: run.compute.backward_weight(state)),
    Op.R: lambda run, action, state: run._recompute(action, state),
    Op.UNSHARD: lambda run, action, state: run._sharded(action).unshard(),
    Op.RESHARD: lambda run, action, state: run._sharded(action).reshard(),
    Op.REDUCE_GRAD: lambda run, action, state: (
        run._sharded(action).reduce() if action.peer is None else run.exchanges.run(action, state)
    ),
    Op.WAIT_REDUCE_GRAD: lambda run, action, state: run.exchanges.run(action, state),
    Op.SEND_F: lambda run, action, state: run._messages.send(action, state),
    Op.SEND_B: lambda run, action, state: run._messages.send(action, state),
    Op.RECV_F: lambda run, action, state: run._messages.receive(action, state),
    Op.RECV_B: lambda run, action, state: run._messages.receive(action, state),
    Op.WAIT_SEND_F: lambda run, action, state: run._messages.complete_send(action, state),
    Op.WAIT_SEND_B: lambda run, action, state: run._messages.complete_send(action, state),
    Op.WAIT_RECV_F: lambda run, action, state: run._messages.complete_receive(action, state),
    Op.WAIT_RECV_B: lambda run, action, state: run._messages.complete_receive(action, state),
    Op.EVICT: lambda run, action, state: run.evictions.evict(action, state),
    Op.WAIT_EVICT: lambda run, action, state: run.evictions.complete_evict(action, state),
    Op.LOAD: lambda run, action, state: run.evictions.load(action, state),
    Op.WAIT_LOAD: lambda run, action, state: run.evictions.complete_load(action, state),
    Op.ACCEPT: lambda run, action, state: run._acceptor(action).accept(action, state),
    Op.WAIT_ACCEPT: lambda run, action, state: run._acceptor(action).complete(action, state),
    Op.RETURN: lambda run, action, state: run._acceptor(action).return_(action, state),
    Op.WAIT_RETURN: lambda run, action, state: run._acceptor(action).complete(action, state),
}
