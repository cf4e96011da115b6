"""Stages under DistributedDataParallel: gradients add up over the microbatches, and are averaged in the last backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bpipe.cleanup import noted_on
from bpipe.errors import StageError
from bpipe.model.stage import ModuleSnapshot
from bpipe.parallel.settings import changed
from bpipe.schedules import Action, Op
from bpipe.torch_private.ddp_reducer import DELAYS, averages_check, forget_backward, make_buffers_equal, option_of

__all__: list[str] = []

# Options that cannot work with several microbatches in flight, and why.
REFUSED = {
    "find_unused_parameters": "it searches unused parameters from each forward's outputs, which a pipeline has already sent",
    "static_graph": "it expects one backward per step, but a pipeline runs one for each microbatch",
    "mixed_precision": "it frees its low precision weights after each backward, but other microbatches still need them",
    DELAYS: "it sums all gradients after one backward, but a pipeline runs one for each microbatch",
}


def last_of(lane: Iterable[Action], ops: Collection[Op]) -> dict[int, tuple[Op, int, int]]:
    """Return each stage's last action among some operations, as its operation, stage and microbatch."""
    return {action.stage: action.op_key for action in lane if action.op in ops}


class Replicated:
    """The modules of one rank's stages that are under DDP, during one step. Their backwards run as a whole."""

    def __init__(self, stages: Mapping[int, ModuleSnapshot], lane: Iterable[Action]) -> None:
        found = {index: replicas for index, parts in stages.items() if (replicas := replicas_in(parts.modules))}
        self._last = last_of(lane, (Op.B, Op.I)) if found else {}  # W actions do nothing here
        self.stages = {index: replicas for index, replicas in found.items() if index in self._last}
        self._reducing: dict[int, list[DistributedDataParallel]] = {}

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Keep backwards from reducing by themselves, and restore the user's setting of the modules in the end."""
        for index, replicas in self.stages.items():
            for replica in replicas:
                _check(replica, index)
        self._reducing = {index: [one for one in of if one.require_backward_grad_sync] for index, of in self.stages.items()}
        with changed([(one, "require_backward_grad_sync", False) for of in self.stages.values() for one in of]):
            yield

    def averaged_later(self) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients this step only adds up, as the user has said (`no_sync`)."""
        for index, replicas in self.stages.items():
            for replica in replicas:
                if replica not in self._reducing[index]:
                    yield from replica.parameters()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Wrap a backward, so that the last one of a stage under DDP averages its gradients.

        Raises:
            StageError: some parameters got no gradient in it, so theirs were not averaged.
        """
        is_last = self._last.get(action.stage) == action.op_key
        reducing = self._reducing.get(action.stage, ()) if is_last else ()
        for replica in reducing:
            replica.reducer.prepare_for_backward([])
        try:
            yield
            for replica in reducing:
                _check_reduced(replica, action)
        except BaseException as error:
            for replica in reducing:
                with noted_on(error):
                    forget_backward(replica)  # otherwise the next forward would refuse to run
            raise
        for replica in reducing:
            replica.require_forward_param_sync = True  # buffers are synchronised before the next forward, as without a pipeline


def equalise_buffers(modules: Iterable[nn.Module]) -> None:
    """Make the buffers of replicas equal as the next forward would: a forward that runs twice must find the same values."""
    for replica in replicas_in(modules):
        if make_buffers_equal(replica):
            replica.require_forward_param_sync = False


def replicas_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    return [one for one in modules if isinstance(one, DistributedDataParallel)]


def _check(replica: DistributedDataParallel, stage: int) -> None:
    for option, reason in REFUSED.items():
        if option_of(replica, option):
            name = "delay_all_reduce_named_params" if option == DELAYS else option
            raise StageError(
                f"stage {stage} is under DistributedDataParallel with {name}={getattr(replica, option)}: {reason}. "
                "Leave that option out, or use fully_shard"
            )


def _check_reduced(replica: DistributedDataParallel, action: Action) -> None:
    check = averages_check(replica)
    try:
        check()
    except RuntimeError as error:
        raise StageError(
            f"stage {action.stage}: some parameters under DistributedDataParallel got no gradient in the last microbatch's "
            f"backward ({action}), so this step has not averaged all gradients. Freeze parameters that are not used, or "
            "use fully_shard, which reduces the gradients of all microbatches"
        ) from error
