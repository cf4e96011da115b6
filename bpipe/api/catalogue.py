"""The schedules that users construct: each binds a rule to `Schedule`. p ranks, m microbatches, v stages per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bpipe.api.options import RUNNING, SLICING, Options, options_for
from bpipe.api.schedule import Schedule
from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import skips_of
from bpipe.model.call import ArgsSpec, KwargsSpec, Loss
from bpipe.schedules import Plan, verify

__all__ = [
    "ZBH1",
    "ZBH2",
    "ZBV",
    "BalancedOneFOneB",
    "BitPipe",
    "BitPipeReordered",
    "BitPipeZB",
    "BreadthFirst",
    "Chimera",
    "DualPipeV",
    "FromPlan",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "OneFOneB",
    "Seq1F1B",
    "TeraPipe",
    "VHalf",
    "VMin",
]


class OneFOneB(Schedule):
    """1F1B: rank x of p holds at most min(p-x, m) microbatches (Narayanan et al., arXiv 2104.04473).

    Example:
        >>> from torch import nn, zeros
        >>> from bpipe import PipelineStage
        >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
        >>> schedule = OneFOneB(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        >>> schedule.step(zeros(4, 4), target=zeros(4, 4)).shape
        torch.Size([4, 4])
    """

    rule = "1f1b"


class GPipe(Schedule):
    """GPipe: all forwards, then all backwards; every rank holds m microbatches (Huang et al., arXiv 1811.06965).

    Example:
        >>> from bpipe.schedules import build
        >>> build(GPipe.rule, num_stages=4, num_microbatches=8).peak_slots
        (8, 8, 8, 8)
    """

    rule = "gpipe"


class BalancedOneFOneB(Schedule):
    """1F1B in which early ranks evict saved activations to late ones (BPipe, Kim et al., ICML 2023).

    Every rank holds at most `Options.slots` microbatches, by default ceil((p+2)/2), remote ones and those in flight included.
    The gradients are `OneFOneB`'s to the bit. If a late stage needs the most memory, for example because of a large head, remote
    activations may make its rank fuller than any rank was before: the logger "bpipe" warns of it after the first step, and
    `Balanced` counts bytes instead.

    Arguments, methods and errors are `Schedule`'s.

    Example:
        >>> from bpipe.schedules import build
        >>> build(BalancedOneFOneB.rule, num_stages=4, num_microbatches=8).peak_slots
        (3, 3, 2, 3)
    """

    rule = "balanced_1f1b"


class ZBH1(Schedule):
    """ZB-H1: 1F1B whose weight gradients wait until a rank would idle (Qi et al., arXiv 2401.10241).

    Every rank holds at most min(p, m) microbatches. Gradients are `OneFOneB`'s to the bit, for any module: operations that cannot
    be split into gradients of inputs and of weights without extra work, such as custom autograd Functions, recomputed and compiled
    regions, are not split. A hook on a tensor inside a stage may run in both passes; its result counts once, and a hook that
    changes its gradient in place is refused. `retain_grad()` on such a tensor may add its gradient up twice.

    Example:
        >>> from bpipe.schedules import build
        >>> build(ZBH1.rule, num_stages=4, num_microbatches=8).peak_slots
        (4, 4, 4, 4)
    """

    rule = "zb_h1"


class ZBH2(Schedule):
    """ZB-H2: ZB-H1 with more forwards first, and up to 2p-1 microbatches on a rank, so that no rank waits in between.

    Example:
        >>> from bpipe.schedules import build
        >>> build(ZBH2.rule, num_stages=4, num_microbatches=8).peak_slots
        (7, 7, 7, 7)
    """

    rule = "zb_h2"


class _Slices(Schedule):
    """A schedule of slices; the other arguments are `Schedule`'s.

    Args:
        slices: k, the slices into which each microbatch is cut along its sequence; stages take them as `bpipe.slices` says. None:
            stages take microbatches whole, as in a schedule without slices. How sequences are cut is in `options`.

    Raises:
        ConfigurationError: a stage takes no slices, or options of slices were given where nothing is cut.
    """

    _takes: tuple[str, ...] = ("slots", *RUNNING, *SLICING)

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        slices: int | None = 1,
        options: Options | None = None,
    ) -> None:
        self._slices = slices
        arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        super().__init__(stage, n_microbatches, *arguments, options=options)


class Seq1F1B(_Slices):
    """Seq1F1B: 1F1B over slices of each microbatch's sequence (Sun et al., arXiv 2406.03488).

    With k slices, rank x of p holds at most (k+p-1-x)/k microbatches, and the bubble is 1F1B's divided by k; with one, it is 1F1B.

    Example:
        >>> from torch import nn, zeros
        >>> from bpipe import PipelineStage
        >>> class Layer(nn.Linear):
        ...     def forward(self, x, past=()):  # of a slice, and what it returned for the slices before; it needs nothing of them
        ...         return super().forward(x), None
        >>> stage = PipelineStage(Layer(4, 4), 0, 1, "cpu")
        >>> schedule = Seq1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss, slices=2)
        >>> x = zeros(2, 6, 4)  # two sequences of six positions: two microbatches of two slices each
        >>> schedule.step(x, target=x).shape
        torch.Size([2, 6, 4])
    """

    rule = "seq_1f1b"


class TeraPipe(_Slices):
    """TeraPipe: GPipe over slices of each microbatch's sequence; every rank holds m microbatches (Li et al., arXiv 2102.07988).

    Example:
        >>> from bpipe.schedules import build
        >>> build(TeraPipe.rule, num_stages=4, num_microbatches=8, slices=2).peak_slots  # in slices
        (16, 16, 16, 16)
    """

    rule = "tera_pipe"


class FromPlan(_Slices):
    """Any plan: one that you wrote or changed, or one from a file. It is verified here, before anything runs.

    Args:
        stage: as in `Schedule`; a list if the plan puts several stages on a rank. Ranks may hold different numbers of stages.
        plan: a finished plan, the same on all ranks, such as `Plan.from_text(path.read_text())` gives.
        loss_fn: this and the other arguments as in `Schedule`, and for a plan of slices as in `Seq1F1B`; the plan says how many
            slices there are.

    Raises:
        PlanError: the plan breaks a rule; the message lists every violation, and shows the first.
        ConfigurationError: the plan is for other stages or ranks, only evaluates, or has another number of slices than
            `slice_lengths`, or none.

    Example:
        >>> from torch import nn, zeros
        >>> from bpipe import PipelineStage
        >>> from bpipe.schedules import Plan, build
        >>> text = build("1f1b", num_stages=1, num_microbatches=4).to_text()
        >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
        >>> schedule = FromPlan(stage, Plan.from_text(text), loss_fn=nn.functional.mse_loss)
        >>> schedule.step(zeros(4, 4), target=zeros(4, 4)).shape
        torch.Size([4, 4])
    """

    is_single = False
    _takes = (*RUNNING, *SLICING)
    _may_be_uneven = True

    def __init__(
        self,
        stage: Any,
        plan: Plan,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        options: Options | None = None,
    ) -> None:
        verify(plan)
        if not plan.has_backward:
            raise ConfigurationError(f"plan {plan.name!r} has no backwards: give a plan that trains, and call eval() to evaluate")
        self._given, self.rule = plan, plan.name
        options = options_for(type(self).__name__, options, self._takes)
        if options.slice_lengths is not None and not callable(options.slice_lengths):
            from bpipe.slices.positions import numbers_of  # loaded for schedules with slices

            numbers = numbers_of(options.slice_lengths)
            options = replace(options, slice_lengths=numbers or options.slice_lengths)
            if plan.slices > 1 and 0 < len(numbers) != plan.slices:
                raise ConfigurationError(
                    f"plan {plan.name!r} cuts each microbatch into {plan.slices} slices, but slice_lengths={numbers} has "
                    f"{len(numbers)}: give one length for each slice, or a plan with slices={len(numbers)}"
                )
        arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        slices = plan.slices if plan.slices > 1 else None
        super().__init__(stage, plan.num_microbatches, *arguments, slices=slices, options=options)

    def _make_plan(self, num_stages: int, num_ranks: int, *_: Any) -> Plan:
        plan = self._given
        if plan.num_stages != num_stages:
            raise ConfigurationError(
                f"plan {plan.name!r} is for {plan.num_stages} stages on {plan.num_ranks} ranks, but these are {num_stages} stages"
            )
        if (found := skips_of(plan.flow)) != self._skips:
            raise ConfigurationError(
                f"plan {plan.name!r} has the skips {found!r:.200}, and its stages have {self._skips!r:.200}: build the plan "
                "with build(..., skips=stage.skips.values())"
            )
        return plan


class _Stages(Schedule):
    """A schedule whose ranks hold several stages each, given as a list; the other arguments are `Schedule`'s."""

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        options: Options | None = None,
    ) -> None:
        arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        super().__init__(stages, n_microbatches, *arguments, options=options)


