"""Let a trainer written for GPUs start on CPU: what its launcher asks of the machine is answered, and nothing else is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

ANSWERS: dict[str, Callable[..., Any]] = {  # what torch.cuda answers before a first step
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
}


def answer_for_the_device() -> None:
    """Make `torch.cpu` the device that torch reports, with gloo's barrier, which takes no `device_ids`."""
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in ANSWERS.items():
        setattr(torch.cpu, name, answer)
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def leave_group() -> None:
    """Leave the group of `run_ranks`, and set what torchrun sets for its store: the trainer makes its own group, over gloo."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), _port()
    dist.destroy_process_group()
    os.environ |= {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "1",  # keys of its own in the store
    }


def _port() -> int:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return int(store.port)


def be_newer_than_2_13() -> None:
    """Give torch 2.13 what torchtitan 0.3.0 needs of a newer one: `set_timeout`, and torch's own schedules with `arg_mbs`."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in signature(schedule.step).parameters:
            schedule.step = _step


def _step(
    self: Any,
    *,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    target: None = None,
    return_outputs: bool = True,
    loss_kwargs: Any = None,
) -> None:
    for stage in self._stages if hasattr(self, "_stages") else [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)
