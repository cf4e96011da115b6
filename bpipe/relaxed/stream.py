"""A stream: in every tick all stages run, each on what the stage before made a tick ago (PARTIME, arXiv 2210.09147)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import util
from typing import Any

import torch

from bpipe._version import __version__
from bpipe.api.description import state_of
from bpipe.api.loopback import LoopbackGroup
from bpipe.api.options import WAITS, Options, options_for
from bpipe.api.schedule import group_or_alone, transport_for
from bpipe.cleanup import concise, note
from bpipe.comm.health.activity import State
from bpipe.comm.health.agreement import StepRecord, check
from bpipe.comm.health.collective import Collective
from bpipe.comm.transport.base import Transport
from bpipe.engine.lanes import Lanes
from bpipe.errors import AgreementError, CommError, ConfigurationError, StageError
from bpipe.memory.optimizers import several
from bpipe.model.call import Loss
from bpipe.model.cut import Cut, cut_of
from bpipe.model.stage import PipelineStage
from bpipe.model.ties import check_ties
from bpipe.not_copied import NotCopied
from bpipe.parallel.fsdp import trained
from bpipe.relaxed.stage_ticks import StageTicks, Steps
from bpipe.relaxed.tick_messages import Call
from bpipe.schedules import build
from bpipe.schedules.by_name import forward_plan
from bpipe.session.guard import Guard

__all__ = ["Stream"]


class Stream(NotCopied):
    """A pipeline without microbatches that wait for each other, for samples that come one after the other.

    In every tick all stages run at once: each runs forward what the stage before has put out in the tick before, and then backward
    through the graph of this forward, with the gradient that the next stage has made in the tick before; then its optimizer steps.
    So a tick takes as long as the slowest stage, and a stage holds one sample. The price: that gradient is of an earlier sample,
    and of the weights that later stages had for it (docs/relaxed.md). Where inputs change slowly and learning rates are small, this
    is close to backpropagation; with a constant input and constant weights it is equal to it.

    `push` and `drain` are collective over the pipeline's ranks, and block the host until this rank's tick is done. A rank may be
    ahead of the next one by what their channel holds, and in a stream that learns by no more than one tick.

    Args:
        stage: this rank's only `PipelineStage`, ours or torch's, over processes (or a single one).
        loss_fn: `loss_fn(output, target)`, one number; give it on all ranks. None: the stream does not learn.
        optimizer: of this stage's parameters, or any object with `step()` and `zero_grad()`, or several in a list. In each tick it
            forgets the gradients before the backward and steps behind it, in ticks in which the stage has a gradient. None:
            gradients are added to `.grad`, as in `schedule.step`, for you to use between two ticks.
        options: `timeout_s` and `slow_s`.

    Raises:
        ConfigurationError: the arguments cannot work together, the stage has skips, two directions or a `dw_builder`, there is no
            process group, or its ranks are those of a `Loopback`.

    Example:
        >>> import bpipe
        >>> from torch import nn
        >>> stage = bpipe.PipelineStage(nn.Linear(4, 4), stage_index=0, num_stages=1)      # alone; else one in each process
        >>> stream = bpipe.Stream(stage, nn.functional.mse_loss, torch.optim.SGD(stage.submod.parameters(), lr=0.1))
        >>> for x in torch.randn(3, 2, 4):
        ...     output = stream.push(x, target=2 * x)
        >>> output.shape, stream.drain()
        (torch.Size([2, 4]), [])
        >>> stream.close()
    """

    @concise
    def __init__(
        self,
        stage: Any,
        loss_fn: Loss = None,
        optimizer: Steps | Sequence[Steps] | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        self._stage = own = PipelineStage.adopt(stage)
        optimizers = several(optimizer, "step")
        _check(own, loss_fn, optimizers)
        options = options_for("Stream", options, WAITS)
        plan = build("1f1b", own.num_stages, 1)  # of a tick, in which a receive is of what was sent in the tick before
        self._plan = replace(plan if loss_fn is not None else forward_plan(plan), name="stream")
        group = group_or_alone(own.group, own.num_stages)
        if isinstance(group, LoopbackGroup) and own.num_stages > 1:
            raise ConfigurationError(
                "the ranks of a Stream run at the same time, and those of a Loopback one after the other: start a process for each "
                "rank, with torch.distributed's gloo backend if there is no GPU for each"
            )
        self._transport = transport_for(group, own.device, self._plan, options)
        self._guard = Guard(self._transport, Lanes(self._transport), owner="stream", call="push() or drain()", unit="tick")
        self._ticks = StageTicks(own, loss_fn, optimizers, self._plan, self._transport)
        self._finalizer = weakref.finalize(self, _close, self._ticks, self._guard, self._transport, os.getpid())
        util.Finalize(self, self._finalizer, exitpriority=0)  # processes of multiprocessing end without atexit
        self._transport.enlist()

    def __repr__(self) -> str:
        if "_finalizer" not in vars(self):
            return "Stream(not constructed)"
        stage, learns = self._stage, "" if self._plan.has_backward else ", learns nothing"
        return f"Stream(stage {stage.stage_index} of {stage.num_stages} on {stage.device}{learns}, {state_of(self._guard, 'tick')})"

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the output that came out in the latest tick, on the last rank, without graph; None where there is none.

        Behind `drain` it is that of its last tick.
        """
        return self._ticks.loss

    @property
    def num_ticks(self) -> int:
        """The ticks that are done."""
        return self._guard.num_steps

    @concise
    def push(self, *args: Any, target: Any = None, learn: bool = True) -> Any:
        """Run one tick: a new sample enters the first stage, and all others move on by one stage.

        Collective over the pipeline; blocks the host until this rank's part is done.

        Args:
            args: the first stage's positional arguments, one sample or a batch of them; used on its rank, allowed on all.
            target: of the same sample; the rank of the last stage keeps it for p-1 ticks, with copies of its tensors. Used there,
                allowed on all ranks. Other values in it, such as NumPy arrays, are not copied: do not reuse their memory.
            learn: False: nothing learns in this tick, so no stage builds a graph, and the gradients that arrive wait for the next
                tick that learns; give the same on all ranks.

        Returns:
            On the rank of the last stage, the output that comes out, without graph: that of the sample that was pushed p-1 ticks
            ago, or None if there is none yet. None elsewhere.

        Raises:
            ConfigurationError: there is no input on the first rank, no target on the last one, or gradients are disabled and
                this learns.
            AgreementError: the ranks make different calls.
            StageError: the module or the loss returned a value that cannot be used, an output's shape differs from that of the
                sample before, or one was changed in place while it was being sent.
            RankFailedError: another rank failed. The stream is broken then, as after any error inside a tick; the rank where the
                error happened raises it with its own type.
            RankLostError: another rank's process ended.
            TransferTimeoutError: this rank, or another one, waited longer than `Options.timeout_s`.
            CommError: a message is not what was expected.
            PipelineBrokenError: an earlier tick failed, the stream is closed, or a tick of it is running.
        """
        with self._guard.entered():
            self._meet()
            return next(iter(self._tick(args, target, learns=learn)), None)

    @concise
    def drain(self, *, learn: bool = True) -> list[Any]:
        """Run p-1 ticks without new samples, so that all samples leave the pipeline; the next `push` begins a new stream.

        Samples of another shape may follow, and a gradient of the last samples does not reach samples that come later. Collective
        over the pipeline; blocks the host until this rank and its neighbours are done.

        Args:
            learn: as in `push`.

        Returns:
            On the rank of the last stage the outputs that come out, in the order of their samples; an empty list elsewhere.

        Raises:
            BPipeError: as `push`.
        """
        with self._guard.entered():
            self._meet()
            last = self._stage.num_stages - 2
            return [output for tick in range(last + 1) for output in self._tick(learns=learn, drains=True, is_last=tick == last)]

    def close(self) -> None:
        """Release groups and threads, once the neighbours' latest tick is done; this also happens when the stream is collected.

        Call it on all ranks, as `push`: it waits for the neighbours' latest tick, but no longer than `Options.timeout_s`.

        Raises:
            AgreementError: the ranks made different calls in the latest tick. All is released then, too.
            PipelineBrokenError: a tick of it is running.
        """
        self._guard.leave()
        if (error := self._finalizer()) is not None:
            raise error

    def _tick(
        self, args: tuple[Any, ...] = (), target: Any = None, *, learns: bool, drains: bool = False, is_last: bool = False
    ) -> list[Any]:
        """Run a tick; return the output that comes out, if there is one."""
        guard, control = self._guard, self._transport.control
        with guard.failing_together(), control.interruptible():
            self._ticks.begin(guard.num_steps)
            try:
                results = self._ticks.run(Call(guard.num_steps, drains, bool(learns) and self._plan.has_backward), args, target)
                if is_last:
                    self._ticks.finish()
            except BaseException as error:
                note(error, f"bpipe: {control.activity.place()}")
                raise
            guard.num_steps += 1
            return results

    def _meet(self) -> None:
        """Compare with the other ranks what this is, and open the channels, before the first tick."""
        if self._ticks.is_connected:
            return
        own, transport = self._stage, self._transport
        record = StepRecord(
            version=__version__,
            schedule=self._plan.name,
            fingerprint=self._plan.fingerprint(),
            is_training=self._plan.has_backward,
            step=self._guard.num_steps,
            num_stages=own.num_stages,
            num_ranks=own.num_stages,
            num_microbatches=1,
            pipeline=transport.identity,
            signature=bytes(16),
            stages=(own.stage_index,),
            rooms=(cut_of(own.submod) or Cut(),),
        ).pack()
        with self._guard.failing_together(AgreementError):
            given = [record] if own.num_stages == 1 else transport.exchange(Collective.STEP, record)
            transport.control.activity.state = State.AGREEING
            records = [StepRecord.unpack(one) for one in given]
            _check_losses(records)
            check(records)
            transport.control.activity.state = State.PREPARING
            self._ticks.connect([rank for _, rank in sorted((one.stages[0], rank) for rank, one in enumerate(records))])