class Interleaved1F1B(_Slices):
    """Interleaved 1F1B: v >= 2 stages per rank in a loop, stage s on rank s mod p (Narayanan et al., arXiv 2104.04473).

    It takes a multiple of p microbatches, or another number that divides into floor(m/p) rounds, as torch's does. With `slices=k`,
    which cuts these along their sequences, it takes a multiple of p / gcd(p, k). Arguments are `Seq1F1B`'s, except `stages`, the
    list of this rank's stages, which take whole microbatches by default, and `overlapped`: whether forwards run side by side with
    backwards in the steady state, with one more forward ahead on each rank; how they do is up to `overlap`.

    Example:
        >>> from torch import nn, zeros
        >>> from bpipe import Loopback, PipelineStage
        >>> loopback = Loopback(2)
        >>> stages = [[PipelineStage(nn.Linear(4, 4), s, 4, "cpu", loopback.rank(r)) for s in (r, r + 2)] for r in range(2)]
        >>> schedules = [Interleaved1F1B(of_rank, 2, loss_fn=nn.functional.mse_loss) for of_rank in stages]
        >>> loopback.step(schedules, zeros(4, 4), target=zeros(4, 4)).shape
        torch.Size([4, 4])
    """

    rule = "interleaved_1f1b"

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        slices: int | None = None,
        overlapped: bool = False,
        options: Options | None = None,
    ) -> None:
        self._overlapped = overlapped
        arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        super().__init__(stages, n_microbatches, *arguments, slices=slices, options=options)


