"""The norm of all stages' gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bpipe.errors import AgreementError, ConfigurationError, StageError
from bpipe.parallel.twins import COPY
from bpipe.training.gathered import Gathered, has_unreduced
from bpipe.training.pipeline_ranks import Ranks
from bpipe.training.sums import problem_with_sums
from bpipe.training.tensors import local, mesh_of

__all__ = ["clip_grad_norm_"]

Parameters = torch.Tensor | Iterable[torch.Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters | Mapping[int, Parameters],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    copies: Iterable[torch.Tensor] = (),
    group: Any = None,
) -> torch.Tensor:
    """Clip the gradients of a whole pipeline by their total norm: torch.nn.utils.clip_grad_norm_ over all stages.

    The ranks exchange the norm of every single gradient, and each puts them together as torch does: the result has the same
    bits on all ranks, and with whole gradients of one dtype it has the bits of a single process that has all parameters, in
    the stages' order. A sharded gradient (DTensor: FSDP2, tensor parallelism) adds its mesh's own total, whose sum has another
    order: equal to a few units in the last place. For weights that FSDP2 has gathered, it takes the gradients of the sharded ones.

    Communicates two all_gathers over the pipeline's group: 48 bytes per rank, and 16 bytes times the most gradients that a rank
    has; and for DTensors one reduction of a number over each of their meshes. Collective over the pipeline, and over those
    meshes; blocks the host.

    Args:
        parameters: this rank's; where it holds several stages, a dict of them by stage index, so that norms are in the model's
            order for any placement. They may have no gradient; one that several of the stages share counts once.
        max_norm: the norm that the gradients have at most afterwards; infinity to learn the norm alone.
        norm_type: p of the p-norm, infinity or "inf". An empty gradient has no influence on the largest.
        error_if_nonfinite: raise if the total is infinite or NaN, on all ranks, and leave the gradients unchanged then.
        foreach: whether torch's foreach functions run; default: where they can.
        copies: those parameters that another rank counts: they are clipped, but not counted again. `TiedWeights.copies` must be
            among them; the twins of a schedule of two directions are known.
        group: the process group of the pipeline's ranks, a DeviceMesh of one dimension, or None for the default group.

    Returns:
        The total norm before clipping, without dimensions, where this rank's gradients are.

    Raises:
        AgreementError: the ranks clip differently; raised on all of them.
        StageError: with `error_if_nonfinite`.
        ConfigurationError: a gradient is sparse, sharded over several ranks of the group, or not reduced yet; a norm that does
            not exist, a `max_norm` that is negative or NaN; copies of tied weights that are not among `copies`, or not summed.
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
    everything = [parameter for parameter in places if parameter.grad is not None]
    elsewhere = {id(gathered.sharded(parameter)) for parameter in copies} | {id(one) for one in places if getattr(one, COPY, False)}
    how, problem = _settings(max_norm, norm_type, error_if_nonfinite)
    problem = problem or _problem(list(places), ranks) or problem_with_sums(everything, elsewhere, ranks)
    counted: dict[int, list[Any]] = {place: [] for place in places.values()}
    for parameter in everything:
        if id(parameter) not in elsewhere and parameter.grad.layout is torch.strided:  # type: ignore[union-attr]
            counted[places[parameter]].append(parameter.grad)
    norms: list[tuple[int, torch.Tensor]] = []
    refusal = ConfigurationError(problem) if problem else None
    try:
        norms += [(place, norm) for place, gradients in counted.items() for norm in _norms(gradients, how[1], foreach)]
    except Exception as error:  # the other ranks are to hear of it, instead of waiting for this one
        if refusal is None:
            refusal = ConfigurationError(f"torch has no norm of order {how[1]} of the gradients: {error}")
            refusal.__cause__ = error
    total = _total(norms, how, refusal, ranks)
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
        for parameter in _listed(by_place[place]):
            places.setdefault(gathered.sharded(parameter), place)
    return places


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _norms(gradients: Sequence[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """Compute the norm of each whole gradient, and one norm of all those that are sharded over the same mesh."""
    norms: list[torch.Tensor] = []
    for mesh, alike in _by_mesh(gradients, gradients).items():
        if mesh is not None:
            norms.append(_norm_over(mesh, alike, order, foreach))
            continue
        if math.isinf(order):
            alike = [gradient for gradient in alike if gradient.numel()]  # of nothing there is no largest element
        if foreach is False or not alike:
            norms += [torch.linalg.vector_norm(gradient, order) for gradient in alike]
        else:
            norms += torch._foreach_norm(alike, order)
    return norms


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
    norms: Sequence[tuple[int, torch.Tensor]], how: tuple[float, float, bool], refusal: ConfigurationError | None, ranks: Ranks
) -> torch.Tensor:
    """Compute the norm of all ranks' norms, put in the order of their places."""
    bits = sum({1 << DTYPES.index(norm.dtype) for _, norm in norms})
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
    gathered = torch.cat(ranks.gather_uneven(_rows(norms).to(ranks.device), [int(length) for length in lengths]))
    in_order = gathered[torch.argsort(gathered[:, 0], stable=True), 1]
    total: torch.Tensor = torch.linalg.vector_norm(in_order.to(_promoted([int(seen) for seen in dtypes])), how[1])
    return total


def _rows(norms: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Stack places and norms side by side, in a dtype that represents both exactly."""
    if not norms:
        return torch.zeros(0, 2, dtype=torch.float64)
    device = norms[0][1].device
    places = torch.tensor([place for place, _ in norms], dtype=torch.float64, device=device)
    return torch.stack([places, torch.stack([norm.to(device, torch.float64) for _, norm in norms])], 1)


def _promoted(seen: Sequence[int]) -> torch.dtype:
    """Return the dtype of a stack of norms in all dtypes that the ranks have seen, each rank's as a sum of powers of two."""
    found = [dtype for index, dtype in enumerate(DTYPES) if any(bits >> index & 1 for bits in seen)]
    return reduce(torch.promote_types, found)


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
