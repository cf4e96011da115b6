"""Schedules whose plan bpipe chooses: for stages that are there, or for a whole model, which is then cut, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn

from bpipe.api.balanced import check_unused
from bpipe.api.catalogue import FromPlan
from bpipe.api.description import described
from bpipe.api.measured_plans import RESERVE_BYTES
from bpipe.api.policy import MARGIN, Budget, Measure, Policy, Way
from bpipe.api.schedule import Schedule
from bpipe.chooser.choose_plan import HOST_LINK
from bpipe.chooser.chosen_plans import ChosenPlans, Wishes
from bpipe.chooser.compare_plans import EFFORT
from bpipe.chooser.known_costs import KnownCosts
from bpipe.chooser.plan_choice import Choice
from bpipe.chooser.whole_model import WholeModel
from bpipe.device import is_asynchronous
from bpipe.errors import ConfigurationError
from bpipe.estimate import advise_inputs
from bpipe.estimate.checks import check_count
from bpipe.logs import RankLog
from bpipe.memory.optimizers import States
from bpipe.model.stage import stages_of
from bpipe.passes.fit import Budgets
from bpipe.plan.destinations import Destinations
from bpipe.schedules import build
from bpipe.schedules.registry import rule_named
from bpipe.simulator.costs import Costs, Link

__all__ = ["AutoSchedule", "auto"]


class AutoSchedule(Schedule):
    """A schedule that `bpipe.auto` makes: `step`, `eval` and the rest are `Schedule`'s."""

    _makes_plans = True

    def __init__(
        self,
        schedule: Schedule,
        policy: Policy,
        wishes: Wishes,
        known: KnownCosts,
        replicas: torch.distributed.ProcessGroup | None,
        optimizer: torch.optim.Optimizer | None,
        reserve_bytes: int,
        told: Callable[[int, int], None] | None,
    ) -> None:
        check_unused(schedule)
        context = schedule.session.context
        self.rule, self.group = "auto", schedule.group
        self._source: ChosenPlans = ChosenPlans(
            schedule.plan,
            self.rule,
            policy,
            context,
            replicas=replicas,
            known=known,
            wishes=wishes,
            reserve_bytes=reserve_bytes,
            asked=f"{policy} {wishes} {known} {replicas is not None}",
            told=told,
        )
        self._session = schedule.hand_over()
        context.states = States(context.transport.device, optimizer)
        self.session.adopt(self._source)
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
    parts: int = 1,
    host: bool = False,
    link: str | float | Link | None = None,
    cross_link: str | float | Link | None = None,
    host_link: str | float | Link = HOST_LINK,
    nodes: Sequence[int] | None = None,
    measure: Measure = "auto",
    margin: float = MARGIN,
    reserve_bytes: int = RESERVE_BYTES,
    optimizer: torch.optim.Optimizer | None = None,
    replicas: torch.distributed.ProcessGroup | None = None,
    effort: int = EFFORT,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> AutoSchedule:
    """Make a schedule whose plan bpipe chooses: for this rank's stages, or for a whole model, which it cuts.

    A whole model is measured first, layer by layer, on rank 0, which chooses where to cut it, how many stages a rank has, and the
    microbatch size (`bpipe.choose_plan` says how). Each rank makes its stages: `modules` of the result has them.

    The first step measures, as it does for `bpipe.Balanced`: it runs one microbatch at a time. Before the second one rank 0
    chooses the fastest plan within the memory of the ranks, of all schedules that place stages like this and of orders made to
    measure; all ranks verify it. Some steps of it are timed. If another plan would be at least 2% faster by what these took, it
    takes its place, three times at most; a plan that turns out slower than one before it is given up for that one. Then nothing
    is timed any more. The logger "bpipe" says what was chosen, expected and measured. The ranks of a `Loopback` take turns, so
    that their steps tell nothing: the first choice stays.

    Gradients are 1F1B's to the bit, whatever the plan: it changes only when a microbatch is computed. If results depend on the
    order, as `Balanced` finds out, the order of `start` stays, and only what leaves the memory is chosen.

    Args:
        stages: this rank's `PipelineStage`, or a list of them; or a whole model that `bpipe.split_model` can cut between layers,
            with the same weights on all ranks, and then the call is collective.
        batch: for stages, the number of microbatches m. For a model, positional arguments of a step, whose rows are cut: one
            tensor, or a tuple.
        loss_fn: as in `Schedule`.
        start: for stages, the name of the schedule that they are placed for; default: "1f1b", and for several stages a rank, "zbv"
            if the rank has stages x and 2p-1-x, and "interleaved_1f1b" if it has x, x+p and so on. Give it where p is odd, because
            the rank in the middle has the same two stages either way.
        slices: for stages that take slices of sequences, how many a microbatch is cut into; further options then are `Seq1F1B`'s.
        target: for a model, what `loss_fn` gets for the batch.
        layers: for a model, as `bpipe.measure_layers` takes them.
        microbatch_sizes: for a model, to choose from; default: such as give p, 2p and 4p microbatches.
        stages_per_rank: for a model, to choose from.
        device: for a model, the device of this rank's stages; on rank 0 the model is on one of the same kind.
        group: for a model, the process group, or the rank's place in a `Loopback`; default: all processes.
        memory_bytes: the most bytes that each rank may use, static ones included, one number or one for each rank (None: no
            limit); "auto": what its CUDA device has, and no limit on CPU. A model is cut for numbers only.
        by: what keeps the memory: "evict", "recompute" or "evict_or_recompute"; stages with skips are never recomputed.
        schedules: names to choose from; default: all.
        parts: the most parts into which a microbatch may be cut to move.
        host: whether activations may go to the host where no rank has room.
        link: between ranks of a node, a name, bytes per second or a `bpipe.schedules.Link`, until steps show it; on CUDA they do
            not.
        cross_link: between nodes.
        host_link: between a rank and its host's memory.
        nodes: the node of each rank of the plan.
        measure: as in `Balanced`; "in_order" also keeps the order of `start`, whatever is measured.
        margin: as in `Balanced`.
        reserve_bytes: as in `Balanced`.
        optimizer: as in `Balanced`.
        replicas: a process group of all ranks that hold the same stages, in other pipelines or in tensor parallelism: all run the
            plan that the first of them chooses, for sizes that cover all of theirs. Stages that communicate inside, under FSDP2,
            DDP or tensor parallelism, need it, because they do so in the order of the plan; bpipe does not see other
            communication. These ranks then compare two numbers in each training step.
        effort: items of work that run while orders are made to measure; 0: named schedules only. The other ranks wait meanwhile, so
            that it must end within `timeout_s`.
        seed: of the search.
        progress: called on rank 0 as `progress(done, total)` while it chooses.
        options: further arguments of `Schedule`.

    Raises:
        ConfigurationError: the arguments cannot work together, or the stages have no placement of a known schedule.
        BudgetError: no plan was found within the memory; with measured bytes in the second step, on all ranks.
        AgreementError: rank 0 cannot cut the model; or in a step, ranks with other arguments.

    Example:
        >>> import bpipe
        >>> loopback = bpipe.Loopback(4)
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(8)))
        >>> x = torch.randn(64, 8)
        >>> wishes = {"target": x, "effort": 0}
        >>> ranks = map(loopback.rank, range(4))
        >>> schedules = [auto(model, x, nn.functional.mse_loss, group=rank, **wishes) for rank in ranks]
        >>> _ = [loopback.step(schedules, x, target=x, return_outputs=False) for _ in range(2)]
        >>> schedules[0].choice.plan == schedules[3].plan
        True
    """
    if by not in get_args(Way):
        raise ConfigurationError(f"by={by!r}: choose 'evict', 'recompute' or 'evict_or_recompute'")
    check_count("effort", effort, least=0)
    named = None if schedules is None else tuple(schedules)
    to_host = advise_inputs.links_of(None, host_link, None, None, ()).link
    if isinstance(stages, nn.Module):
        if start is not None or slices != 1:
            raise ConfigurationError("start= and slices= are about stages, and this model is not cut yet: leave them out")
        if loss_fn is None:
            raise ConfigurationError("a model is cut to be trained: give loss_fn=, which is measured with the last layer")
        args = batch if isinstance(batch, tuple) else (batch,)
        whole = WholeModel(
            model=stages,
            batch=args,
            target=target,
            loss_fn=loss_fn,
            layers=layers,
            microbatch_sizes=microbatch_sizes,
            device=torch.device(device),
            group=group,
        )
        rank, p = whole.place
        cut = whole.cut(
            budgets=_numbers(memory_bytes, p),
            links=advise_inputs.links_of(None, link, cross_link, nodes, (p,)),
            host_link=to_host,
            schedules=named,
            stages_per_rank=tuple(stages_per_rank),
            parts=parts,
            host=host,
            by=by,
        )
        stages, batch, start = cut.stages, cut.choice.plan.num_microbatches, cut.choice.plan.name
        if rank == 0:
            numbers = " ".join(str(len(names)) for names in cut.choice.stages)
            RankLog(0).info("auto: cut the model into stages of %s layers; by these alone, best is %s", numbers, cut.choice.name)
    own = stages_of(stages)
    first = next(iter(own.values()))
    p = first.num_stages // len(own)
    if start is None:
        start = "seq_1f1b" if slices > 1 and len(own) == 1 else _start(own, p, batch)
    skips = tuple(sorted(set(first.skips.values())))
    plan = build(start, first.num_stages, batch, num_ranks=p, skips=skips, slices=slices)
    is_measured = memory_bytes == "auto" and is_asynchronous(first.device)
    policy = Policy(
        budget="auto" if is_measured else _numbers(memory_bytes, p),
        parts=parts,
        inside=False,
        to=Destinations(nodes=nodes, host="last" if host else "no"),
        costs=None,
        sizes=None,
        measure=measure,
        margin=margin,
    )
    policy.check(plan)
    if skips and by == "recompute":
        raise ConfigurationError("by='recompute' counts no bytes of skips: leave by= out, or give by='evict'")
    links = advise_inputs.links_of(None, link, cross_link, nodes, (p,))
    known = KnownCosts(assumed=Costs(link=links.link, cross_link=links.cross_link, host_link=to_host), nodes=nodes)
    wishes = Wishes(schedules=named, by=by, effort=effort, seed=seed)
    schedule = FromPlan(stages, plan, loss_fn, **options)
    return AutoSchedule(schedule, policy, wishes, known, replicas, optimizer, reserve_bytes, progress)


def _numbers(memory_bytes: Budget, num_ranks: int) -> Budgets:
    """Return the budgets of ranks in numbers; what a device has free is not known before it has its stages."""
    if memory_bytes is None or memory_bytes == "auto":
        return (None,) * num_ranks
    given: list[Any] = [memory_bytes] * num_ranks
    if isinstance(memory_bytes, Sequence) and not isinstance(memory_bytes, str):
        given = list(memory_bytes)
    if len(given) != num_ranks or not all(one is None or (type(one) is int and one >= 1) for one in given):
        raise ConfigurationError(
            f"memory_bytes={memory_bytes!r}: give bytes, at least 1, one number or one for each of {num_ranks} ranks (None: no "
            "limit), or 'auto'"
        )
    return tuple(given)


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
