"""Make the transport over a stage's group."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.api.loopback import LoopbackGroup
from bpipe.comm.transport.base import Transport
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.errors import ConfigurationError

__all__: list[str] = []


def transport_for(
    group: Any, device: torch.device, num_ranks: int, *, timeout_s: float | None, slow_s: float, transfers_at_once: int
) -> Transport:
    """Make this rank's end of a pipeline over a process group, or over a loopback.

    Raises:
        ConfigurationError: the group has a different number of ranks, or there is none.
    """
    if isinstance(group, LoopbackGroup):
        _check_size(group.loopback.num_ranks, num_ranks)
        return LoopbackTransport(group.loopback.wires, device)
    from bpipe.comm.transport.c10d import C10dTransport

    transport = C10dTransport(group, device, timeout_s=timeout_s, slow_s=slow_s, transfers_at_once=transfers_at_once)
    _check_size(transport.size, num_ranks)
    return transport


def _check_size(size: int, num_ranks: int) -> None:
    if size != num_ranks:
        raise ConfigurationError(
            f"the plan needs {num_ranks} ranks and the group has {size}: give the stages the process group of their own pipeline"
        )
