"""torch's schedules of several stages per rank: bpipe's under torch's names, with torch's order of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpipe.api.catalogue import ZBV, BreadthFirst, DualPipeV, Interleaved1F1B, InterleavedZeroBubble
from bpipe.api.options import Options
from bpipe.cleanup import concise
from bpipe.model.call import ArgsSpec, KwargsSpec, Loss
from bpipe.model.of_torch_alone import check_options

__all__ = [
    "ScheduleDualPipeV",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
]


class _TorchOrder:
    """A schedule that takes its arguments in torch's order.

    Args:
        stages: this and the next six are those of `Schedule`.
        backward_requires_autograd: accepted and not used, because every backward here is autograd's.
        defer_pp_recv: accepted and not used, because the plan has a place for every receive.
        options: as in `Schedule`.
        of_torch: further arguments of torch's class, which act on its runtime, such as `max_active_stages`: they are refused unless
            they have torch's default (docs/torch-pipelining.md).
    """

    @concise
    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: Options | None = None,
        **of_torch: Any,
    ) -> None:
        own = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        given = check_options(type(self).__name__, of_torch)
        super().__init__(stages, n_microbatches, *own, options=options, **given)  # type: ignore[call-arg]


class ScheduleInterleaved1F1B(_TorchOrder, Interleaved1F1B):
    """`Interleaved1F1B`, with torch's order of arguments.

    Example:
        >>> ScheduleInterleaved1F1B.rule
        'interleaved_1f1b'
    """


class ScheduleInterleavedZeroBubble(_TorchOrder, InterleavedZeroBubble):
    """`InterleavedZeroBubble`, with torch's order of arguments.

    Example:
        >>> ScheduleInterleavedZeroBubble.rule
        'interleaved_zb'
    """


class ScheduleZBVZeroBubble(_TorchOrder, ZBV):
    """`ZBV`, with torch's order of arguments.

    Example:
        >>> ScheduleZBVZeroBubble.rule
        'zbv'
    """


class ScheduleDualPipeV(_TorchOrder, DualPipeV):
    """`DualPipeV`, with torch's order of arguments; `overlapped=True` makes its pairs, and `schedule.overlap` says how they run.

    Example:
        >>> ScheduleDualPipeV.rule
        'dualpipe_v'
    """


class ScheduleLoopedBFS(_TorchOrder, BreadthFirst):
    """`BreadthFirst`, with torch's order of arguments, which has no place for chunk specs: they may be given by name.

    Example:
        >>> ScheduleLoopedBFS.rule
        'breadth_first'
    """

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        options: Options | None = None,
        **of_torch: Any,
    ) -> None:
        given: dict[str, Any] = {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads, "options": options}
        super().__init__(stages, n_microbatches, loss_fn, **given, **of_torch)
