"""What programs written for torch.distributed.pipelining ask a schedule; docs/torch-pipelining.md names who uses private names."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from bpipe.checks import check_choice, check_count
from bpipe.cleanup import concise
from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import directions_of, has_own_losses, skips_of
from bpipe.model.call import Specs
from bpipe.model.of_torch_alone import SCHEDULE, check_missing, check_overrides
from bpipe.model.stage import PipelineStage
from bpipe.passes.communicate import computations_only
from bpipe.plan.plan import Plan
from bpipe.schedules.registry import rule_named
from bpipe.schedules.torch_csv import from_csv
from bpipe.session.plan_source import PlanSource
from bpipe.session.session import Session
from bpipe.torch_private.distributed import action_of
from bpipe.torch_private.release import release
from bpipe.verifier.proof import verify
from bpipe.whole_file import write_whole

__all__: list[str] = []

CsvFormat = Literal["compute_only", "compute_comms"]
FIXED: dict[str, Callable[[Plan], object]] = {  # what a schedule was constructed for
    "stage_ranks": lambda plan: plan.stage_ranks,
    "slices": lambda plan: plan.slices,
    "directions": lambda plan: directions_of(plan.flow),
    "skips": lambda plan: skips_of(plan.flow),
    "local": lambda plan: has_own_losses(plan.flow),
}
WANTS_SEND_WAITS = release() >= (2, 15)  # torch adds them itself before


def _spec(name: str) -> property:
    """Return an attribute for one of the specs by which a schedule's batches are cut."""

    def change(self: TorchAttributes, spec: Any) -> None:
        context = self.session.context
        context.specs = Specs.checked(**(context.specs._asdict() | {name: spec}))

    return property(lambda self: getattr(self.session.context.specs, name), change)


