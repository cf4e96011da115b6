"""Run callbacks that hooks queue for the end of a backward (`queue_callback`); if it is split, after `backward_weight`.

Autograd's engine runs several times for a microbatch whose backward is split, and runs callbacks at the end of each run.
Therefore this engine replaces torch's while a step with such backwards runs, and keeps the callbacks that are queued during a
split backward. If `backward_input` queues any, `backward_weight` follows at once, and then the callbacks: that backward runs as a
whole after all. If `backward_weight` queues some, they run after it, but are refused if another microbatch has run its
`backward_input` since: the callback would find gradients that no single process has at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from bpipe.errors import StageError
from bpipe.torch_private.engine_and_graph import Engine, backward_runs, will_run

__all__: list[str] = []

Callback = Callable[[], None]


class Callbacks(Engine):
    """Torch's engine, except for callbacks queued during a split backward; it takes its place during a step."""

    def __init__(self) -> None:
        self.is_ours: Callable[[], bool] | None = None  # in a split backward: whether it queues, not a backward inside it
        self.is_late: Callable[[], bool] | None = None  # in backward_weight: whether another backward_input ran since its own
        self.queued: list[Callback] = []
        self.were_any = False  # whether callbacks were queued in this step
        self.behind: Any = None  # the engine that this one replaces: torch's, or another rank's in this process

    def queue_callback(self, callback: Callback) -> None:
        """Queue a callback for the end of the backward that runs.

        Raises:
            StageError: the callback would not find the gradients that it finds in a single process.
        """
        of_fsdp = type(getattr(callback, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")
        if of_fsdp:  # `Sharding` handles the end of FSDP's backwards
            self.behind.queue_callback(callback)
            return
        self.were_any, is_ours = True, self.is_ours  # another thread may set it, if the callback belongs to its pipeline
        if is_ours is None or not is_ours():
            self.behind.queue_callback(callback)
            return
        if self.is_late is not None and self.is_late():
            raise StageError(
                f"a hook queues {_name_of(callback)} for the end of a backward (queue_callback) during backward_weight, but "
                "another microbatch has run its backward_input since, so the callback would also find that one's gradients. Use a "
                "schedule with whole backwards, such as OneFOneB, or queue the callback in the first microbatch of the first step "
                "too: if hooks on parameters queue callbacks there, bpipe runs backwards as a whole"
            )
        self.queued.append(callback)

    def take(self) -> list[Callback]:
        """Take the queued callbacks; the caller has to run them."""
        queued, self.queued = self.queued, []
        return queued

    def call(self, queued: Sequence[Callback]) -> None:
        """Run callbacks, and those that they queue themselves, as at the end of a backward."""
        before, self.is_ours = self.is_ours, lambda: not backward_runs()
        self.queued[:0] = queued
        while self.queued:
            self.queued.pop(0)()
        self.is_ours = before


def goes_to(leaf: torch.Tensor) -> bool:
    """Return whether the backward that calls this function, through a hook, leads to a leaf."""
    return will_run(get_gradient_edge(leaf).node)


def _name_of(callback: Any) -> str:
    """Return a callback's name, and the location of its code."""
    function = getattr(callback, "func", callback)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
