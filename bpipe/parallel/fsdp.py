"""Gather, free and reduce stages under data parallelism where the plan says so, and reduce gradients once per step otherwise.

Under FSDP2 (`fully_shard`) a plan may say when a stage's weights are gathered and freed, and when its gradients are reduced. If it
does not for a stage, FSDP gathers and frees by itself, and the stage's gradients add up over the microbatches, unsharded, until its
last backward has run. Weights that FSDP keeps between a forward and its backward also stay until then: with several microbatches in
flight they would be freed only to be gathered again. If no backward follows, they are freed in the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from bpipe.backward.new_gradients import apart
from bpipe.cleanup import keeping, noted_on
from bpipe.model.stage import ModuleSnapshot
from bpipe.parallel.ddp import Replicated, last_of
from bpipe.parallel.settings import Setting, changed
from bpipe.plan.action import SHARDING
from bpipe.schedules import Action, Op
from bpipe.torch_private.fsdp_states import (
    end_backward,
    forget_gathering,
    free,
    gathered,
    groups_of,
    is_root,
    pass_over,
    shared_by,
    state_of,
    streams_of,
)

__all__: list[str] = []

REDUCING = ("reduce_grads", "all_reduce_grads")
# The attributes of a parameter group that keep FSDP from freeing weights by itself after a forward or a backward.
KEEPING = {"post_forward_mesh_info": None, "reshard_after_backward": False}
BACKWARDS = (Op.B, Op.I, Op.W)


def trained(modules: Sequence[nn.Module], parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that an optimizer trains: the sharded ones for those that FSDP2 has gathered in their place."""
    shards = (one for unit in units_in(modules) for group in groups_of(unit) for one in group.fsdp_params)
    kept = {id(whole): one.sharded_param for one in shards if (whole := gathered(one)) is not None}
    return [kept.get(id(parameter), parameter) for parameter in parameters]


