"""The norm of all stages' gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bpipe.comm.wire.dtensor import local, mesh_of
from bpipe.errors import AgreementError, ConfigurationError, StageError
from bpipe.parallel.replicas import COPY
from bpipe.torch_private.operators import norms_of
from bpipe.training.gathered import Gathered, has_unreduced
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.replica_norms import DTYPES, INSTEAD, Norm, difference, of_all, ranks_along, rows_of
from bpipe.training.summed_copies import problem_with_sums

__all__ = ["clip_grad_norm_"]

Parameters = torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters | Mapping[int, Parameters],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    copies: Iterable[torch.Tensor] = (),
    own: Iterable[torch.Tensor] = (),
    group: Any = None,
    replicas: Any = None,
) -> torch.Tensor:
    """Clip the gradients of a whole pipeline by their total norm: torch.nn.utils.clip_grad_norm_ over all stages.

    The ranks exchange the norm of every single gradient, and each puts them together as torch does: the result has the same
    bits on all ranks, and with whole gradients of one dtype it has the bits of a single process that has all parameters, in
    the stages' order. A sharded gradient (DTensor: FSDP2, tensor parallelism) adds its mesh's own total, whose sum has another
    order: equal to a few units in the last place. For weights that FSDP2 has gathered, it takes the gradients of the sharded ones.

    Communicates two all_gathers over the pipeline's group: 48 bytes per rank, and 16 bytes times the most gradients that a rank
    has; for DTensors one reduction of a number over each of their meshes, and an all_gather or two along its dimensions, to see
    that gradients beside them are alike; likewise over `replicas`. Collective over all of these; blocks the host.

    Args:
        parameters: this rank's; where it holds several stages, a dict of them by stage index, so that norms are in the model's
            order for any placement. They may have no gradient; one that several of the stages share counts once.
        max_norm: the norm that the gradients have at most afterwards; infinity to learn the norm alone.
        norm_type: p of the p-norm, infinity or "inf". An empty gradient has no influence on the largest.
        error_if_nonfinite: raise if the total is infinite or NaN, on all ranks, and leave the gradients unchanged then.
        foreach: whether torch's foreach functions run; default: where they can.
        copies: those parameters that another rank counts: they are clipped, but not counted again. `TiedWeights.copies` must be
            among them; the twins of a schedule of two directions are known.
        own: those parameters that only this one of the `replicas` has, such as its experts: each counts in the total, which is
            then that of all replicas. DTensors on a mesh of the experts count so without it.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.
        replicas: the ranks that have the same stages in other pipelines with other `own` weights, as a process group or a
            DeviceMesh of one dimension, such as `mesh["ep"]` (not those that hold the same experts, too). What is not in `own`
            must be equal on them: its gradients are compared.

    Returns:
        The total norm before clipping, without dimensions, where this rank's gradients are.

    Raises:
        AgreementError: the ranks clip differently; raised on all of them.
        StageError: with `error_if_nonfinite`.
        ConfigurationError: a gradient is sparse, sharded over several ranks of the group, or not reduced yet; a norm that does
            not exist, a `max_norm` that is negative or NaN; copies of tied weights that are not among `copies`, or not summed;
            `own` without `replicas`; other gradients that differ between `replicas`, or between the ranks of a DTensor's mesh.
            Raised on all ranks. Or the group is a `Loopback`'s.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(2.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    ranks = Ranks(group, "torch.nn.utils.clip_grad_norm_ over the parameters of all stages does it")
    gathered = Gathered()
    places = _places(parameters, ranks.rank, gathered)
    beside = None if replicas is None else Ranks(replicas, INSTEAD)
    everything = [parameter for parameter in places if parameter.grad is not None]
    elsewhere = {id(gathered.sharded(parameter)) for parameter in copies} | {id(one) for one in places if getattr(one, COPY, False)}
    how, problem = _settings(max_norm, norm_type, error_if_nonfinite)
    owned = {id(gathered.sharded(parameter)) for parameter in own}
    problem = problem or _problem(list(places), ranks) or problem_with_sums(everything, elsewhere, ranks)
    problem = problem or _problem_with_replicas(owned, ranks, beside)
    counted: dict[tuple[bool, int], list[Any]] = {(is_own, place): [] for is_own in (False, True) for place in places.values()}
    for parameter in everything:
        if id(parameter) not in elsewhere and parameter.grad.layout is torch.strided:  # type: ignore[union-attr]
            counted[id(parameter) in owned, places[parameter]].append(parameter.grad)
    shared, of_this = list[Norm](), list[Norm]()
    refusal = ConfigurationError(problem) if problem else None
    try:
        for (is_own, place), gradients in counted.items():
            (of_this if is_own else shared).extend(_norms(place, gradients, how[1], foreach))
    except Exception as error:  # the other ranks are to hear of it, instead of waiting for this one
        if refusal is None:
            refusal = ConfigurationError(f"torch has no norm of order {how[1]} of the gradients: {error}")
            refusal.__cause__ = error
    problem = _different(shared, everything, beside)
    if problem and refusal is None:
        refusal = ConfigurationError(problem)
    total = _total([*shared, *(of_this if beside is None else of_all(beside, of_this))], how, refusal, ranks)
    if error_if_nonfinite and not total.isfinite():
        raise StageError(f"the total norm of order {how[1]} of the gradients is {total.item()}, so they cannot be clipped by it")
    for alike in _by_mesh(everything, [parameter.grad for parameter in everything]).values():
        clip_grads_with_norm_(alike, how[0], total, foreach)
    return total.to(everything[0].grad.device) if everything else total  # type: ignore[union-attr]


