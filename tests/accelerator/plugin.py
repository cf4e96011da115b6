"""The simulated NCCL as a package registers it for its make of device: bpipe finds it as it finds any other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.accelerator.device import KIND
from tests.accelerator.nccl import Options, SimulatedNCCL

NAME = "simulated"


class Plugged(SimulatedNCCL, dist.ProcessGroupGloo):  # type: ignore[misc]
    """As a backend of a package. torch holds a group's backend as one of C++, which Python can derive from gloo's only."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroupGloo.__init__(self, dist.PrefixStore("torch", store), rank, size, timeout)
        options = Options()
        options._timeout = timeout
        SimulatedNCCL.__init__(self, store, rank, size, options)


def join_again() -> None:
    """Register the backend, and make the default process group again, with it for the device. Collective."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.Backend.register_backend(NAME, Plugged, devices=[KIND])
    dist.init_process_group(f"cpu:gloo,{KIND}:{NAME}", store=dist.PrefixStore(NAME, store), rank=rank, world_size=size)
    dist.barrier()  # all are connected: none may leave before
