"""Process groups, their backends, and torch's own pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bpipe.torch_private.names import ask
from bpipe.torch_private.release import release

__all__: list[str] = []


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of a process group's backend for a device; None if torch does not tell."""
    get_backend = getattr(group, "get_backend", None) or ask(group, "_get_backend", None)  # public since torch 2.14
    timeout = None if get_backend is None else getattr(getattr(get_backend(device), "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def backends_of_packages() -> Mapping[str, Any]:
    """Return the backends that packages have registered, by their names in capitals; since torch 2.14 also torch's own."""
    return ask(dist.Backend, "_plugins", {})


def backend_options() -> Any:
    """Return new options for a package's backend."""
    return ask(dist.distributed_c10d, "_DistributedBackendOptions")()


def begin_transfer(backend: Any) -> None:
    """Let what a backend is given from now on be one transfer."""
    ask(backend, "_start_coalescing")()


def end_transfer(backend: Any) -> Any:
    """Post what a backend was given since `begin_transfer`, and return its work."""
    return ask(backend, "_end_coalescing")()


def action_of(text: str) -> Any:
    """Return one of torch.distributed.pipelining's actions, such as 2F0."""
    import torch.distributed.pipelining.schedules as schedules

    return ask(schedules, "_Action").from_str(text)


def is_replicate(spec: Any) -> bool:
    """Return whether a chunk spec is torch's for a value that every microbatch gets: the class, or an instance of it."""
    return "_Replicate" in (getattr(spec, "__name__", ""), type(spec).__name__)


def mesh_of_stage(stage: Any) -> Any:
    """Return the `get_mesh` that torch's stage was given; None if there is none."""
    return ask(ask(stage, "_mesh_cache", None), "_get_mesh_cb", None)


def contexts_of_stage(stage: Any) -> Mapping[int, Any]:
    """Return the forward contexts that are registered on torch's stage, by their handles' numbers."""
    return {} if release() < (2, 15) else ask(stage, "_forward_contexts")


def examples_of_stage(stage: Any) -> Any:
    """Return the descriptions of the inputs that torch's stage was given; None if there are none."""
    return getattr(ask(stage, "_user_meta", None), "inputs", None) or getattr(stage, "inputs_meta", None)
