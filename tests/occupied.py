"""What ranks hold during and after each of their actions, counted without bpipe's help, beside what their plans say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bpipe.engine.run import Observer
from bpipe.plan.action import SERVED
from bpipe.schedules import Action, Plan
from tests.storages import StorageCount


class Whose(TorchDispatchMode):
    """Gives every new storage to the count of the rank that acts now."""

    def __init__(self) -> None:
        super().__init__()
        self.acting: StorageCount | None = None
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known.expired():
            self._known[storage._cdata] = StorageWeakRef(storage)
            if self.acting is not None:
                self.acting.note(tensor)


class Moment(NamedTuple):
    """An action: what was counted and what is planned while it ran, at its fullest, and when it had run.

    Nothing is counted (None) during an action other than a forward, in which no code of ours runs.
    """

    action: Action
    counted_during: int | None
    planned_during: int
    counted_after: int
    planned_after: int


class Counting(Observer):
    """Follows the steps of one rank of a schedule. What stays is left out: parameters, gradients, batches, what a step returns.

    Args:
        schedule: the rank's.
        whose: a mode to be entered for a step; ranks of a loopback share it.
        has_rooms: whether remote activations are served under it too, as in a loopback, or by other threads.
    """

    def __init__(self, schedule: Any, whose: Whose, *, has_rooms: bool = True) -> None:
        self.schedule, self._whose, self._has_rooms, self._count = schedule, whose, has_rooms, StorageCount()
        self.batch: Sequence[torch.Tensor] = ()
        self.looks = True  # whether it counts, or remembers whose storages are for a later step
        self._modules = [stage.submod for stage in schedule.session.context.stages.values()]
        self._loss_fn = schedule.session.context.loss_fn
        schedule.session.observer, schedule.session.context.loss_fn = self, self._after_loss
        for module in self._modules:
            module.register_forward_hook(lambda *_: self._look_inside())

    def _after_loss(self, *args: Any) -> torch.Tensor:
        loss = self._loss_fn(*args)
        self._look_inside()
        return loss

    def _look_inside(self) -> None:
        self._during = self._live() if self.looks else None

    def started(self, run: Any) -> None:
        self._run, self._seen = run, []

    def before(self, run: Any, action: Action) -> None:
        if self._has_rooms or action.op not in SERVED:
            self._whose.acting, self._during = self._count, None

    def after(self, run: Any, action: Action) -> None:
        if action.op in SERVED:
            return
        self._whose.acting = None
        if self.looks:
            self._seen.append((action, self._during, self._live()))

    def _live(self) -> int:
        parameters = [p for module in self._modules for p in module.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        buffers = [b for module in self._modules for b in module.buffers()]
        returned = self._run.results.returned
        return self._count.live_bytes(without=[*parameters, *gradients, *buffers, *self.batch, *returned])

    @property
    def peak(self) -> int:
        """The most that was counted in the last step, but for the buffers on the host, which on CPU are counted too."""
        counts = (count for _, during, after in self._seen for count in (during, after) if count is not None)
        return max(counts) - self._host_bytes

    @property
    def _host_bytes(self) -> int:
        plan = self._run.plan
        return 0 if plan.sizes is None else plan.host_bytes(self._run.rank)

    def moments(self) -> Iterator[Moment]:
        """Every action of the last step, with the plan's numbers beside; buffers, for other ranks and on the host, are in both."""
        plan, rank = self._run.plan, self._run.rank
        remotes = plan.idle_bytes(rank) - plan.sizes.static[rank] if self._has_rooms else 0
        remote_buffers = remotes + self._host_bytes
        for (action, *counted), (during, after) in zip(self._seen, planned(plan, rank), strict=True):
            yield Moment(action, counted[0], remote_buffers + during, counted[1], remote_buffers + after)


def planned(plan: Plan, rank: int) -> Iterator[tuple[int, int]]:
    """What a plan's list comes to during each action, and behind it."""
    meter, live, twice = plan.meter(), 0, plan.recomputed(rank)
    begun, ended = meter.held(plan.actions[rank])
    for index, action in enumerate(plan.actions[rank]):
        takes, gives = meter.change(action, again=action.key in twice)
        during = live + begun.get(index, 0) + takes
        live = during - ended.get(index, 0) - gives
        yield during, live