def _check(stage: PipelineStage, loss_fn: object, optimizers: Sequence[object]) -> None:
    """Raise a ConfigurationError if a stream cannot run a stage, or cannot use what else it gets."""
    has = {"skips": stage.skips, "two directions": stage.directions > 1, "a dw_builder": stage.dw_builder is not None}
    if refused := [what for what, is_there in has.items() if is_there]:
        raise ConfigurationError(f"a Stream runs no stage with {' or '.join(refused)}: give it a plain one, or use a schedule")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigurationError(f"loss_fn={loss_fn!r}: give a function of an output and a target, or None")
    if optimizers and loss_fn is None:
        raise ConfigurationError("a Stream without loss_fn does not learn, so that its optimizer would never step: give loss_fn")
    if loss_fn is not None:
        check_ties({stage.stage_index: stage.submod}, trained, are_alone=True, are_summed=not optimizers)
    for one in optimizers:
        if not all(callable(getattr(one, name, None)) for name in ("step", "zero_grad")):
            raise ConfigurationError(f"optimizer={one!r}: give an object with step() and zero_grad(), several of them, or None")


def _check_losses(records: Sequence[StepRecord]) -> None:
    """Raise if only some ranks of a stream have a loss function."""
    learn = [one.is_training for one in records]
    if len(set(learn)) > 1 and {one.schedule for one in records} == {"stream"}:
        raise AgreementError(
            f"rank {learn.index(True)} has a loss_fn, and rank {learn.index(False)} has none: give the Stream one on all ranks, or "
            "on none"
        )


def _close(ticks: StageTicks, guard: Guard, transport: Transport, process: int) -> AgreementError | None:
    """Release what a stream has; return the error if the ranks made different calls in the latest tick."""
    if os.getpid() != process:  # a forked child must not release its parent's resources
        return None
    control, found = transport.control, None
    if control.failure is None and guard.broken is None and guard.num_steps:
        try:
            with control.interruptible():
                ticks.begin(guard.num_steps - 1)
                ticks.finish()
        except AgreementError as error:
            note(error, f"bpipe: {control.activity.place()}")
            found = error
        except (CommError, StageError):
            pass  # what the other ranks do by now does not matter
        control.activity.end(guard.num_steps)
    transport.close()
    return found
