"""Ranks that hold the same stages: what they exchange of gradients, and whether a microbatch takes the same memory on all."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bpipe.comm.transport.process_group import backends_of
from bpipe.comm.wire.dtensor import local
from bpipe.errors import StageError
from bpipe.plan.sizes import IN, OUT, StageSizes

__all__: list[str] = []

MOST_STAGES = 64  # on one rank
SAVED: dict[str, Callable[[StageSizes], int]] = {"saved": lambda own: own.saved, "movable": lambda own: own.movable}
COMPARED = SAVED | {"received": lambda own: own[IN].num_bytes, "sent": lambda own: own[OUT].num_bytes}
VARIES = -2
COPY = "_bpipe_copy"  # the attribute of a parameter: whether another rank counts its gradient when gradients are clipped


def difference(
    group: dist.ProcessGroup, stages: Mapping[int, Sequence[StageSizes]], varying: Container[int], device: torch.device
) -> str:
    """Describe how the sizes of ranks with the same stages differ; empty if they are equal. Collective over their group; blocks.

    A stage's saved bytes are not compared if they vary in one of the replicas. Those of slices are compared together.
    """
    mine = torch.full((MOST_STAGES, 1 + len(COMPARED)), -1, dtype=torch.int64)
    for row, (stage, units) in enumerate(sorted(stages.items())):
        varies = SAVED if stage in varying else ()
        numbers = [VARIES if name in varies else sum(map(number, units)) for name, number in COMPARED.items()]
        mine[row] = torch.tensor([stage, *numbers])
    carried = mine.to("cpu" if "cpu" in backends_of(group) else device)
    gathered = [torch.empty_like(carried) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, carried, group=group)
    theirs = torch.stack(gathered).cpu()
    return next((text for row in range(len(stages)) if (text := _row_difference(group, theirs[:, row]))), "")


def _row_difference(group: dist.ProcessGroup, rows: torch.Tensor) -> str:
    """Describe how ranks' numbers of one stage, [ranks, numbers], differ from the first rank's; empty if they do not."""
    differing = ((rows != rows[0]) & ~(rows == VARIES).any(0)).nonzero()
    if not len(differing):
        return ""
    other, column = differing[0].tolist()
    ranks = [dist.get_global_rank(group, rank) for rank in (0, other)]
    if column == 0:
        return f"replicas differ: rank {ranks[0]} holds stage {int(rows[0, 0])} and rank {ranks[1]} stage {int(rows[other, 0])}"
    here, there, name = int(rows[0, column]), int(rows[other, column]), list(COMPARED)[column - 1]
    return (
        f"replicas differ: for a microbatch of stage {int(rows[0, 0])}, rank {ranks[0]} has {here} {name} bytes "
        f"and rank {ranks[1]} has {there}. Give all replicas microbatches of the same shapes."
    )


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the gradients of some parameters on this rank, each once."""
    return sum(local(one.grad).nbytes for one in {id(one): one for one in parameters}.values() if one.grad is not None)


def dense_gradient(parameter: nn.Parameter, place: str, *, is_there: bool = True) -> torch.Tensor:
    """Return what is sent of a parameter's gradient: zeros if it has none, or if that is not there yet for others.

    Raises:
        StageError: it is sparse.
    """
    gradient = parameter.grad if is_there else None
    if gradient is None:
        dtype = getattr(parameter, "grad_dtype", None)
        return torch.zeros_like(local(parameter), dtype=dtype, memory_format=torch.contiguous_format)
    if gradient.layout is not torch.strided:
        raise StageError(
            f"{place}: a gradient of shape {list(gradient.shape)} is sparse, and ranks exchange dense ones: use "
            "nn.Embedding(sparse=False)"
        )
    return local(gradient).contiguous()
