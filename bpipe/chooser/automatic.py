"""Schedules whose plan bpipe chooses: for stages that are there, or for a whole model, which is then cut, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.api.catalogue import FromPlan
from bpipe.api.description import described
from bpipe.api.loopback import LoopbackGroup
from bpipe.api.options import BALANCING, RUNNING, SEARCHING, SLICING, TO_HOST, Options, options_for, values_of
from bpipe.api.policy import Budget, Policy, Way
from bpipe.api.schedule import Schedule, group_or_alone
from bpipe.backward.without_loss import check_loss
from bpipe.checks import budgets_of, counts_of
from bpipe.chooser.chosen_plans import ChosenPlans
from bpipe.chooser.known_costs import KnownCosts
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.ways import Wishes, check_placed, named_schedules
from bpipe.chooser.whole_model import WholeModel
from bpipe.comm.transport.process_group import group_of, is_fake
from bpipe.device import is_asynchronous
from bpipe.errors import ConfigurationError
from bpipe.estimate import advise_inputs
from bpipe.memory.optimizers import Optimizers, States
from bpipe.model.stage import PipelineStage, stages_of
from bpipe.passes.fit import Budgets
from bpipe.plan.destinations import Destinations
from bpipe.schedules import Plan, build
from bpipe.schedules.registry import rule_named
from bpipe.simulator.costs import Costs, Link

__all__ = ["AutoSchedule", "auto"]


class AutoSchedule(Schedule):
    """A schedule that `bpipe.auto` makes: `step`, `eval` and the rest are `Schedule`'s."""

    _makes_plans = True

    def __init__(self, schedule: Schedule, source: ChosenPlans, optimizer: Optimizers | None) -> None:
        context = schedule.session.context
        self.rule, self.group = "auto", schedule.group
        self._source: ChosenPlans = source
        self._session = schedule.hand_over()
        context.states = States(context.transport.device, optimizer)
        self.session.adopt(source)
        self.modules: list[nn.Module] = context.modules()

    def __repr__(self) -> str:
        is_open = "_source" in vars(self) and self.choice is None
        return described(self, "the plan is chosen after the first step" if is_open else "")

    @property
    def choice(self) -> Choice | None:
        """What was chosen for the latest steps, and why; None before the second step."""
        return self._source.choice


