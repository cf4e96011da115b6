"""Run the steps of one rank of a fake process group: what the other ranks would say follows from what this one says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpipe.comm.health.agreement import StepRecord
from bpipe.dry_run.absent_peers import AbsentPeers
from bpipe.dry_run.fake_transport import FakeTransport
from bpipe.engine.run import Run
from bpipe.errors import CommError, ConfigurationError
from bpipe.flow.shape_arguments import skips_of
from bpipe.logs import LOG
from bpipe.model.call import Call
from bpipe.model.ties import is_summed, tied_in
from bpipe.plan.plan import Plan
from bpipe.schedules import Op
from bpipe.session.context import RankContext
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import sums_shared
from bpipe.session.report import Report
from bpipe.session.session import PreparedStep, Session
from bpipe.torch_private.modes import dispatch_modes

__all__: list[str] = []


class DrySession(Session):
    """The steps of one rank whose peers do not exist.

    The other ranks are about to run the same step, each with its stages of the plan. Their microbatches take what this rank's have
    taken in the step before. What arrives is as large as what the stages' examples promise, and its values are zeros.
    """

    is_dry = True

    def __init__(self, context: RankContext, source: PlanSource) -> None:
        super().__init__(context, source)
        LOG.warning(
            "rank %d: the process group is a fake one, so this is a dry run: shapes, plans and memory are those of a step, and "
            "outputs, losses and gradients are not",
            self._fake.rank,
        )
        self._evicted_bytes = 0  # the most that a microbatch of this rank could move in the latest step

    def begin(self, call: Call, *, is_training: bool) -> PreparedStep:
        plan = self.source.announced(is_training=is_training).plan
        self._check(plan)
        return super().begin(call, is_training=is_training)

    def _check(self, plan: Plan) -> None:
        """Raise a ConfigurationError if the messages of the other ranks cannot be known, or tensors have no memory."""
        rank = self.context.plan_rank
        parameters = (one for module in self.context.modules() for one in module.parameters())
        if any(map(_is_fake, (*dispatch_modes(), *parameters))):
            raise ConfigurationError(
                "a step under FakeTensorMode cannot be counted, because FakeTensors have no memory of their own: over a fake "
                "process group use real tensors, such as small ones on the CPU"
            )
        tied = (one.parameter for i, stage in self.context.stages.items() for one in tied_in(stage.submod, i))
        exchanges = plan.has_backward and sums_shared(plan, self.context.transport)
        unheard = {
            "slices of sequences": plan.slices > 1,
            "skips between stages": bool(skips_of(plan.flow)),
            "weights that its stages may share with others": exchanges and any(w.requires_grad and not is_summed(w) for w in tied),
        }
        for what, is_there in unheard.items():
            if is_there:
                raise ConfigurationError(
                    f"rank {rank} of a fake process group cannot step {self.source.rule} with {what}: no other rank says what it "
                    "sends. Run all ranks in one process with bpipe.Loopback"
                )
        received = {action.stage for action in plan.actions[rank] if action.op is Op.RECV_F}
        unknown = sorted(stage for stage in received if self.context.stages[stage].input_forms is None)
        if unknown:
            raise ConfigurationError(
                f"stage {unknown[0]} is on a fake process group, where no other rank says what its input looks like: give "
                "PipelineStage(input_args=...), an example of what the stage gets in one microbatch, such as torch.empty(2, 8, "
                "device='meta')"
            )

    def agree(self, step: PreparedStep, packed: Sequence[bytes], gather: Gather) -> Run:
        num_calls = step.num_calls
        own = StepRecord.unpack(packed[0], num_calls)
        records = [record.pack(num_calls) for record in self._records(own, len(packed))]
        run = super().agree(step, records, lambda ask: self._answers(gather(ask)))
        inputs = {index: stage.input_forms or [] for index, stage in self.context.stages.items()}
        self._fake.peers = AbsentPeers(run.plan, run.rank, run.step, inputs, self._evicted_bytes)
        return run

    def finish(self, step: PreparedStep, run: Run, started: float) -> None:
        super().finish(step, run, started)
        self._fake.peers = None
        if step.is_training:
            sizes = run.evictions.settled().values()
            self._evicted_bytes = max(one.movable for of_stage in sizes for one in of_stage)

    @property
    def _fake(self) -> FakeTransport:
        transport = self.context.transport
        assert isinstance(transport, FakeTransport)
        return transport

    def _records(self, own: StepRecord, size: int) -> list[StepRecord]:
        """Return the records of all ranks of the group: rank r holds the stages of the plan's rank r, as far as it can."""
        plan = self.source.plan
        others = (rank for rank in range(size) if rank != self.context.plan_rank)
        holders = [self.context.plan_rank if rank == self._fake.rank else next(others) for rank in range(size)]
        rooms = tuple(one for one in own.rooms if not one.is_by_stage)
        return [
            own if rank == self._fake.rank else own._replace(stages=tuple(plan.stages_of(holder)), rooms=rooms)
            for rank, holder in enumerate(holders)
        ]

    def _answers(self, same: list[bytes]) -> list[bytes]:
        """Return the answers of all ranks to a question about the plan, each of which is now this rank's."""
        try:
            own = Report.unpack(same[0], self._fake.rank)
        except CommError:  # any other answer is alike on all ranks
            return same
        return [self._report(own, rank).pack() for rank in range(len(same))]

    def _report(self, own: Report, rank: int) -> Report:
        """Return the report of the plan's rank: its stages take what this rank's take, each in its place among them."""
        if rank == own.rank or own.refusal:
            return own._replace(rank=rank)
        sizes: list[Any] = [own.stages[stage] for stage in sorted(own.stages)]
        stages = dict(zip(self.source.plan.stages_of(rank), sizes, strict=True))
        return own._replace(rank=rank, stages=stages, budget=own.budget if (given := self.source.budget(rank)) is None else given)


def _is_fake(one: object) -> bool:
    """Return whether this is torch's FakeTensorMode, or a tensor made under it."""
    return any(kind.__name__ in ("FakeTensor", "FakeTensorMode") for kind in type(one).__mro__)