def _settings(max_norm: Any, norm_type: Any, error_if_nonfinite: bool) -> tuple[tuple[float, float, bool], str]:
    """Return the highest norm, its order and whether to raise if it is not finite, and a text that describes errors in them."""
    try:
        highest, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        return (0.0, 2.0, False), f"max_norm={max_norm!r}, norm_type={norm_type!r}: give numbers; norm_type may be 'inf'"
    problem = ""
    if not highest >= 0:
        problem = f"max_norm={highest}: a NaN would spoil every gradient, a negative one would turn them round: give at least 0"
    if math.isnan(order):
        order, problem = 2.0, f"norm_type={norm_type!r}: give the p of a p-norm, or 'inf'"
    return (highest, order, bool(error_if_nonfinite)), problem


def _places(parameters: Any, rank: int, gathered: Gathered) -> dict[torch.Tensor, int]:
    """Return each parameter once, with the place of its stage, or of the first one if several stages share it."""
    by_place = parameters if isinstance(parameters, Mapping) else {rank: parameters}
    places: dict[torch.Tensor, int] = {}
    for place in sorted(by_place):
        of_place = by_place[place]
        for parameter in [of_place] if isinstance(of_place, torch.Tensor) else of_place:
            places.setdefault(gathered.sharded(parameter), place)
    return places


def _norms(place: int, gradients: Sequence[torch.Tensor], order: float, foreach: bool | None) -> Iterator[Norm]:
    """Compute the norm of each whole gradient, and one norm of all those that are sharded over the same mesh."""
    for mesh, alike in _by_mesh(gradients, gradients).items():
        if mesh is not None:
            yield Norm(place, f"{len(alike)} gradients on {mesh}", mesh, _norm_over(mesh, alike, order, foreach))
            continue
        if math.isinf(order):
            alike = [gradient for gradient in alike if gradient.numel()]  # of nothing there is no largest element
        if foreach is False or not alike:
            norms: Sequence[torch.Tensor] = [torch.linalg.vector_norm(gradient, order) for gradient in alike]
        else:
            norms = norms_of(alike, order)
        for gradient, norm in zip(alike, norms, strict=True):
            yield Norm(place, f"one of shape {list(gradient.shape)}", None, norm)


def _different(norms: Sequence[Norm], parameters: Sequence[torch.Tensor], replicas: Ranks | None) -> str:
    """Describe how gradients differ on ranks that should have them alike, and so the total. Collective over these ranks.

    Ranks that share the mesh of a parameter are replicas of each other in what is not sharded over it.
    """
    found = ["" if replicas is None else difference(replicas, norms)]
    for mesh in _by_mesh(parameters, [parameter.grad for parameter in parameters]):
        if mesh is not None:
            found += [difference(ranks, [one for one in norms if one.mesh != mesh]) for ranks in ranks_along(mesh)]
    return next(filter(None, found), "")


def _problem_with_replicas(own: Set[int], ranks: Ranks, replicas: Ranks | None) -> str:
    """Return what is wrong if it is not said which ranks have other weights, or if ranks of this pipeline are said to."""
    if replicas is None:
        return "own= are weights that other replicas do not have: give replicas=, the ranks that have others" if own else ""
    if both := sorted({*ranks.global_ranks} & {*replicas.global_ranks} - {ranks.global_ranks[ranks.rank]}):
        return f"ranks {both} are in the group and in replicas=: give the ranks of one pipeline, and those of other ones"
    return ""