class TorchAttributes:
    """What torch's users ask a schedule; `Schedule` inherits it, and gives it a session and a source of plans."""

    rule: str
    group: Any
    is_single: ClassVar[bool | None] = None  # whether it takes one stage and not a list; None: as its rule says
    _source: PlanSource
    _check_placement: Callable[[Plan, Mapping[int, PipelineStage]], None]
    _makes_plans: ClassVar[bool] = False  # as it learns, so that it takes none
    _is_from_csv = False  # whether its plan was loaded
    _given_microbatches = 0  # that a plan must have which is loaded later

    if TYPE_CHECKING:

        @property
        def session(self) -> Session: ...

        @property
        def plan(self) -> Plan: ...

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_overrides(cls, SCHEDULE)

    def __getattr__(self, name: str) -> Any:
        check_missing(type(self).__name__, name, SCHEDULE)
        return object.__getattribute__(self, name)  # raises again what a property raised

    @property
    def stages(self) -> list[Any]:
        """This rank's stages, as they were given."""
        return [stage.original for stage in self.session.context.stages.values()]

    @property
    def takes_one_stage(self) -> bool:
        """Whether it has one stage per rank, and not a list."""
        return self.plan.num_stages == self.plan.num_ranks if self.is_single is None else self.is_single

    @property
    def _stages(self) -> list[Any]:
        if self.takes_one_stage:
            raise AttributeError(f"{type(self).__name__} has one stage, _stage")
        return self.stages

    @property
    def _stage(self) -> Any:
        if len(self.stages) > 1:
            raise AttributeError(f"{type(self).__name__} has several stages, _stages")
        return self.stages[0]

    @property
    def n_local_stages(self) -> int:
        """The number of this rank's stages."""
        return len(self.stages)

    @property
    def pp_group_size(self) -> int:
        """The number of ranks, p."""
        return self.plan.num_ranks

    @property
    def rank(self) -> int:
        """This process's number in the pipeline's group."""
        return int(self.stages[0].group_rank)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of the plan that holds each stage; of a group in the plan's order, as torch's are, its ranks."""
        return dict(enumerate(self.plan.stage_ranks))

    @property
    def scale_grads(self) -> bool:
        """Whether the loss of each of m microbatches is scaled by 1/m."""
        return self.session.context.scale_grads

    @scale_grads.setter
    def scale_grads(self, value: bool) -> None:
        self.session.context.scale_grads = value

    @property
    def _loss_fn(self) -> Callable[..., Any] | None:
        return self.session.context.loss_fn

    @_loss_fn.setter
    def _loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        self.session.context.loss_fn = loss_fn

    @property
    def _has_backward(self) -> bool:
        return self.session.context.trains

    @_has_backward.setter
    def _has_backward(self, trains: bool) -> None:
        self.session.context.only_evaluates = not trains

    _args_chunk_spec, _kwargs_chunk_spec = _spec("args"), _spec("kwargs")

    @property
    def _n_microbatches(self) -> int:
        return self._given_microbatches or self.plan.num_microbatches

    @_n_microbatches.setter
    def _n_microbatches(self, number: int) -> None:
        check_count("_n_microbatches", number)
        self._check_takes_plans()
        if number != self._n_microbatches:
            if self._is_from_csv:
                raise ConfigurationError(
                    f"the CSV that was loaded has {self._n_microbatches} microbatches: load one for {number} into a new schedule"
                )
            self._take_plan(self._plan_for(number))

    def _check_takes_plans(self) -> None:
        if self._makes_plans:
            raise ConfigurationError(
                f"{type(self).__name__} makes its own plans: change the schedule before it takes it, or make a new one"
            )

    def _plan_for(self, num_microbatches: int) -> Plan:
        """Return the plan for another number of microbatches."""
        raise ConfigurationError(
            f"{type(self).__name__} has a plan for {self._n_microbatches} microbatches: make a new schedule for {num_microbatches}"
        )

    def _take_plan(self, plan: Plan) -> None:
        """Run another plan from the next step on; all ranks have to take the same."""
        session, context = self.session, self.session.context
        self._check_placement(plan, context.stages)
        kind = type(self).__name__
        if any(slots is not None for slots in self.plan.slots) and all(slots is None for slots in plan.slots):
            raise ConfigurationError(f"{kind} keeps to slots, which a CSV cannot say: leave Options(slots=) out, or use FromCSV")
        for what, of in FIXED.items():
            old, new = of(self.plan), of(plan)
            if new != old:
                raise ConfigurationError(f"the plan has {what}={new}, and {kind} was made with {old}: use FromPlan")
        with session.guard.entered():
            context.plan_rank = plan.stage_ranks[next(iter(context.stages))]
            self._source = PlanSource(plan, self.rule)
            session.adopt(self._source)

    # Orders, as torch writes them

    @property
    def pipeline_order(self) -> dict[int, list[Any]]:
        """Each rank's computations, as torch's actions, without the idle moments that torch writes as None, and without evictions.

        Raises:
            PlanError: torch has no words for the plan.
        """
        return _torch_actions(_compute_only(self.plan))

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Any]]:
        """Each rank's computations and the starts of its transfers, as torch's actions; since torch 2.15 also waits of sends."""
        return _torch_actions(self.plan)

    @concise
    def load_csv(self, path_or_text: str | os.PathLike[str], format: CsvFormat = "compute_only") -> None:
        """Run the order of computations in a CSV of torch.distributed.pipelining from the next step on; all ranks load the same.

        Args:
            path_or_text: a file, or its content.
            format: which of torch's two the CSV has. Transfers are placed anew, so both give the same plan.

        Raises:
            PlanError: it is no pipeline schedule; the message lists every violation.
            ConfigurationError: it is for other microbatches, it puts stages on other ranks, or the schedule has slots or slices.
        """
        check_choice("format", format, get_args(CsvFormat))
        self._check_takes_plans()
        is_text = isinstance(path_or_text, str) and ("\n" in path_or_text or "," in path_or_text)
        text = os.fspath(path_or_text) if is_text else Path(path_or_text).read_text()
        plan = from_csv(text, name="csv")
        verify(plan)
        if plan.num_microbatches != self._n_microbatches:
            raise ConfigurationError(
                f"the CSV has {plan.num_microbatches} microbatches, and the schedule {self._n_microbatches}: give it as many"
            )
        self._take_plan(plan)
        self._is_from_csv = True

    def dump_csv(self, path: str | os.PathLike[str], format: CsvFormat = "compute_comms") -> None:
        """Write the order of computations, and with "compute_comms" the starts of transfers, as torch.distributed.pipelining does.

        Raises:
            PlanError: torch has no words for the plan, such as one that evicts in "compute_comms"; `plan.to_text()` writes any.
            ConfigurationError: another format.
            OSError: the file cannot be written; what was there before is still there.
        """
        check_choice("format", format, get_args(CsvFormat))
        plan = self.plan if format == "compute_comms" else _compute_only(self.plan)
        write_whole(path, plan.to_csv(send_waits=WANTS_SEND_WAITS))

    def _load_csv(self, filename: str | os.PathLike[str], format: CsvFormat = "compute_only") -> None:
        self.load_csv(filename, format)


def is_single(kind: type[TorchAttributes]) -> bool | None:
    """Return whether a class of schedules takes one stage, and not a list; None if each of its schedules has a rule of its own."""
    if kind.is_single is None and hasattr(kind, "rule"):
        return rule_named(kind.rule).default_stages_per_rank == 1
    return kind.is_single


def _compute_only(plan: Plan) -> Plan:
    """Return the computations of a plan alone: torch, too, adds the gathering of sharded weights when it adds transfers."""
    plain = computations_only(plan)
    return replace(plain, actions=tuple(tuple(plain.compute(rank)) for rank in range(plan.num_ranks)))


def _torch_actions(plan: Plan) -> dict[int, list[Any]]:
    rows = csv.reader(io.StringIO(plan.to_csv(send_waits=WANTS_SEND_WAITS)))
    return {rank: [action_of(cell) for cell in row] for rank, row in enumerate(rows)}
