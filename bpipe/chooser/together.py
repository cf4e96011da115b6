"""Ranks that hold the same stages, in replicas of a pipeline or of tensor parallelism, and have to run the same plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import CommError
from bpipe.memory.saved.footprint import covering
from bpipe.parallel.ddp import replicas_in
from bpipe.parallel.fsdp import communicates, units_in
from bpipe.passes.fit import Budgets
from bpipe.plan.sizes import Sizes, StageSizes
from bpipe.training.pipeline_ranks import Ranks

__all__: list[str] = []


class _Needs(NamedTuple):
    """What a replica's stages take, each by slice, and what its ranks hold besides and may hold."""

    stages: tuple[tuple[StageSizes, ...], ...]
    static: tuple[int, ...]
    budgets: tuple[int | None, ...]


class Together:
    """The ranks of a group of replicas; every method is collective over them, and blocks. Without a group there is one replica.

    Args:
        group: the ranks that hold the same stages, one of each pipeline; None if there is one pipeline.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._ranks = None if group is None else Ranks(group, "leave replicas= out")

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that chooses; not collective."""
        return self._ranks is None or self._ranks.rank == 0

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number that any replica gives."""
        if self._ranks is None:
            return list(numbers)
        found: list[int] = self._ranks.greatest(torch.tensor(numbers)).tolist()
        return found

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all replicas."""
        return [data] if self._ranks is None else self._ranks.gather_bytes(data)

    def covering(self, sizes: Sizes, budgets: Budgets) -> tuple[Sizes, Budgets]:
        """Return sizes that cover those of all replicas, and the least of their budgets."""
        if self._ranks is None:
            return sizes, budgets
        own = encode(_Needs(tuple(zip(*sizes.by_unit)), sizes.static, budgets))  # slices that are all alike are given once
        given = [decode(_Needs, data, f"list of sizes of replica {replica}", inf) for replica, data in enumerate(self.gather(own))]
        if len({len(one.stages) for one in given}) > 1:
            raise CommError("replicas have different stages")
        most = max(len(by_slice) for one in given for by_slice in one.stages)
        alike = [[by_slice * (most // len(by_slice)) for by_slice in one.stages] for one in given]
        slices = [covering(list(zip(*of_stage))) for of_stage in zip(*alike)]
        static = tuple(map(max, zip(*(one.static for one in given))))
        least = tuple(min(filter(None, column), default=None) for column in zip(*(one.budgets for one in given)))
        return Sizes.of_slices(zip(*slices), static=static), least


def communicate_inside(modules: Iterable[nn.Module]) -> bool:
    """Return whether stages communicate while they compute, as far as that shows: under FSDP2, DDP, or in tensor parallelism."""
    inner = [one for module in modules for one in module.modules()]
    cut = (one for module in inner for one in module.parameters(recurse=False) if isinstance(one, DTensor))
    return any(map(communicates, units_in(inner))) or bool(replicas_in(inner)) or any(one.device_mesh.size() > 1 for one in cut)