def auto(
    stages: Any,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    start: str | None = None,
    slices: int = 1,
    target: Any = None,
    layers: Sequence[str | Sequence[str]] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    stages_per_rank: Sequence[int] = (1, 2),
    device: torch.device | str = "cpu",
    group: Any = None,
    memory_bytes: Budget = "auto",
    by: Way = "evict_or_recompute",
    schedules: Sequence[str] | None = None,
    link: str | float | Link | None = None,
    cross_link: str | float | Link | None = None,
    nodes: Sequence[int] | None = None,
    optimizer: Optimizers | None = None,
    replicas: torch.distributed.ProcessGroup | None = None,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
    output_merge_spec: Any = None,
    scale_grads: bool = True,
    options: Options | None = None,
) -> AutoSchedule:
    """Make a schedule whose plan bpipe chooses: for this rank's stages, or for a whole model, which it cuts.

    A whole model is measured first, layer by layer, on rank 0, which chooses where to cut it, how many stages a rank has, and the
    microbatch size (`bpipe.choose_plan` says how). Each rank makes its stages: `modules` of the result has them.

    The first step with inputs of a form measures bytes and times: it runs one microbatch at a time, which needs no more memory than
    the later steps, and may take p times as long. If results depend on the order, it keeps the order of `start`, on all ranks: if
    stages of a rank share a parameter or a buffer, or one of them has a Dropout, RReLU, RNN or MultiheadAttention that draws random
    numbers. Some dependences show only in the step itself, which then raises a StageError: a backward that draws random numbers, or
    that changes a parameter or a buffer; with several stages on a rank, a forward that draws, or a tensor in which gradients of two
    stages add up. `Options(measure="in_order")` is the remedy (docs/limits.md). Before the second step rank 0
    chooses the fastest plan within the memory of the ranks, of all schedules that place stages like this and of orders made to
    measure; all ranks verify it. Some steps of it are timed. If another plan would be at least 2% faster by what these took, it
    takes its place, three times at most; a plan that turns out slower than one before it is given up for that one. Then nothing
    is timed any more. The logger "bpipe" says what was chosen, expected and measured. The ranks of a `Loopback` take turns, so
    that their steps tell nothing: the first choice stays.

    Gradients are 1F1B's to the bit, whatever the plan: it changes only when a microbatch is computed. If results depend on the
    order, that of `start` stays, and only what leaves the memory is chosen.

    Args:
        stages: this rank's `PipelineStage`, or a list of them; or a whole model that `bpipe.split_transformer` or
            `bpipe.split_model` can cut between layers, or else `bpipe.split_traced`, with the same weights on all ranks, and then
            the call is collective.
        batch: for stages, the number of microbatches m. For a model, positional arguments of a step, whose rows are cut: one
            tensor, or a tuple; for a model of Transformers `input_ids` alone.
        loss_fn: as in `Schedule`.
        start: for stages, the name of the schedule that they are placed for; default: "1f1b", and for several stages a rank, "zbv"
            if the rank has stages x and 2p-1-x, and "interleaved_1f1b" if it has x, x+p and so on. Give it where p is odd, because
            the rank in the middle has the same two stages either way.
        slices: for stages that take slices of sequences, how many a microbatch is cut into.
        target: for a model, what `loss_fn` gets for the batch.
        layers: for a model, as `bpipe.measure_layers` takes them; default: of a model of Transformers its `transformer_layers`.
        microbatch_sizes: for a model, to choose from; default: such as give p, 2p and 4p microbatches.
        stages_per_rank: for a model, to choose from.
        device: for a model, the device of this rank's stages; on rank 0 the model is on one of the same kind.
        group: for a model, the process group, or the rank's place in a `Loopback`; default: all processes.
        memory_bytes: the most bytes that each rank may use, static ones included, one number or one for each rank (None: no
            limit); "auto": what its CUDA device has, and no limit on CPU. A model is cut for numbers only.
        by: what keeps the memory: "evict", "recompute" or "evict_or_recompute"; models with skips are never recomputed.
        schedules: names to choose from; default: all.
        link: between ranks of a node, a name, bytes per second or a `bpipe.schedules.Link`, until steps show it; on CUDA they do
            not.
        cross_link: between nodes.
        nodes: the node of each rank of the plan.
        optimizer: as in `Balanced`.
        replicas: a process group of all ranks that hold the same stages, in other pipelines or in tensor parallelism: all run the
            plan that the first of them chooses, for sizes that cover all of theirs. Stages that communicate inside, under FSDP2,
            DDP or tensor parallelism, need it, because they do so in the order of the plan; bpipe does not see other
            communication. These ranks then compare two numbers in each training step.
        args_chunk_spec: this and the next three as in `Schedule`.
        options: all but `slots` and `bytes_per_parameter`; those of slices only for stages that take them.

    Raises:
        ConfigurationError: the arguments cannot work together, or the stages have no placement of a known schedule.
        BudgetError: no plan was found within the memory; with measured bytes in the second step, on all ranks.
        AgreementError: rank 0 cannot cut the model; or in a step, ranks with other arguments.

    Example:
        >>> import bpipe
        >>> loopback = bpipe.Loopback(4)
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)))
        >>> x = torch.randn(64, 8)
        >>> wishes = {"target": x, "options": bpipe.Options(effort=0)}
        >>> ranks = map(loopback.rank, range(4))
        >>> schedules = [auto(model, x, nn.functional.mse_loss, group=rank, **wishes) for rank in ranks]
        >>> _ = [loopback.step(schedules, x, target=x, return_outputs=False) for _ in range(2)]
        >>> schedules[0].choice.plan == schedules[3].plan
        True
    """
    options = options_for("auto", options, (*RUNNING, *SLICING, *BALANCING, *SEARCHING, *TO_HOST, "progress"))
    wishes = Wishes(schedules=named_schedules(schedules), by=by, **values_of(options, SEARCHING))
    if isinstance(stages, nn.Module):
        if start is not None or slices != 1:
            raise ConfigurationError("start= and slices= are about stages, and this model is not cut yet: leave them out")
        whole = WholeModel(
            model=stages,
            batch=batch if isinstance(batch, tuple) else (batch,),
            target=target,
            loss_fn=loss_fn,
            layers=layers,
            microbatch_sizes=None if microbatch_sizes is None else counts_of("microbatch_sizes", microbatch_sizes),
            device=torch.device(device),
            group=group_or_alone(group_of(group), 1),
        )
        _check_ranks(whole.group, whole.device)
        _, p = whole.place
        cut = whole.cut(
            budgets=_numbers(memory_bytes, p),
            links=advise_inputs.links_of(None, link, cross_link, nodes, (p,), options.host_link),
            schedules=wishes.schedules,
            stages_per_rank=tuple(counts_of("stages_per_rank", stages_per_rank)),
            parts=options.parts,
            host=options.host,
            by=by,
        )
        stages, batch, start = cut.stages, cut.choice.plan.num_microbatches, cut.choice.plan.name
    check_loss(loss_fn, "auto", optimizer=optimizer)
    own = stages_of(stages)
    first = next(iter(own.values()))
    _check_ranks(first.group, first.device)
    plan = _first_plan(own, batch, start, slices, wishes)
    policy = _policy(plan, memory_bytes, first.device, nodes, options)
    links = advise_inputs.links_of(None, link, cross_link, nodes, (plan.num_ranks,), options.host_link)
    known = KnownCosts(assumed=links.between(Costs()), nodes=nodes)
    arguments = (loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
    schedule = FromPlan(stages, plan, *arguments, options=Options(**values_of(options, (*RUNNING, *SLICING))))
    source = ChosenPlans(schedule, policy, known, wishes, replicas=replicas, told=options.progress)
    return AutoSchedule(schedule, source, optimizer)


def _check_ranks(group: Any, device: torch.device) -> None:
    """Raise where there are no other ranks whose steps show what stages and links take."""
    if not isinstance(group, LoopbackGroup) and is_fake(group, device):
        raise ConfigurationError(
            "auto chooses by the times of all ranks, and a fake process group has no other ranks: choose with bpipe.choose_plan "
            "and give its plan to bpipe.FromPlan there, or run all ranks in one process with bpipe.Loopback"
        )


def _numbers(memory_bytes: Budget, num_ranks: int) -> Budgets:
    """Return the budgets of ranks in numbers; what a device has free is not known before it has its stages."""
    advice = f"give bytes, at least 1, one number or one for each of {num_ranks} ranks (None: no limit), or 'auto'"
    return budgets_of("memory_bytes", None if memory_bytes == "auto" else memory_bytes, num_ranks, advice)


def _policy(plan: Plan, memory_bytes: Budget, device: torch.device, nodes: Sequence[int] | None, options: Options) -> Policy:
    """Return what plans keep to; the way is chosen with each."""
    is_measured = memory_bytes == "auto" and is_asynchronous(device)
    policy = Policy(
        budget="auto" if is_measured else _numbers(memory_bytes, plan.num_ranks),
        to=Destinations(nodes=nodes, host="last" if options.host else "no"),
        costs=None,
        sizes=None,
        **values_of(options, BALANCING),
    )
    policy.check(plan)
    return policy


def _first_plan(
    own: Mapping[int, PipelineStage], num_microbatches: int, start: str | None, slices: int, wishes: Wishes
) -> Plan:
    """Return the plan of the first step, for stages that are placed like those of this rank."""
    first = next(iter(own.values()))
    p = first.num_stages // len(own)
    if start is None:
        start = "seq_1f1b" if slices > 1 and len(own) == 1 else _start(own, p, num_microbatches)
    skips = tuple(sorted(set(first.skips.values())))
    plan = build(start, first.num_stages, num_microbatches, num_ranks=p, skips=skips, slices=slices)
    if wishes.schedules is not None:
        check_placed(wishes.schedules, plan)
    return plan


def _start(own: Mapping[int, Any], num_ranks: int, num_microbatches: int) -> str:
    """Return a schedule that places stages like those of this rank."""
    places, p = sorted(own), num_ranks
    if len(places) == 1:
        return "1f1b"
    is_v, is_looped = places == [places[0], 2 * p - 1 - places[0]], all(place % p == places[0] for place in places)
    if is_v and is_looped:
        raise ConfigurationError(
            f"stages {places} of a rank are placed in a V and in a loop alike: give start='zbv' or 'interleaved_1f1b' on all ranks"
        )
    if not is_v and not is_looped:
        raise ConfigurationError(f"no schedule places stages {places} on one of {p} ranks: give x and x+p, or x and 2p-1-x")
    if is_v:
        return "zbv"
    return "interleaved_1f1b" if rule_named("interleaved_1f1b").allows(p, num_microbatches) else "breadth_first"