def _norm_over(mesh: Any, gradients: Sequence[Any], order: float, foreach: bool | None) -> torch.Tensor:
    """Compute the norm of gradients sharded over a mesh. Collective over it: a rank may have nothing, but must take part."""
    if not math.isinf(order):
        if order < 0:  # it has no value for an empty shard: all ranks of the mesh refuse, not only those that have one
            raise ValueError("gradients that are sharded have norms of order 0 to infinity, and -infinity")
        whole: torch.Tensor = get_total_norm(gradients, order, foreach=foreach).full_tensor()  # type: ignore[attr-defined]
        return whole
    parts = [part for part in map(local, map(_without_sums, gradients)) if part.numel()]
    dtype = reduce(torch.promote_types, [gradient.dtype for gradient in gradients])
    nothing = torch.full((), math.inf if order < 0 else 0.0, dtype=dtype, device=local(gradients[0]).device)
    largest = get_total_norm(parts, order, foreach=foreach).to(dtype) if parts else nothing
    for dim in range(mesh.ndim):
        gathered = [torch.empty_like(largest) for _ in range(mesh.size(dim))]
        dist.all_gather(gathered, largest, group=mesh.get_group(dim))
        largest = torch.linalg.vector_norm(torch.stack(gathered), order)  # unlike a reduction, it keeps a NaN
    return largest


def _without_sums(gradient: Any) -> Any:
    """Return a sharded gradient with no sums pending. Collective over its mesh if some are."""
    from torch.distributed.tensor import Replicate

    pending = [placement.is_partial() for placement in gradient.placements]
    final = [Replicate() if is_sum else one for is_sum, one in zip(pending, gradient.placements)]
    return gradient.redistribute(placements=final) if any(pending) else gradient


def _total(
    norms: Sequence[Norm], how: tuple[float, float, bool], refusal: ConfigurationError | None, ranks: Ranks
) -> torch.Tensor:
    """Compute the norm of all ranks' norms, put in the order of their places."""
    bits = sum({1 << DTYPES.index(one.norm.dtype) for one in norms})
    mine = torch.tensor([len(norms), bits, refusal is not None, *how], dtype=torch.float64)
    lengths, dtypes, problems, *hows = torch.stack(ranks.gather(mine)).T.tolist()
    if any(problems):
        raise refusal or ConfigurationError(f"rank {problems.index(True)} of the group cannot clip: it says why")
    if any(len(set(values)) > 1 for values in hows):
        seen = ", ".join(f"rank {rank} {values}" for rank, values in enumerate(zip(*hows)))
        raise AgreementError(
            f"the ranks clip by different (max_norm, norm_type, error_if_nonfinite): {seen}. Give the same on all of them."
        )
    if not any(lengths):
        return torch.tensor(0.0)
    rows = rows_of(norms, [one.place for one in norms])
    gathered = torch.cat(ranks.gather_uneven(rows, [int(length) for length in lengths]))
    in_order = gathered[torch.argsort(gathered[:, 1], stable=True), 0]
    in_use = [dtype for index, dtype in enumerate(DTYPES) if any(int(bits) >> index & 1 for bits in dtypes)]
    total: torch.Tensor = torch.linalg.vector_norm(in_order.to(reduce(torch.promote_types, in_use)), how[1])
    return total


def _by_mesh(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> dict[Any, list[torch.Tensor]]:
    """Group tensors by the mesh of their gradients; None stands for gradients that are whole on this rank."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor, gradient in zip(tensors, gradients):
        groups.setdefault(mesh_of(gradient), []).append(tensor)
    return groups


def _problem(parameters: Sequence[torch.Tensor], ranks: Ranks) -> str:
    """Return what is wrong if a gradient has no norm or is not final, or if shards of one would count for several stages."""
    pipeline, gradients = set(ranks.global_ranks), [one.grad for one in parameters if one.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        return "a gradient is sparse, and torch has no norm of it: use nn.Embedding(sparse=False)"
    if has_unreduced(parameters):
        return (
            "FSDP2 keeps gradients that are not reduced over the replicas yet: clip after a step that reduces them, with "
            "set_requires_gradient_sync(True)"
        )
    for mesh in {mesh_of(gradient) for gradient in gradients} - {None}:
        sharded_over = mesh.mesh.flatten().tolist()
        if len(pipeline.intersection(sharded_over)) > 1:
            return (
                f"gradients are sharded over ranks {sharded_over}, of which the group {sorted(pipeline)} has several: "
                "give the group of one pipeline, such as mesh['pp']"
            )
    return ""
