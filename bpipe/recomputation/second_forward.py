"""Run some forwards twice: the first saves nothing, and the second builds the graph, when its backward is near."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

from bpipe.engine.compute import Compute, followed
from bpipe.engine.conventions import Call
from bpipe.engine.inputs import Arrived
from bpipe.engine.microbatch_state import MicrobatchState
from bpipe.engine.run import Operations
from bpipe.engine.setup import BUFFER, Setup
from bpipe.model.microbatch import tensors_in
from bpipe.parallel.ddp import equalise_buffers
from bpipe.recomputation.rerun import Rerun, Reruns
from bpipe.recomputation.state import Learned
from bpipe.schedules import Action, Op

__all__: list[str] = []


class Record(NamedTuple):
    """What a second forward runs from.

    Args:
        rerun: restores what the first one found, and compares what both return.
        arrived: the values that had come from other stages.
        left_bytes: of what the first one has left to others on its stage, as far as they are counted.
    """

    rerun: Rerun
    arrived: Arrived
    left_bytes: int


class SecondForwards(Operations):
    """The forwards of one rank that run twice during one step.

    Args:
        setup: of the step.
        compute: runs them.
        learned: what is known about the stages; this step adds to it.
    """

    def __init__(self, setup: Setup, compute: Compute, learned: MutableMapping[int, Learned]) -> None:
        self.keys, self._reruns = setup.plan.recomputed(setup.rank), Reruns()
        self._compute, self._setup, self._learned = compute, setup, learned

    def run(self, action: Action, state: MicrobatchState) -> None:
        (self._first if action.op is Op.F else self._second)(state)

    def check(self) -> None:
        self._reruns.check()

    def _first(self, state: MicrobatchState) -> None:
        """Run the first of a microbatch's two forwards: what it makes goes to other stages, and only what it got is kept."""
        compute = self._compute
        arrived = compute.inputs.arrived(state)
        call = compute.inputs.call(state, arrived)
        call.saves = False
        compute.inputs.share(call)
        rerun = self._rerun(call)
        with compute.noticing(state), torch.enable_grad(), rerun.first():
            compute.run(call)
        rerun.returned((call.output, call.values), call.loss)
        state.record = Record(rerun, arrived, compute.evictions.enter_left(state.stage, call.shapes))
        compute.outputs.hand_on(call)
        if state.stage in self._setup.with_loss:
            compute.results.finish(call)

    def _second(self, state: MicrobatchState) -> None:
        """Run the second one, which builds the graph and saves what the backward needs."""
        compute, hooks = self._compute, self._compute.hooks
        record: Record = state.record
        state.record, num_common = None, hooks.num_common
        call = compute.inputs.call(state, record.arrived)
        compute.evictions.follow(call).left_bytes = record.left_bytes
        if not self._setup.is_plain:
            compute.inputs.count(call)
        with torch.enable_grad(), record.rerun.again(), followed(call):
            if call.stash is not None:
                buffers = (buffer for module in call.parts.modules for buffer in module._buffers.values())
                call.stash.set_apart([buffer for buffer in buffers if buffer is not None], BUFFER)
            compute.run(call)
        record.rerun.returned((call.output, call.values), call.loss)
        compute.outputs.make_again(call)
        if call.stash is not None and state.stage in self._setup.with_loss:
            compute.evictions.returned(call)
        compute.keep(call, num_common)

    def _rerun(self, call: Call) -> Rerun:
        """Return what runs a forward twice, with the state that it may change."""
        setup, state, given = self._setup, call.state, self._setup.given
        has_loss = state.stage in setup.with_loss
        target = given.targets[state.microbatch] if has_loss and given.targets is not None else None
        tensors = tensors_in([call.args, call.kwargs, target, dict(given.loss_kwargs)])
        equalise_buffers(call.parts.modules)
        running: list[Any] = [call.stage.submod, *([given.loss_fn] if has_loss else ())]
        known, makeup = self._learned.get(state.stage), call.parts.makeup
        if known is None or known.makeup != makeup:  # nothing is known yet of another makeup
            known = self._learned[state.stage] = Learned(makeup)
        device, kinds = setup.traffic.transport.device, setup.non_activations
        return Rerun(state.stage, state.microbatch, tensors, running, known, self._reruns, device, kinds)
