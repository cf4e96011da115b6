"""A schedule that is read from torch's CSV after it is made, as torch's runtime does."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from typing import Any

from bpipe.api.catalogue import FromPlan
from bpipe.api.options import Options
from bpipe.as_torch import several_stages
from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.logs import LOG
from bpipe.model.call import ArgsSpec, KwargsSpec, Loss
from bpipe.model.of_torch_alone import check_options
from bpipe.model.stage import stages_of
from bpipe.plan.plan import Plan
from bpipe.session.session import Session

__all__ = ["FromCSV", "_PipelineScheduleRuntime"]


class FromCSV(FromPlan, metaclass=ABCMeta):
    """The order of computations in a CSV that torch.distributed.pipelining wrote: `load_csv` reads, proves and takes it.

    It has the role of torch's `_PipelineScheduleRuntime`, under whose name it can be imported, too.

    Args:
        stages: this rank's stages.
        n_microbatches: m, which the CSV must have.
        loss_fn: this and the next three as in `Schedule`.
        use_full_backward: accepted and not used, as in torch, which no longer supports it.
        scale_grads: as in `Schedule`.
        backward_requires_autograd: accepted and not used, because every backward here is autograd's.
        defer_pp_recv: accepted and not used, because the plan has a place for every receive.
        options: as in `FromPlan`.
        of_torch: further arguments of torch's class, which act on its runtime, such as `max_active_stages`: they are refused unless
            they have torch's default.

    Raises:
        ConfigurationError: as `Schedule`; from `step` and `eval`, if nothing was loaded.

    Example:
        >>> from torch import nn
        >>> from bpipe import PipelineStage
        >>> schedule = FromCSV([PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")], 2, nn.functional.mse_loss)
        >>> schedule.load_csv("0F0,0B0,0F1,0B1")
        >>> print(*schedule.plan.compute(rank=0))
        0F0 0B0 0F1 0B1
    """

    rule = "csv"
    _session = None
    _is_loaded = False

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: Options | None = None,
        **of_torch: Any,
    ) -> None:
        check_count("n_microbatches", n_microbatches)
        if use_full_backward is not None:
            LOG.warning("use_full_backward is not used any more, by torch neither: leave it out")
        self._given_stages = list(stages_of(stages, may_be_uneven=True).values())
        self._given_microbatches = n_microbatches
        own = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        given = check_options(type(self).__name__, of_torch)
        self._arguments: tuple[Any, tuple[Any, ...], dict[str, Any]] = stages, own, {"options": options, **given}

    @property
    def session(self) -> Session:
        """The session of this rank.

        Raises:
            ConfigurationError: no CSV was loaded.
        """
        if not self._is_loaded:
            raise ConfigurationError("this schedule has no order of computations yet: call load_csv(path) on all ranks first")
        return super().session

    @property
    def is_handed_over(self) -> bool:
        """Whether another schedule has its session."""
        return self._is_loaded and super().is_handed_over

    @property
    def plan(self) -> Plan:
        """The plan that was loaded."""
        return super().plan if self._is_loaded else self.session.source.plan

    @property
    def stages(self) -> list[Any]:
        """This rank's stages, as they were given."""
        return [stage.original for stage in self._given_stages]

    def _take_plan(self, plan: Plan) -> None:
        if self._is_loaded:
            super()._take_plan(plan)
        else:
            stages, own, options = self._arguments
            FromPlan.__init__(self, stages, plan, *own, **options)
            self._is_loaded = True


for _kind in (getattr(several_stages, name) for name in several_stages.__all__):
    FromCSV.register(_kind)  # torch's derive from its runtime
_PipelineScheduleRuntime = FromCSV
