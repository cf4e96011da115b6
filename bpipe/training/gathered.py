"""Find the sharded parameters that gathered ones stand for in a module: FSDP2 swaps them, and trains the sharded ones.

A module has its gathered weights after a forward of the user's own, after `unshard()`, and wherever FSDP is set to keep them.
They have no gradient and no state of the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from bpipe.parallel.fsdp import _groups

__all__: list[str] = []

T = TypeVar("T", bound=torch.Tensor)


class Gathered:
    """The parameters that FSDP2 has gathered in this process now, found by a look at all of them; none if FSDP is not in use."""

    def __init__(self) -> None:
        parameters = (one for group in _fsdp_groups() for one in group.fsdp_params)
        self._of = {id(other): one for one in parameters for other in _stand_ins(one)}

    def sharded(self, parameter: T) -> T:
        """Return the parameter that is trained: the sharded one if a gathered one is given."""
        found = self._of.get(id(parameter))
        return parameter if found is None else found.sharded_param

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is a gathered one, which no optimizer can train."""
        return id(parameter) in self._of


def has_unreduced(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether FSDP still keeps gradients of some of these sharded parameters that are not reduced over the replicas."""
    kept = {id(one.sharded_param) for group in _fsdp_groups() for one in group.fsdp_params if _keeps_gradient(group, one)}
    return bool(kept) and any(id(parameter) in kept for parameter in parameters)


def free(parameter: torch.Tensor) -> None:
    """Free what was gathered of a sharded parameter, and with it of its group, because its value has changed."""
    for group in _fsdp_groups():
        if not group.is_sharded and any(one.sharded_param is parameter for one in group.fsdp_params):
            group._to_sharded()


def _stand_ins(one: Any) -> Iterator[torch.Tensor]:
    """Yield the gathered parameter, and that of `reshard_after_forward=4`, sharded over fewer ranks."""
    for name in ("_unsharded_param", "_sharded_post_forward_param"):
        other = getattr(one, name, None)
        if other is not None:
            yield other


def _keeps_gradient(group: Any, one: Any) -> bool:
    """Return whether a gradient waits for `set_requires_gradient_sync(True)`, or for `set_requires_all_reduce(True)`."""
    gathered, partly_reduced = getattr(one, "_unsharded_param", None), getattr(group, "_partial_reduce_output", None)
    accumulated = getattr(one, "unsharded_accumulated_grad", None)
    return any(kept is not None for kept in (accumulated, partly_reduced, None if gathered is None else gathered.grad))


def _fsdp_groups() -> Iterator[Any]:
    """Yield the groups of all modules under FSDP2 in this process, from torch: a gathered parameter does not know its own."""
    if "torch.distributed.fsdp" in sys.modules:
        states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
        alive = {id(state): state for state in (reference() for reference in list(states.values())) if state is not None}
        for state in alive.values():
            if hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group"):
                yield from _groups(state)
