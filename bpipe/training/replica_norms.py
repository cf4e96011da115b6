"""The replicas of a pipeline: which gradients are those of weights that all of them have, and the norms of those that one has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from bpipe.training.pipeline_ranks import Ranks

__all__: list[str] = []

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INSTEAD = "replicas are other processes"
LEAST_PRECISION = 1e-4  # to which gradients agree that each rank computes by itself


class Norm(NamedTuple):
    """A norm of gradients of a stage."""

    place: int  # of the stage
    what: str  # the gradients, in words
    mesh: Any  # over which they are sharded; None if this rank has all of them
    norm: torch.Tensor


def rows_of(norms: Sequence[Norm], *columns: Sequence[float]) -> torch.Tensor:
    """Put norms and columns of numbers side by side, in a dtype that represents all exactly, without waiting for a device."""
    if not norms:
        return torch.zeros(0, 1 + len(columns), dtype=torch.float64)
    device = norms[0].norm.device
    values = torch.stack([one.norm.to(device, torch.float64) for one in norms])
    return torch.stack([values, *(torch.tensor(column, dtype=torch.float64, device=device) for column in columns)], 1)


def ranks_along(mesh: Any) -> Iterator[Ranks]:
    """Yield the ranks beside this one along each dimension of a device mesh that has several."""
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            yield Ranks(mesh.get_group(dim), INSTEAD)


def difference(ranks: Ranks, norms: Sequence[Norm]) -> str:
    """Describe how gradients differ that ranks should have alike; empty if they do not. Collective; blocks the host.

    Those of equal weights have equal bits once they are reduced, or nearly so if each rank computes them by itself.
    """
    mine = rows_of(norms, [2 * torch.finfo(one.norm.dtype).eps for one in norms])
    first, *others = [part.tolist() for part in ranks.gather_rows(mine)]
    for other, theirs in enumerate(others, 1):
        for index, (one, another) in enumerate(zip_longest(first, theirs)):
            if not _are_alike(one, another):
                return _described(ranks, other, norms, index, one, another)
    return ""


def _are_alike(one: Sequence[float] | None, another: Sequence[float] | None) -> bool:
    if one is None or another is None:
        return False
    (norm, eps), (other, other_eps) = (torch.tensor(row, dtype=torch.float64) for row in (one, another))
    return torch.allclose(norm, other, rtol=max(LEAST_PRECISION, float(eps), float(other_eps)), atol=0.0, equal_nan=True)


def _described(ranks: Ranks, other: int, norms: Sequence[Norm], index: int, one: Any, another: Any) -> str:
    here, there = ("none" if row is None else f"{row[0]:.6g}" for row in (one, another))
    what = f"number {index} ({norms[index].what} on this rank)" if index < len(norms) else f"number {index}"
    names = ranks.global_ranks
    return (
        f"ranks {names[0]} and {names[other]} have the same stages in two replicas, but not the same gradients: {what} has the "
        f"norm {here} and {there}. Each weight that only one replica has, such as an expert, counts in the total of all: give "
        "own=, those parameters, and replicas=, the ranks that have other ones, such as mesh['ep']. Reduce the gradients of all "
        "others first"
    )


def of_all(ranks: Ranks, norms: Sequence[Norm]) -> list[Norm]:
    """Return the norms of the weights that only one replica has, of all replicas in the order of their ranks. Collective."""
    mine = rows_of(norms, [one.place for one in norms], [DTYPES.index(one.norm.dtype) for one in norms])
    return [
        Norm(int(place), "", None, torch.tensor(norm, dtype=DTYPES[int(dtype)]))
        for part in ranks.gather_rows(mine)
        for norm, place, dtype in part.tolist()
    ]