class InterleavedZeroBubble(_Stages):
    """Interleaved 1F1B whose backwards are split, with weight gradients where a rank would wait (Qi et al., arXiv 2401.10241).

    The order of computations is that of torch's ScheduleInterleavedZeroBubble. With a multiple of p microbatches, every rank holds
    at most p of them. Arguments are `Schedule`'s, except `stages`, the list of this rank's stages; hooks are as in `ZBH1`.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(InterleavedZeroBubble.rule, num_stages=4, num_microbatches=2, num_ranks=2)
        >>> print(*plan.compute(rank=0))
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    """

    rule = "interleaved_zb"


class BreadthFirst(_Stages):
    """Breadth-first: each of a rank's v stages runs all its microbatches before the next (Lamy-Poirier, arXiv 2211.05953).

    Stage s is on rank s mod p. Stages under FSDP2 (`fully_shard`) gather their weights at most twice per step and reduce their
    gradients once, for any number of microbatches. Arguments are `Schedule`'s, except `stages`, the list of this rank's stages.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(BreadthFirst.rule, num_stages=4, num_microbatches=2, num_ranks=2)
        >>> print(*plan.compute(rank=0))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    """

    rule = "breadth_first"


class ZBV(_Stages):
    """ZBV: two stages per rank in a V, and no idle time in between from 2p-1 microbatches on (Qi et al., arXiv 2401.10241).

    Rank x holds stages x and 2p-1-x, so rank 0 the first and the last: it takes the target, and returns losses and outputs.
    Every rank holds at most min(p, m) microbatches. Arguments are `Schedule`'s, except `stages`, this rank's two stages.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(ZBV.rule, num_stages=4, num_microbatches=2, num_ranks=2)
        >>> print(*plan.compute(rank=0))
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
    """

    rule = "zbv"


class VHalf(_Stages):
    """V-Half: half of 1F1B's memory, (p+2)//2 microbatches on every rank, placed as in `ZBV` (Qi et al., arXiv 2405.15362).

    Example:
        >>> from bpipe.schedules import build
        >>> build(VHalf.rule, num_stages=8, num_microbatches=8, num_ranks=4).peak_slots  # a microbatch takes two, one in each stage
        (6, 6, 6, 6)
    """

    rule = "v_half"


