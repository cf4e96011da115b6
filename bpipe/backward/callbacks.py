"""Callbacks that hooks queue for the end of a backward (`queue_callback`): if it is in two halves, they run after the second.

Autograd's engine runs several times for a microbatch whose backward is in two halves, and calls back at the end of each run.
Therefore this engine stands in front of torch's while a step with such backwards runs, and keeps what is queued in a half. What is
queued in an input half makes the weight half follow at once, and then the callbacks: that backward is whole after all. What is
queued in a weight half is called after it, but refused if another microbatch has had its input half since: the callback would find
gradients that no single process has at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from bpipe.errors import StageError

__all__: list[str] = []

Callback = Callable[[], None]


class Callbacks(torch._C._ImperativeEngine):
    """Torch's engine, except for what is queued while half of a backward runs; it is `Variable._execution_engine` during a step."""

    def __init__(self) -> None:
        self.is_ours: Callable[[], bool] | None = None  # while a half runs: whether that half queues, not a backward inside it
        self.is_late: Callable[[], bool] | None = None  # while a weight half runs: whether another input half ran since its own
        self.queued: list[Callback] = []
        self.were_any = False  # in this step
        self.behind = Variable._execution_engine  # the one before which this stands: torch's, or another rank's in this process

    def queue_callback(self, callback: Callback) -> None:
        """Queue a callback for the end of the backward that runs.

        Raises:
            StageError: it would not find the gradients that it finds in a single process.
        """
        if _is_of_fsdp(callback):  # whose end of a backward `Sharding` looks after
            self.behind.queue_callback(callback)
            return
        self.were_any, is_ours = True, self.is_ours  # another thread may set it, where the callback is of its pipeline
        if is_ours is None or not is_ours():
            self.behind.queue_callback(callback)
            return
        if self.is_late is not None and self.is_late():
            raise StageError(
                f"a hook queues {_name_of(callback)} for the end of a backward (queue_callback) in the second half of that, and "
                "another microbatch has had the first half of its own since: it would find gradients of that one, too. Use a "
                "schedule with whole backwards, such as OneFOneB, or queue it in the first microbatch of the first step, too: "
                "bpipe runs backwards as a whole where it has seen there that hooks on parameters queue callbacks"
            )
        self.queued.append(callback)

    def take(self) -> list[Callback]:
        """Take what was queued; the caller has to call it."""
        queued, self.queued = self.queued, []
        return queued

    def call(self, queued: Sequence[Callback]) -> None:
        """Run callbacks, and those that they queue themselves, as at the end of a backward."""
        before, self.is_ours = self.is_ours, _is_no_backward
        self.queued[:0] = queued
        while self.queued:
            self.queued.pop(0)()
        self.is_ours = before


def goes_to(leaf: torch.Tensor) -> bool:
    """Return whether the backward that calls this, through a hook, leads to a leaf."""
    return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))


def _is_no_backward() -> bool:
    return torch._C._current_graph_task_id() == -1


def _is_of_fsdp(callback: Any) -> bool:
    return type(getattr(callback, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def _name_of(callback: Any) -> str:
    """Return a callback's name, and where its code is."""
    function = getattr(callback, "func", callback)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
