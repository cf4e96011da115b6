"""One step of one rank: a dispatch from operation to a short method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import itemgetter

from torch.autograd import profiler

from bpipe.backward.user_hooks import UserHooks
from bpipe.backward.without_loss import cut_off
from bpipe.cleanup import note
from bpipe.comm.health.activity import place_of
from bpipe.comm.transport.base import Transport
from bpipe.engine.acceptor import Acceptor
from bpipe.engine.compute import Compute, StepInputs
from bpipe.engine.evictions import Evictions
from bpipe.engine.messages import Messages, MessageSpecs
from bpipe.engine.microbatch_state import LAST, MicrobatchState, MicrobatchStates
from bpipe.engine.remembered import Memory
from bpipe.engine.traffic import Traffic
from bpipe.logs import LOG
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.parallel.fsdp import Sharding
from bpipe.parallel.twins import Twins
from bpipe.plan.action import MESSAGES, SERVED, SHARDING
from bpipe.schedules import Action, Op, Plan
from bpipe.skips.carrier import Carrier
from bpipe.skips.routes import skips_of
from bpipe.torch_private.engine_and_graph import is_profiled

__all__: list[str] = []


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


class Run:
    """One step of one rank of a plan.

    Args:
        plan: the plan to run; `rank` is this rank's place in it.
        step: its number.
        stages: the stages on this rank, by index.
        parts: a snapshot of each stage's modules, parameters and buffers when the step begins.
        transport: carries the messages.
        step_inputs: the inputs and options of this step.
        specs: the agreed message specs, or an empty mapping to learn them into when `is_learning`.
        memory: what the schedule remembers from step to step.
        name: the name of this rank in messages.
        takes_slices: whether the stages take sequences in slices.
        observer: called at the start of the step, and before and after each action on the thread that runs it.
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
        step_inputs: StepInputs,
        specs: MessageSpecs,
        is_learning: bool,
        memory: Memory,
        name: str,
        takes_slices: bool,
        observer: Observer | None,
    ) -> None:
        self.plan, self.rank, self.step, self.device, self._name = plan, rank, step, transport.device, name
        self._stages, self._is_learning, self._memory = tuple(stages), is_learning, memory
        self.holds_last_stage = any(stage.is_last for stage in stages.values())
        is_local, has_skips = plan.flow.arguments("local") is not None, bool(skips_of(plan.flow))
        self.has_loss = self.holds_last_stage or is_local
        self.microbatches = MicrobatchStates(plan.slices)
        self.traffic = Traffic(transport, rank, step, self.microbatches, stages, memory.device_waits)
        self.sharding = Sharding(parts, plan.actions[rank])
        self.twins = Twins(plan, rank, parts, self.traffic)
        is_split = Op.I in map(itemgetter(0), plan.actions[rank])
        self.hooks = UserHooks(parts if is_split else {}, memory.silent)
        self.compute = Compute(
            stages,
            parts,
            step_inputs,
            self.traffic,
            has_backward=plan.has_backward,
            undivided=self.sharding.undivided,
            hooks=self.hooks,
            recomputed=plan.recomputed(rank),
            learned=memory.learned,
            slices=plan.slices if takes_slices else None,
            is_learning=is_learning,
            skips=Carrier(plan, next(iter(stages.values())).skips, self._stages, self.microbatches) if has_skips else None,
            local=is_local,
        )
        num_parts = {stage: plan.num_parts(stage) for stage in stages}
        followed = plan.evicted(rank)
        self.evictions = Evictions(self.traffic, followed, memory, self.compute.non_activations, self.compute.returned, num_parts)
        trainable = {i for i, of in parts.items() if any(p.requires_grad for p in of.parameters)} if plan.has_backward else set()
        self._messages = Messages(self.traffic, specs, is_learning=is_learning, trainable=trainable, plan=plan)
        self._acceptors = {
            peer: Acceptor(Traffic(transport, rank, step, MicrobatchStates(plan.slices)), buffers)
            for peer, buffers in memory.served().items()
        }
        self.position: int | None = None  # in the rank's lane, if its actions run in another order
        self.is_side_by_side = False  # whether a forward and a backward run now, of which either may begin or end first
        self._observer = observer
        if observer is not None:
            observer.started(self)

    def taken(self, microbatch: int) -> object:
        """Return the memory and the messages of a microbatch on this rank, to compare them with another microbatch's."""
        sizes = [(stage, self.evictions.taken((stage, microbatch))) for stage in self._stages]
        return sizes, self._messages.agreed(microbatch, self._stages)

    def serves(self, evictor: int) -> bool:
        """Return whether this rank does anything for an evictor: it does not if the evictor reaches its memory."""
        return evictor in self._acceptors

    def chains(self) -> dict[int, Sequence[Action]]:
        """Return what this rank does for each evictor that it serves."""
        return {evictor: chain for evictor, chain in self.plan.chains(self.rank).items() if self.serves(evictor)}

    def _acceptor(self, action: Action) -> Acceptor:
        assert action.peer is not None
        return self._acceptors[action.peer]

    def _forward(self, action: Action, state: MicrobatchState) -> None:
        self.compute.forward(action, state, self.evictions)
        if action.stage in self.compute.cut_off:
            self._check_cut_off(action.stage)

    def _check_cut_off(self, stage: int) -> None:
        """Raise behind the last forward of a stage if none of its microbatches brings gradients to earlier stages that want them.

        In some microbatches a stage may, as in a single process. A need that came from another rank is remembered from earlier
        steps, in which it may have been there alone, so behind the first step this is only said, once.
        """
        if self.compute.cut_off[stage] < self._num_forwards[stage]:
            return
        error = cut_off(f"stage {stage}, all microbatches")
        if self._is_learning or (stage - 1 in self._stages and not skips_of(self.plan.flow)):
            raise error
        if stage not in self._memory.cut_off:
            self._memory.cut_off.add(stage)
            LOG.warning("%s. If those stages needed gradients only in earlier steps, all is well", error)

    @cached_property
    def _num_forwards(self) -> Counter[int]:
        return Counter(action.stage for action in self.plan.actions[self.rank] if action.op is Op.F)

    def _backward(self, action: Action, compute: Callable[[], None]) -> None:
        if not self.sharding.is_needed:
            compute()
            return
        with self.sharding.around(action):
            compute()

    def execute(self, action: Action) -> None:
        """Run one action of the compute lane or of an acceptor lane.

        Raises:
            BaseException: any error of the user's code or a transfer, with a note that says where it happened.
        """
        microbatches = self._acceptor(action).microbatches if action.op in SERVED else self.microbatches
        is_sharding = action.op in SHARDING  # which concerns a stage, and no microbatch of it
        key = action[1:4] if action.part and action.op in MESSAGES else action[1:3]
        state = MicrobatchState(action.stage, 0) if is_sharding else microbatches[key]
        try:
            if self._observer is None and not is_profiled():
                _METHODS[action.op](self, action, state)
            else:
                self._execute_observed(action, state)
        except BaseException as error:
            note(
                error,
                f"bpipe: {self._name}, {place_of(action, self.plan.slices)}, step {self.step}" + f"; {state}" * (not is_sharding),
            )
            raise
        if not is_sharding:
            state.latest = action
            if action.op in LAST and state.graph is None and state.is_over:
                del microbatches[key]

    def _execute_observed(self, action: Action, state: MicrobatchState) -> None:
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
_METHODS: dict[Op, Callable[[Run, Action, MicrobatchState], None]] = {
    Op.F: lambda run, action, state: run._forward(action, state),
    Op.B: lambda run, action, state: run._backward(action, lambda: run.compute.backward(action, state, run.evictions)),
    Op.I: lambda run, action, state: run._backward(action, lambda: run.compute.backward_input(action, state, run.evictions)),
    Op.W: lambda run, action, state: run._backward(action, lambda: run.compute.backward_weight(action, state, run.evictions)),
    Op.R: lambda run, action, state: run.compute.recompute(action, state, run.evictions),
    Op.UNSHARD: lambda run, action, state: run.sharding.stages[action.stage].unshard(),
    Op.RESHARD: lambda run, action, state: run.sharding.stages[action.stage].reshard(),
    Op.REDUCE_GRAD: lambda run, action, state: (
        run.sharding.stages[action.stage].reduce() if action.peer is None else run.twins.start(action)
    ),
    Op.WAIT_REDUCE_GRAD: lambda run, action, state: run.twins.complete(action),
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
    Op.WAIT_ACCEPT: lambda run, action, state: run._acceptor(action).complete_accept(action, state),
    Op.RETURN: lambda run, action, state: run._acceptor(action).return_(action, state),
    Op.WAIT_RETURN: lambda run, action, state: run._acceptor(action).complete_return(action, state),
}
