"""Find the sharded parameters that gathered ones stand for in a module: FSDP2 swaps them, and trains the sharded ones.

A module has its gathered weights after a forward of the user's own, after `unshard()`, and wherever FSDP is set to keep them.
They have no gradient and no state of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from bpipe.torch_private.fsdp_states import all_groups, gathered, partly_reduced, stand_ins
from bpipe.torch_private.fsdp_states import free as free_group

__all__: list[str] = []

T = TypeVar("T", bound=torch.Tensor)


class Gathered:
    """The parameters that FSDP2 has gathered in this process now, found by a look at all of them; none if FSDP is not in use."""

    def __init__(self) -> None:
        parameters = (one for group in all_groups() for one in group.fsdp_params)
        self._of = {id(other): one for one in parameters for other in stand_ins(one)}

    def sharded(self, parameter: T) -> T:
        """Return the parameter that is trained: the sharded one if a gathered one is given."""
        found = self._of.get(id(parameter))
        return parameter if found is None else found.sharded_param

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is a gathered one, which no optimizer can train."""
        return id(parameter) in self._of


def has_unreduced(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether FSDP still keeps gradients of some of these sharded parameters that are not reduced over the replicas."""
    kept = {id(one.sharded_param) for group in all_groups() for one in group.fsdp_params if _keeps_gradient(group, one)}
    return bool(kept) and any(id(parameter) in kept for parameter in parameters)


def free(parameter: torch.Tensor) -> None:
    """Free what was gathered of a sharded parameter, and with it of its group, because its value has changed."""
    for group in all_groups():
        if not group.is_sharded and any(one.sharded_param is parameter for one in group.fsdp_params):
            free_group(group)


def _keeps_gradient(group: Any, one: Any) -> bool:
    """Return whether a gradient waits for `set_requires_gradient_sync(True)`, or for `set_requires_all_reduce(True)`."""
    whole, accumulated = gathered(one), getattr(one, "unsharded_accumulated_grad", None)
    return any(kept is not None for kept in (accumulated, partly_reduced(group), None if whole is None else whole.grad))
