"""One step of one rank: a dispatch from operation to a short method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from bpipe.comm.transport import Transport
from bpipe.runtime.compute import Compute, Job
from bpipe.runtime.evictions import Evictions, Memory
from bpipe.runtime.messages import Layouts, Messages
from bpipe.runtime.observe import Observer
from bpipe.runtime.serve import Acceptor
from bpipe.runtime.traffic import Traffic
from bpipe.schedules import Action, Op, Plan
from bpipe.stage import PipelineStage

__all__: list[str] = []


class Run:
    """One step of one rank of a plan.

    Args:
        plan: what to run; `rank` is this rank's place in it.
        step: its number.
        stages: the stages on this rank by index.
        transport: carries the messages.
        job: what the user wants of this step.
        layouts: the agreed messages, or an empty mapping to learn them into when `is_learning`.
        memory: what the schedule remembers from step to step.
        observer: told of the step, and before and after each action on the thread that does it.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        step: int,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        job: Job,
        layouts: Layouts,
        is_learning: bool,
        memory: Memory,
        observer: Observer | None = None,
    ) -> None:
        self.plan, self.rank, self.step, self.device = plan, rank, step, transport.device
        self.holds_last_stage = any(stage.is_last for stage in stages.values())
        self.traffic = Traffic(transport, rank, step)
        self.compute = Compute(stages, job, self.traffic, has_backward=plan.has_backward)
        self.evictions = Evictions(self.traffic, plan.evicted(rank), memory, self.compute.foreign, self.compute.kept)
        self._messages = Messages(self.traffic, layouts, is_learning=is_learning)
        self._acceptors = {peer: Acceptor(Traffic(transport, rank, step), rooms) for peer, rooms in memory.rooms.items()}
        self._observer = observer
        if observer is not None:
            observer.started(self)

    def _acceptor(self, action: Action) -> Acceptor:
        assert action.peer is not None
        return self._acceptors[action.peer]

    def execute(self, action: Action) -> None:
        """Do one action of the compute lane or the served lane.

        Raises:
            Exception: whatever the user's code or a transfer raises, with a note that says where.
        """
        try:
            if self._observer is None and not profiler._is_profiler_enabled:
                _METHODS[action.op](self, action)
            else:
                self._execute_observed(action)
        except Exception as error:
            error.add_note(
                f"bpipe: rank {self.rank}, stage {action.stage}, microbatch {action.microbatch}, action {action}, step {self.step}"
            )
            raise

    def _execute_observed(self, action: Action) -> None:
        """Do an action under its name in torch.profiler, if that is on, and with the observer told."""
        with self._named(action):
            if self._observer is not None:
                self._observer.before(self, action)
            _METHODS[action.op](self, action)
            if self._observer is not None:
                self._observer.after(self, action)

    def _named(self, action: Action) -> AbstractContextManager[object]:
        # Only where the profiler is on: record_function takes microseconds where it is off, too.
        return profiler.record_function(f"bpipe rank {self.rank} {action}") if profiler._is_profiler_enabled else nullcontext()


# Beside the class, not bound methods in each run: those would be a cycle that keeps a step's tensors until it is collected.
_METHODS: dict[Op, Callable[[Run, Action], None]] = {
    Op.F: lambda run, action: run.compute.forward(action, run.evictions),
    Op.B: lambda run, action: run.compute.backward(action, run.evictions),
    Op.SEND_F: lambda run, action: run._messages.send(action),
    Op.SEND_B: lambda run, action: run._messages.send(action),
    Op.RECV_F: lambda run, action: run._messages.receive(action),
    Op.RECV_B: lambda run, action: run._messages.receive(action),
    Op.WAIT_SEND_F: lambda run, action: run._messages.complete_send(action),
    Op.WAIT_SEND_B: lambda run, action: run._messages.complete_send(action),
    Op.WAIT_RECV_F: lambda run, action: run._messages.complete_receive(action),
    Op.WAIT_RECV_B: lambda run, action: run._messages.complete_receive(action),
    Op.EVICT: lambda run, action: run.evictions.evict(action),
    Op.WAIT_EVICT: lambda run, action: run.evictions.complete_evict(action),
    Op.LOAD: lambda run, action: run.evictions.load(action),
    Op.WAIT_LOAD: lambda run, action: run.evictions.complete_load(action),
    Op.ACCEPT: lambda run, action: run._acceptor(action).accept(action),
    Op.WAIT_ACCEPT: lambda run, action: run._acceptor(action).complete_accept(action),
    Op.RETURN: lambda run, action: run._acceptor(action).give_back(action),
    Op.WAIT_RETURN: lambda run, action: run._acceptor(action).complete_return(action),
}
