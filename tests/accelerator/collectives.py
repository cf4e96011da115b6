"""The backend "simulated" of torch.distributed: ProcessGroupNCCL's collectives on the simulated device, carried by gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.accelerator.device import simulator

NAME = "simulated"
BACKENDS = f"cpu:gloo,cuda:{NAME}"  # of a group that has both


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return simulator.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


def install() -> None:
    """Let this process make groups with the backend, as `init_process_group` and `new_group` do for `BACKENDS`."""
    dist.Backend.register_backend(NAME, _made, devices=["cuda"])
