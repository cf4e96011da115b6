"""A case of modules and batches, run in one process and under every schedule, and compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import bpipe
from tests.models import Result, assert_same, held_by, state_of
from tests.over import Over

NUM_STAGES, M = 4, 8

# Whose ranks hold one stage each, so that a stage may draw random numbers.
ONE_STAGE: dict[str, Any] = {
    "gpipe": bpipe.GPipe,
    "1f1b": bpipe.OneFOneB,
    "balanced_1f1b": bpipe.BalancedOneFOneB,
    "bytes": Over(bpipe.OneFOneB, {"budget": "lowest"}),
    "parts": Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=4)}),
    "recompute": Over(bpipe.OneFOneB, {"budget": None, "by": "recompute"}),
    "zb_h1": bpipe.ZBH1,
    "zb_h2": bpipe.ZBH2,
}
TWO_STAGES: dict[str, Any] = {
    "interleaved": bpipe.Interleaved1F1B,
    "zbv": bpipe.ZBV,
    "dualpipe_v": bpipe.DualPipeV,
    "v_half": bpipe.VHalf,
}
SCHEDULES = {**ONE_STAGE, **TWO_STAGES}


@dataclass
class Batch:
    """What a step gets.

    Args:
        args: of `step`, whole.
        target: likewise.
        kwargs: likewise; every stage gets them.
        cut: the microbatches' `(args, kwargs, target)` as a single process cuts them; default: each tensor's chunks along 0.
    """

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    cut: Sequence[tuple[tuple[Any, ...], Mapping[str, Any], Any]] | None = None

    def microbatches(self) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any], Any]]:
        if self.cut is not None:
            yield from self.cut
        else:
            args, targets = [arg.chunk(M) for arg in self.args], self.target.chunk(M)
            chunks = {name: value.chunk(M) for name, value in self.kwargs.items()}
            for i in range(M):
                yield tuple(arg[i] for arg in args), {name: parts[i] for name, parts in chunks.items()}, targets[i]


@dataclass
class Case:
    """Modules and a loop.

    Args:
        make: the stages' modules, the same at each call.
        batch: that of a step, by its number.
        loss_fn: the loss of a microbatch.
        steps: gradients add up over so many; three, because `Balanced` measures in the first.
        after: called with the modules and the step's number after each step, as a loop's own code.
    """

    make: Callable[[], list[nn.Module]]
    batch: Callable[[int], Batch]
    loss_fn: Callable[..., torch.Tensor]
    steps: int = 3
    after: Callable[[list[nn.Module], int], None] = lambda modules, step: None

    def alone(self) -> Result:
        """Train in one process, microbatch by microbatch; each stage has a random number state of its own."""
        torch.manual_seed(0)
        modules, result = self.make(), Result()
        torch.manual_seed(1)
        random = [torch.get_rng_state()] * len(modules)
        for step in range(self.steps):
            result.losses, result.outputs = [], []
            for args, kwargs, target in self.batch(step).microbatches():
                value: Any = args
                for i, module in enumerate(modules):
                    torch.set_rng_state(random[i])
                    value = module(*value, **kwargs) if isinstance(value, (tuple, list)) else module(value, **kwargs)
                    random[i] = torch.get_rng_state()
                loss = self.loss_fn(value, target)
                (loss / M).backward()
                result.losses.append(loss.detach())
                result.outputs += [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            self.after(modules, step)
        return _finished(result, modules)

    def piped(self, schedule: Any) -> Result:
        """Train under a schedule, all ranks in a loopback. Outputs are not compared: they are merged there."""
        torch.manual_seed(0)
        modules, result = self.make(), Result()
        torch.manual_seed(1)
        loopback, schedules = pipeline(schedule, modules, self.loss_fn)
        for step in range(self.steps):
            batch = self.batch(step)
            losses = result.losses
            loopback.step(schedules, *batch.args, target=batch.target, losses=losses, return_outputs=False, **batch.kwargs)
            self.after(modules, step)
        result.stats = [one.stats for one in schedules]
        for one in schedules:
            one.close()
        return _finished(result, modules)

    def check(self, names: Sequence[str] = tuple(SCHEDULES)) -> None:
        """Compare schedules with the single process, and so with each other: losses, gradients and buffers have the same bits."""
        expected = self.alone()
        expected.outputs = [torch.zeros(1)]
        for name in names:
            result = self.piped(SCHEDULES[name])
            result.outputs = expected.outputs
            try:
                assert_same(result, expected)
            except Exception as error:
                error.add_note(f"under {name}")
                raise

    def refused(self, error: type[Exception], match: str, names: Sequence[str] = tuple(SCHEDULES)) -> None:
        """Check that schedules refuse the first step before anything is sent: no gradient has come, and they go on working."""
        for name in names:
            modules = self.make()
            loopback, schedules = pipeline(SCHEDULES[name], modules, self.loss_fn)
            batch = self.batch(0)
            with pytest.raises(error, match=match):
                loopback.step(schedules, *batch.args, target=batch.target, return_outputs=False, **batch.kwargs)
            assert all(parameter.grad is None for module in modules for parameter in module.parameters())
            assert all(one.session.guard.broken is None for one in schedules)


def pipeline(
    schedule: Any, modules: Sequence[nn.Module], loss_fn: Callable[..., Any], m: int = M
) -> tuple[bpipe.Loopback, list[Any]]:
    """A loopback of the stages, one or two on a rank, and a schedule for each of its ranks."""
    is_single = _class_of(schedule) not in TWO_STAGES.values()
    loopback = bpipe.Loopback(len(modules) if is_single else len(modules) // 2)
    stages = [
        [bpipe.PipelineStage(modules[i], i, len(modules), "cpu", loopback.rank(rank)) for i in held]
        for rank, held in enumerate(held_by(schedule, loopback.num_ranks, len(modules)))
    ]
    return loopback, [schedule(of_rank, m, loss_fn=loss_fn) for of_rank in stages]


def _class_of(schedule: Any) -> Any:
    """The schedule's class, under `Balanced` and `auto` too."""
    return getattr(schedule, "schedule", schedule)


def _finished(result: Result, modules: Sequence[nn.Module]) -> Result:
    for gradients, buffers in map(state_of, modules):
        result.gradients.append(gradients)
        result.buffers.append(buffers)
    return result
