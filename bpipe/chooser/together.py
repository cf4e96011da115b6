"""Ranks that hold the same stages, in replicas of a pipeline or of tensor parallelism, and have to run the same plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bpipe.api.report import Report
from bpipe.comm.transport.process_group import device_of
from bpipe.errors import CommError
from bpipe.memory.saved.footprint import covering
from bpipe.parallel.ddp import replicas_in
from bpipe.parallel.fsdp import communicates, units_in
from bpipe.passes.fit import Budgets
from bpipe.plan.sizes import Sizes

__all__: list[str] = []


class Together:
    """The ranks of a group of replicas; every method is collective over them, and blocks. Without a group there is one replica.

    Args:
        group: the ranks that hold the same stages, one of each pipeline; None if there is one pipeline.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is the replica that chooses; not collective."""
        return self._group is None or dist.get_rank(self._group) == 0

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number that any replica gives."""
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, device=device_of(self._group))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        found: list[int] = tensor.tolist()
        return found

    def texts(self, text: str) -> list[str]:
        """Return the texts of all replicas."""
        return [text] if self._group is None else texts_of(text, self._group)

    def covering(self, sizes: Sizes, budgets: Budgets) -> tuple[Sizes, Budgets]:
        """Return sizes that cover those of all replicas, and the least of their budgets."""
        if self._group is None:
            return sizes, budgets
        stages = {stage: tuple(slices) for stage, slices in enumerate(zip(*sizes.by_slice))}
        packed = json.dumps([Report(0, stages).pack().decode(), sizes.static, budgets])
        try:
            given = [json.loads(text) for text in self.texts(packed)]
        except ValueError as error:
            raise CommError(f"a replica sent unreadable sizes: {error}") from error
        reports = [Report.unpack(report.encode(), replica).stages for replica, (report, _, _) in enumerate(given)]
        if any(one.keys() != stages.keys() for one in reports):
            raise CommError("replicas have different stages")
        slices = [covering(list(zip(*(one[stage] for one in reports)))) for stage in stages]
        static = tuple(map(max, zip(*(static for _, static, _ in given))))
        least = tuple(min(filter(None, column), default=None) for column in zip(*(budgets for *_, budgets in given)))
        return Sizes.of_slices(zip(*slices), static=static), least


def communicate_inside(modules: Iterable[nn.Module]) -> bool:
    """Return whether stages communicate while they compute, as far as that shows: under FSDP2, DDP, or in tensor parallelism."""
    inner = [one for module in modules for one in module.modules()]
    cut = (one for module in inner for one in module.parameters(recurse=False) if isinstance(one, DTensor))
    return any(map(communicates, units_in(inner))) or bool(replicas_in(inner)) or any(one.device_mesh.size() > 1 for one in cut)


def texts_of(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Return the texts of all ranks of a group. Collective; blocks."""
    where, data = device_of(group), text.encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=where) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)], device=where), group=group)
    longest = max(1, *(int(length) for length in lengths))
    packed = torch.zeros(longest, dtype=torch.uint8)
    packed[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else packed[:0]
    gathered = [torch.zeros(longest, dtype=torch.uint8, device=where) for _ in lengths]
    dist.all_gather(gathered, packed.to(where), group=group)
    return [bytes(one[: int(length)].tolist()).decode(errors="replace") for one, length in zip(gathered, lengths)]