class VMin(_Stages):
    """V-Min: a third of 1F1B's memory, (p+4)//3 microbatches on every rank, placed as in `ZBV` (Qi et al., arXiv 2405.15362).

    Example:
        >>> from bpipe.schedules import build
        >>> build(VMin.rule, num_stages=8, num_microbatches=8, num_ranks=4).peak_slots  # a microbatch takes two, one in each stage
        (4, 4, 4, 4)
    """

    rule = "v_min"


class BitPipe(_Stages):
    """BitPipe: two V-shaped pipelines in opposite directions (Wu et al., arXiv 2410.19367), in the order that was published.

    Every stage exists twice: of 4p stages on p ranks, p even, stages 0 to 2p-1 are the model, and stage s + 2p is the twin of
    stage s, on rank p-1-x if that is on rank x. Even microbatches take the first direction, odd ones the other. Both ranks that
    hold a first stage get the inputs, and both that hold a last one the targets; each of these returns the outputs and losses of
    the microbatches of its direction. m is a multiple of p.

    Twins start with the same weights, which the first step checks, and exchange their gradients within the step, so that an
    optimizer with the same settings keeps them equal to the bit. Gradients are those of `OneFOneB`, added up in two halves.
    Buffers, such as BatchNorm's statistics, are each twin's own. `docs/two-directions.md` has the details.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(BitPipe.rule, num_stages=8, num_microbatches=2, num_ranks=2)
        >>> [plan.stages_of(rank) for rank in range(2)]  # 4 is the twin of 0, whose ranks exchange their gradients
        [[0, 3, 5, 6], [1, 2, 4, 7]]
    """

    rule = "bitpipe"


class BitPipeReordered(_Stages):
    """`BitPipe` whose units of p microbatches are mixed: shorter steps for m > p, with p/4 - 1/2 more microbatches on a rank.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> plans = [build(cls.rule, num_stages=16, num_microbatches=16, num_ranks=4) for cls in (BitPipe, BitPipeReordered)]
        >>> [simulate(plan, Costs(forward_s=1.0)).makespan_s for plan in plans]
        [103.0, 99.0]
    """

    rule = "bitpipe_reordered"


class BitPipeZB(_Stages):
    """`BitPipe` with backwards in halves: the weights' half fills the waits that are left, within p microbatches on a rank.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> plan = build(BitPipeZB.rule, num_stages=16, num_microbatches=16, num_ranks=4)
        >>> simulate(plan, Costs(forward_s=1.0)).makespan_s, plan.peak_slots
        (97.0, (8, 8, 8, 8))
    """

    rule = "bitpipe_zb"


class Chimera(_Stages):
    """Chimera: two pipelines in opposite directions, with one stage of each on a rank (Li and Hoefler, arXiv 2107.06925).

    Of 2p stages on p ranks, p even, stages 0 to p-1 are the model, and stage s + p is the twin of stage s, on rank p-1-s. All else
    is as for `BitPipe`.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(Chimera.rule, num_stages=4, num_microbatches=2, num_ranks=2)
        >>> [plan.stages_of(rank) for rank in range(2)]
        [[0, 3], [1, 2]]
    """

    rule = "chimera"


class DualPipeV(_Stages):
    """DualPipeV: DeepSeek's DualPipe cut in half, placed as in `ZBV`; it takes at least 2p microbatches (arXiv 2412.19437).

    With `overlapped=True` it runs forwards side by side with backwards in its steady state, the same pairs as torch's; how it does
    is up to `overlap`. Without, they run one after the other. The other arguments are `Schedule`'s, except `stages`, a list of two.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build(DualPipeV.rule, num_stages=4, num_microbatches=4, num_ranks=2, overlapped=True)
        >>> [str(action) for action in plan.compute(rank=0) if plan.begins_pair(action)]  # beside the backward that follows
        ['0F3', '3F2', '3F3']
    """

    rule = "dualpipe_v"

    def __init__(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        overlapped: bool = False,
        options: Options | None = None,
    ) -> None:
        self._overlapped = overlapped
        arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        super().__init__(stages, n_microbatches, *arguments, options=options)
