"""Count what the ranks of a loopback hold, without bpipe's help: every storage that was made in a rank's actions and is alive.

What the user has (parameters, gradients, buffers, the batch, losses) and what travels between stages is left out, as it is in
`peak_bytes`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bpipe
from bpipe.engine.run import Observer
from tests.storages import StorageCount


class LiveRanks:
    """Schedules of a loopback whose steps are watched.

    Args:
        schedules: one a rank.
        modules: all stages'.
        state: tensors that modules and hooks keep for themselves.
        collects: whether circles are collected before each count, because hooks on several tensors make some: torch's closure over
            the nodes of a graph hangs on that graph.
        keeps_graphs: whether modules keep tensors of graphs that keep what they have saved, because a split backward frees none.
    """

    def __init__(
        self,
        loopback: bpipe.Loopback,
        schedules: Sequence[Any],
        modules: Sequence[nn.Module],
        state: Callable[[], list[torch.Tensor]] = list,
        *,
        collects: bool = False,
        keeps_graphs: bool = False,
    ) -> None:
        self.collects, self._keeps_graphs = collects, keeps_graphs
        self._loopback, self._schedules, self._modules, self._state = loopback, schedules, modules, state
        self._ranks = [_Rank(self) for _ in schedules]
        self.count = self.outside = StorageCount()
        self.batch: list[torch.Tensor] = []
        self._parts: list[nn.Module] = []  # all modules, looked for once in a step
        for schedule, rank in zip(schedules, self._ranks):
            schedule.session.observer = rank

    def step(self, x: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> list[tuple[int, dict[str, float]]]:
        """Run a step; for each rank, the most bytes that were counted, and its statistics."""
        for rank in self._ranks:
            rank.peak = rank.collected = 0
        self.batch, self._parts = [x, target], _parts(self._modules)
        if self.collects:
            gc.freeze()  # what is there already need not be looked through each time
        with _Noting(self), patch.object(torch, "get_rng_state", self._random_state):
            self._loopback.step(self._schedules, x, target=target, return_outputs=False, **kwargs)
        self._parts = []
        return [(rank.peak, schedule.stats) for rank, schedule in zip(self._ranks, self._schedules)]

    def between(self) -> list[tuple[int, int]]:
        """The least and the most that the last step's peak was, on each rank.

        They are the count, but for what circles held that were collected, and what graphs have left that modules keep.
        """
        left = [rank.count.live_bytes(without=self.users()) if self._keeps_graphs else 0 for rank in self._ranks]
        return [(rank.peak - one, rank.peak + rank.collected) for rank, one in zip(self._ranks, left)]

    def _random_state(self) -> torch.Tensor:
        """The state of random numbers, as regions under `torch.utils.checkpoint` keep it: no operation makes that."""
        state = torch.default_generator.get_state()
        self.count.note(state)
        return state

    def users(self) -> list[torch.Tensor]:
        """What is the user's."""
        parts = self._parts or _parts(self._modules)
        parameters = [one for part in parts for one in part._parameters.values() if one is not None]
        gradients = [one.grad for one in parameters if one.grad is not None]
        buffers = [one for part in parts for one in part._buffers.values() if one is not None]
        return [*parameters, *gradients, *buffers, *self.batch, *self._state()]


def _parts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [part for module in modules for part in module.modules()]


class _Noting(TorchDispatchMode):
    """Every new storage belongs to the rank whose action makes it."""

    def __init__(self, live: LiveRanks) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        made = [one for one in _tensors((result,)) if one.untyped_storage()._cdata not in given]  # none, by `copy_`
        self._live.count.note(made)
        return result


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class _Rank(Observer):
    def __init__(self, live: LiveRanks) -> None:
        self._live, self.count = live, StorageCount()
        self.peak = self.collected = 0

    def before(self, run: Any, action: Any) -> None:
        self._live.count = self.count

    def after(self, run: Any, action: Any) -> None:
        edges = [edge for state in run.microbatches.values() for edge in state.edges.values()]
        left = [message for edge in edges for message in (edge.values, edge.gradients)]
        waiting = [tensor for message in left if message is not None for tensor in message.tensors]
        under_way = [one for edge in edges for one in edge.transfers.values()]
        travelling = [tensor for transfer, sent in under_way for tensor in (*transfer.tensors, *sent)]
        messages = [tensor for tensor in (*waiting, *travelling) if tensor is not None]
        known = [*messages, *self._live.users(), *run.results.returned]
        live = self.count.live_bytes(without=known)
        if self._live.collects:
            gc.collect()
            self.collected += live - (live := self.count.live_bytes(without=known))
        self.peak = max(self.peak, live)
        self._live.count = self._live.outside