class Sharding:
    """The data parallelism of one rank's stages during one step."""

    def __init__(self, stages: Mapping[int, ModuleSnapshot], lane: Sequence[Action]) -> None:
        units = {index: units_in(parts.modules) for index, parts in stages.items()}
        planned = {action.stage for action in lane if action.op in SHARDING and action.peer is None}
        self._last = last_of(lane, BACKWARDS) if any(units.values()) else {}
        self.stages = {
            index: ShardedStage(found, is_planned=index in planned)
            for index, found in units.items()
            if index in planned or (found and index in self._last)
        }
        self._without_backward = [] if self._last else [unit for found in units.values() for unit in found]
        self._replicated = Replicated(stages, lane)
        self.is_needed = bool(self.stages or self._replicated.stages)
        self.undivided = set(self._replicated.stages)  # their backwards run as a whole; FSDP's are known when it is in charge

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Keep stages from reducing by themselves, or freeing if the plan says when; restore the user's settings in the end."""
        with keeping(ExitStack()) as stack:
            stack.enter_context(_freed(self._without_backward))
            stack.enter_context(self._replicated.silent())
            for index, stage in self.stages.items():
                stack.enter_context(stage.passive())
                if stage.frees_after_backward:
                    self.undivided.add(index)
            yield

    def averaged_later(self) -> Iterator[nn.Parameter]:
        """Yield the parameters under DDP whose gradients a later step averages. Those under FSDP have none before."""
        yield from self._replicated.averaged_later()

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Wrap a backward (or I, or W), and update the gradients of its stage when it ends."""
        is_parallel = action.stage in self.stages or action.stage in self._replicated.stages
        return self._around(action) if is_parallel else nullcontext()

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        stage = self.stages.get(action.stage)
        if stage is not None:
            stage.pass_over()
        with self._replicated.around(action):
            yield
        if stage is None:
            return
        stage.order_gatherings()
        stage.separate()
        if action.op is Op.W and action.stage not in self.undivided:
            stage.collect()
        if not stage.is_planned and self._last[action.stage] == action.op_key:
            stage.reduce()


class ShardedStage:
    """A stage's modules under FSDP: none if it is not sharded."""

    def __init__(self, units: Sequence[Any], *, is_planned: bool) -> None:
        self._units, self.is_planned = units, is_planned
        self._gathering: list[Any] = []
        self._reducing: list[Setting] = []
        self._without: list[Any] = []  # FSDP's parameters without an unsharded gradient
        self._never_gathered: list[Any] = []  # its groups of parameters that no forward has needed yet
        self.frees_after_backward = False

    @contextmanager
    def passive(self) -> Iterator[None]:
        states = [state_of(unit) for unit in self._units]
        groups = [group for unit in self._units for group in groups_of(unit)]
        self._without = [parameter for group in groups for parameter in group.fsdp_params]
        self._never_gathered = groups
        self._roots = [state for state in states if is_root(state)]
        kept = groups if self.is_planned else [group for group in groups if group.post_forward_mesh_info is None]
        self.frees_after_backward = any(group.reshard_after_backward for group in groups if group not in kept)
        self._reducing = [(group, name, getattr(group, name)) for group in groups for name in REDUCING]
        if not self.is_planned:
            self._reducing += [(group, "reshard_after_backward", group.reshard_after_backward) for group in kept]
        passive: list[Setting] = [(group, name, False) for group in groups for name in REDUCING]
        passive += [(shared_by(root), "is_last_backward", False) for root in self._roots if self.is_planned]
        with changed([*passive, *((group, name, value) for group in kept for name, value in KEEPING.items())]):
            try:
                yield
            except BaseException as error:
                with noted_on(error):
                    self._abandon(groups)
                raise

    def _abandon(self, groups: Sequence[Any]) -> None:
        """Drop what a failed step has gathered and added up, because `zero_grad` sees only sharded gradients.

        Nothing is waited for: another replica may never gather again.
        """
        for group in groups:
            if group.device.type == "cpu":
                forget_gathering(group)
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.14; then the gathered one has that gradient
                parameter.unsharded_accumulated_grad = None
            if (whole := gathered(parameter)) is not None:
                whole.grad = None
        for root in self._roots:
            shared_by(root).iter_forward_root = None  # or the next forward would not begin as the first one
        ending = [(shared_by(root), "is_last_backward", True) for root in self._roots]
        with changed([*((group, "reshard_after_backward", True) for group in groups), *ending]):
            self.collect()

    def order_gatherings(self) -> None:
        """Make FSDP's next copy of weights for an all-gather wait for its last all-gather, whose memory it may be given.

        After several forwards FSDP gathers weights for a backward that is not the next one, and drops them when this backward ends:
        the computation waits for them then, but not the stream on which they were allocated, and on which the next ones will be.
        """
        for root in self._roots:
            streams = streams_of(root)
            streams.all_gather_copy_in_stream.wait_stream(streams.all_gather_stream)

    def separate(self) -> None:
        """Separate the unsharded gradients of a backward, so that no two share memory, as `Compute` does with all others."""
        wholes = [whole for parameter in self._without if (whole := gathered(parameter)) is not None]
        apart([whole for whole in wholes if whole.grad is not None])
        self._without = [one for one in self._without if (whole := gathered(one)) is None or whole.grad is None]

    def unshard(self) -> None:
        """Start to gather the weights; each module waits for its own before it computes."""
        self._gathering = [unit.unshard(async_op=True) for unit in self._units]

    def reshard(self) -> None:
        for handle in self._gathering:
            handle.wait()
        for unit in self._units:
            unit.reshard()

    def reduce(self) -> None:
        """Add the gradients up over the data-parallel ranks, unless the user has switched that off for now."""
        last = [(shared_by(root), "is_last_backward", True) for root in self._roots] if self.is_planned else []
        with changed([*self._reducing, *last]):
            self.collect()

    def collect(self) -> None:
        """Do what FSDP does when a backward has ended, because FSDP does not detect a `backward_weight` by itself.

        It adds up each backward's gradients in the precision of its reduction.
        """
        self.pass_over()
        for root in self._roots:
            end_backward(root)

    def pass_over(self) -> None:
        """Let the end of a backward pass over parameters that were never gathered.

        FSDP looks for their gradients even if it does not reduce, but there is no place for them yet.
        """
        groups = self._never_gathered
        self._never_gathered = [group for group in groups if any(gathered(one) is None for one in group.fsdp_params)]
        for group in self._never_gathered:
            pass_over(group)


@contextmanager
def _freed(units: Sequence[Any]) -> Iterator[None]:
    """Free in the end the weights that an evaluation has gathered: FSDP keeps them for a backward that does not come.

    They would stay in the module instead of the parameters that have gradients, and, after the optimizer's next step, have the
    old values. Weights that the user has gathered stay.
    """
    sharded = [group for unit in units for group in groups_of(unit) if group.is_sharded]
    try:
        yield
    finally:
        for group in sharded:
            free(group)


def communicates(unit: Any) -> bool:
    """Return whether a module under FSDP2 shares its weights with another rank: in a mesh of one rank it waits for nobody."""
    return any(group.mesh_info.mesh.size() > 1 for group in groups_of(unit))


def units_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules under FSDP, from the outermost in. Without FSDP loaded there are none, and loading it takes a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [unit for unit in modules if isinstance(unit, fsdp.FSDPModule)]
