"""The ranks of a pipeline, for the work between two steps: which ranks they are, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bpipe.api.loopback import LoopbackGroup
from bpipe.comm.transport.process_group import device_of, group_of
from bpipe.errors import ConfigurationError

__all__: list[str] = []


class Ranks:
    """The ranks of a pipeline's group, this one among them; without a process group, this one alone.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the default group, as for a `PipelineStage`.
        instead: what to do where all ranks are in this process, for the error.

    Raises:
        ConfigurationError: this rank is not in the group, or the group is a mesh of several dimensions or a rank of a `Loopback`.

    Attributes:
        device: where messages are: on the GPU with NCCL, else on the CPU.
    """

    def __init__(self, group: Any, instead: str) -> None:
        if isinstance(group, LoopbackGroup):
            raise ConfigurationError(f"on a Loopback all stages are in this process, where nothing is to be sent: {instead}")
        self.group, self.rank, self.size, self.device = None, 0, 1, torch.device("cpu")
        if group is not None or dist.is_initialized():
            self.group = dist.group.WORLD if group is None else group_of(group)
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            self.device = device_of(self.group)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks by their numbers in the default group."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def greatest(self, number: torch.Tensor) -> torch.Tensor:
        """Return the greatest number of all ranks, on `device`. Collective, one all_reduce."""
        number = number.to(self.device)
        if self.group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        return number

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor of one shape from each rank, onto `device` and in the order of the ranks. Collective, one all_gather."""
        row = row.to(self.device).contiguous()
        if self.group is None:
            return [row]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.group)
        return rows

    def gather_uneven(self, rows: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Gather rows from each rank, which may each give another number of them. Collective, one all_gather of the longest."""
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: len(rows)] = rows
        return [row[:length] for row, length in zip(self.gather(padded), lengths, strict=True)]

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Gather rows from each rank, however many each has. Collective, two all_gathers, or one if there are none; blocks."""
        lengths = [int(length) for length in self.gather(torch.tensor([len(rows)]))]
        return self.gather_uneven(rows, lengths) if any(lengths) else [rows] * self.size

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather bytes from each rank. Collective, two all_gathers at most; blocks the host."""
        return [bytes(row.tolist()) for row in self.gather_rows(torch.tensor([*data], dtype=torch.uint8))]

    def exchange(self, mine: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Exchange tensors of one shape among some ranks; only they send, to each other, over the group's own connections.

        Returns:
            One tensor per rank, in the order of `ranks`; this rank's is `mine` itself.
        """
        parts = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in ranks}
        others = [rank for rank in ranks if rank != self.rank]
        self._transfer([(dist.isend, mine, rank) for rank in others] + [(dist.irecv, parts[rank], rank) for rank in others])
        return [parts[rank] for rank in ranks]

    def send(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Send a tensor on `device` to some ranks."""
        self._transfer([(dist.isend, tensor, rank) for rank in ranks])

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill a tensor on `device` with what a rank sends."""
        self._transfer([(dist.irecv, tensor, rank)])

    def _transfer(self, transfers: Sequence[tuple[Any, torch.Tensor, int]]) -> None:
        ops = [dist.P2POp(op, tensor, self.global_ranks[rank], self.group) for op, tensor, rank in transfers]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
