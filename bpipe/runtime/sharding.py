"""Stages under fully sharded data parallelism (FSDP2): gathered, freed and reduced where the plan says, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from bpipe.schedules import Action
from bpipe.schedules.action import SHARDING
from bpipe.stage import PipelineStage

__all__: list[str] = []

# With these settings of a parameter group, FSDP does nothing by itself after a forward or a backward.
PASSIVE = {"post_forward_mesh_info": None, "reshard_after_backward": False, "reduce_grads": False, "all_reduce_grads": False}
REDUCING = ("reduce_grads", "all_reduce_grads")

Setting = tuple[Any, str, Any]  # whose, its name, its value


class Sharding:
    """The sharded weights of one rank during one step.

    Args:
        stages: the stages on this rank by index.
        lane: this rank's actions.
    """

    def __init__(self, stages: Mapping[int, PipelineStage], lane: Iterable[Action]) -> None:
        units = {index: _units(stage.submod) for index, stage in stages.items()}
        planned = {action.stage for action in lane if action.op in SHARDING}
        self.unplanned = {index for index, found in units.items() if found and index not in planned}
        self._stages = {index: _ShardedStage(units[index]) for index in planned}

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Let FSDP do nothing by itself on the stages whose sharding is planned; in the end it is as the user left it."""
        with ExitStack() as stack:
            for stage in self._stages.values():
                stack.enter_context(stage.passive())
            yield

    def unshard(self, action: Action) -> None:
        self._stages[action.stage].unshard()

    def reshard(self, action: Action) -> None:
        self._stages[action.stage].reshard()

    def reduce(self, action: Action) -> None:
        self._stages[action.stage].reduce()

    def after_weight_half(self, action: Action) -> None:
        """FSDP adds up each backward's gradients in the precision of its reduction; it does not see a weight half by itself."""
        if action.stage in self._stages:
            self._stages[action.stage].collect()


class _ShardedStage:
    """A stage's modules under FSDP: none if it is not sharded."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = units
        self._gathering: list[Any] = []
        self._reducing: list[Setting] = []

    @contextmanager
    def passive(self) -> Iterator[None]:
        states = [unit._get_fsdp_state() for unit in self._units]
        for state in states:
            state._lazy_init()
        groups = [group for state in states for group in state._fsdp_param_groups]
        self._roots = [state for state in states if state._is_root]
        self._reducing = [(group, name, getattr(group, name)) for group in groups for name in REDUCING]
        last = [(root._state_ctx, "is_last_backward", False) for root in self._roots]
        with _set([*last, *((group, name, value) for group in groups for name, value in PASSIVE.items())]):
            yield

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
        last = [(root._state_ctx, "is_last_backward", True) for root in self._roots]
        with _set([*self._reducing, *last]):
            self.collect()

    def collect(self) -> None:
        """Do what FSDP does when a backward has ended."""
        for root in self._roots:
            root._root_post_backward_final_callback()


@contextmanager
def _set(settings: Iterable[Setting]) -> Iterator[None]:
    """Change settings for a while."""
    settings = list(settings)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _units(module: nn.Module) -> list[Any]:
    """The modules under FSDP, from the outermost in. Without FSDP loaded there are none, and loading it takes a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule)]
